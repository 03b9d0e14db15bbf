-- Purpose: give shards back at once, with their floors (L5); tell which of them stay because somebody keeps their row
--          locked: to wait for it would keep the keeper's session from renewing (L2).
-- Values:  $1 shards, $2 epochs, $3 floors or null, $4 instance, $5 fingerprint.
-- Locks:   FOR NO KEY UPDATE SKIP LOCKED on the shard rows, in shard order.
-- Index:   none needed, the table has 64 rows.
-- Caller:  relay/outbox.py `release`.
WITH last AS MATERIALIZED (SELECT CASE WHEN is_called THEN last_value ELSE last_value - 1 END AS seq FROM {sequence}),
     locked AS MATERIALIZED (
        SELECT s.shard FROM {shard} s WHERE s.owner = $4::text AND s.shard = ANY ($1::smallint[])
         ORDER BY s.shard FOR NO KEY UPDATE SKIP LOCKED),
     given AS (
        UPDATE {shard} s
           SET owner = NULL, owner_pid = NULL, owner_backend_start = NULL, leased_until = NULL,
               floor = CASE WHEN s.floor > last.seq OR s.fingerprint IS DISTINCT FROM $5::text THEN 0
                            WHEN g.floor IS NULL THEN s.floor
                            ELSE greatest(s.floor, least(g.floor, last.seq)) END,
               last_seq = last.seq, fingerprint = $5::text
          FROM locked JOIN unnest($1::smallint[], $2::bigint[], $3::bigint[]) g(shard, epoch, floor) ON g.shard = locked.shard
         CROSS JOIN last
         WHERE s.shard = locked.shard AND s.owner = $4::text AND s.epoch = g.epoch
        RETURNING s.shard)
SELECT s.shard FROM {shard} s JOIN unnest($1::smallint[], $2::bigint[]) g(shard, epoch) ON g.shard = s.shard
 WHERE s.owner = $4::text AND s.epoch = g.epoch AND NOT EXISTS (SELECT FROM given WHERE given.shard = s.shard)
