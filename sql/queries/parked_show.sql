-- Purpose: everything that is kept of one parked or unmarkable row; headers and body only on request. The writers' times
--          come as text: they may be infinite.
-- Values:  $1 id, $2 whether headers and body come along. {body} is the payload as bytes.
-- Locks:   none.
-- Index:   the primary keys.
-- Caller:  relay/parked_table.py, in a read-only transaction.
SELECT k.id, coalesce(o.seq, u.seq) AS seq, {shard_of_o} AS shard, u.id IS NOT NULL AS is_fault, o.seq IS NOT NULL AS is_there,
       o.event_type, o.schema_version, o.aggregate_type, o.aggregate_id, o.aggregate_version, o.producer,
       o.correlation_id, o.causation_id, o.traceparent, o.tracestate, o.content_type, o.content_encoding, o.priority,
       o.mandatory, o.exchange, o.routing_key,
       to_json(o.created_at AT TIME ZONE 'UTC') #>> '{}' AS created_at,
       to_json(o.occurred_at AT TIME ZONE 'UTC') #>> '{}' AS occurred_at,
       to_json(o.available_at AT TIME ZONE 'UTC') #>> '{}' AS available_at,
       to_json(o.expires_at AT TIME ZONE 'UTC') #>> '{}' AS expires_at,
       coalesce(u.attempts, o.attempts) AS attempts, coalesce(o.first_failed_at, u.failed_at) AS first_failed_at,
       coalesce(u.failed_at, o.last_failed_at) AS last_failed_at,
       CASE WHEN u.id IS NULL THEN o.parked_at ELSE u.failed_at END AS parked_at,
       coalesce(u.failure_class, o.failure_class, 'unknown') AS failure_class,
       CASE WHEN u.id IS NULL THEN o.failure_error ELSE u.failure_error END AS failure_error,
       CASE WHEN u.id IS NULL THEN o.failure_exchange ELSE u.exchange END AS failure_exchange,
       CASE WHEN u.id IS NULL THEN o.failure_routing_key ELSE u.routing_key END AS failure_routing_key,
       CASE WHEN u.id IS NULL THEN o.failure_relay ELSE u.relay END AS failure_relay,
       CASE WHEN u.id IS NULL THEN o.failure_relay_version ELSE u.relay_version END AS failure_relay_version,
       o.holds AND o.aside = 'parked' AS holds,
       CASE WHEN $2::bool THEN o.headers::text END AS headers, CASE WHEN $2::bool THEN {body} END AS body
  FROM (SELECT $1::text AS id) k
  LEFT JOIN {table} o ON o.id = k.id
  LEFT JOIN {fault} u ON u.id = k.id AND u.seq = coalesce(o.seq, u.seq)
 ORDER BY u.seq DESC LIMIT 1
