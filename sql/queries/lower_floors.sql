-- Purpose: a row that is not sent at or below its shard's floor was given a seq again (`setval`): lower the floor and
--          unseat the owner, whose next renewal would undo it (R5). The same few rows a shard as the purge looks at.
-- Values:  $1 instance, $2 rows in all that the purge may delete.
-- Locks:   FOR UPDATE SKIP LOCKED on the shard rows to change.
-- Index:   {read_index}, one descent a shard.
-- Caller:  relay/outbox.py `purge`.
WITH look AS MATERIALIZED (
        SELECT (4 * $2::bigint / greatest(count(*), 1) + 16)::int AS rows FROM {shard} WHERE owner = $1::text),
     low AS MATERIALIZED (
        SELECT s.shard, s.epoch, min(x.seq) AS seq FROM {shard} s CROSS JOIN LATERAL (
            SELECT o.seq, o.id, o.sent_at FROM {table} o
             WHERE o.shard = s.shard AND o.aside IS NULL AND o.seq <= s.floor ORDER BY o.seq LIMIT (SELECT rows FROM look)) x
         WHERE s.owner = $1::text AND x.sent_at IS NULL
           AND NOT EXISTS (SELECT FROM {fault} u WHERE u.seq = x.seq AND u.id = x.id)
         GROUP BY 1, 2),
     locked AS MATERIALIZED (
        SELECT s.shard, low.seq FROM low JOIN {shard} s ON s.shard = low.shard AND s.epoch = low.epoch
         ORDER BY s.shard FOR UPDATE OF s SKIP LOCKED)
UPDATE {shard} s SET epoch = s.epoch + 1, floor = least(s.floor, locked.seq - 1), owner = NULL, owner_pid = NULL,
       owner_backend_start = NULL, leased_until = NULL
  FROM locked WHERE s.shard = locked.shard
RETURNING s.shard
