-- Purpose: a sample of the rows that wait to be published, with what decides their route: does it lead anywhere?
-- Values:  $1 at most so many of a shard, the oldest first.
-- Locks:   none.
-- Index:   {read}, one descent a shard, above its floor; {aside_due}, one descent a shard.
-- Caller:  relay/preflight/pending.py.
SELECT s.shard, x.seq, x.id, x.event_type, x.aggregate_type, x.aggregate_id, x.exchange, x.routing_key,
       x.schema_version, x.producer, x.correlation_id, x.causation_id, x.mandatory
  FROM {shard} s CROSS JOIN LATERAL (
       (SELECT * FROM {table} o WHERE {shard_of_o} = s.shard AND o.seq > s.floor AND o.aside IS NULL AND o.sent_at IS NULL
         ORDER BY o.seq LIMIT $1::int)
       UNION ALL
       (SELECT * FROM {table} o WHERE {shard_of_o} = s.shard AND o.aside IN ('deferred', 'scheduled')
         ORDER BY o.due_at, o.seq LIMIT $1::int)) x
 WHERE NOT EXISTS (SELECT FROM {fault} u WHERE u.seq = x.seq AND u.id = x.id)
