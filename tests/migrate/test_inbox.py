"""`relay inbox migrate` on a real PostgreSQL."""

from __future__ import annotations

import asyncio

import asyncpg
import pytest

from relay.errors import DatabaseRefused, SchemaForeign, UsageError
from relay.inbox import migrate
from relay.values import table_name
from tests.migrate.given import acting_as, psql

RECORD = (
    "INSERT INTO processed_messages (consumer_name, message_id) VALUES ($1, $2) "
    "ON CONFLICT (consumer_name, message_id) DO NOTHING"
)


async def test_a_message_is_recorded_once_a_consumer(database: asyncpg.Connection) -> None:
    await migrate.migrate(database)
    assert await database.execute(RECORD, "stock", "m1") == "INSERT 0 1"
    assert await database.execute(RECORD, "stock", "m1") == "INSERT 0 0"
    assert await database.execute(RECORD, "mail", "m1") == "INSERT 0 1"
    assert await database.fetchval("SELECT bool_and(processed_at <= now()) FROM processed_messages")


async def test_twice_and_at_once_is_once(database: asyncpg.Connection, database_url: str) -> None:
    await asyncio.gather(*(migrate.run(database_url) for _ in range(4)))
    await database.execute(RECORD, "stock", "m1")
    await migrate.migrate(database)
    assert await database.fetchval("SELECT count(*) FROM processed_messages") == 1


async def test_printed_is_what_psql_runs(database: asyncpg.Connection, database_url: str, role: str) -> None:
    for _ in range(2):
        done = psql(database_url, migrate.printed(role=role))
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    await migrate.migrate(database)
    await database.execute(RECORD, "stock", "m1")


async def test_the_role_records_and_forgets_and_no_more(database: asyncpg.Connection, role: str) -> None:
    await migrate.migrate(database, role=role)
    async with acting_as(database, role):
        await database.execute(RECORD, "stock", "m1")
        await database.execute("DELETE FROM processed_messages WHERE processed_at < now() - interval '90 days'")
        await database.execute("INSERT INTO processed_versions VALUES ('stock', 'order', '42', 1)")
        assert await database.fetch("SELECT * FROM inbox_claim(1)") == []
        assert await database.fetchval("SELECT inbox_done('m1')") is False
        for forbidden in ("UPDATE processed_messages SET message_id = 'x'", "TRUNCATE processed_messages"):
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                await database.execute(forbidden)


async def test_the_role_works_in_the_schema_of_the_inbox_table(database: asyncpg.Connection, role: str) -> None:
    """It need not be the schema of `processed_messages`."""
    await database.execute('CREATE SCHEMA "Sa les"')
    for _ in range(2):
        await migrate.migrate(database, table=table_name('"Sa les".mail'), role=role)
    async with acting_as(database, role):
        assert await database.execute(RECORD, "stock", "m1") == "INSERT 0 1"
        assert await database.fetch('SELECT * FROM "Sa les".mail_claim(1)') == []
        assert await database.fetchval("SELECT \"Sa les\".mail_done('m1')") is False
        assert await database.fetchval('SELECT count(*) FROM "Sa les".mail_writer') == 0


async def test_the_articles_own_table_is_accepted_another_is_not(database: asyncpg.Connection) -> None:
    await database.execute(
        "CREATE TABLE processed_messages (consumer_name text, message_id text, note text, "
        "processed_at timestamptz DEFAULT now(), PRIMARY KEY (consumer_name, message_id))"
    )
    await migrate.migrate(database)
    for other in (
        "ALTER TABLE processed_messages DROP CONSTRAINT processed_messages_pkey",
        "DROP TABLE processed_messages; CREATE TABLE processed_messages (id int)",
        "DROP TABLE processed_messages; CREATE VIEW processed_messages AS SELECT 1 AS one",
    ):
        await database.execute(other)
        with pytest.raises(SchemaForeign, match="another table processed_messages"):
            await migrate.migrate(database)


async def test_what_is_wrong_is_said(database: asyncpg.Connection, role: str) -> None:
    with pytest.raises(UsageError, match="no such role: nobody"):
        await migrate.migrate(database, role="nobody")
    assert await database.fetchval("SELECT to_regclass('processed_messages')") is None
    await database.execute("SET search_path = nowhere")
    with pytest.raises(UsageError, match="no schema of the search_path"):
        await migrate.migrate(database)
    await database.execute("RESET search_path; REVOKE CREATE ON SCHEMA public FROM PUBLIC")
    async with acting_as(database, role):
        with pytest.raises(DatabaseRefused, match="may not create tables"):
            await migrate.migrate(database)


async def test_the_inbox_table_is_ours_or_not_touched(database: asyncpg.Connection) -> None:
    table = table_name('"In Box"')
    for _ in range(2):
        await migrate.migrate(database, table=table)
    assert await database.fetch('SELECT * FROM "In Box_claim"(1)') == []
    await database.execute("CREATE TABLE inbox (message_id text)")
    with pytest.raises(SchemaForeign, match="another table"):
        await migrate.migrate(database)
