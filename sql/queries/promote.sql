-- Purpose: H3: where the lowest holding row of a touched key is held, it becomes deferred, due now. The last statement
--          of every transaction that changes rows aside.
-- Values:  $1 types ('' for none) and $2 ids of the keys.
-- Locks:   the promoted rows, as an UPDATE does.
-- Index:   {aside_key_index}, one descent a key; keys are compared by value.
-- Caller:  relay/outbox.py `claim`, relay/settling.py.
WITH k AS MATERIALIZED (SELECT DISTINCT k.t, k.a FROM unnest($1::text[], $2::text[]) k(t, a)),
     lowest AS MATERIALIZED (
        SELECT l.* FROM k CROSS JOIN LATERAL (
            SELECT o.ctid AS c, o.seq, o.aside FROM {table} o
             WHERE hashtextextended((coalesce(o.aggregate_type, '') || chr(31) || o.aggregate_id) COLLATE "C", 0)
                 = hashtextextended((k.t || chr(31) || k.a) COLLATE "C", 0)
               AND o.aside IS NOT NULL AND o.holds AND o.aggregate_id = k.a AND coalesce(o.aggregate_type, '') = k.t
             ORDER BY o.seq LIMIT 1) l
         WHERE l.aside = 'held')
UPDATE {table} o SET aside = 'deferred', due_at = clock_timestamp()
  FROM lowest WHERE o.ctid = lowest.c AND o.seq = lowest.seq
RETURNING o.shard
