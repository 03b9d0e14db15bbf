-- Purpose: which of these rows are there and not sent, looked up without a lock: somebody keeps them locked (S2).
-- Values:  $1 ids, $2 seqs.
-- Locks:   none.
-- Index:   the primary key.
-- Caller:  relay/settling.py.
SELECT array_agg(o.seq) AS seqs FROM unnest($1::text[], $2::bigint[]) k(id, seq)
  JOIN {table} o ON o.id = k.id WHERE o.seq = k.seq AND o.sent_at IS NULL
