-- Purpose: the rows aside by kind where they are more than 100,000, for the gauges. To 200,000 in all they are counted, the parked
--          ones apart, and what is left are the held; those that wait for a time (`timed`) only to 100,000. Beyond, a number is
--          estimated by the size of its index; where what is left may be no more than these are wrong by, the held are what their
--          share of 20,000 rows makes, by hash of their key. Those say how many keys are held, too. The fault table is as in
--          backlog.sql. A row with an unknown `aside` counts as held.
-- Values:  $1 rows aside: counted, 200,001 for more.
-- Locks:   none.
-- Index:   {aside_parked_index}, up to 200,001 entries and no row where vacuum has been; {aside_due_index} and {aside_key_index} for
--          the rows that are looked at.
-- Caller:  relay/outbox.py `backlog`.
WITH moment AS MATERIALIZED (SELECT statement_timestamp() AS now),
     faults AS MATERIALIZED (
        SELECT count(*) AS rows, count(o.aside) AS aside, count(*) FILTER (WHERE o.aside = 'parked') AS parked,
               count(*) FILTER (WHERE o.aside IN ('deferred', 'scheduled')) AS timed
          FROM (SELECT seq, id FROM {fault} LIMIT 100001) u LEFT JOIN {table} o ON o.id = u.id AND o.seq = u.seq),
     timed AS MATERIALIZED (
        SELECT count(*) AS rows, count(*) FILTER (WHERE aside = 'deferred') AS deferred, count(*) FILTER (WHERE is_overdue) AS overdue,
               min(since) FILTER (WHERE (aside = 'deferred' OR is_overdue) AND isfinite(since)) AS since
          FROM (SELECT o.aside, o.aside = 'scheduled' AND o.due_at <= moment.now AS is_overdue, greatest(o.created_at, o.available_at) AS since
                  FROM {table} o CROSS JOIN moment WHERE o.aside IN ('deferred', 'scheduled')
                   AND (NOT (SELECT EXISTS (SELECT FROM {fault})) OR NOT EXISTS (SELECT FROM {fault} u WHERE u.seq = o.seq AND u.id = o.id))
                 LIMIT 100001) o),
     parked AS MATERIALIZED (SELECT count(*) AS rows FROM (SELECT FROM {table} o WHERE o.aside = 'parked'
              LIMIT CASE WHEN $1::bigint > 200000 THEN 100001 ELSE 200001 END) o),
     totals AS MATERIALIZED (
        SELECT $1::bigint > 200000 OR w.rows > 100000 AS is_estimated, f.rows AS faults,
               CASE WHEN $1::bigint > 200000 THEN greatest($1::bigint, {aside_key_entries}) ELSE $1::bigint END - f.aside AS aside,
               CASE WHEN $1::bigint > 200000 AND p.rows > 100000 THEN greatest(p.rows, {aside_parked_entries}) ELSE p.rows END - f.parked AS parked,
               CASE WHEN w.rows > 100000 THEN greatest(w.rows, {aside_due_entries} - f.timed) ELSE w.rows END AS timed
          FROM parked p, faults f, timed w),
     sample AS MATERIALIZED (
        SELECT count(*) AS rows, count(held_key) AS held, count(DISTINCT held_key) AS held_keys,
               min(since) FILTER (WHERE held_key IS NOT NULL AND isfinite(since)) AS since
          FROM (SELECT CASE o.aside WHEN 'held' THEN
                            hashtextextended((coalesce(o.aggregate_type, '') || chr(31) || o.aggregate_id) COLLATE "C", 0) END AS held_key,
                       greatest(o.created_at, o.available_at) AS since
                  FROM {table} o WHERE o.aside IS NOT NULL
                   AND (NOT (SELECT EXISTS (SELECT FROM {fault})) OR NOT EXISTS (SELECT FROM {fault} u WHERE u.seq = o.seq AND u.id = o.id))
                 LIMIT 20000) o),
     kinds AS MATERIALIZED (
        SELECT t.is_estimated, t.parked + t.faults AS parked,
               t.timed * w.deferred / greatest(w.rows, 1) AS deferred, t.timed * w.overdue / greatest(w.rows, 1) AS overdue, t.timed,
               CASE WHEN NOT t.is_estimated OR 3 * (t.aside - t.parked - t.timed) > t.aside THEN greatest(t.aside - t.parked - t.timed, 0)
                    ELSE t.aside * s.held / greatest(s.rows, 1) END AS held
          FROM totals t, timed w, sample s)
SELECT k.is_estimated, k.deferred, k.parked, k.held, k.overdue, k.timed - k.deferred - k.overdue AS scheduled,
       CASE WHEN k.held > 0 THEN greatest(s.held_keys - 1, 0) * k.held / greatest(s.held, 1) + 1 ELSE 0 END AS held_keys,
       date_part('epoch', moment.now) - date_part('epoch', least(w.since, s.since)) AS oldest_age_s
  FROM moment, kinds k, timed w, sample s
