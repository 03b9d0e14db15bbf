-- Purpose: mark sent rows by their identity, where the address was no longer right or is not known (S2);
--          which were found, and which of them were aside.
-- Values:  $1 ids, $2 seqs.
-- Locks:   FOR NO KEY UPDATE SKIP LOCKED on the rows.
-- Index:   the primary key.
-- Caller:  relay/settling.py.
WITH t AS (
        SELECT o.ctid AS c, o.seq, o.aside IS NOT NULL AS was_aside FROM unnest($1::text[], $2::bigint[]) k(id, seq)
          JOIN {table} o ON o.id = k.id
         WHERE o.seq = k.seq AND o.sent_at IS NULL
           FOR NO KEY UPDATE OF o SKIP LOCKED),
     u AS (UPDATE {table} o SET sent_at = clock_timestamp(), aside = NULL, holds = NULL, due_at = NULL
          FROM t WHERE o.ctid = t.c AND o.seq = t.seq RETURNING o.seq, t.was_aside)
SELECT array_agg(u.seq) AS seqs, array_agg(u.seq) FILTER (WHERE u.was_aside) AS freed FROM u
