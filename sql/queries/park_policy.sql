-- Purpose: rows that were parked under another RELAY_ON_PARKED get this owner's, some at a time: how many, and those that were locked and
--          stayed as they were: a trigger suppresses it. Who walks over the held keys then finds those that nothing holds any more.
-- Values:  $1 shards, $2 whether parked rows hold, $3 rows in all, $4 seqs of rows that are spared.
-- Locks:   the rows, as an UPDATE does; skips those that somebody keeps locked. Under the shards' fence.
-- Index:   {aside_parked_index}.
-- Caller:  relay/sparing.py, before a shard is read that was last owned under something else.
{other_policy},
     u AS (
        UPDATE {table} o SET holds = $2::bool AND o.aggregate_id IS NOT NULL
          FROM t WHERE o.ctid = t.c AND o.seq = t.seq RETURNING o.seq)
SELECT count(u.seq) AS rows, array_agg(t.seq) FILTER (WHERE u.seq IS NULL) AS untouched FROM t LEFT JOIN u ON u.seq = t.seq
