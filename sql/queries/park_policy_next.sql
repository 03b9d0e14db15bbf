-- Purpose: which rows park_policy.sql would change.
-- Values:  $1 shards, $2 whether parked rows hold, $3 rows in all, $4 seqs of rows that are spared.
-- Locks:   as park_policy.sql.
-- Index:   {aside_parked_index}.
-- Caller:  relay/sparing.py, after a refusal.
{other_policy}
SELECT t.seq, t.id FROM t
