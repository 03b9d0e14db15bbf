-- Purpose: forget one fault (H7); no line where another operator was first.
-- Values:  $1 id, $2 seq.
-- Locks:   the fault's row, under its shard's lock.
-- Index:   the primary key.
-- Caller:  relay/parked_table.py.
DELETE FROM {fault} u WHERE u.seq = $2::bigint AND u.id = $1::text RETURNING u.seq
