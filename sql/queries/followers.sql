-- Purpose: the held rows that come next behind due heads of their keys, without a gap: up to the first holding row that is not
--          held, or lies above the shard's cursor (H4).
-- Values:  $1 types ('' for none) and $2 ids of the keys, $3 the heads' seqs, $4 the shards' cursors, $5 rows a head.
-- Locks:   none.
-- Index:   {aside_key_index}, one descent a head; then by address. Rows of the fault table hold nothing.
-- Caller:  relay/outbox.py `followers`.
SELECT x.aside, false AS is_blocked, x.shard, {row} FROM (
SELECT found.aside, {shard_of_o} AS shard, {raw}
  FROM unnest($1::text[], $2::text[], $3::bigint[], $4::bigint[]) k(t, a, seq, cursor)
 CROSS JOIN LATERAL (
        SELECT n.c, n.aside, bool_and(n.aside = 'held' AND n.seq <= k.cursor) OVER (ORDER BY n.seq) AS is_next FROM (
            SELECT b.ctid AS c, b.seq, b.aside FROM {table} b
             WHERE hashtextextended((coalesce(b.aggregate_type, '') || chr(31) || b.aggregate_id) COLLATE "C", 0)
                 = hashtextextended((k.t || chr(31) || k.a) COLLATE "C", 0)
               AND b.aside IS NOT NULL AND b.seq > k.seq AND b.holds AND b.aggregate_id = k.a
               AND coalesce(b.aggregate_type, '') = k.t
               AND (NOT (SELECT EXISTS (SELECT FROM {fault})) OR (SELECT 1 FROM {fault} u WHERE u.seq = b.seq AND u.id = b.id) IS NULL)
             ORDER BY b.seq LIMIT $5::int) n) found
  JOIN {table} o ON o.ctid = found.c
 WHERE found.is_next OFFSET 0) x
 ORDER BY x.seq
