-- Purpose: the rows of which something was left behind, whole, as far as they are there still.
-- Values:  $1 ids, $2 seqs.
-- Locks:   none.
-- Index:   the primary key.
-- Caller:  relay/outbox.py `load`.
SELECT x.shard, {row} FROM unnest($1::text[], $2::bigint[]) k(id, seq)
 CROSS JOIN LATERAL (
    SELECT {shard_of_o} AS shard, {raw} FROM {table} o
     WHERE o.id = k.id AND o.seq = k.seq AND o.sent_at IS NULL LIMIT 1) x
