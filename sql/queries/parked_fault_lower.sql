-- Purpose: a fault is forgotten: its row is to be read again, so the floor goes below it, and the owner, whose next renewal
--          would undo that, is unseated (H7, R5). A row that is aside is found by its time, one that was marked stays.
--          The key comes back for the promotion (H3).
-- Values:  $1 id, $2 seq.
-- Locks:   the shard's row, locked FOR UPDATE already.
-- Index:   the primary keys.
-- Caller:  relay/parked_table.py.
WITH r AS MATERIALIZED (
        SELECT {shard_of_o} AS shard, o.aside, o.aggregate_type, o.aggregate_id FROM {table} o
         WHERE o.id = $1::text AND o.seq = $2::bigint AND o.sent_at IS NULL),
     lowered AS (
        UPDATE {shard} s SET epoch = s.epoch + 1, floor = least(s.floor, $2::bigint - 1)
          FROM r WHERE s.shard = r.shard AND r.aside IS NULL)
SELECT $2::bigint AS seq, coalesce(r.aggregate_type, '') AS aggregate_type, r.aggregate_id, false AS is_untouched FROM r
