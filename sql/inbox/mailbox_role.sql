-- What the sidecar and the service need on the inbox table. The functions are everybody's, their rights are the caller's.
--
-- Rights:  USAGE on the table's schema too, which need not be the one of `processed_messages` (role.sql).
-- Locks:   none beyond the catalog's rows.
-- Caller:  0002_mailbox.sql; {role} is the quoted name, {role_text} the same as a string literal.
DO $rights$
DECLARE
    home regnamespace := (SELECT relnamespace FROM pg_class WHERE oid = {table_text}::regclass);
BEGIN
    IF NOT has_schema_privilege({role_text}, home, 'USAGE') THEN
        EXECUTE format('GRANT USAGE ON SCHEMA %s TO %I', home, {role_text});
    END IF;
END $rights$;
GRANT SELECT, INSERT, UPDATE, DELETE ON {table} TO {role};
GRANT SELECT, INSERT, UPDATE ON {writer} TO {role};
