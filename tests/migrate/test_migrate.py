"""`relay migrate` on a real PostgreSQL: what it makes, what it refuses, who may do what afterwards."""

from __future__ import annotations

import asyncio
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
from relay.servers import PostgresServer
from relay.values import TableName, table_name
from tests.conftest import eventually
from tests.migrate.given import ARTICLE, WRITERS_COLUMNS, acting_as, dump, psql
from tests.pooler import IS_INSTALLED, Pooler

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


async def test_an_older_schema_is_upgraded_not_created(
    database: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `relay migrate` says it did goes by the version that it found; an older one counted as none."""
    await migrate.migrate(database)
    found = migrate.SCHEMA_VERSION
    monkeypatch.setattr(migrate, "SCHEMA_VERSION", found + 1)
    assert await migrate._version(database, table_name("outbox")) == found


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


async def test_a_schema_that_the_role_may_not_look_into_is_named(database: asyncpg.Connection, role: str) -> None:
    """It was told to create the table, which is there."""
    await database.execute('CREATE SCHEMA "my app"')
    await migrate.migrate(database, table_name('"my app".outbox'))
    await database.execute('SET search_path = "my app", public')
    assert (await migrate.read_schema(database, table_name("outbox"))).table.schema == "my app"
    async with acting_as(database, role):
        with pytest.raises(SchemaMissing, match='no USAGE on the schema "my app"') as missing:
            await migrate.read_schema(database, table_name("outbox"))
        assert 'GRANT USAGE ON SCHEMA "my app"' in str(missing.value.hint)
        with pytest.raises(SchemaMissing, match=r"no outbox table other$"):
            await migrate.read_schema(database, table_name("other"))


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
            "UPDATE outbox SET expires_at = NULL",
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


def test_literals_are_quoted() -> None:
    assert literal("it's") == "'it''s'"
    assert literal("a\\b'") == "E'a\\\\b'''"
    assert literal(None) == "NULL"
