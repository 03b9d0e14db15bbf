-- Purpose: unsent rows were found at or below these shards' floors: lower the floors below them and unseat the owner, whose
--          next renewal would undo it (R5).
-- Values:  $1 instance, $2 shards, $3 the lowest unsent seq of each.
-- Locks:   FOR UPDATE on the shard rows, in shard order.
-- Index:   none needed, the table has 64 rows.
-- Caller:  relay/outbox.py `search`.
WITH locked AS MATERIALIZED (
        SELECT s.shard, k.seq FROM {shard} s JOIN unnest($2::smallint[], $3::bigint[]) k(shard, seq) ON k.shard = s.shard
         WHERE s.owner = $1::text AND s.floor >= k.seq ORDER BY s.shard FOR UPDATE OF s)
UPDATE {shard} s SET epoch = s.epoch + 1, floor = least(s.floor, locked.seq - 1)
  FROM locked WHERE s.shard = locked.shard
RETURNING s.shard, s.floor
