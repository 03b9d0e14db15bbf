-- Purpose: lock those of our shards that have parked rows, or rows of the fault table, older than their retention (O2).
-- Values:  $1 instance, $2 retention in seconds.
-- Locks:   FOR UPDATE on the shard rows, in shard order: excludes settlements, claims and operators.
-- Index:   {aside_parked_index}, two descents a shard; the fault table, where there is one, end to end.
-- Caller:  relay/retention.py.
WITH old AS MATERIALIZED (
        SELECT s.shard FROM {shard} s CROSS JOIN (VALUES (true), (false)) h(holds) CROSS JOIN LATERAL (
            SELECT 1 FROM {table} o
             WHERE {shard_of_o} = s.shard AND o.aside = 'parked' AND o.holds = h.holds
               AND o.parked_at < statement_timestamp() - $2::float8 * interval '1 second'
             ORDER BY o.parked_at LIMIT 1) x
         WHERE s.owner = $1::text
        UNION
        SELECT {shard_of_o} AS shard FROM {fault} u JOIN {table} o ON o.id = u.id
         WHERE o.seq = u.seq AND u.failed_at < statement_timestamp() - $2::float8 * interval '1 second')
SELECT array_agg(l.shard) AS shards FROM (
    SELECT s.shard FROM {shard} s JOIN old ON old.shard = s.shard
     WHERE s.owner = $1::text ORDER BY s.shard FOR UPDATE OF s) l
