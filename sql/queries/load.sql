-- Purpose: the bodies that were left behind, with the position in the list of who is there still.
-- Values:  $1 ids, $2 seqs.
-- Locks:   none.
-- Index:   the primary key.
-- Caller:  relay/outbox.py `load`.
SELECT k.n, {body} AS body
  FROM unnest($1::text[], $2::bigint[]) WITH ORDINALITY k(id, seq, n)
  JOIN {table} o ON o.id = k.id AND o.seq = k.seq
 WHERE o.sent_at IS NULL
