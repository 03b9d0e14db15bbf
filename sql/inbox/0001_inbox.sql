-- 0001: what a consumer has processed already, in the consumer's own database.
--
-- Purpose: the row goes in with the business change, in one transaction; a duplicate inserts nothing and is
--          acknowledged. A consumer may thus see a message twice and act once.
-- Locks:   new objects only; one transaction, under an advisory lock of its own.
-- Caller:  relay/inbox/migrate.py, which sends this text or prints it; it may be run again. The first schema of
--          the search_path takes the table, unless one of its schemas has it already. {grants} is role.sql or
--          empty, {role_text} the role as a string literal or NULL.
-- Errors:  RLY01 another table of that name, RLY04 no such role, RLY05 no schema, RLY06 no right to create.
BEGIN ISOLATION LEVEL READ COMMITTED, READ WRITE;
SET LOCAL lock_timeout = '2s';
SET LOCAL statement_timeout = 0;
SET LOCAL idle_in_transaction_session_timeout = '60s';
DO $migration$
DECLARE
    home text;
    shape text;
BEGIN
    PERFORM pg_advisory_xact_lock(7310302589285851001);
    home := coalesce((SELECT n.nspname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
                       WHERE c.oid = to_regclass('processed_messages')), current_schema());
    IF home IS NULL THEN
        RAISE EXCEPTION 'no schema of the search_path exists'
            USING ERRCODE = 'RLY05', HINT = 'create it first, or set the role''s search_path';
    END IF;
    PERFORM set_config('search_path', quote_ident(home), true);
    IF {role_text} IS NOT NULL AND NOT EXISTS (SELECT FROM pg_roles WHERE rolname = {role_text}) THEN
        RAISE EXCEPTION 'no such role: %', quote_ident({role_text})
            USING ERRCODE = 'RLY04', HINT = 'create it first: CREATE ROLE name LOGIN';
    END IF;
    IF to_regclass('processed_messages') IS NULL THEN
        IF NOT has_schema_privilege(home, 'CREATE') THEN
            RAISE EXCEPTION 'the role % may not create tables in the schema %', quote_ident(current_user), quote_ident(home)
                USING ERRCODE = 'RLY06',
                      HINT = format('as its owner: GRANT USAGE, CREATE ON SCHEMA %I TO %I; or give an administrator '
                                    'what `relay inbox migrate --print` writes', home, current_user);
        END IF;
        CREATE TABLE processed_messages (
            consumer_name text NOT NULL,
            message_id text NOT NULL,
            processed_at timestamptz NOT NULL DEFAULT now(),
            PRIMARY KEY (consumer_name, message_id)
        );
        -- For the deletion of old rows: a few pages, and next to nothing at an insert.
        CREATE INDEX processed_messages_age ON processed_messages USING brin (processed_at);
        COMMENT ON TABLE processed_messages IS 'outbox-relay: messages whose effect is committed';
    ELSE
        -- Our own, or one that somebody made after the same article: the columns and the key are what counts.
        SELECT string_agg(a.attname || ' ' || format_type(a.atttypid, a.atttypmod), ', ' ORDER BY a.attname)
               || coalesce('; key ' || (SELECT string_agg(k.attname, ', ' ORDER BY k.attname)
                                          FROM pg_index i JOIN pg_attribute k ON k.attrelid = i.indrelid
                                           AND k.attnum = ANY (i.indkey)
                                         WHERE i.indrelid = 'processed_messages'::regclass AND i.indisprimary), '')
          INTO shape
          FROM pg_attribute a
         WHERE a.attrelid = 'processed_messages'::regclass AND a.attnum > 0 AND NOT a.attisdropped
           AND (a.attnotnull AND NOT a.atthasdef OR a.attname IN ('consumer_name', 'message_id', 'processed_at'));
        IF shape IS DISTINCT FROM 'consumer_name text, message_id text, processed_at timestamp with time zone'
                                  '; key consumer_name, message_id' THEN
            RAISE EXCEPTION 'in the schema % there is another table processed_messages (%)',
                quote_ident(home), coalesce(shape, 'without these columns')
                USING ERRCODE = 'RLY01',
                      HINT = 'rename it, or give the consumer a schema of its own by its role''s search_path';
        END IF;
    END IF;
    -- Under the order policy `version`. The name is ours alone: its presence is enough.
    IF to_regclass('processed_versions') IS NULL THEN
        CREATE TABLE processed_versions (
            consumer_name text NOT NULL,
            aggregate_type text NOT NULL,
            aggregate_id text NOT NULL,
            version bigint NOT NULL,
            processed_at timestamptz NOT NULL DEFAULT now(),
            PRIMARY KEY (consumer_name, aggregate_type, aggregate_id)
        ) WITH (fillfactor = 70);
        COMMENT ON TABLE processed_versions IS 'outbox-relay: the version that each aggregate was brought to';
    END IF;
    {grants}
END $migration$;
COMMIT;
