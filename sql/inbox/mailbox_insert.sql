-- A batch of messages, in the order in which the queue delivered them; those that are there already are left alone. What comes far
-- behind others of its key, or behind a parked one, is held; of the other copy of a message nothing is counted, or a row could be
-- held by nobody.
--
-- Values:  $1 queue; $2 … $19 one array a column, in the order of the columns below.
-- Says:    INSERT 0 n, n of them new.
-- Locks:   the new rows.
-- Index:   the primary key; of each key the one of its unfinished rows, one descent.
-- Caller:  relay/inbox/mailbox.py.
WITH fresh AS MATERIALIZED (
        SELECT b.number, b.aggregate_type, b.aggregate_id,
               row_number() OVER (PARTITION BY b.aggregate_type, b.aggregate_id ORDER BY b.number) AS place
          FROM unnest($2::text[], $5::text[], $6::text[]) WITH ORDINALITY AS b (message_id, aggregate_type, aggregate_id, number)
         WHERE (SELECT 1 FROM {table} known WHERE known.message_id = b.message_id) IS NULL),
     placed AS MATERIALIZED (
        SELECT f.number, f.aggregate_id IS NOT NULL
               AND (f.place > {free_rows}
                    OR bool_or(f.place = 1 AND (head.parked_at IS NOT NULL OR head.seq IS NOT NULL AND (
                          SELECT t.seq FROM {table} t
                           WHERE t.aggregate_type = f.aggregate_type AND t.aggregate_id = f.aggregate_id AND t.done_at IS NULL
                           ORDER BY t.seq OFFSET {free_rows} - 1 LIMIT 1) IS NOT NULL))
                       OVER (PARTITION BY f.aggregate_type, f.aggregate_id)) AS held
          FROM fresh f LEFT JOIN LATERAL (
               SELECT t.seq, t.parked_at FROM {table} t
                WHERE f.place = 1
                  AND t.aggregate_type = f.aggregate_type AND t.aggregate_id = f.aggregate_id AND t.done_at IS NULL
                ORDER BY t.seq LIMIT 1) head ON true)
INSERT INTO {table} (queue, message_id, event_type, schema_version, aggregate_type, aggregate_id, aggregate_version, payload,
                     content_type, content_encoding, headers, exchange, routing_key, correlation_id, causation_id,
                     producer, traceparent, tracestate, occurred_at, held)
SELECT $1, b.message_id, b.event_type, b.schema_version, b.aggregate_type, b.aggregate_id, b.aggregate_version, b.payload,
       b.content_type, b.content_encoding, b.headers::jsonb, b.exchange, b.routing_key, b.correlation_id, b.causation_id,
       b.producer, b.traceparent, b.tracestate, b.occurred_at, placed.held
  FROM unnest($2::text[], $3::text[], $4::int[], $5::text[], $6::text[], $7::bigint[], $8::bytea[], $9::text[], $10::text[],
              $11::text[], $12::text[], $13::text[], $14::text[], $15::text[], $16::text[], $17::text[], $18::text[],
              $19::timestamptz[]) WITH ORDINALITY
       AS b (message_id, event_type, schema_version, aggregate_type, aggregate_id, aggregate_version, payload, content_type,
             content_encoding, headers, exchange, routing_key, correlation_id, causation_id, producer, traceparent,
             tracestate, occurred_at, number)
  JOIN placed ON placed.number = b.number
 ORDER BY b.number
ON CONFLICT (message_id) DO NOTHING
