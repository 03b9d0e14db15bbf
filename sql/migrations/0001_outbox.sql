-- 0001: the outbox and the relays' own tables beside it.
--
-- Purpose: everything of the schema's first version; docs/schema.md explains each column.
-- Locks:   new objects only. Runs in one transaction, under the migrations' advisory lock.
-- Caller:  relay/migrate.py, which puts these statements into a PL/pgSQL block (block.sql): no SELECT without
--          a target, no transaction control. The block's variables: bell_class, sign_class, lock_object (int)
--          and channel (text), the numbers drawn for this outbox.
-- Names:   {table} {shard} {relay} {fault} {meta} {sequence} {ring} {bell_wait} {..._index} are this outbox's
--          objects, quoted; the search_path is its schema alone. {x_name_text} is the name of x as a string literal.
--          {payload_type} is the payload column's type, {row_shard} a row's shard (parts/shard.sql).

-- Column order: what is wide and fixed first, so that no row carries padding between them; what is null
-- costs nothing. No column is generated and there is no CHECK: either is parsed and compiled anew for every
-- statement of every writer. Fill factor 50 leaves room for each row's mark on its own page: marks are then HOT.
-- The writers' columns carry no constraint beyond the contract's: what the relay cannot publish is parked
-- where an operator sees it; a writer's business transaction never fails over it.
CREATE TABLE {table} (
    seq bigint NOT NULL GENERATED ALWAYS AS IDENTITY (SEQUENCE NAME {sequence} CACHE 1),
    created_at timestamptz DEFAULT now(),
    occurred_at timestamptz DEFAULT now(),
    sent_at timestamptz,
    due_at timestamptz,
    available_at timestamptz,
    expires_at timestamptz,
    first_failed_at timestamptz,
    last_failed_at timestamptz,
    parked_at timestamptz,
    aggregate_version bigint,
    attempts int NOT NULL DEFAULT 0,
    schema_version int DEFAULT 1,
    priority smallint,
    holds boolean,
    mandatory boolean,
    id text COLLATE "C" NOT NULL DEFAULT gen_random_uuid()::text,
    event_type text NOT NULL,
    aggregate_type text COLLATE "C",
    aggregate_id text COLLATE "C",
    payload {payload_type},
    headers jsonb DEFAULT '{}',
    aside text COLLATE "C",
    content_type text,
    content_encoding text,
    exchange text,
    routing_key text,
    correlation_id text,
    causation_id text,
    producer text,
    traceparent text,
    tracestate text,
    failure_class text,
    failure_error text,
    failure_exchange text,
    failure_routing_key text,
    failure_relay text,
    failure_relay_version text,
    CONSTRAINT {pkey_index} PRIMARY KEY (id)
) WITH (
    fillfactor = 50,
    -- Dead rows come at the rate of the traffic; a fifth of a large table would be far too late.
    autovacuum_vacuum_scale_factor = 0.02,
    autovacuum_vacuum_insert_scale_factor = 0.1,
    autovacuum_analyze_scale_factor = 0.05,
    -- Giving back the file's empty end takes an exclusive lock that stops every writer; the room is reused.
    vacuum_truncate = false,
    toast.vacuum_truncate = false
);

-- The reading index. Neither its key nor its predicate may ever name a column that a mark changes.
CREATE INDEX {read_index} ON {table} (({row_shard}), seq) WHERE aside IS NULL;

-- Rows aside by ordering key. A btree entry holds 2,700 bytes and keys may be longer: the hash is indexed,
-- the values are compared. Written once, here; queries repeat the expression word for word.
CREATE INDEX {aside_key_index} ON {table} (
    hashtextextended((coalesce(aggregate_type, '') || chr(31) || aggregate_id) COLLATE "C", 0), seq)
    WHERE aside IS NOT NULL;

-- Rows aside by the time at which they are looked at again.
CREATE INDEX {aside_due_index} ON {table} (({row_shard}), due_at, seq) WHERE aside IN ('deferred', 'scheduled');

-- Parked rows by the time at which they were parked: their retention, and an owner of another policy, find them.
CREATE INDEX {aside_parked_index} ON {table} (({row_shard}), holds, parked_at, seq) WHERE aside = 'parked';

-- Leases: one row a shard, rewritten every second by its owner. A page has room for the versions of a
-- whole autovacuum period, so that renewals stay HOT and the table small.
CREATE TABLE {shard} (
    shard smallint NOT NULL CHECK (shard BETWEEN 0 AND 63),
    epoch bigint NOT NULL DEFAULT 0,
    floor bigint NOT NULL DEFAULT 0,
    last_seq bigint NOT NULL DEFAULT 0,
    leased_until timestamptz,
    owner_backend_start timestamptz,
    owner_pid int,
    owner text,
    fingerprint text,
    parked_hold boolean,
    CONSTRAINT {shard_pkey_index} PRIMARY KEY (shard)
) WITH (
    fillfactor = 10,
    autovacuum_vacuum_scale_factor = 0,
    autovacuum_vacuum_threshold = 500,
    autovacuum_vacuum_cost_delay = 0,
    autovacuum_analyze_scale_factor = 0,
    autovacuum_analyze_threshold = 10000,
    vacuum_truncate = false
);
INSERT INTO {shard} (shard) SELECT generate_series(0, 63);

