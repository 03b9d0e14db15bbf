-- Purpose: the seconds until the next row aside of these shards falls due, null where none waits.
-- Values:  $1 shards.
-- Locks:   none.
-- Index:   {aside_due_index}, one descent a shard.
-- Caller:  relay/outbox.py `due`.
SELECT date_part('epoch', min(x.due_at)) - date_part('epoch', statement_timestamp()) AS later_s
  FROM unnest($1::smallint[]) f(shard)
 CROSS JOIN LATERAL (
        SELECT o.due_at FROM {table} o
         WHERE {shard_of_o} = f.shard AND o.aside IN ('deferred', 'scheduled') AND o.due_at > statement_timestamp()
         ORDER BY o.due_at, o.seq LIMIT 1) x
