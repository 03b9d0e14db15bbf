-- Purpose: one row of the benchmark's own outbox, under an id that its writer knows.
-- Values:  $1 id, $2 key, $3 the payload's bytes.
-- Locks:   as any insert.
-- Index:   none is read.
-- Caller:  relay/benchmark/load.py, a commit of its own.
INSERT INTO {table} (id, event_type, aggregate_type, aggregate_id, payload)
VALUES ($1, 'bench', 'bench', $2, to_json(repeat('x', $3::int - 2)))
