-- Purpose: how large the largest body is that waits to be published; the oldest 100,000 rows are looked at.
-- Locks:   none.
-- Index:   {read}, above each shard's floor. Every body is read: the caller bounds the time.
-- Caller:  relay/preflight/pending.py. {size} is the length of the row's body in bytes.
SELECT count(*) AS rows, coalesce(max(x.size), 0)::bigint AS largest_bytes
  FROM (SELECT o.size FROM {shard} s CROSS JOIN LATERAL (
            SELECT {size} AS size FROM {table} r
             WHERE r.shard = s.shard AND r.seq > s.floor AND r.aside IS NULL AND r.sent_at IS NULL
             ORDER BY r.seq LIMIT 100000) o
         LIMIT 100000) x
