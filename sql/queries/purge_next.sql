-- Purpose: which rows purge.sql would delete.
-- Values:  $1 instance, $2 age in seconds, $3 rows in all, $4 seqs of rows that are spared.
-- Locks:   none.
-- Index:   {read_index}, one descent a shard.
-- Caller:  relay/sparing.py, after a refusal.
{purgeable}
SELECT old.seq, old.id FROM old
