-- Purpose: rows as they are now, of those that are still pending and not aside; bodies stay behind.
-- Values:  $1 ids, $2 seqs, $3 whether there are faults.
-- Locks:   none.
-- Index:   the primary key.
-- Caller:  relay/outbox.py `reload`.
SELECT o.shard, {row}
  FROM unnest($1::text[], $2::bigint[]) k(id, seq)
  JOIN {table} o ON o.id = k.id AND o.seq = k.seq
 WHERE o.sent_at IS NULL AND o.aside IS NULL
   AND (NOT $3::bool OR NOT EXISTS (SELECT FROM {fault} u WHERE u.seq = o.seq AND u.id = o.id))
