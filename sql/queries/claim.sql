-- Purpose: take shards that are free, run out, or whose owner's session is gone (L1, L3), with the floor where it may be
--          trusted: the fingerprint holds and the sequence has not fallen (R5). Relays that are long gone leave the
--          membership.
-- Values:  $1 at most so many, $2 instance, $3 lease in seconds, $4 whether our session is direct (behind a proxy
--          its pid means nothing), $5 fingerprint, $6 whether this owner's parked rows hold their keys.
-- Locks:   FOR UPDATE SKIP LOCKED on the shard rows (excludes settlements and renewals), on stale membership rows too.
-- Index:   none needed, both tables have a few rows.
-- Caller:  relay/outbox.py `claim`.
WITH last AS MATERIALIZED (SELECT CASE WHEN is_called THEN last_value ELSE last_value - 1 END AS seq FROM {sequence}),
     sessions AS MATERIALIZED (SELECT a.pid, a.backend_start FROM pg_stat_get_activity(NULL) a),
     free AS MATERIALIZED (
        SELECT s.shard, s.floor, s.last_seq, s.fingerprint, s.parked_hold FROM {shard} s
         WHERE s.owner IS NULL OR s.leased_until IS NULL OR s.leased_until < clock_timestamp()
            OR s.owner_pid IS NOT NULL AND NOT EXISTS (
                SELECT FROM sessions a WHERE a.pid = s.owner_pid
                   AND (a.backend_start IS NULL OR s.owner_backend_start IS NULL OR a.backend_start = s.owner_backend_start))
         ORDER BY s.shard LIMIT $1::int FOR UPDATE SKIP LOCKED),
     trusted AS MATERIALIZED (
        SELECT free.shard, free.floor, last.seq,
               free.fingerprint IS NOT DISTINCT FROM $5::text
                   AND last.seq >= free.last_seq AND last.seq >= free.floor AS is_trusted,
               free.parked_hold AS parked_hold_before
          FROM free CROSS JOIN last),
     claimed AS (
        UPDATE {shard} s
           SET epoch = s.epoch + 1, owner = $2::text,
               owner_pid = CASE WHEN $4::bool THEN pg_backend_pid() END,
               owner_backend_start = CASE WHEN $4::bool THEN (
                   SELECT a.backend_start FROM pg_stat_get_activity(pg_backend_pid()) a) END,
               leased_until = clock_timestamp() + $3::float8 * interval '1 second',
               floor = CASE WHEN t.is_trusted THEN t.floor ELSE 0 END, last_seq = t.seq, fingerprint = $5::text,
               parked_hold = nullif(t.parked_hold_before, NOT $6::bool)
          FROM trusted t WHERE s.shard = t.shard
        RETURNING s.shard, s.epoch, s.floor),
     gone AS (
        DELETE FROM {relay} r WHERE r.instance IN (
            SELECT q.instance FROM {relay} q
             WHERE q.heartbeat < clock_timestamp() - 10 * $3::float8 * interval '1 second' FOR UPDATE SKIP LOCKED))
SELECT c.shard, c.epoch, c.floor, t.floor > 0 AND NOT t.is_trusted AS is_void,
       t.parked_hold_before IS DISTINCT FROM $6::bool AS has_other_policy
  FROM claimed c JOIN trusted t ON t.shard = c.shard ORDER BY c.shard
