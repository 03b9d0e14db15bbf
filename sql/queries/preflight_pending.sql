-- Purpose: a sample of the rows that wait to be published, with what decides their route: does it lead anywhere?
-- Values:  $1 at most so many of a shard, the oldest first.
-- Locks:   none.
-- Index:   {read}, one descent a shard, above its floor; {aside_due}, one descent a shard.
-- Caller:  relay/preflight/pending.py.
SELECT s.shard, o.seq, o.id, o.event_type, o.aggregate_type, o.aggregate_id, o.exchange, o.routing_key,
       o.schema_version, o.producer, o.correlation_id, o.causation_id, o.mandatory
  FROM {shard} s CROSS JOIN LATERAL (
       (SELECT * FROM {table} r WHERE r.shard = s.shard AND r.seq > s.floor AND r.aside IS NULL AND r.sent_at IS NULL
         ORDER BY r.seq LIMIT $1::int)
       UNION ALL
       (SELECT * FROM {table} r WHERE r.shard = s.shard AND r.aside IN ('deferred', 'scheduled')
         ORDER BY r.due_at, r.seq LIMIT $1::int)) o
 WHERE NOT EXISTS (SELECT FROM {fault} u WHERE u.seq = o.seq AND u.id = o.id)
