-- Purpose: rows as they are now, of those that are still pending and not aside; bodies and headers stay behind.
-- Values:  $1 ids, $2 seqs.
-- Locks:   none.
-- Index:   the primary key. `coalesce`, lest without statistics the planner walks all of {read_index} instead, whose
--          predicate would be met otherwise (PostgreSQL 18 did).
-- Caller:  relay/outbox.py `reload`.
SELECT x.shard, {row} FROM unnest($1::text[], $2::bigint[]) k(id, seq)
 CROSS JOIN LATERAL (
    SELECT {shard_of_o} AS shard, {raw} FROM {table} o
     WHERE o.id = k.id AND o.seq = k.seq AND o.sent_at IS NULL AND coalesce(o.aside, '') = ''
       AND (NOT (SELECT EXISTS (SELECT FROM {fault})) OR (SELECT 1 FROM {fault} u WHERE u.seq = o.seq AND u.id = o.id) IS NULL)
     LIMIT 1) x
