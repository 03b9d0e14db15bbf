"""The settler's session comes and goes: an idle relay keeps two connections, and settles without a third if it must."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

import asyncpg
import pytest

from relay import migrate, sessions
from relay.errors import DatabaseUnavailable
from relay.servers import PostgresServer
from relay.sessions import Group, Sessions
from relay.urls import DatabaseTarget
from tests.conftest import eventually
from tests.integration.relay import Relay, insert, states
from tests.proxy import Proxy, Side, Trap


async def until(connection: asyncpg.Connection, count: int) -> None:
    """Wait until the relay has so many connections."""

    async def has_them() -> bool:
        text = (
            "SELECT count(*) FROM pg_stat_activity"
            " WHERE application_name LIKE 'outbox-relay%' AND datname = current_database()"
        )
        return bool(await connection.fetchval(text) == count)

    await eventually(has_them)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle settler's session goes with the keeper's next call."""
    monkeypatch.setattr(sessions, "SETTLER_IDLE_S", 0.0)


@pytest.mark.usefixtures("at_once")
async def test_an_idle_settler_gives_its_connection_back(
    database: asyncpg.Connection, started: Callable[..., Relay]
) -> None:
    relay = await started().start()
    await relay.check()
    await until(database, 2)
    assert relay.lost == []
    await insert(database, "k", "l")
    first, second = await relay.read()
    assert (await relay.settle(relay.settlement(sent=[first]))).done == [first]
    await until(database, 3)
    assert (await relay.settle(relay.settlement(sent=[second]))).done == [second]
    assert await states(database) == ["sent", "sent"]
    await relay.check()
    await until(database, 2)
    await relay.close()
    await until(database, 0)
    assert relay.lost == []


@pytest.mark.usefixtures("at_once")
async def test_an_opened_settler_that_dies_is_a_loss_of_all(
    database: asyncpg.Connection, started: Callable[..., Relay]
) -> None:
    relay = await started().start()
    await relay.check()
    await relay.settle(relay.settlement())
    await database.execute("SELECT pg_terminate_backend($1)", relay._sessions.pid(Group.SETTLER))
    await eventually(lambda: len(relay.lost) == 1)
    await until(database, 0)


@pytest.mark.usefixtures("at_once")
async def test_without_a_third_connection_settlements_go_over_the_readers(
    database: asyncpg.Connection, database_url: str, postgres_server: PostgresServer
) -> None:
    """What is published must be settled: a relay that reconnected for want of a connection would publish it again."""
    role = f"two_{os.getpid()}"
    await database.execute(f"CREATE ROLE {role} LOGIN")
    await migrate.run(database_url, role=role)
    relay = await Relay(postgres_server.url(database_url.rpartition("/")[2], user=role), "a").start()
    try:
        await relay.check()
        await until(database, 2)
        await database.execute(f"ALTER ROLE {role} CONNECTION LIMIT 2")
        await insert(database, "k", "l")
        for row in await relay.read():
            assert (await relay.settle(relay.settlement(sent=[row]))).done == [row]
        await until(database, 2)
        assert relay.lost == []
        assert await states(database) == ["sent", "sent"]
    finally:
        await relay.close()
        await database.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")


@pytest.mark.usefixtures("at_once")
async def test_a_settlers_session_on_another_server_is_none(
    database: asyncpg.Connection, started: Callable[..., Relay]
) -> None:
    """Several hosts in the URL: after a fail-over in between, the new session would not see what the others do."""
    relay = await started().start()
    await relay.check()
    await insert(database, "k")
    relay._sessions._server = "another start of another server"
    rows = await relay.read()
    assert (await relay.settle(relay.settlement(sent=rows))).done == rows
    await until(database, 2)


# ---------------------------------------------------------------- where the sessions lead


async def test_sessions_on_two_servers_are_none(database: asyncpg.Connection, database_url: str) -> None:
    """A fail-over while they are opened: what the keeper claims in one server's table the reader would read in another's."""
    name = database_url.rpartition("/")[2]
    with await asyncio.to_thread(lambda: PostgresServer.start(durable=False)) as other:
        other.create_database(name)
        async with Proxy(database_url) as proxy:
            proxy.trap(
                Trap(
                    Side.CLIENT,
                    b"pg_backend_pid",
                    lambda: proxy.lead_to(other.port),
                    session=b"outbox-relay keeper",
                    is_passed=True,
                )
            )
            opened = Sessions(5.0, settle_commit=True)
            with pytest.raises(DatabaseUnavailable, match="led to different PostgreSQL servers"):
                await opened.open(lambda: DatabaseTarget(proxy.url, "test"), "a")
            assert proxy.accepted == len(Group)
            await until(database, 0)
            # The next try finds all three at the new place.
            await opened.open(lambda: DatabaseTarget(proxy.url, "test"), "a")
            await opened.close()


async def test_a_standby_is_none_of_ours(database: asyncpg.Connection, database_url: str) -> None:
    """It would refuse every write only when one comes. (A real one: case 28, in the long form.)"""
    name = await database.fetchval("SELECT quote_ident(current_database())")
    await database.execute(
        "CREATE FUNCTION public.pg_is_in_recovery() RETURNS bool LANGUAGE sql AS 'SELECT true';"
        f" ALTER DATABASE {name} SET search_path = public, pg_catalog"
    )
    opened = Sessions(5.0, settle_commit=True)
    with pytest.raises(DatabaseUnavailable, match="is a standby"):
        await opened.open(lambda: DatabaseTarget(database_url, "test"), "a")
    await until(database, 0)
    await database.execute("DROP FUNCTION public.pg_is_in_recovery()")
    await opened.open(lambda: DatabaseTarget(database_url, "test"), "a")
    await opened.close()
