-- Purpose: how much there is to publish and how old the oldest is, for the gauges. The rows to publish are counted to
--          100,000 and above that estimated, by {backlog_estimate}; where there are more aside, backlog_aside.sql has those.
--          A scheduled row whose time has come is one to publish, whoever looks (`overdue`).
--          Rows of the fault table are an operator's: they count as parked, whatever they look like.
-- Values:  $1 shards and $2 up to where each has nothing that waits, as far as the caller knows: its floor may lie far
--          below, with all that was sent since a writer opened that has not ended.
-- Locks:   none.
-- Index:   {read_index} above each shard's floor; {aside_key_index}: up to 200,001 entries, and the rows of no more than 100,000.
-- Caller:  relay/outbox.py `backlog`.
WITH moment AS MATERIALIZED (SELECT statement_timestamp() AS now),
     last AS MATERIALIZED (SELECT CASE WHEN is_called THEN last_value ELSE last_value - 1 END AS seq FROM {sequence}),
     floors AS MATERIALIZED (
        SELECT s.shard, greatest(s.floor, g.start) AS floor
          FROM {shard} s LEFT JOIN unnest($1::smallint[], $2::bigint[]) g(shard, start) ON g.shard = s.shard),
     pending AS MATERIALIZED (
        SELECT p.is_due FROM floors s CROSS JOIN moment CROSS JOIN LATERAL (
            SELECT o.available_at IS NULL OR o.available_at <= moment.now AS is_due FROM {table} o
             WHERE {shard_of_o} = s.shard AND o.seq > s.floor AND o.aside IS NULL AND o.sent_at IS NULL
               AND (NOT (SELECT EXISTS (SELECT FROM {fault})) OR NOT EXISTS (SELECT FROM {fault} u WHERE u.seq = o.seq AND u.id = o.id)) LIMIT 100001) p
         LIMIT 100001),
     oldest AS MATERIALIZED (
        SELECT min(greatest(p.created_at, p.available_at)) AS since FROM floors s CROSS JOIN moment CROSS JOIN LATERAL (
            SELECT o.created_at, o.available_at FROM {table} o
             WHERE {shard_of_o} = s.shard AND o.seq > s.floor AND o.aside IS NULL AND o.sent_at IS NULL
               AND (NOT (SELECT EXISTS (SELECT FROM {fault})) OR NOT EXISTS (SELECT FROM {fault} u WHERE u.seq = o.seq AND u.id = o.id))
               AND (o.available_at IS NULL OR o.available_at <= moment.now)
             ORDER BY o.seq LIMIT 1) p
         WHERE isfinite(p.created_at)),
     aside AS MATERIALIZED (SELECT count(*) AS rows FROM (SELECT FROM {table} o WHERE o.aside IS NOT NULL LIMIT 200001) o),
     waiting AS (
        SELECT o.aside, o.aside = 'scheduled' AND o.due_at <= moment.now AS is_overdue,
               CASE o.aside WHEN 'held' THEN hashtextextended((coalesce(o.aggregate_type, '') || chr(31) || o.aggregate_id) COLLATE "C", 0) END AS held_key,
               greatest(o.created_at, o.available_at) AS since
          FROM {table} o CROSS JOIN moment WHERE o.aside IS NOT NULL AND (SELECT rows <= 100000 FROM aside)
           AND (NOT (SELECT EXISTS (SELECT FROM {fault})) OR NOT EXISTS (SELECT FROM {fault} u WHERE u.seq = o.seq AND u.id = o.id))),
     faults AS MATERIALIZED (SELECT count(*) AS rows FROM (SELECT FROM {fault} LIMIT 100001) u),
     counts AS MATERIALIZED (
        SELECT count(*) FILTER (WHERE aside = 'deferred') AS deferred,
               count(*) FILTER (WHERE aside = 'parked') AS parked,
               count(*) FILTER (WHERE aside = 'held') AS held,
               count(*) FILTER (WHERE aside = 'scheduled' AND NOT is_overdue) AS scheduled,
               count(*) FILTER (WHERE is_overdue) AS overdue,
               count(DISTINCT held_key) AS held_keys,
               min(since) FILTER (WHERE (aside IN ('deferred', 'held') OR is_overdue) AND isfinite(since)) AS since
          FROM waiting)
SELECT (SELECT count(*) FILTER (WHERE is_due) FROM pending) AS pending,
       (SELECT count(*) FILTER (WHERE NOT is_due) FROM pending) AS unread_scheduled,
       (SELECT count(*) > 100000 FROM pending) AS is_capped,
       CASE WHEN (SELECT count(*) > 100000 FROM pending) THEN ({backlog_estimate}) END AS estimate,
       aside.rows AS aside, c.deferred, c.parked + faults.rows AS parked, c.held, c.scheduled, c.overdue, c.held_keys,
       date_part('epoch', moment.now) - date_part('epoch', least(oldest.since, c.since)) AS oldest_age_s,
       last.seq AS newest_seq
  FROM moment, last, oldest, aside, counts c, faults
