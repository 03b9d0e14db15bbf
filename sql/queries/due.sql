-- Purpose: rows aside whose time has come, at or below the cursors, oldest due first (H4, H6), each with whether a
--          lower row of its key holds it. The rows are chosen first, by their addresses, and only those are looked
--          at closely. A row of the fault table is not released and holds nobody.
--          Nothing of a shard that is another's in this snapshot (L8).
-- Values:  $1 shards, $2 cursors, $3 rows in all, $4 whether keys are ordered, $5 instance, $6 `seq`s of rows that the
--          caller has: while those cannot go they would hide all others. (`IS NOT TRUE` keeps the array hashed.)
-- Locks:   none.
-- Index:   {aside_due_index}, then {aside_key_index} once a row.
-- Caller:  relay/outbox.py `due`.
WITH chosen AS MATERIALIZED (
        SELECT x.* FROM unnest($1::smallint[], $2::bigint[]) f(shard, cursor)
         CROSS JOIN LATERAL (
            SELECT {shard_of_o} AS shard, o.due_at, o.seq, o.ctid AS c FROM {table} o
             WHERE {shard_of_o} = f.shard AND o.aside IN ('deferred', 'scheduled') AND o.due_at <= statement_timestamp()
               AND o.seq <= f.cursor AND o.sent_at IS NULL AND (o.seq = ANY ($6::bigint[])) IS NOT TRUE
               AND (NOT (SELECT EXISTS (SELECT FROM {fault})) OR (SELECT 1 FROM {fault} u WHERE u.seq = o.seq AND u.id = o.id) IS NULL)
             ORDER BY o.due_at, o.seq LIMIT $3::int) x
         WHERE f.shard = ANY (ARRAY (SELECT s.shard FROM {shard} s WHERE s.owner = $5::text))
         ORDER BY x.due_at, x.seq LIMIT $3::int)
SELECT x.aside, x.is_blocked, x.shard, {row}
  FROM (SELECT o.aside, $4::bool AND o.aggregate_id IS NOT NULL AND {blocker} AS is_blocked, {shard_of_o} AS shard,
               chosen.due_at, {raw}
          FROM chosen JOIN {table} o ON o.ctid = chosen.c) x
 ORDER BY x.due_at, x.seq
