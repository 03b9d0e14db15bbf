-- Purpose: of each ordering key that something holds its highest holding row, at most so many a shard, for a shard's new owner.
-- Values:  $1 shards, $2 keys a shard.
-- Locks:   none.
-- Index:   {aside_key_index} from end to end: all rows aside are looked at, once a claim.
-- Caller:  relay/outbox.py `holding_keys`.
SELECT k.shard, k.seq, k.id, k.event_type, k.aggregate_type, k.aggregate_id
  FROM (SELECT l.*, row_number() OVER (PARTITION BY l.shard ORDER BY l.seq) AS n
          FROM (SELECT DISTINCT ON (coalesce(o.aggregate_type, ''), o.aggregate_id)
                       o.shard, o.seq, o.id, o.event_type, o.aggregate_type, o.aggregate_id
                  FROM {table} o
                 WHERE o.aside IS NOT NULL AND o.holds AND o.aggregate_id IS NOT NULL AND o.shard = ANY ($1::smallint[])
                   AND (NOT (SELECT EXISTS (SELECT FROM {fault})) OR NOT EXISTS (SELECT FROM {fault} u WHERE u.seq = o.seq AND u.id = o.id))
                 ORDER BY coalesce(o.aggregate_type, ''), o.aggregate_id, o.seq DESC) l) k
 WHERE k.n <= $2::int
