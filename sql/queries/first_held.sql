-- Purpose: the lowest holding row of a key, if it is held: the one whose promotion the database refuses.
-- Values:  $1 type ('' for none) and $2 id of the key.
-- Locks:   none.
-- Index:   {aside_key_index}, one descent.
-- Caller:  relay/settling.py, after a refusal.
SELECT l.shard, l.seq, l.id, l.attempts FROM (
    SELECT {shard_of_o} AS shard, o.seq, o.id, o.attempts, o.aside FROM {table} o
     WHERE hashtextextended((coalesce(o.aggregate_type, '') || chr(31) || o.aggregate_id) COLLATE "C", 0)
         = hashtextextended(($1::text || chr(31) || $2::text) COLLATE "C", 0)
       AND o.aside IS NOT NULL AND o.holds AND o.aggregate_id = $2::text AND coalesce(o.aggregate_type, '') = $1::text
       AND (NOT (SELECT EXISTS (SELECT FROM {fault})) OR (SELECT 1 FROM {fault} u WHERE u.seq = o.seq AND u.id = o.id) IS NULL)
     ORDER BY o.seq LIMIT 1) l
 WHERE l.aside = 'held'
