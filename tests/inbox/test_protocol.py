"""The protocol by which a service works through the inbox table: claim, done, failed, redrive, discard."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import asyncpg
import pytest

from tests.inbox.site import Site, fill

CLAIM = "SELECT message_id FROM inbox_claim($1)"


@pytest.fixture(autouse=True)
async def _queues(inbox: Site) -> None:
    await inbox.declare(())


async def claimed(connection: asyncpg.Connection, at_most: int = 10) -> list[str]:
    return [row["message_id"] for row in await connection.fetch(CLAIM, at_most)]


@pytest.fixture
async def other(inbox: Site) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(inbox.database_url)
    yield connection
    await connection.close(timeout=5)


async def test_claim_effect_and_done_commit_together(inbox: Site, other: asyncpg.Connection) -> None:
    await fill(inbox, "m1", "m2")
    transaction = inbox.database.transaction()
    await transaction.start()
    assert await claimed(inbox.database, 1) == ["m1"]
    assert await claimed(other) == ["m2"], "what somebody works on is skipped"
    assert await inbox.database.fetchval("SELECT inbox_done('m1')") is True
    await transaction.rollback()
    assert await claimed(other) == ["m1", "m2"], "a crash gives it back"
    assert await other.fetchval("SELECT inbox_done('m1')") is True
    assert await other.fetchval("SELECT inbox_done('m1')") is False
    assert await claimed(other) == ["m2"]


async def test_a_keys_messages_follow_each_other(inbox: Site, other: asyncpg.Connection) -> None:
    await fill(inbox, "k1", "k2", key="42")
    await fill(inbox, "free")
    async with inbox.database.transaction():
        assert await claimed(inbox.database) == ["k1", "free"]
        assert await claimed(other) == []
    assert await other.fetchval("SELECT inbox_failed('k1', 'transient', 'later', '{1h}')") == "deferred"
    assert await claimed(other) == ["free"], "one that waits holds those behind it"
    assert await other.fetchval("SELECT inbox_failed('k1', 'transient', 'again', '{1h}')") == "parked"
    assert await claimed(other) == ["free"]
    assert await other.fetchval("SELECT inbox_redrive('k1')") is True
    assert await claimed(other) == ["k1", "free"]
    assert await other.fetchval("SELECT inbox_failed('k1', 'permanent', $1)", "x" * 900) == "parked"
    row = await other.fetchrow(
        "SELECT error_class, length(error), attempts, first_failed_at FROM inbox WHERE message_id = 'k1'"
    )
    assert tuple(row)[:3] == ("permanent", 500, 1) and row["first_failed_at"] is not None
    assert await other.fetchval("SELECT inbox_discard('k1')") is True
    assert await claimed(other) == ["k2", "free"]


async def test_what_makes_no_sense_is_refused(other: asyncpg.Connection) -> None:
    with pytest.raises(asyncpg.InvalidParameterValueError, match="transient, unknown or permanent"):
        await other.fetchval("SELECT inbox_failed('m1', 'odd')")
    with pytest.raises(asyncpg.InvalidParameterValueError, match="no class NULL: transient, unknown or permanent"):
        await other.fetchval("SELECT inbox_failed('m1', NULL)")
    for delays in "NULL", "'{NULL}'", "'{5s,-1s}'", "'{{1s,2s}}'":
        with pytest.raises(asyncpg.InvalidParameterValueError, match=r"no delays .*: an array of intervals from 0 on"):
            await other.fetchval(f"SELECT inbox_failed('m1', 'transient', 'text', {delays})")
    assert await other.fetchval("SELECT inbox_failed('nobody', 'unknown')") is None
    assert await other.fetchval("SELECT inbox_redrive('nobody')") is False


async def test_workers_together_never_have_two_of_one_key(inbox: Site) -> None:
    for key in range(5):
        await fill(inbox, *(f"{key}-{number}" for number in range(20)), key=str(key))
    await inbox.database.execute("CREATE TABLE applied (seq bigint GENERATED ALWAYS AS IDENTITY, key text, number int)")

    async def work() -> None:
        connection = await asyncpg.connect(inbox.database_url)
        try:
            while await connection.fetchval("SELECT EXISTS (SELECT FROM inbox WHERE done_at IS NULL)"):
                async with connection.transaction():
                    for message_id in await claimed(connection, 2):
                        key, _, number = message_id.partition("-")
                        await connection.execute("INSERT INTO applied (key, number) VALUES ($1, $2)", key, int(number))
                        await connection.execute("SELECT inbox_done($1)", message_id)
        finally:
            await connection.close(timeout=5)

    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        for _ in range(4):
            group.create_task(work())
    for key in range(5):
        found = await inbox.database.fetch("SELECT number FROM applied WHERE key = $1 ORDER BY seq", str(key))
        assert [row["number"] for row in found] == list(range(20))
