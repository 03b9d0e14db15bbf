-- Purpose: how many rows there are to publish where they are too many to count: the first 200 that wait of each shard
--          span some seqs; up to S there are as many more as that density makes. So neither a hot key nor sent rows above
--          a floor (a writer that stays open keeps it back) count for more than they are. Part of backlog and
--          status_backlog, whose `last` has S and whose `floors` say above what to look.
-- Index:   the reading index, one descent a shard and past what was sent above its floor.
SELECT sum(CASE WHEN p.rows < 200 THEN p.rows
                ELSE p.rows * greatest(1, (last.seq - p.first)::float8 / greatest(p.reached - p.first, 1)) END)::bigint
  FROM floors s CROSS JOIN last CROSS JOIN LATERAL (
       SELECT count(*) AS rows, min(x.seq) AS first, max(x.seq) AS reached FROM (
           SELECT o.seq FROM {table} o
            WHERE {shard_of_o} = s.shard AND o.seq > s.floor AND o.aside IS NULL AND o.sent_at IS NULL
            ORDER BY o.seq LIMIT 200) x) p
