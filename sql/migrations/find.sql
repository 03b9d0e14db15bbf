-- The outbox by its name, and whether a migration made it.
--
-- Locks:   none.
-- Index:   the catalog's.
-- Caller:  relay/migrate.py `read_schema`; $1 the quoted name, $2 the plain name of its meta table.
SELECT c.oid, n.nspname, d.oid AS database_oid,
       EXISTS (SELECT FROM pg_attribute a WHERE a.attname = 'bell_classid'
                  AND a.attrelid = to_regclass(format('%I.%I', n.nspname, $2::text))) AS is_ours
  FROM pg_class c
  JOIN pg_namespace n ON n.oid = c.relnamespace
  JOIN pg_database d ON d.datname = current_database()
 WHERE c.oid = to_regclass($1)
