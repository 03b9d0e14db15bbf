-- 0002: the inbox table of `relay inbox run`, and the protocol by which a service works through it.
--
-- Purpose: each message once, in the order of its queue; the service claims a row, does its effect and says "done" in
--          one transaction. A claimed row is a locked row: a crash gives it back.
-- Locks:   new objects only; one transaction, under the same advisory lock as 0001.
-- Caller:  relay/inbox/migrate.py, which sends this text or prints it; it may be run again, and replaces the functions.
--          {claimable} is parts/claimable.sql; {table}, {writer} and the functions' names are quoted, {channel_text} is the
--          doorbell's channel as a literal, {mark_text} the comment by which the table is known again, {grants} the rights of a role or empty;
--          {free_rows} of a key's rows are never held.
-- Errors:  RLY01 another table of that name.
BEGIN ISOLATION LEVEL READ COMMITTED, READ WRITE;
SET LOCAL lock_timeout = '2s';
SET LOCAL statement_timeout = 0;
SET LOCAL idle_in_transaction_session_timeout = '60s';
DO $migration$
BEGIN
    PERFORM pg_advisory_xact_lock(7310302589285851001);
    IF to_regclass({table_text}) IS NULL THEN
        CREATE TABLE {table} (
            seq bigint GENERATED ALWAYS AS IDENTITY,
            message_id text NOT NULL PRIMARY KEY,
            queue text NOT NULL,
            event_type text NOT NULL,
            schema_version int NOT NULL,
            aggregate_type text NOT NULL,
            aggregate_id text,
            aggregate_version bigint,
            payload bytea NOT NULL,
            content_type text,
            content_encoding text,
            headers jsonb NOT NULL,
            exchange text NOT NULL,
            routing_key text NOT NULL,
            correlation_id text,
            causation_id text,
            producer text,
            traceparent text,
            tracestate text,
            occurred_at timestamptz,
            received_at timestamptz NOT NULL DEFAULT now(),
            attempts int NOT NULL DEFAULT 0,
            due_at timestamptz NOT NULL DEFAULT now(),
            first_failed_at timestamptz,
            error_class text,
            error text,
            parked_at timestamptz,
            done_at timestamptz,
            -- Not looked at by a claim: far behind others of its key, or behind one that failed. It says only what needs no look: who is
            -- next is decided by what is done (parts/claimable.sql).
            held boolean NOT NULL DEFAULT false
        );
        -- What may be claimed, in order; the head of a key; the first that is held of each; what the purge deletes.
        CREATE INDEX ON {table} (seq) WHERE done_at IS NULL AND parked_at IS NULL AND NOT held;
        CREATE INDEX ON {table} (aggregate_type, aggregate_id, seq) WHERE done_at IS NULL;
        CREATE INDEX ON {table} (aggregate_type, aggregate_id, seq) WHERE done_at IS NULL AND held;
        CREATE INDEX ON {table} (done_at) WHERE done_at IS NOT NULL;
        EXECUTE format('COMMENT ON TABLE %s IS %L', {table_text}::regclass, {mark_text});
    ELSIF obj_description({table_text}::regclass, 'pg_class') IS DISTINCT FROM {mark_text} THEN
        RAISE EXCEPTION 'there is another table %', {table_text}
            USING ERRCODE = 'RLY01', HINT = 'rename it, or set RELAY_INBOX_TABLE';
    END IF;
    -- Who may write a queue into the table. The name is ours alone: its presence is enough.
    IF to_regclass({writer_text}) IS NULL THEN
        CREATE TABLE {writer} (
            queue text NOT NULL PRIMARY KEY,
            owner text NOT NULL,
            owner_pid int,
            owner_began timestamptz,
            leased_until timestamptz NOT NULL
        ) WITH (fillfactor = 50);
    END IF;
END $migration$;

-- The next messages that may be worked on, locked until the end of the caller's transaction. Only the oldest unfinished
-- message of a key is ever among them: one that waits for its next attempt, or is parked, holds those behind it.
CREATE OR REPLACE FUNCTION {claim}(at_most int DEFAULT 1) RETURNS SETOF {table}
LANGUAGE sql VOLATILE AS $body$
    SELECT head.* FROM {table} head
     WHERE {claimable}
     ORDER BY head.seq LIMIT at_most FOR UPDATE OF head SKIP LOCKED
$body$;

