-- Purpose: which of these rows are still what and where they were, looked up without a lock after a change of them missed:
--          somebody keeps them locked (S2).
-- Values:  $1 ctids, $2 seqs, $3 ids, each as an array's text.
-- Locks:   none.
-- Index:   none, by address.
-- Caller:  relay/settling.py.
SELECT array_agg(o.seq) AS seqs FROM unnest($1::text::tid[], $2::text::bigint[], $3::text::text[]) k(c, seq, id)
  JOIN {table} o ON o.ctid = k.c WHERE o.seq = k.seq AND o.id = k.id AND o.sent_at IS NULL
