-- Purpose: what the current role may do that no relay needs.
-- Values:  $1 the table's oid.
-- Locks:   none.
-- Index:   catalogs only.
-- Caller:  relay/preflight/database.py.
SELECT array_agg(what) AS excess FROM (
    SELECT t.what FROM pg_roles r, pg_class c CROSS JOIN LATERAL (VALUES
        ('superuser', r.rolsuper),
        ('CREATEROLE', r.rolcreaterole),
        ('CREATEDB', r.rolcreatedb),
        ('REPLICATION', r.rolreplication),
        ('the table''s owner', NOT r.rolsuper AND pg_has_role(r.oid, c.relowner, 'USAGE')),
        ('INSERT', NOT r.rolsuper AND NOT pg_has_role(r.oid, c.relowner, 'USAGE') AND has_any_column_privilege(c.oid, 'INSERT')),
        ('UPDATE of what writers wrote', NOT r.rolsuper AND NOT pg_has_role(r.oid, c.relowner, 'USAGE')
             AND has_column_privilege(c.oid, 'payload', 'UPDATE')),
        ('TRUNCATE', NOT r.rolsuper AND NOT pg_has_role(r.oid, c.relowner, 'USAGE') AND has_table_privilege(c.oid, 'TRUNCATE'))
    ) t(what, has_it) WHERE r.rolname = current_user AND c.oid = $1 AND t.has_it) x
