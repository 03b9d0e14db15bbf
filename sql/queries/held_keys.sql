-- Purpose: one page of a walk over the rows aside, by hash of their key and seq: of each key that something holds the highest
--          holding row, and whether the lowest is held, so that nothing would ever release it (H3: a promotion that was owed
--          when its relay ended). And where the page ended, null when that was the end.
-- Values:  $1 shards, $2 hash and $3 seq of the row that the last page ended with, $4 rows to look at.
-- Locks:   none.
-- Index:   {aside_key_index}, from there on; bounded, whatever there is aside. Rows without a key stand at its end, and
--          are not looked at.
-- Caller:  relay/outbox.py `held_keys`.
WITH look AS MATERIALIZED (
        SELECT hashtextextended((coalesce(o.aggregate_type, '') || chr(31) || o.aggregate_id) COLLATE "C", 0) AS hash,
               o.seq, o.id, {shard_of_o} AS shard, o.aside, o.holds, coalesce(o.aggregate_type, '') AS t, o.aggregate_id AS a
          FROM {table} o
         WHERE o.aside IS NOT NULL
           AND (hashtextextended((coalesce(o.aggregate_type, '') || chr(31) || o.aggregate_id) COLLATE "C", 0), o.seq)
             > ($2::bigint, $3::bigint)
         ORDER BY hashtextextended((coalesce(o.aggregate_type, '') || chr(31) || o.aggregate_id) COLLATE "C", 0), o.seq
         LIMIT $4::int),
     keys AS MATERIALIZED (
        SELECT l.hash, l.shard, l.t, l.a, max(l.seq) AS highest, (array_agg(l.aside ORDER BY l.seq))[1] = 'held' AS is_lowest_held
          FROM look l
         WHERE l.holds AND l.shard = ANY ($1::smallint[])
           AND (NOT (SELECT EXISTS (SELECT FROM {fault})) OR (SELECT 1 FROM {fault} u WHERE u.seq = l.seq AND u.id = l.id) IS NULL)
         GROUP BY l.hash, l.shard, l.t, l.a),
     reached AS MATERIALIZED (
        SELECT l.hash, l.seq FROM look l WHERE (SELECT count(*) FROM look) >= $4::int
         ORDER BY l.hash DESC, l.seq DESC LIMIT 1)
SELECT k.hash, k.shard, k.t, k.a, k.highest, k.is_lowest_held, r.hash AS reached_hash, r.seq AS reached_seq
  FROM (SELECT 1) one LEFT JOIN keys k ON true LEFT JOIN reached r ON true
