-- Purpose: rows of the benchmark's own outbox, so many a statement.
-- Values:  $1 the first row's number, $2 the last one's, $3 keys, $4 the payload's bytes.
-- Locks:   as any insert.
-- Index:   none is read.
-- Caller:  relay/benchmark/load.py, in one transaction that is the whole backlog.
INSERT INTO {table} (event_type, aggregate_type, aggregate_id, payload)
SELECT 'bench', 'bench', (hashint4(n) & 2147483647) % $3::int, to_json(repeat('x', $4::int - 2))
  FROM generate_series($1::int, $2::int) n
