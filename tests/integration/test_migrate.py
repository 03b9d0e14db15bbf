"""`relay migrate` on a real PostgreSQL: what it makes, what it refuses, who may do what afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import pytest

from relay import migrate
from relay.database import connect, literal
from relay.errors import (
    DatabaseRefused,
    DatabaseUnavailable,
    SchemaForeign,
    SchemaIncompatible,
    SchemaMissing,
    UsageError,
)
from relay.message import PayloadType
from relay.servers import PostgresServer, find_postgres
from relay.values import TableName
from tests.conftest import eventually
from tests.pooler import IS_INSTALLED, Pooler

WRITERS_COLUMNS = {
    "id": ("text", "(gen_random_uuid())::text"),
    "aggregate_type": ("text", None),
    "aggregate_id": ("text", None),
    "aggregate_version": ("bigint", None),
    "event_type": ("text", None),
    "schema_version": ("integer", "1"),
    "payload": ("json", None),
    "content_type": ("text", None),
    "content_encoding": ("text", None),
    "headers": ("jsonb", "'{}'::jsonb"),
    "exchange": ("text", None),
    "routing_key": ("text", None),
    "correlation_id": ("text", None),
    "causation_id": ("text", None),
    "producer": ("text", None),
    "traceparent": ("text", None),
    "tracestate": ("text", None),
    "priority": ("smallint", None),
    "expires_at": ("timestamp with time zone", None),
    "mandatory": ("boolean", None),
    "available_at": ("timestamp with time zone", None),
    "occurred_at": ("timestamp with time zone", "now()"),
    "created_at": ("timestamp with time zone", "now()"),
}

ARTICLE = (
    "INSERT INTO outbox (id, event_type, payload, created_at) "
    "VALUES ('01K0ORDERCREATED', 'order.created', '{\"order_id\":\"42\"}', now())"
)

KEY_HASH = "hashtextextended((coalesce(aggregate_type, '') || chr(31) || aggregate_id) COLLATE \"C\", 0)"


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[asyncpg.Connection]:
    connection = await connect(database_url)
    yield connection
    await connection.close()


@pytest.fixture
async def role(database: asyncpg.Connection, request: pytest.FixtureRequest) -> AsyncIterator[str]:
    """A role of the test's own, with a name that needs quoting."""
    name = f'o\'Neil "{request.node.name}" %s'[:60]
    quoted = '"' + name.replace('"', '""') + '"'
    await database.execute(f"CREATE ROLE {quoted} LOGIN")
    yield name
    await database.execute(f"RESET ROLE; DROP OWNED BY {quoted}; DROP ROLE {quoted}")


@contextlib.asynccontextmanager
async def acting_as(database: asyncpg.Connection, name: str) -> AsyncIterator[None]:
    await database.execute("SET ROLE " + '"' + name.replace('"', '""') + '"')
    try:
        yield
    finally:
        await database.execute("RESET ROLE")


def psql(url: str, text: str) -> subprocess.CompletedProcess[str]:
    command = [str(find_postgres() / "psql"), "-X", "-q", "-v", "ON_ERROR_STOP=1", url]
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=60, check=False)


