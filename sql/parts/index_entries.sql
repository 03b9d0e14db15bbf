-- Purpose: about how many entries an index has, as the planner takes it: by its size now, and how many were on a page when it was
--          vacuumed or analyzed last. Part of backlog_aside.
-- Values:  {index} its name as a literal, {per_page} entries a page where nobody has looked yet.
(SELECT (pg_relation_size(c.oid) / current_setting('block_size')::int
         * CASE WHEN c.relpages > 100 AND c.reltuples > 0 THEN c.reltuples / c.relpages ELSE {per_page} END)::bigint
   FROM pg_class c WHERE c.oid = to_regclass({index}))