-- Membership: one row a running relay; shares are counted from those whose heartbeat is young.
CREATE TABLE {relay} (
    instance text COLLATE "C" NOT NULL,
    name text NOT NULL,
    version text NOT NULL,
    started_at timestamptz NOT NULL DEFAULT now(),
    heartbeat timestamptz NOT NULL DEFAULT now(),
    session_start timestamptz,
    session_pid int,
    is_available boolean NOT NULL DEFAULT false,
    CONSTRAINT {relay_pkey_index} PRIMARY KEY (instance)
) WITH (
    fillfactor = 10,
    autovacuum_vacuum_scale_factor = 0,
    autovacuum_vacuum_threshold = 500,
    autovacuum_vacuum_cost_delay = 0,
    vacuum_truncate = false
);

-- Faults: rows that were published and whose mark the database refuses, kept beside the outbox because
-- the row itself cannot be changed.
CREATE TABLE {fault} (
    seq bigint NOT NULL,
    id text COLLATE "C" NOT NULL,
    failure_class text NOT NULL,
    failure_error text,
    failed_at timestamptz NOT NULL DEFAULT now(),
    attempts int NOT NULL DEFAULT 0,
    relay text,
    relay_version text,
    exchange text,
    routing_key text,
    CONSTRAINT {fault_pkey_index} PRIMARY KEY (seq, id)
);

-- What relays must agree on. The advisory locks' numbers and the channel are drawn once, here, and stay:
-- the trigger holds them as constants. (bell_classid, bell_objid) is the doorbell; (sign_classid,
-- sign_objid) is taken shared by the relays' own writing transactions: their check leaves those out.
CREATE TABLE {meta} (
    is_only_row boolean NOT NULL DEFAULT true CHECK (is_only_row),
    schema_version int NOT NULL,
    compatible_from int NOT NULL,
    payload_type text NOT NULL,
    bell_classid int NOT NULL,
    bell_objid int NOT NULL,
    bell_channel text NOT NULL,
    sign_classid int NOT NULL,
    sign_objid int NOT NULL,
    has_doorbell boolean NOT NULL,
    paused_at timestamptz,
    paused_by text,
    CONSTRAINT {meta_pkey_index} PRIMARY KEY (is_only_row)
);
-- NOTIFY forbids PREPARE TRANSACTION, so the doorbell is left out by itself where a server has that enabled.
INSERT INTO {meta} (schema_version, compatible_from, payload_type, bell_classid, bell_objid, bell_channel,
                    sign_classid, sign_objid, has_doorbell)
VALUES (1, 1, '{payload_type}', bell_class, lock_object, channel,
        sign_class, lock_object, current_setting('max_prepared_transactions')::int = 0);

-- The doorbell's two halves; doorbell.sql hangs the trigger. EXECUTE, because a function's text and a
-- trigger's condition hold constants, not variables.
EXECUTE format($sql$
    CREATE FUNCTION %I() RETURNS trigger LANGUAGE plpgsql AS $function$
    BEGIN
      PERFORM pg_catalog.pg_notify(%L, '');
      RETURN NULL;
    END $function$
$sql$, {ring_name_text}, channel);

-- True: the lock is this session's (it outlives the commit). False: not within `wait_ms`; caught here, so
-- that the server's log gets no ERROR line twice a second. The caller's statement_timeout runs already and
-- must be longer: it cannot be changed from inside.
EXECUTE format($sql$
    CREATE FUNCTION %I(wait_ms int) RETURNS boolean LANGUAGE plpgsql AS $function$
    BEGIN
      PERFORM pg_catalog.set_config('lock_timeout', wait_ms::text, true);
      PERFORM pg_catalog.pg_advisory_lock(%s, %s);
      RETURN true;
    EXCEPTION WHEN lock_not_available THEN
      RETURN false;
    END $function$
$sql$, {bell_wait_name_text}, bell_class, lock_object);

COMMENT ON TABLE {table} IS 'outbox-relay: events to publish; see docs/schema.md';
COMMENT ON TABLE {shard} IS 'outbox-relay: leases and floors of the 64 shards';
COMMENT ON TABLE {relay} IS 'outbox-relay: the running relays';
COMMENT ON TABLE {fault} IS 'outbox-relay: published rows whose mark the database refuses';
COMMENT ON TABLE {meta} IS 'outbox-relay: version and constants of this schema';