def dump(url: str) -> str:
    """The schema as pg_dump writes it, without the lines that differ from run to run."""
    command = [str(find_postgres() / "pg_dump"), "--schema-only", url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if "server version mismatch" in done.stderr:
        pytest.skip("pg_dump is older than the server")
    assert done.returncode == 0, done.stderr
    return "\n".join(line for line in done.stdout.splitlines() if not line.startswith(("--", "\\")))


# ---------------------------------------------------------------- what it makes


async def test_the_articles_insert_works_word_for_word(database: asyncpg.Connection) -> None:
    done = await migrate.migrate(database)
    assert (done.version_before, done.schema.version) == (0, migrate.SCHEMA_VERSION)
    await database.execute(ARTICLE)
    row = await database.fetchrow("SELECT * FROM outbox")
    assert (row["seq"], row["id"], row["event_type"]) == (1, "01K0ORDERCREATED", "order.created")
    assert (row["payload"], row["headers"], row["schema_version"]) == ('{"order_id":"42"}', "{}", 1)
    assert (row["sent_at"], row["aside"], row["holds"], row["attempts"]) == (None, None, None, 0)
    assert row["occurred_at"] == row["created_at"]


async def test_columns_and_defaults_are_the_contracts(database: asyncpg.Connection) -> None:
    await migrate.migrate(database)
    columns = await database.fetch(
        "SELECT attname, format_type(atttypid, atttypmod) AS type, attnotnull, "
        "pg_get_expr(adbin, adrelid) AS value FROM pg_attribute "
        "LEFT JOIN pg_attrdef ON adrelid = attrelid AND adnum = attnum "
        "WHERE attrelid = 'outbox'::regclass AND attnum > 0"
    )
    found = {column["attname"]: (column["type"], column["value"]) for column in columns}
    assert {name: found[name] for name in WRITERS_COLUMNS} == WRITERS_COLUMNS
    required = {column["attname"] for column in columns if column["attnotnull"]}
    assert required == {"seq", "shard", "attempts", "id", "event_type"}


@pytest.mark.parametrize("payload", PayloadType)
async def test_each_payload_type_is_kept_and_read_back(database: asyncpg.Connection, payload: PayloadType) -> None:
    await migrate.migrate(database, payload=payload)
    kind = await database.fetchval(
        "SELECT format_type(atttypid, -1) FROM pg_attribute WHERE attrelid = 'outbox'::regclass AND attname = 'payload'"
    )
    assert kind == payload
    assert (await migrate.migrate(database)).schema.payload_type == payload
    other = PayloadType.TEXT if payload != PayloadType.TEXT else PayloadType.JSON
    with pytest.raises(UsageError, match=f"is {payload}, not {other}"):
        await migrate.migrate(database, payload=other)


async def test_a_writers_null_or_odd_value_never_fails_its_transaction(database: asyncpg.Connection) -> None:
    await migrate.migrate(database)
    await database.execute(
        "INSERT INTO outbox (event_type, payload, headers, schema_version, created_at, occurred_at, "
        "priority, expires_at, aggregate_version, exchange) "
        "VALUES ('', NULL, NULL, NULL, NULL, NULL, -1, '-infinity', -5, '')"
    )


async def test_the_shard_is_the_hash_of_the_key_or_of_the_id(database: asyncpg.Connection) -> None:
    await migrate.migrate(database)
    await database.execute(
        "INSERT INTO outbox (id, event_type, aggregate_type, aggregate_id) VALUES "
        "('a', 'e', 'order', '7'), ('b', 'e', 'order', '7'), ('c', 'e', NULL, '7'), ('d', 'e', NULL, NULL)"
    )
    rows = await database.fetch(
        "SELECT id, shard, hashtextextended((CASE id WHEN 'c' THEN chr(31) || '7' "
        "WHEN 'd' THEN chr(31) || 'd' ELSE 'order' || chr(31) || '7' END) COLLATE \"C\", 0) & 63 AS wanted "
        "FROM outbox"
    )
    assert [row["shard"] for row in rows] == [row["wanted"] for row in rows]


async def test_there_are_64_free_shards_and_no_cache_on_the_sequence(database: asyncpg.Connection) -> None:
    await migrate.migrate(database)
    shards = await database.fetch("SELECT * FROM outbox_shard ORDER BY shard")
    assert [row["shard"] for row in shards] == list(range(64))
    assert all((row["epoch"], row["floor"], row["owner"], row["leased_until"]) == (0, 0, None, None) for row in shards)
    assert await database.fetchval("SELECT seqcache FROM pg_sequence WHERE seqrelid = 'outbox_seq_seq'::regclass") == 1
    assert await database.fetchval("SELECT pg_get_serial_sequence('outbox', 'seq')") == "public.outbox_seq_seq"


async def test_marks_are_hot(database: asyncpg.Connection) -> None:
    """A mark that changed an indexed column, or found no room on its page, would write every index anew."""
    await migrate.migrate(database)
    await database.execute(
        "INSERT INTO outbox (event_type, aggregate_type, aggregate_id, payload) "
        "SELECT 'order.created', 'order', (i % 500)::text, json_build_object('pad', repeat('x', 230)) "
        "FROM generate_series(1, 5000) i"
    )
    for first in range(1, 5001, 500):
        await database.execute(
            "WITH t AS (SELECT ctid c, seq s FROM outbox WHERE seq >= $1 AND seq < $1 + 500 "
            "           FOR NO KEY UPDATE SKIP LOCKED) "
            "UPDATE outbox o SET sent_at = now() FROM t WHERE o.ctid = t.c AND o.seq = t.s",
            first,
        )

    async def updates() -> Any:
        row = await database.fetchrow(
            "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables WHERE relname = 'outbox'"
        )
        return row if row["n_tup_upd"] >= 5000 else None

    seen: Any = await eventually(updates)
    assert seen["n_tup_hot_upd"] >= 0.99 * seen["n_tup_upd"]


async def test_case_24_keys_of_9_kb_are_inserted_and_set_aside(database: asyncpg.Connection) -> None:
    """A btree entry holds 2,700 bytes: an index over the key would fail the insert or the move aside."""
    await migrate.migrate(database)
    await database.execute(
        "INSERT INTO outbox (event_type, aggregate_type, aggregate_id) "
        "SELECT 'e', string_agg(md5(random()::text), ''), string_agg(md5(random()::text), '') "
        "FROM generate_series(1, 288)"
    )
    await database.execute("INSERT INTO outbox (event_type, aggregate_id) VALUES ('e', 'plain'), ('e', NULL)")
    for aside, holds in (("scheduled", False), ("held", True), ("deferred", True), ("parked", True)):
        await database.execute(
            "UPDATE outbox SET aside = $1, holds = $2, due_at = now(), failure_error = repeat('x', 9000)",
            aside,
            holds,
        )
    plan = await database.fetch(
        f"EXPLAIN SELECT seq FROM outbox WHERE {KEY_HASH} = $1 AND seq < $2 AND aside IS NOT NULL", 1, 1
    )
    assert any("outbox_aside_key" in line[0] for line in plan)


async def test_reads_and_due_times_have_their_index(database: asyncpg.Connection) -> None:
    await migrate.migrate(database)
    await database.execute("SET enable_seqscan = off")
    for query, index in (
        ("seq > 9 AND aside IS NULL ORDER BY seq", "outbox_read"),
        ("due_at <= now() AND aside IN ('deferred', 'scheduled') ORDER BY due_at", "outbox_aside_due"),
        ("holds AND parked_at < now() AND aside = 'parked' ORDER BY parked_at", "outbox_aside_parked"),
    ):
        lines = await database.fetch(f"EXPLAIN SELECT seq FROM outbox WHERE shard = 3 AND {query} LIMIT 5")
        plan = "\n".join(line[0] for line in lines)
        assert f"using {index}" in plan
        assert "Sort" not in plan


async def test_aside_and_holds_belong_together(database: asyncpg.Connection) -> None:
    await migrate.migrate(database)
    await database.execute(ARTICLE)
    for wrong in ("aside = 'lost', holds = true", "aside = 'held'", "holds = false"):
        with pytest.raises(asyncpg.CheckViolationError):
            await database.execute(f"UPDATE outbox SET {wrong}")


# ---------------------------------------------------------------- again, at once, beside others


async def test_twice_changes_nothing(database: asyncpg.Connection, database_url: str) -> None:
    first = await migrate.migrate(database)
    await database.execute(ARTICLE)
    await database.execute("UPDATE outbox_shard SET epoch = 5, floor = 3 WHERE shard = 0")
    before = dump(database_url)
    second = await migrate.migrate(database)
    assert second == migrate.Migrated(migrate.SCHEMA_VERSION, first.schema)
    assert dump(database_url) == before
    assert await database.fetchval("SELECT epoch FROM outbox_shard WHERE shard = 0") == 5
    assert await database.fetchval("SELECT count(*) FROM outbox") == 1


async def test_eight_at_once_make_one_schema(database: asyncpg.Connection, database_url: str) -> None:
    done = await asyncio.gather(*(migrate.run(database_url) for _ in range(8)))
    assert {each.schema.table_oid for each in done} == {done[0].schema.table_oid}
    assert await database.fetchval("SELECT count(*) FROM outbox_meta") == 1


async def test_printed_equals_applied(database: asyncpg.Connection, database_url: str, role: str) -> None:
    await database.execute("CREATE DATABASE " + (printed := urlsplit(database_url).path[1:] + "_printed"))
    printed_url = database_url + "_printed"
    try:
        await migrate.migrate(database, role=role, writer=role, payload="bytea")
        text = migrate.printed(role=role, writer=role, payload="bytea")
        for _ in range(2):
            done = psql(printed_url, text)
            assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        assert dump(printed_url) == dump(database_url)
        other = await connect(printed_url)
        metas = [await each.fetchrow("SELECT * FROM outbox_meta") for each in (database, other)]
        await other.close()
        assert metas[0] == metas[1]
    finally:
        await database.execute(f"DROP DATABASE {printed} WITH (FORCE)")


async def test_an_open_transaction_is_waited_for_and_not_for_ever(
    database: asyncpg.Connection, database_url: str
) -> None:
    await migrate.migrate(database)
    transaction = database.transaction()
    await transaction.start()
    await database.execute(ARTICLE)
    with pytest.raises(DatabaseUnavailable, match="no lock"):
        await migrate.run(database_url, doorbell=False, patience_s=0.5)
    waiting = asyncio.create_task(migrate.run(database_url, doorbell=False))
    await eventually(
        lambda: database.fetchval(
            "SELECT EXISTS (SELECT FROM pg_locks WHERE NOT granted AND relation = 'outbox'::regclass)"
        )
    )
    await transaction.commit()
    assert not (await waiting).schema.has_doorbell


async def test_a_failed_migration_leaves_the_session_usable_and_nothing_behind(
    database: asyncpg.Connection,
) -> None:
    with pytest.raises(UsageError, match="no such role: nobody_here"):
        await migrate.migrate(database, role="nobody_here")
    assert not database.is_in_transaction()
    assert await database.fetchval("SELECT to_regclass('outbox')") is None


@pytest.mark.skipif(not IS_INSTALLED, reason="pgbouncer is not installed")
async def test_case_21_behind_a_transaction_pooling_proxy(database_url: str) -> None:
    with Pooler(database_url) as pooler:
        done = await asyncio.gather(*(migrate.run(pooler.url) for _ in range(4)))
        again = await migrate.run(database_url)
        assert again == migrate.Migrated(migrate.SCHEMA_VERSION, done[0].schema)


async def test_prepared_transactions_leave_the_doorbell_out() -> None:
    """NOTIFY forbids PREPARE TRANSACTION: the trigger would break an application that uses it."""
    with PostgresServer.start(durable=False, options={"max_prepared_transactions": "5"}) as server:
        assert not (await migrate.run(server.url())).schema.has_doorbell
        assert (await migrate.run(server.url(), doorbell=True)).schema.has_doorbell
        assert (await migrate.run(server.url())).schema.has_doorbell


# ---------------------------------------------------------------- names


async def test_quoted_names_in_another_schema(database: asyncpg.Connection, role: str) -> None:
    await database.execute('CREATE SCHEMA "Sales $migration$ \'%s"')
    table = TableName("Sales $migration$ '%s", 'My "Outbox" $sql$ {table} %I')
    done = await migrate.migrate(database, table, role=role, writer=role, doorbell=True)
    assert done.schema.table == table
    await database.execute(f"INSERT INTO {table.quoted} (event_type) VALUES ('e')")
    assert await database.fetchval(f"SELECT {table.derived('_bell_wait')}(10)")
    assert (await migrate.migrate(database, table)).version_before == migrate.SCHEMA_VERSION


async def test_two_outboxes_in_one_database_never_meet(database: asyncpg.Connection) -> None:
    await database.execute("CREATE SCHEMA billing")
    schemas = [
        (await migrate.migrate(database, name)).schema for name in ("outbox", "billing.outbox", '"Outbox"', "outbox2")
    ]
    assert len({schema.table_oid for schema in schemas}) == 4
    assert len({schema.bell_channel for schema in schemas}) == 4
    assert len({pair for schema in schemas for pair in (schema.bell, schema.sign)}) == 8


async def test_the_search_path_says_where_an_unqualified_table_is(database: asyncpg.Connection) -> None:
    await database.execute("CREATE SCHEMA first; CREATE SCHEMA second; SET search_path = second")
    assert (await migrate.migrate(database)).schema.table == TableName("second", "outbox")
    await database.execute("SET search_path = first, second")
    assert (await migrate.migrate(database, doorbell=False)).schema.table == TableName("second", "outbox")
    assert await database.fetchval("SELECT to_regclass('first.outbox')") is None
    assert await database.fetchval("SHOW search_path") == "first, second"


# ---------------------------------------------------------------- what it refuses


async def test_a_table_that_it_did_not_create_is_named_and_left_alone(
    database: asyncpg.Connection, database_url: str
) -> None:
    await database.execute("CREATE TABLE outbox (id int PRIMARY KEY, body text)")
    before = dump(database_url)
    with pytest.raises(SchemaForeign, match=r"table outbox \(id, body\)"):
        await migrate.migrate(database)
    with pytest.raises(SchemaForeign, match="not created by relay migrate"):
        await migrate.read_schema(database)
    assert dump(database_url) == before


@pytest.mark.parametrize(
    ("made", "named"),
    [
        ("CREATE TABLE outbox_meta (version int)", "table outbox_meta"),
        ("CREATE VIEW outbox AS SELECT 1 AS one", "view outbox"),
        ("CREATE TABLE t (i int); CREATE INDEX outbox_read ON t (i)", "index outbox_read"),
        ("CREATE FUNCTION outbox_ring() RETURNS int LANGUAGE sql AS 'SELECT 1'", r"function outbox_ring\(\)"),
    ],
)
async def test_any_object_in_the_way_is_named(database: asyncpg.Connection, made: str, named: str) -> None:
    await database.execute(made)
    with pytest.raises(SchemaForeign, match=named):
        await migrate.migrate(database)


async def test_a_dropped_table_is_said_and_its_remains_can_be_dropped(database: asyncpg.Connection) -> None:
    await migrate.migrate(database)
    await database.execute("DROP TABLE outbox")
    with pytest.raises(SchemaForeign, match=r"public.outbox is gone") as refused:
        await migrate.migrate(database)
    await database.execute(str(refused.value.hint).partition("or: ")[2])
    assert (await migrate.migrate(database)).version_before == 0


async def test_schemas_of_other_versions(database: asyncpg.Connection) -> None:
    with pytest.raises(SchemaMissing, match="no outbox table outbox"):
        await migrate.read_schema(database)
    await migrate.migrate(database)
    newer = migrate.SCHEMA_VERSION + 1
    await database.execute(f"UPDATE outbox_meta SET schema_version = {newer}")
    assert (await migrate.read_schema(database)).version == newer
    assert (await migrate.migrate(database)).version_before == newer
    await database.execute(f"UPDATE outbox_meta SET compatible_from = {newer}")
    for attempt in (migrate.read_schema, migrate.migrate):
        with pytest.raises(SchemaIncompatible) as refused:
            await attempt(database)
        assert refused.value.exit_code == 3
        assert refused.value.hint == "upgrade the relay"
    await database.execute("UPDATE outbox_meta SET schema_version = 0, compatible_from = 0")
    with pytest.raises(SchemaIncompatible) as refused:
        await migrate.read_schema(database)
    assert refused.value.hint == "upgrade it: relay migrate"


async def test_missing_schema_and_missing_right_are_said(database: asyncpg.Connection, role: str) -> None:
    with pytest.raises(UsageError, match="the schema nowhere does not exist"):
        await migrate.migrate(database, "nowhere.outbox")
    async with acting_as(database, role):
        if int(await database.fetchval("SHOW server_version_num")) >= 150000:
            with pytest.raises(DatabaseRefused, match="may not create tables in the schema public") as refused:
                await migrate.migrate(database)
            assert "GRANT USAGE, CREATE ON SCHEMA public" in str(refused.value.hint)
    await database.execute(
        f"GRANT CREATE ON DATABASE {await database.fetchval('SELECT current_database()')} TO "
        + await database.fetchval("SELECT quote_ident($1)", role)
    )
    async with acting_as(database, role):  # an owner that is no superuser
        await database.execute("CREATE SCHEMA owned")
        await migrate.migrate(database, "owned.outbox")
        await migrate.migrate(database, "owned.outbox", doorbell=False)


async def test_a_relay_that_owns_nothing_may_run_migrate_where_all_is_there(
    database: asyncpg.Connection, role: str
) -> None:
    await migrate.migrate(database, role=role)
    async with acting_as(database, role):
        assert (await migrate.migrate(database)).version_before == migrate.SCHEMA_VERSION


async def test_an_unknown_payload_type_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="no payload type xml"):
        migrate.printed(payload="xml")


