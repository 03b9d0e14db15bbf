-- Purpose: what `relay check` asks of the server before it knows of a schema.
-- Locks:   none.
-- Index:   none.
-- Caller:  relay/preflight/database.py. A number that this role may not see is NULL. So is backend_type, of other roles'
--          sessions, while their database and role are there for everybody; an autovacuum worker has no role, what
--          belongs to the server no database. reserved_connections came with PostgreSQL 16.
SELECT current_setting('server_version') AS version,
       current_setting('server_version_num')::int AS version_number,
       pg_backend_pid() AS pid,
       current_user::text AS role,
       extract(epoch FROM clock_timestamp())::float8 AS now,
       current_setting('server_encoding') AS encoding,
       pg_is_in_recovery() AS is_standby,
       current_setting('default_transaction_read_only')::boolean AS is_read_only,
       current_setting('max_connections')::int - current_setting('superuser_reserved_connections')::int
           - coalesce(current_setting('reserved_connections', true)::int, 0)
           - (SELECT count(*)
                FROM pg_stat_activity
               WHERE coalesce(backend_type, 'client backend') = 'client backend'
                 AND datid IS NOT NULL
                 AND usesysid IS NOT NULL) AS connections_left,
       (SELECT rolconnlimit FROM pg_roles WHERE rolname = current_user) AS role_connections_max,
       (SELECT count(*) FROM pg_stat_activity WHERE usename = current_user) AS role_connections
