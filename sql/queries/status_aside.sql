-- Purpose: the rows set aside, by kind and failure class, for `relay status`. `overdue` are scheduled ones whose time has
--          come; `since_s` is the age of the oldest (of these, where they are scheduled), `due_in_s` the time to the next attempt. Rows of the fault table are parked, too: status_meta.sql counts them.
-- Locks:   none.
-- Index:   whichever partial index over rows aside the planner takes; a million parked rows take seconds.
-- Caller:  relay/admin.py, in a read-only transaction.
SELECT aside, CASE WHEN aside = 'parked' THEN failure_class END AS failure_class, count(*) AS rows,
       count(*) FILTER (WHERE aside = 'scheduled' AND due_at <= clock_timestamp()) AS overdue,
       count(DISTINCT (coalesce(aggregate_type, ''), aggregate_id)) FILTER (WHERE aside = 'held') AS keys,
       extract(epoch FROM clock_timestamp()
               - min(greatest(created_at, available_at)) FILTER (WHERE isfinite(created_at) AND (aside <> 'scheduled' OR due_at <= clock_timestamp())))::float8 AS since_s,
       extract(epoch FROM min(due_at) FILTER (WHERE isfinite(due_at)) - clock_timestamp())::float8 AS due_in_s
FROM {table} o WHERE aside IS NOT NULL AND NOT EXISTS (SELECT FROM {fault} u WHERE u.seq = o.seq AND u.id = o.id)
GROUP BY 1, 2 ORDER BY 1, 2