# ---------------------------------------------------------------- rights


async def test_a_writer_inserts_the_writers_columns_and_nothing_else(database: asyncpg.Connection, role: str) -> None:
    await migrate.migrate(database, writer=role)
    columns = ", ".join(WRITERS_COLUMNS)
    values = ", ".join(
        {"text": "'x'", "json": "'{}'", "jsonb": "'{}'", "boolean": "true"}.get(
            kind, "now()" if kind.startswith("timestamp") else "1"
        )
        for kind, _ in WRITERS_COLUMNS.values()
    )
    async with acting_as(database, role):
        await database.execute(ARTICLE)
        await database.execute(f"INSERT INTO outbox ({columns}) VALUES ({values})")
        for forbidden in (
            "INSERT INTO outbox (event_type, seq) OVERRIDING SYSTEM VALUE VALUES ('e', 9)",
            "INSERT INTO outbox (event_type, sent_at) VALUES ('e', now())",
            "INSERT INTO outbox (event_type, aside, holds) VALUES ('e', 'held', true)",
            "SELECT id FROM outbox",
            "UPDATE outbox SET payload = '1'",
            "DELETE FROM outbox",
            "SELECT nextval('outbox_seq_seq')",
            "SELECT * FROM outbox_meta",
            "UPDATE outbox_shard SET epoch = 1",
        ):
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                await database.execute(forbidden)
        await database.execute(ARTICLE + " ON CONFLICT DO NOTHING")


