-- Purpose: the rows that were parked longest ago, past their retention (O2). Not those of the fault table: they have a time
--          of their own.
-- Values:  $1 shards, $2 retention in seconds, $3 rows in all, $4 seqs that are left alone, for the database refuses it.
-- Locks:   none; under the shards' locks.
-- Index:   {aside_parked_index}, two descents a shard.
-- Caller:  relay/retention.py.
SELECT x.shard, x.seq, x.id FROM unnest($1::smallint[]) f(shard) CROSS JOIN (VALUES (true), (false)) h(holds) CROSS JOIN LATERAL (
        SELECT {shard_of_o} AS shard, o.seq, o.id, o.parked_at FROM {table} o
         WHERE {shard_of_o} = f.shard AND o.aside = 'parked' AND o.holds = h.holds
           AND o.parked_at < statement_timestamp() - $2::float8 * interval '1 second' AND o.seq NOT IN (SELECT unnest($4::bigint[]))
           AND (NOT (SELECT EXISTS (SELECT FROM {fault})) OR (SELECT 1 FROM {fault} u WHERE u.seq = o.seq AND u.id = o.id) IS NULL)
         ORDER BY o.parked_at, o.seq LIMIT $3::int) x
 ORDER BY x.parked_at, x.seq LIMIT $3::int
