-- A schema that holds a table of this name and that this role may not look into: its name.
--
-- Locks:   none.
-- Index:   the catalog's.
-- Caller:  relay/migrate.py `read_schema`, where the outbox is not found; $1 the table's plain name.
SELECT n.nspname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE c.relname = $1::text AND c.relkind IN ('r', 'p') AND NOT has_schema_privilege(n.oid, 'USAGE')
 ORDER BY n.nspname LIMIT 1
