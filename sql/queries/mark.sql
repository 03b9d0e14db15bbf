-- Purpose: mark sent rows where they were last seen (S2); which were found. Columns that keep their value do not stand in the way of a HOT update.
-- Values:  $1 ctids, $2 seqs, $3 ids.
-- Locks:   FOR NO KEY UPDATE SKIP LOCKED on the rows: one that an application keeps locked stalls no batch.
-- Index:   none, by address.
-- Caller:  relay/settling.py.
WITH t AS (
        SELECT o.ctid AS c, o.seq FROM unnest($1::tid[], $2::bigint[], $3::text[]) k(c, seq, id)
          JOIN {table} o ON o.ctid = k.c
         WHERE o.seq = k.seq AND o.id = k.id AND o.sent_at IS NULL
           FOR NO KEY UPDATE OF o SKIP LOCKED),
     u AS (UPDATE {table} o SET sent_at = clock_timestamp(), aside = NULL, holds = NULL, due_at = NULL
          FROM t WHERE o.ctid = t.c AND o.seq = t.seq RETURNING o.seq)
SELECT array_agg(u.seq) AS seqs FROM u
