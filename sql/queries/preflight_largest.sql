-- Purpose: how large the largest body is that waits to be published; the oldest 100,000 rows are looked at.
-- Locks:   none.
-- Index:   {read}, above each shard's floor. Every body is read: the caller bounds the time.
-- Caller:  relay/preflight/pending.py. {size} is the length of the row's body in bytes, as it goes out.
SELECT count(*) AS rows, coalesce(max(x.size), 0)::bigint AS largest_bytes
  FROM (SELECT y.size FROM {shard} s CROSS JOIN LATERAL (
            SELECT {size} AS size FROM {table} o
             WHERE {shard_of_o} = s.shard AND o.seq > s.floor AND o.aside IS NULL AND o.sent_at IS NULL
             ORDER BY o.seq LIMIT 100000) y
         LIMIT 100000) x
