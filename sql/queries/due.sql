-- Purpose: rows aside whose time has come, at or below the cursors (H4, H6), each with whether a lower row of its key
--          holds it, and whether there may be more: of each shard the oldest due ones, twice its share of them at most, and
--          of those the oldest. The rows are chosen first, by their addresses, and only those are looked at closely. A row
--          of the fault table is not released and holds nobody.
--          Nothing of a shard that is another's in this snapshot (L8).
-- Values:  $1 shards, $2 cursors, $3 rows in all, $4 whether keys are ordered, $5 instance, $6 `seq`s of rows that the
--          caller has: while those cannot go they would hide all others. (`NOT IN` a subselect is hashed; the array itself
--          would be gone through for each row.)
-- Locks:   none.
-- Index:   {aside_due_index}, one descent a shard and a second one where something is due, then {aside_key_index} once a row.
-- Caller:  relay/outbox.py `due`.
WITH f AS MATERIALIZED (
        SELECT f.shard, f.cursor FROM unnest($1::smallint[], $2::bigint[]) f(shard, cursor)
         CROSS JOIN LATERAL (SELECT FROM {table} o WHERE {is_due} LIMIT 1) x
         WHERE f.shard = ANY (ARRAY (SELECT s.shard FROM {shard} s WHERE s.owner = $5::text))),
     look AS MATERIALIZED (SELECT (2 * $3::bigint / greatest(count(*), 1) + 1)::int AS rows FROM f),
     chosen AS MATERIALIZED (
        SELECT x.*, count(*) OVER (PARTITION BY f.shard) >= (SELECT rows FROM look) AS is_more
          FROM f CROSS JOIN LATERAL (
               SELECT o.due_at, o.seq, o.ctid AS c FROM {table} o WHERE {is_due}
                ORDER BY o.due_at, o.seq LIMIT (SELECT rows FROM look)) x
         ORDER BY x.due_at, x.seq LIMIT $3::int)
SELECT x.aside, x.is_blocked, x.shard, {row}, x.is_more
  FROM (SELECT o.aside, $4::bool AND o.aggregate_id IS NOT NULL AND {blocker} AS is_blocked, {shard_of_o} AS shard,
               chosen.due_at, chosen.is_more, {raw}
          FROM chosen JOIN {table} o ON o.ctid = chosen.c OFFSET 0) x
 ORDER BY x.due_at, x.seq
