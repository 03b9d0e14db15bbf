-- Purpose: rows that were parked under another RELAY_ON_PARKED get this owner's, some at a time: how many were changed. Who
--          walks over the held keys then finds those that nothing holds any more. Expired and unmarkable rows never hold.
-- Values:  $1 shards, $2 whether parked rows hold, $3 rows in all.
-- Locks:   the rows, as an UPDATE does; skips those that somebody keeps locked. Under the shards' fence.
-- Index:   {aside_parked_index}: those of the shards' parked rows that are to be changed.
-- Caller:  relay/outbox.py `apply_policy`, before a shard is read that was last owned under something else.
WITH t AS (
        SELECT x.c, x.seq FROM unnest($1::smallint[]) f(shard) CROSS JOIN LATERAL (
            SELECT o.ctid AS c, o.seq FROM {table} o
             WHERE {shard_of_o} = f.shard AND o.aside = 'parked' AND o.holds = NOT $2::bool
               AND coalesce(o.failure_class, '') NOT IN ('expired', 'unmarkable')
               AND o.holds <> ($2::bool AND o.aggregate_id IS NOT NULL)
             LIMIT $3::int FOR NO KEY UPDATE SKIP LOCKED) x
         LIMIT $3::int),
     u AS (
        UPDATE {table} o SET holds = $2::bool AND o.aggregate_id IS NOT NULL
          FROM t WHERE o.ctid = t.c AND o.seq = t.seq RETURNING 1)
SELECT count(*) AS rows FROM u
