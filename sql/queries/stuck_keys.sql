-- Purpose: keys whose lowest holding row is held, so that nothing would ever release it: a promotion that was owed (H3) when
--          its relay died. For a shard's new owner.
-- Values:  $1 shards.
-- Locks:   none.
-- Index:   {aside_key_index} from end to end: all rows aside are looked at, once a claim.
-- Caller:  relay/outbox.py `stuck_keys`.
SELECT l.shard, l.aggregate_type, l.aggregate_id
  FROM (SELECT DISTINCT ON (coalesce(o.aggregate_type, ''), o.aggregate_id)
               o.shard, coalesce(o.aggregate_type, '') AS aggregate_type, o.aggregate_id, o.aside
          FROM {table} o
         WHERE o.aside IS NOT NULL AND o.holds AND o.aggregate_id IS NOT NULL AND o.shard = ANY ($1::smallint[])
           AND (NOT (SELECT EXISTS (SELECT FROM {fault})) OR NOT EXISTS (SELECT FROM {fault} u WHERE u.seq = o.seq AND u.id = o.id))
         ORDER BY coalesce(o.aggregate_type, ''), o.aggregate_id, o.seq) l
 WHERE l.aside = 'held'
