-- Purpose: the rows that a relay has to publish still, for `relay status`: their number (counted to 100,000,
--          estimated by {backlog_estimate} above), the age of the oldest, rows scheduled but not read yet, and what the
--          sequence gave last.
-- Locks:   none.
-- Index:   the reading index, above each shard's floor; the oldest by one probe a shard.
-- Caller:  relay/admin.py, in a read-only transaction.
WITH moment AS (SELECT clock_timestamp() AS now),
     last AS (SELECT CASE WHEN is_called THEN last_value ELSE last_value - 1 END AS seq FROM {sequence}),
     floors AS (SELECT s.shard, s.floor FROM {shard} s),
     pending AS (
        SELECT p.is_due FROM floors s CROSS JOIN moment CROSS JOIN LATERAL (
            SELECT o.available_at IS NULL OR o.available_at <= moment.now AS is_due FROM {table} o
            WHERE {shard_of_o} = s.shard AND o.seq > s.floor AND o.aside IS NULL AND o.sent_at IS NULL
              AND NOT EXISTS (SELECT FROM {fault} u WHERE u.seq = o.seq AND u.id = o.id) LIMIT 100001) p
        LIMIT 100001),
     oldest AS (
        SELECT min(greatest(p.created_at, p.available_at)) AS since FROM floors s CROSS JOIN moment CROSS JOIN LATERAL (
            SELECT o.created_at, o.available_at FROM {table} o
            WHERE {shard_of_o} = s.shard AND o.seq > s.floor AND o.aside IS NULL AND o.sent_at IS NULL
              AND NOT EXISTS (SELECT FROM {fault} u WHERE u.seq = o.seq AND u.id = o.id)
              AND (o.available_at IS NULL OR o.available_at <= moment.now)
            ORDER BY o.seq LIMIT 1) p)
SELECT moment.now AS observed_at,
       last.seq AS newest_seq,
       (SELECT count(*) FROM pending WHERE is_due) AS pending_rows,
       (SELECT count(*) FROM pending WHERE NOT is_due) AS unread_scheduled_rows,
       (SELECT count(*) > 100000 FROM pending) AS is_estimated,
       CASE WHEN (SELECT count(*) > 100000 FROM pending) THEN ({backlog_estimate}) END AS estimate,
       CASE WHEN isfinite(oldest.since) THEN extract(epoch FROM moment.now - oldest.since)::float8 END AS oldest_age_s,
       (SELECT n_live_tup FROM pg_stat_all_tables WHERE relid = $1) AS live_rows
FROM moment, last, oldest
