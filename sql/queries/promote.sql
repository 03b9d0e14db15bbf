-- Purpose: H3: where the lowest holding row of a touched key is held, it becomes deferred, due now. The last statement
--          of every transaction that changes rows aside. One line for each key that stood so, with the row's new address; where it is not promoted,
--          somebody keeps the row locked, and whoever asked must see to it that it is promoted later.
-- Values:  $1 types ('' for none) and $2 ids of the keys.
-- Locks:   FOR NO KEY UPDATE SKIP LOCKED on the promoted rows.
-- Index:   {aside_key_index}, one descent a key; keys are compared by value. Rows of the fault table hold nothing.
-- Caller:  relay/settling.py, relay/parked.py.
WITH k AS MATERIALIZED (SELECT DISTINCT k.t, k.a FROM unnest($1::text[], $2::text[]) k(t, a)),
     lowest AS MATERIALIZED (
        SELECT l.*, k.t, k.a FROM k CROSS JOIN LATERAL (
            SELECT o.ctid AS c, o.seq, {shard_of_o} AS shard, o.aside FROM {table} o
             WHERE hashtextextended((coalesce(o.aggregate_type, '') || chr(31) || o.aggregate_id) COLLATE "C", 0)
                 = hashtextextended((k.t || chr(31) || k.a) COLLATE "C", 0)
               AND o.aside IS NOT NULL AND o.holds AND o.aggregate_id = k.a AND coalesce(o.aggregate_type, '') = k.t
               AND (NOT (SELECT EXISTS (SELECT FROM {fault})) OR (SELECT 1 FROM {fault} u WHERE u.seq = o.seq AND u.id = o.id) IS NULL)
             ORDER BY o.seq LIMIT 1) l
         WHERE l.aside = 'held'),
     t AS (
        SELECT o.ctid AS c, o.seq FROM lowest JOIN {table} o ON o.ctid = lowest.c
         WHERE o.seq = lowest.seq AND o.aside = 'held' FOR NO KEY UPDATE OF o SKIP LOCKED),
     u AS (
        UPDATE {table} o SET aside = 'deferred', due_at = clock_timestamp()
          FROM t WHERE o.ctid = t.c AND o.seq = t.seq RETURNING o.seq, o.ctid AS c)
SELECT lowest.shard, lowest.t AS aggregate_type, lowest.a AS aggregate_id, u.seq IS NOT NULL AS is_promoted, u.seq, u.c::text AS ctid,
       t.seq IS NOT NULL AND u.seq IS NULL AS is_untouched
  FROM lowest LEFT JOIN t ON t.seq = lowest.seq LEFT JOIN u ON u.seq = lowest.seq