async def test_a_relays_role_does_what_run_does_and_no_more(database: asyncpg.Connection, role: str) -> None:
    await migrate.migrate(database, role=role)
    await database.execute(ARTICLE)
    async with acting_as(database, role):
        for needed in (
            "SELECT * FROM outbox WHERE seq = 1 FOR NO KEY UPDATE",
            "UPDATE outbox SET sent_at = now()",
            "UPDATE outbox SET aside = 'parked', holds = true, parked_at = now(), attempts = 1, "
            "failure_class = 'x', failure_error = '', failure_exchange = '', failure_routing_key = '', "
            "failure_relay = '', failure_relay_version = '', first_failed_at = now(), "
            "last_failed_at = now(), due_at = now()",
            "SELECT last_value, is_called FROM outbox_seq_seq",
            "SELECT * FROM outbox_shard FOR UPDATE",
            "UPDATE outbox_shard SET owner = 'me', epoch = epoch + 1",
            "INSERT INTO outbox_relay (instance, name, version) VALUES ('i', 'n', '0')",
            "UPDATE outbox_relay SET heartbeat = now()",
            "DELETE FROM outbox_relay",
            "INSERT INTO outbox_fault (seq, id, failure_class) VALUES (1, 'i', 'unmarkable')",
            "DELETE FROM outbox_fault",
            "UPDATE outbox_meta SET paused_at = now(), paused_by = 'me'",
            "SELECT outbox_bell_wait(10)",
            "SELECT system_identifier, pg_relation_filenode('outbox_seq_seq') FROM pg_control_system()",
            "SELECT count(*) FROM pg_lock_status()",
            "DELETE FROM outbox",
        ):
            await database.execute(needed)
        for forbidden in (
            "INSERT INTO outbox (event_type) VALUES ('e')",
            "UPDATE outbox SET payload = '1'",
            "UPDATE outbox SET id = 'other'",
            "TRUNCATE outbox",
            "UPDATE outbox_meta SET schema_version = 9",
            "SELECT setval('outbox_seq_seq', 1)",
        ):
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                await database.execute(forbidden)


