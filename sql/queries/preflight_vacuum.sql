-- Purpose: whether autovacuum keeps up with the outbox: what is dead, what makes it due, when it came last; and who keeps
--          dead rows alive beside open transactions.
-- Values:  $1 the table's oid.
-- Locks:   none.
-- Index:   catalogs and statistics only.
-- Caller:  relay/preflight/vacuum.py. What this role may not see is NULL.
SELECT current_setting('autovacuum')::bool AND current_setting('track_counts')::bool AS is_on,
       coalesce((SELECT option_value::bool FROM pg_options_to_table(c.reloptions) WHERE option_name = 'autovacuum_enabled'), true) AS is_on_here,
       coalesce((SELECT option_value::float8 FROM pg_options_to_table(c.reloptions) WHERE option_name = 'autovacuum_vacuum_threshold'),
                current_setting('autovacuum_vacuum_threshold')::float8)
       + coalesce((SELECT option_value::float8 FROM pg_options_to_table(c.reloptions) WHERE option_name = 'autovacuum_vacuum_scale_factor'),
                  current_setting('autovacuum_vacuum_scale_factor')::float8) * greatest(c.reltuples, 0) AS due_at_rows,
       s.n_dead_tup AS dead_rows,
       extract(epoch FROM clock_timestamp() - greatest(s.last_vacuum, s.last_autovacuum))::float8 AS vacuumed_s_ago,
       pg_has_role(current_user, 'pg_read_all_stats', 'USAGE') AS sees_sessions,
       (SELECT extract(epoch FROM clock_timestamp() - min(a.xact_start))::float8 FROM pg_stat_activity a
         WHERE (a.backend_xmin IS NOT NULL OR a.backend_xid IS NOT NULL) AND a.pid <> pg_backend_pid()
           AND a.backend_type = 'client backend') AS oldest_transaction_s,
       (SELECT extract(epoch FROM clock_timestamp() - min(p.prepared))::float8 FROM pg_prepared_xacts p) AS oldest_prepared_s,
       (SELECT max(greatest(age(r.xmin), age(r.catalog_xmin))) FROM pg_replication_slots r) AS slot_age_transactions
  FROM pg_class c LEFT JOIN pg_stat_all_tables s ON s.relid = c.oid WHERE c.oid = $1
