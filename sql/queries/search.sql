-- Purpose: rows of our shards that are not sent at or below their floor, where nobody reads them any more: they were given a
--          seq again (`setval`), or put back from a copy (R5). From each of the given positions on a few rows are looked at:
--          how far, how many, and the lowest unsent one.
-- Values:  $1 instance, $2 shards, $3 seqs to look above, $4 rows a position.
-- Locks:   none.
-- Index:   {read_index}, one descent a position.
-- Caller:  relay/outbox.py `search`.
SELECT a.n, x.last_seq, x.rows, x.lowest_unsent
  FROM unnest($2::smallint[], $3::bigint[]) WITH ORDINALITY a(shard, above, n)
  JOIN {shard} s ON s.shard = a.shard AND s.owner = $1::text
 CROSS JOIN LATERAL (
        SELECT count(*) AS rows, max(y.seq) AS last_seq, min(y.seq) FILTER (WHERE y.is_unsent) AS lowest_unsent
          FROM (SELECT o.seq, o.sent_at IS NULL
                       AND (NOT (SELECT EXISTS (SELECT FROM {fault}))
                            OR (SELECT 1 FROM {fault} u WHERE u.seq = o.seq AND u.id = o.id) IS NULL) AS is_unsent
                  FROM {table} o
                 WHERE {shard_of_o} = s.shard AND o.aside IS NULL AND o.seq > a.above AND o.seq <= s.floor
                 ORDER BY o.seq LIMIT $4::int) y) x
 ORDER BY a.n
