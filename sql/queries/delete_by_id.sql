-- Purpose: delete sent rows by their identity, where the address was no longer right or is not known (S2);
--          which were found, which of them were aside, and which were locked and yet did not change: somebody had changed
--          them meanwhile, or a trigger suppresses it.
-- Values:  $1 ids, $2 seqs.
-- Locks:   FOR NO KEY UPDATE SKIP LOCKED on the rows.
-- Index:   the primary key.
-- Caller:  relay/settling.py.
WITH t AS (
        SELECT o.ctid AS c, o.seq FROM unnest($1::text[], $2::bigint[]) k(id, seq)
          JOIN {table} o ON o.id = k.id
         WHERE o.seq = k.seq AND o.sent_at IS NULL
           FOR NO KEY UPDATE OF o SKIP LOCKED),
     u AS (DELETE FROM {table} o USING t WHERE o.ctid = t.c AND o.seq = t.seq RETURNING o.seq, o.aside IS NOT NULL AS was_aside)
SELECT array_agg(u.seq) FILTER (WHERE u.seq IS NOT NULL) AS seqs, array_agg(u.seq) FILTER (WHERE u.was_aside) AS freed,
       array_agg(t.seq) FILTER (WHERE u.seq IS NULL) AS untouched
  FROM t LEFT JOIN u ON u.seq = t.seq
