-- A batch of messages, in the order in which the queue delivered them; those that are there already are left alone.
--
-- Values:  $1 queue; $2 … $19 one array a column, in the order of the columns below.
-- Says:    INSERT 0 n, n of them new.
-- Locks:   the new rows.
-- Index:   the primary key.
-- Caller:  relay/inbox/mailbox.py.
INSERT INTO {table} (queue, message_id, event_type, schema_version, aggregate_type, aggregate_id, aggregate_version, payload,
                     content_type, content_encoding, headers, exchange, routing_key, correlation_id, causation_id,
                     producer, traceparent, tracestate, occurred_at)
SELECT $1, b.message_id, b.event_type, b.schema_version, b.aggregate_type, b.aggregate_id, b.aggregate_version, b.payload,
       b.content_type, b.content_encoding, b.headers::jsonb, b.exchange, b.routing_key, b.correlation_id, b.causation_id,
       b.producer, b.traceparent, b.tracestate, b.occurred_at
  FROM unnest($2::text[], $3::text[], $4::int[], $5::text[], $6::text[], $7::bigint[], $8::bytea[], $9::text[], $10::text[],
              $11::text[], $12::text[], $13::text[], $14::text[], $15::text[], $16::text[], $17::text[], $18::text[],
              $19::timestamptz[]) WITH ORDINALITY
       AS b (message_id, event_type, schema_version, aggregate_type, aggregate_id, aggregate_version, payload, content_type,
             content_encoding, headers, exchange, routing_key, correlation_id, causation_id, producer, traceparent,
             tracestate, occurred_at, number)
 ORDER BY b.number
ON CONFLICT (message_id) DO NOTHING
