-- Purpose: rows that may have a blocker: those that do become held (H2), those that do not come back, and need no lock
--          for it. Under the shards' locks, after the settlement's other changes.
-- Values:  $1 ctids, $2 seqs, $3 ids, each as an array's text.
-- Locks:   FOR NO KEY UPDATE SKIP LOCKED on the rows that become held.
-- Index:   by address, then {aside_key_index} once a row; keys are compared by value.
-- Caller:  relay/settling.py.
WITH t AS MATERIALIZED (
        SELECT o.ctid AS c, o.seq, {blocker} AS is_blocked
          FROM unnest($1::text::tid[], $2::text::bigint[], $3::text::text[]) k(c, seq, id)
          JOIN {table} o ON o.ctid = k.c
         WHERE o.seq = k.seq AND o.id = k.id AND o.sent_at IS NULL),
     l AS (
        SELECT o.ctid AS c, o.seq FROM t JOIN {table} o ON o.ctid = t.c
         WHERE t.is_blocked AND o.seq = t.seq AND o.sent_at IS NULL
           FOR NO KEY UPDATE OF o SKIP LOCKED),
     u AS (UPDATE {table} o SET aside = 'held', holds = true, due_at = NULL
             FROM l WHERE o.ctid = l.c AND o.seq = l.seq RETURNING o.seq)
SELECT (SELECT array_agg(u.seq) FROM u) AS held, (SELECT array_agg(t.seq) FROM t WHERE NOT t.is_blocked) AS unblocked,
       (SELECT array_agg(l.seq) FROM l LEFT JOIN u ON u.seq = l.seq WHERE u.seq IS NULL) AS untouched
