-- Purpose: the relays of this outbox and how many shards each holds, for `relay status`.
-- Locks:   none.
-- Index:   none; the tables have 64 rows and a few.
-- Caller:  relay/admin.py, in a read-only transaction.
SELECT coalesce(r.instance, s.owner) AS instance, r.name, r.version, r.started_at,
       extract(epoch FROM clock_timestamp() - r.heartbeat)::float8 AS heartbeat_age_s,
       coalesce(r.is_available, false) AS is_available, coalesce(s.shards, 0) AS shards
FROM {relay} r
FULL JOIN (SELECT owner, count(*) AS shards FROM {shard} WHERE leased_until > clock_timestamp() GROUP BY owner) s
    ON s.owner = r.instance
ORDER BY r.started_at, 1
