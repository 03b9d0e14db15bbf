-- Purpose: rows of the benchmark's own outbox, so many a statement.
-- Values:  $1 rows, $2 keys, $3 the payload's bytes.
-- Locks:   as any insert.
-- Index:   none is read.
-- Caller:  relay/benchmark/load.py, in one transaction that is the whole backlog.
INSERT INTO {table} (event_type, aggregate_type, aggregate_id, payload)
SELECT 'bench', 'bench', (hashint4(n) & 2147483647) % $2::int, to_json(repeat('x', $3::int - 2))
  FROM generate_series(1, $1::int) n
