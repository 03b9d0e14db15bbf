-- What every step runs in: one transaction that finds the outbox, looks whether it may be touched (guard.sql),
-- and then does the step's own part. Where there is nothing to do it changes nothing.
--
-- Locks:   the migrations' advisory lock until the commit; waits at most the lock_timeout for it or any other.
-- Caller:  relay/migrate.py, which sends this text, or prints it for an administrator, and tries again after
--          a lock_timeout. One plain text without parameters: it passes any proxy.
-- Values:  {schema_text} NULL where RELAY_TABLE is not qualified: the search_path then says where, first by
--          an outbox that is there; {table_name_text} {meta_name_text} the plain names as string literals.
BEGIN ISOLATION LEVEL READ COMMITTED, READ WRITE;
SET LOCAL lock_timeout = '2s';
SET LOCAL statement_timeout = 0;
SET LOCAL idle_in_transaction_session_timeout = '60s';
DO {quote}
DECLARE
    home text;
    known_version int := 0;
    known_compatible_from int;
    known_payload_type text;
    wants_doorbell boolean;
    has_trigger boolean;
    bell_class int := 1919249505;   -- 'rela'; the same in every outbox, and the sign's is the next number
    sign_class int := 1919249506;
    lock_object int;                -- drawn from schema and table: no two outboxes of a database meet
    channel text;
    obstacle text;
BEGIN
    PERFORM pg_advisory_xact_lock(7310302589285851000);
    home := coalesce({schema_text}, (
        SELECT n.nspname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
         WHERE c.oid = coalesce(to_regclass(quote_ident({meta_name_text})), to_regclass(quote_ident({table_name_text})))
    ), current_schema());
    PERFORM set_config('search_path', coalesce(quote_ident(home), ''), true);
    lock_object := hashtext((home || '.' || {table_name_text}) COLLATE "C") & 2147483647;
    channel := 'relay_' || to_hex(lock_object);
    IF EXISTS (SELECT FROM pg_attribute WHERE attname = 'bell_classid'
                  AND attrelid = to_regclass(format('%I.%I', home, {meta_name_text}))) THEN
        SELECT schema_version, compatible_from, payload_type, bell_classid, bell_objid, bell_channel, has_doorbell
          INTO STRICT known_version, known_compatible_from, known_payload_type, bell_class, lock_object, channel,
               wants_doorbell
          FROM {meta};
    END IF;

    {body}
END {quote};
COMMIT;
