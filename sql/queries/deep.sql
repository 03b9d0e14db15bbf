-- Purpose: one step of `relay check --deep`: of each shard the rows of a range of seqs that lie at or below its floor and are
--          neither sent, nor aside, nor in the fault table: nobody reads them any more (R5). And where the next row below a
--          floor lies: gaps cost nothing. One line for each shard that has such rows, or else one with nulls.
-- Values:  $1 above this seq, $2 up to this seq, $3 shards whose floors count.
-- Locks:   none.
-- Index:   {read_index}, two descents a shard; all shards in one range, so that each page of the table is looked at once.
-- Caller:  relay/preflight/deep.py, in a short read-only transaction.
WITH f AS MATERIALIZED (SELECT s.shard, s.floor FROM {shard} s WHERE s.shard = ANY ($3::smallint[])),
     next AS MATERIALIZED (
        SELECT min(x.seq) AS seq FROM f CROSS JOIN LATERAL (
            SELECT o.seq FROM {table} o
             WHERE {shard_of_o} = f.shard AND o.aside IS NULL AND o.seq > $2::bigint AND o.seq <= f.floor
             ORDER BY o.seq LIMIT 1) x),
     lost AS MATERIALIZED (
        SELECT f.shard, f.floor, x.rows, x.lowest FROM f CROSS JOIN LATERAL (
            SELECT count(*) AS rows, min(o.seq) AS lowest FROM {table} o
             WHERE {shard_of_o} = f.shard AND o.aside IS NULL AND o.seq > $1::bigint AND o.seq <= least($2::bigint, f.floor)
               AND o.sent_at IS NULL
               AND (NOT (SELECT EXISTS (SELECT FROM {fault})) OR (SELECT 1 FROM {fault} u WHERE u.seq = o.seq AND u.id = o.id) IS NULL)) x
         WHERE x.rows > 0)
SELECT next.seq AS next_seq, lost.shard, lost.floor, lost.rows, lost.lowest FROM next LEFT JOIN lost ON true ORDER BY lost.shard
