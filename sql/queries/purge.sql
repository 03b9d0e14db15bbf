-- Purpose: delete marked rows past their age; how many, and those that were locked and are still there: a trigger suppresses it.
-- Values:  $1 instance, $2 age in seconds, $3 rows in all, $4 seqs of rows that are spared.
-- Locks:   the deleted rows, SKIP LOCKED.
-- Index:   {read_index}, one descent a shard.
-- Caller:  relay/sparing.py.
{purgeable},
     t AS (SELECT o.ctid AS c, o.seq FROM old JOIN {table} o ON o.ctid = old.c
            WHERE o.seq = old.seq AND o.sent_at IS NOT NULL FOR UPDATE OF o SKIP LOCKED),
     d AS (DELETE FROM {table} o USING t WHERE o.ctid = t.c AND o.seq = t.seq RETURNING o.seq)
SELECT count(d.seq) AS rows, array_agg(t.seq) FILTER (WHERE d.seq IS NULL) AS untouched FROM t LEFT JOIN d ON d.seq = t.seq
