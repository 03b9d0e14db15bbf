-- Purpose: delete the outbox row of a fault. No line where it is gone already.
-- Values:  $1 id, $2 seq.
-- Locks:   the row, under its shard's lock.
-- Index:   the primary key.
-- Caller:  relay/parked_table.py.
DELETE FROM {table} o WHERE o.id = $1::text AND o.seq = $2::bigint
RETURNING o.seq, coalesce(o.aggregate_type, '') AS aggregate_type, o.aggregate_id
