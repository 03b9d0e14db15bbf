-- Purpose: marked rows past their age, oldest first, of our own shards below their floors, as `old`; part of purge and purge_next, with
--          their values. A few marked rows a shard are looked at, from the bottom: where those are too young, so are the ones above,
--          but for what was redriven. Rows in the fault table are passed over, or enough of them at the bottom would keep all that
--          lies above them.
-- Index:   {read_index}, one descent a shard.
WITH look AS MATERIALIZED (
        SELECT (4 * $3::bigint / greatest(count(*), 1) + 16)::int AS rows FROM {shard} WHERE owner = $1::text),
     old AS MATERIALIZED (
        SELECT x.c, x.seq, x.id FROM {shard} s CROSS JOIN LATERAL (
            SELECT o.ctid AS c, o.seq, o.id, o.sent_at FROM {table} o
             WHERE {shard_of_o} = s.shard AND o.aside IS NULL AND o.seq <= s.floor AND o.sent_at IS NOT NULL
               AND o.seq NOT IN (SELECT unnest($4::bigint[])) ORDER BY o.seq LIMIT (SELECT rows FROM look)) x
         WHERE s.owner = $1::text AND x.sent_at < statement_timestamp() - $2::float8 * interval '1 second'
         ORDER BY x.seq LIMIT $3::int)
