-- Purpose: the columns of one row `o` as relay/rows.py takes them apart, in this order; part of page, reload and due.
--          Times are seconds since 1970, for a driver's datetime refuses what PostgreSQL allows. A body larger than
--          {inline} bytes stays behind, and then `size` says how large; else `size` is null. `rare` is one JSON text,
--          null where every seldom used column has its default.
-- Values:  {body} the payload as bytes, {large} its size, for the payload's type; {inline} a parameter or number.
o.ctid::text, o.seq, o.id, o.event_type, o.aggregate_type, o.aggregate_id,
CASE WHEN {large} > {inline} THEN NULL ELSE {body} END AS body,
CASE WHEN {large} > {inline} THEN {large} END AS size,
date_part('epoch', coalesce(o.occurred_at, o.created_at)) AS occurred_at,
date_part('epoch', coalesce(o.created_at, o.occurred_at)) AS created_at,
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
