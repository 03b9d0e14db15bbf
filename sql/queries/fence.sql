-- Purpose: lock the shards of a settlement that are still ours (S1); which of them are.
-- Values:  $1 shards, $2 epochs, each as an array's text, $3 instance.
-- Locks:   FOR KEY SHARE on the shard rows, in shard order: stands in no renewal's way, excludes claims and operators.
-- Index:   none needed, the table has 64 rows.
-- Caller:  relay/settling.py.
SELECT array_agg(l.shard) AS shards FROM (
    SELECT s.shard FROM {shard} s JOIN unnest($1::text::smallint[], $2::text::bigint[]) f(shard, epoch)
        ON f.shard = s.shard AND f.epoch = s.epoch
     WHERE s.owner = $3::text ORDER BY s.shard FOR KEY SHARE OF s) l
