-- Purpose: delete the outbox row of a fault. No line where it is gone already; `is_untouched`: a trigger suppresses the deletion.
-- Values:  $1 id, $2 seq.
-- Locks:   the row, under its shard's lock.
-- Index:   the primary key.
-- Caller:  relay/parked_table.py, relay/retention.py.
WITH d AS (
        DELETE FROM {table} o WHERE o.id = $1::text AND o.seq = $2::bigint
        RETURNING o.seq, coalesce(o.aggregate_type, '') AS aggregate_type, o.aggregate_id)
SELECT o.seq, d.aggregate_type, d.aggregate_id, d.seq IS NULL AS is_untouched FROM {table} o LEFT JOIN d ON d.seq = o.seq
 WHERE o.id = $1::text AND o.seq = $2::bigint
