-- Purpose: rows that were read before their time wait aside for it and hold nobody (H6); which were unchanged.
-- Values:  $1 ctids, $2 seqs, $3 ids, each as an array's text.
-- Locks:   FOR NO KEY UPDATE SKIP LOCKED on the rows.
-- Index:   none, by address: a miss means that somebody changed the row, or keeps it locked: unchanged.sql tells (S2).
-- Caller:  relay/settling.py.
WITH t AS (
        SELECT o.ctid AS c, o.seq FROM unnest($1::text::tid[], $2::text::bigint[], $3::text::text[]) k(c, seq, id)
          JOIN {table} o ON o.ctid = k.c
         WHERE o.seq = k.seq AND o.id = k.id AND o.sent_at IS NULL
           FOR NO KEY UPDATE OF o SKIP LOCKED),
     u AS (UPDATE {table} o SET aside = 'scheduled', holds = false, due_at = coalesce(o.available_at, clock_timestamp())
             FROM t WHERE o.ctid = t.c AND o.seq = t.seq RETURNING o.seq)
SELECT array_agg(u.seq) FILTER (WHERE u.seq IS NOT NULL) AS seqs, array_agg(t.seq) FILTER (WHERE u.seq IS NULL) AS untouched
  FROM t LEFT JOIN u ON u.seq = t.seq
