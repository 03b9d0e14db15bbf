-- What a consumer's role needs: to record, to look up, and to delete what is older than any replay.
--
-- Locks:   none beyond the catalog's rows.
-- Caller:  0001_inbox.sql; {role} is the quoted name, {role_text} the same as a string literal.
IF NOT has_schema_privilege({role_text}, home, 'USAGE') THEN
    EXECUTE format('GRANT USAGE ON SCHEMA %I TO %I', home, {role_text});
END IF;
GRANT SELECT, INSERT, DELETE ON processed_messages TO {role};
GRANT SELECT, INSERT, UPDATE, DELETE ON processed_versions TO {role};
