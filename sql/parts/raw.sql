-- Purpose: what row.sql takes of a row `o` of the outbox: its columns, and what is made of them once, for both its size
--          and its value are asked for. `rare` is one JSON text, null where every seldom used column has its default;
--          part of page, load, reload, due and followers.
-- Values:  {body_size} how many bytes the payload has, for its type.
o.ctid, o.seq, o.id, o.event_type, o.aggregate_type, o.aggregate_id, o.payload, {body_size} AS body_size,
o.occurred_at, o.created_at, o.available_at,
CASE WHEN ROW(o.aggregate_version, o.content_type, o.content_encoding, o.exchange, o.routing_key, o.correlation_id,
              o.causation_id, o.producer, o.traceparent, o.tracestate, o.priority, o.mandatory, o.expires_at,
              o.available_at) IS NULL AND coalesce(o.schema_version, 1) = 1 THEN NULL
     ELSE jsonb_strip_nulls(jsonb_build_object(
          'aggregate_version', o.aggregate_version, 'schema_version', nullif(o.schema_version, 1),
          'content_type', o.content_type, 'content_encoding', o.content_encoding, 'exchange', o.exchange,
          'routing_key', o.routing_key, 'correlation_id', o.correlation_id, 'causation_id', o.causation_id,
          'producer', o.producer, 'traceparent', o.traceparent, 'tracestate', o.tracestate, 'priority', o.priority,
          'mandatory', o.mandatory, 'expires_at', date_part('epoch', o.expires_at),
          'available_at', date_part('epoch', o.available_at)))::text END AS rare,
nullif(o.headers, '{}')::text AS headers, o.attempts