# ---------------------------------------------------------------- the doorbell


async def triggers(database: asyncpg.Connection) -> list[str]:
    rows = await database.fetch("SELECT tgname FROM pg_trigger WHERE tgrelid = 'outbox'::regclass")
    return [row["tgname"] for row in rows]


async def test_the_doorbell_goes_and_comes_and_stays_as_chosen(database: asyncpg.Connection) -> None:
    for wanted, expected in ((None, True), (False, False), (None, False), (True, True), (None, True)):
        schema = (await migrate.migrate(database, doorbell=wanted)).schema
        assert schema.has_doorbell == expected
        assert await triggers(database) == (["outbox_ring"] if expected else [])


async def test_an_insert_rings_only_while_a_relay_sleeps(database: asyncpg.Connection, database_url: str) -> None:
    schema = (await migrate.migrate(database)).schema
    rings: asyncio.Queue[str] = asyncio.Queue()
    sleeper, listener = await connect(database_url), await connect(database_url)
    try:
        await listener.add_listener(schema.bell_channel, lambda *said: rings.put_nowait(str(said[3])))
        await database.execute(ARTICLE)
        assert await sleeper.fetchval("SELECT outbox_bell_wait(2000)")
        await database.execute("INSERT INTO outbox (event_type) VALUES ('e')")
        assert await asyncio.wait_for(rings.get(), 5) == ""
        assert rings.empty()
        await sleeper.fetchval("SELECT pg_advisory_unlock($1::int, $2::int)", *schema.bell)
        transaction = database.transaction()
        await transaction.start()
        await database.execute("INSERT INTO outbox (event_type) VALUES ('e')")
        assert not await sleeper.fetchval("SELECT outbox_bell_wait(50)")
        await transaction.commit()
        await database.execute(f"NOTIFY {schema.bell_channel}, 'last'")
        assert await asyncio.wait_for(rings.get(), 5) == "last"
    finally:
        await sleeper.close()
        await listener.close()


async def test_the_search_path_of_a_writer_does_not_matter(database: asyncpg.Connection) -> None:
    await migrate.migrate(database)
    await database.execute("SET search_path = ''")
    await database.execute("INSERT INTO public.outbox (event_type) VALUES ('e')")
    assert await database.fetchval("SELECT public.outbox_bell_wait(10)")
    await database.execute("INSERT INTO public.outbox (event_type) VALUES ('e')")


def test_literals_are_quoted() -> None:
    assert literal("it's") == "'it''s'"
    assert literal("a\\b'") == "E'a\\\\b'''"
    assert literal(None) == "NULL"
