-- Purpose: what row.sql takes of a row `o` of the outbox: its columns, and what is made of them once, for both its size
--          and its value are asked for. `rare` is one JSON text, null where every seldom used column has its default
--          (`concat_ws` leaves nulls out: 2 us where jsonb takes 10);
--          part of page, load, reload, due and followers. The subselect that has it ends with LIMIT or OFFSET 0: else the
--          planner puts these expressions wherever row.sql names them, and `rare` is made ten times a row.
-- Values:  {payload} the payload, and where it is not told from that how many bytes it has (`body_size`), for its type.
o.ctid, o.seq, o.id, o.event_type, o.aggregate_type, o.aggregate_id, {payload},
o.occurred_at, o.created_at, o.available_at,
CASE WHEN ROW(o.aggregate_version, o.content_type, o.content_encoding, o.exchange, o.routing_key, o.correlation_id,
              o.causation_id, o.producer, o.traceparent, o.tracestate, o.priority, o.mandatory, o.expires_at,
              o.available_at) IS NULL AND coalesce(o.schema_version, 1) = 1 THEN NULL
     ELSE '{' || concat_ws(',',
          '"aggregate_version":' || to_json(o.aggregate_version),
          '"schema_version":' || to_json(nullif(o.schema_version, 1)),
          '"content_type":' || to_json(o.content_type),
          '"content_encoding":' || to_json(o.content_encoding),
          '"exchange":' || to_json(o.exchange),
          '"routing_key":' || to_json(o.routing_key),
          '"correlation_id":' || to_json(o.correlation_id),
          '"causation_id":' || to_json(o.causation_id),
          '"producer":' || to_json(o.producer),
          '"traceparent":' || to_json(o.traceparent),
          '"tracestate":' || to_json(o.tracestate),
          '"priority":' || to_json(o.priority),
          '"mandatory":' || to_json(o.mandatory),
          '"expires_at":' || to_json(date_part('epoch', o.expires_at)),
          '"available_at":' || to_json(date_part('epoch', o.available_at))) || '}' END AS rare,
nullif(o.headers, '{}')::text AS headers, o.attempts
