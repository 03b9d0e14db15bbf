-- Purpose: renew all leases with their floors, and this relay's membership; tell what the shards and relays look
--          like (L2). Locked rows are skipped, nothing is waited for. Where the sequence has fallen below a stored
--          floor, or the table's fingerprint is another, the floor is void: 0 (R5).
-- Values:  $1 shards, $2 epochs, $3 floors or null, $4 instance, $5 lease in seconds, $6 whether our session is
--          direct (behind a proxy its pid means nothing), $7 fingerprint, $8 name, $9 version, $10 whether this relay can
--          publish.
-- Locks:   FOR NO KEY UPDATE SKIP LOCKED on our shard rows, in shard order, and on our membership row.
-- Index:   both tables have a few rows; {aside_due_index}, one descent a shard.
-- Caller:  relay/outbox.py `renew`, about once a second.
WITH last AS MATERIALIZED (SELECT CASE WHEN is_called THEN last_value ELSE last_value - 1 END AS seq FROM {sequence}),
     locked AS MATERIALIZED (
        SELECT s.shard FROM {shard} s WHERE s.owner = $4::text AND s.shard = ANY ($1::smallint[])
         ORDER BY s.shard FOR NO KEY UPDATE SKIP LOCKED),
     renewed AS (
        UPDATE {shard} s
           SET leased_until = clock_timestamp() + $5::float8 * interval '1 second',
               floor = CASE WHEN s.floor > last.seq OR s.fingerprint IS DISTINCT FROM $7::text THEN 0
                            WHEN g.floor IS NULL THEN s.floor
                            ELSE greatest(s.floor, least(g.floor, last.seq)) END,
               last_seq = last.seq, fingerprint = $7::text,
               owner_pid = CASE WHEN $6::bool THEN pg_backend_pid() END,
               owner_backend_start = CASE WHEN $6::bool THEN (
                   SELECT a.backend_start FROM pg_stat_get_activity(pg_backend_pid()) a) END
          FROM locked JOIN unnest($1::smallint[], $2::bigint[], $3::bigint[]) g(shard, epoch, floor) ON g.shard = locked.shard
         CROSS JOIN last
         WHERE s.shard = locked.shard AND s.owner = $4::text AND s.epoch = g.epoch
        RETURNING s.shard, s.floor),
     present AS MATERIALIZED (
        SELECT r.instance FROM {relay} r WHERE r.instance = $4::text FOR NO KEY UPDATE SKIP LOCKED),
     beaten AS (
        UPDATE {relay} r
           SET heartbeat = clock_timestamp(), is_available = $10::bool,
               session_pid = CASE WHEN $6::bool THEN pg_backend_pid() END,
               session_start = CASE WHEN $6::bool THEN (
                   SELECT a.backend_start FROM pg_stat_get_activity(pg_backend_pid()) a) END
          FROM present WHERE r.instance = present.instance RETURNING 1),
     joined AS (
        INSERT INTO {relay} (instance, name, version, started_at, heartbeat, is_available)
        SELECT $4::text, $8::text, $9::text, clock_timestamp(), clock_timestamp(), $10::bool
         WHERE NOT EXISTS (SELECT FROM {relay} r WHERE r.instance = $4::text)
            ON CONFLICT DO NOTHING RETURNING 1),
     mine AS MATERIALIZED (
        SELECT s.shard, s.epoch, coalesce(r.floor, s.floor) AS floor, r.shard IS NOT NULL AS is_renewed
          FROM {shard} s LEFT JOIN renewed r ON r.shard = s.shard WHERE s.owner = $4::text),
     sessions AS MATERIALIZED (SELECT a.pid, a.backend_start FROM pg_stat_get_activity(NULL) a)
SELECT (SELECT array_agg(shard) FROM mine) AS shards,
       (SELECT array_agg(epoch) FROM mine) AS epochs,
       (SELECT array_agg(floor) FROM mine) AS floors,
       (SELECT array_agg(is_renewed) FROM mine) AS are_renewed,
       (SELECT count(*) FROM {shard} s
         WHERE s.owner IS DISTINCT FROM $4::text
           AND (s.owner IS NULL OR s.leased_until IS NULL OR s.leased_until < clock_timestamp()
                OR s.owner_pid IS NOT NULL AND NOT EXISTS (
                    SELECT FROM sessions a WHERE a.pid = s.owner_pid
                       AND (a.backend_start IS NULL OR s.owner_backend_start IS NULL OR a.backend_start = s.owner_backend_start)))
       ) AS claimable,
       (SELECT count(*) FROM {relay} r
         WHERE r.instance <> $4::text AND r.is_available
           AND r.heartbeat > clock_timestamp() - $5::float8 * interval '1 second'
           AND (r.session_pid IS NULL OR EXISTS (
               SELECT FROM sessions a WHERE a.pid = r.session_pid
                  AND (a.backend_start IS NULL OR r.session_start IS NULL OR a.backend_start = r.session_start)))
       ) AS other_relays,
       (SELECT m.paused_at IS NOT NULL FROM {meta} m) AS is_paused,
       (SELECT date_part('epoch', min(x.due_at)) - date_part('epoch', clock_timestamp()) FROM mine
         CROSS JOIN LATERAL (SELECT o.due_at FROM {table} o
                              WHERE {shard_of_o} = mine.shard AND o.aside IN ('deferred', 'scheduled')
                                AND (NOT (SELECT EXISTS (SELECT FROM {fault})) OR (SELECT 1 FROM {fault} u WHERE u.seq = o.seq AND u.id = o.id) IS NULL)
                              ORDER BY o.due_at, o.seq LIMIT 1) x) AS next_due_in_s,
       {fingerprint} AS fingerprint,
       date_part('epoch', clock_timestamp()) AS now