-- The next ones of a key are held no more, once the first of them is. Of the functions below; nobody else needs it.
CREATE OR REPLACE FUNCTION {release}(kind text, key text, place bigint) RETURNS void
LANGUAGE plpgsql VOLATILE AS $body$
BEGIN
    IF (SELECT later.held FROM {table} later
         WHERE later.aggregate_type = kind AND later.aggregate_id = key AND later.done_at IS NULL AND later.seq > place
         ORDER BY later.seq LIMIT 1) THEN
        UPDATE {table} SET held = false WHERE held AND message_id IN (
            SELECT later.message_id FROM {table} later
             WHERE later.aggregate_type = kind AND later.aggregate_id = key AND later.done_at IS NULL AND later.seq > place
             ORDER BY later.seq LIMIT {free_rows});
    END IF;
END $body$;

-- The effect is there; commits with it. False where it was done before.
CREATE OR REPLACE FUNCTION {done}(id text) RETURNS boolean
LANGUAGE plpgsql VOLATILE AS $body$
DECLARE
    kind text; key text; place bigint;
BEGIN
    UPDATE {table} SET done_at = now(), attempts = attempts + 1 WHERE message_id = id AND done_at IS NULL
    RETURNING aggregate_type, aggregate_id, seq INTO kind, key, place;
    IF key IS NOT NULL THEN
        PERFORM {release}(kind, key, place);
    END IF;
    RETURN place IS NOT NULL;
END $body$;

-- The attempt failed; called in a transaction of its own, after the ROLLBACK. `class` is transient, unknown or permanent;
-- n delays, none of them NULL, are n + 1 attempts, each 20 % longer or shorter. Says what became of it: deferred, parked, or NULL where there
-- is no such message at work.
CREATE OR REPLACE FUNCTION {failed}(
    id text, class text, error_text text DEFAULT '', delays interval[] DEFAULT '{5 seconds,30 seconds,5 minutes}'
) RETURNS text
LANGUAGE plpgsql VOLATILE AS $body$
DECLARE
    verdict text; kind text; key text; place bigint;
BEGIN
    IF class IS NULL OR class NOT IN ('transient', 'unknown', 'permanent') THEN
        RAISE EXCEPTION 'no class %: transient, unknown or permanent', quote_nullable(class) USING ERRCODE = '22023';
    END IF;
    -- A delay that is NULL or negative would be none: the message would come again at once, for ever where delays is NULL.
    IF delays IS NULL OR array_ndims(delays) > 1
       OR EXISTS (SELECT FROM unnest(delays) delay WHERE delay IS NULL OR delay < interval '0') THEN
        RAISE EXCEPTION 'no delays %: an array of intervals from 0 on, ''{}'' for one attempt', quote_nullable(delays::text)
            USING ERRCODE = '22023', HINT = 'leave the argument out for its default';
    END IF;
    UPDATE {table} SET
        attempts = attempts + 1,
        first_failed_at = coalesce(first_failed_at, now()),
        error_class = class,
        error = left(error_text, 500),
        parked_at = CASE WHEN class = 'permanent' OR attempts >= cardinality(delays) THEN now() END,
        due_at = now() + coalesce(delays[attempts + 1], '0') * (0.8 + 0.4 * random())
     WHERE message_id = id AND done_at IS NULL AND parked_at IS NULL
    RETURNING CASE WHEN parked_at IS NULL THEN 'deferred' ELSE 'parked' END, aggregate_type, aggregate_id, seq
         INTO verdict, kind, key, place;
    -- Those behind it need no look meanwhile; most are held already.
    UPDATE {table} SET held = true WHERE NOT held AND message_id IN (
        SELECT later.message_id FROM {table} later
         WHERE later.aggregate_type = kind AND later.aggregate_id = key AND later.done_at IS NULL AND later.seq > place
         ORDER BY later.seq LIMIT 2 * {free_rows});
    RETURN verdict;
END $body$;

-- An operator's acts on a parked message: due now with a ladder from the start, or finished without an effect.
CREATE OR REPLACE FUNCTION {redrive}(id text) RETURNS boolean
LANGUAGE sql VOLATILE AS $body$
    WITH changed AS (UPDATE {table} SET parked_at = NULL, due_at = now(), attempts = 0
                      WHERE message_id = id AND parked_at IS NOT NULL AND done_at IS NULL RETURNING 1),
         rung AS (SELECT pg_notify({channel_text}, '') FROM changed)
    SELECT count(*) > 0 FROM rung
$body$;
CREATE OR REPLACE FUNCTION {discard}(id text) RETURNS boolean
LANGUAGE sql VOLATILE AS $body$
    WITH changed AS (UPDATE {table} SET done_at = now()
                      WHERE message_id = id AND parked_at IS NOT NULL AND done_at IS NULL
                  RETURNING aggregate_type AS kind, aggregate_id AS key, seq AS place),
         released AS (SELECT {release}(kind, key, place) FROM changed),
         rung AS (SELECT pg_notify({channel_text}, '') FROM released)
    SELECT count(*) > 0 FROM rung
$body$;
{grants}
COMMIT;
