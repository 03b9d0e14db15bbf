"""The protocol by which a service works through the inbox table: claim, done, failed, redrive, discard."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable

import asyncpg
import pytest

from relay.database import fill as fill_in
from relay.database import sql_file
from relay.inbox.migrate import DEFAULT_TABLE
from relay.inbox.naming import FREE_ROWS, names_of
from tests.inbox.site import Site, fill

CLAIM = "SELECT message_id FROM inbox_claim($1)"
RELEASE = fill_in(sql_file("inbox/mailbox_release.sql"), names_of(DEFAULT_TABLE))
HELD = "SELECT count(*) FROM inbox WHERE held AND done_at IS NULL"
ROWS_SEEN = "SELECT seq_tup_read + idx_tup_fetch FROM pg_stat_xact_user_tables WHERE relname = 'inbox'"


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


# ---------------------------------------------------------------- what is held


async def finish(connection: asyncpg.Connection, message_id: str) -> None:
    assert await connection.fetchval("SELECT inbox_done($1)", message_id) is True


async def hold(inbox: Site, other: asyncpg.Connection, head: str, rows: int) -> list[str]:
    """So many rows of one key behind the first of them, and a row of another key."""
    ids = [f"hot-{number}" for number in range(rows)]
    await fill(inbox, ids[0], key="hot")
    if head == "parked before":
        assert await other.fetchval("SELECT inbox_failed('hot-0', 'permanent')") == "parked"
    for first in range(1, rows, 50):
        await fill(inbox, *ids[first : first + 50], key="hot")
    await fill(inbox, "cold", key="cold")
    if head == "parked":
        assert await other.fetchval("SELECT inbox_failed('hot-0', 'permanent')") == "parked"
    elif head == "deferred":
        assert await other.fetchval("SELECT inbox_failed('hot-0', 'transient', '', '{1h}')") == "deferred"
    elif head == "at work":
        await other.execute("BEGIN")
        assert await claimed(other, 1) == ["hot-0"]
    return ids


@pytest.mark.parametrize("head", ["at work", "parked", "deferred", "parked before"])
async def test_a_claim_looks_at_few_rows_however_many_wait_behind_one(
    inbox: Site, other: asyncpg.Connection, head: str
) -> None:
    """It looked at each: with 100,000 of them behind a parked one a claim took two seconds, and every worker's."""
    await hold(inbox, other, head, 3000)
    async with inbox.database.transaction():
        before = await inbox.database.fetchval(ROWS_SEEN)
        assert await claimed(inbox.database) == ["cold"]
        seen = await inbox.database.fetchval(ROWS_SEEN) - before
    assert seen < 4 * FREE_ROWS + 20


@pytest.mark.parametrize("head", ["at work", "parked", "deferred", "parked before"])
async def test_what_waits_behind_one_is_worked_on_in_order_after_it(
    inbox: Site, other: asyncpg.Connection, head: str
) -> None:
    rows = 5 * FREE_ROWS
    ids = await hold(inbox, other, head, rows)
    await other.execute("ROLLBACK")
    free = rows - await other.fetchval(HELD)
    assert FREE_ROWS <= free < 2 * FREE_ROWS if head == "at work" else free == 1
    await other.execute("UPDATE inbox SET due_at = now()")
    await other.fetchval("SELECT inbox_redrive('hot-0')")
    done = []
    while heads := await claimed(other):
        for message_id in heads:
            await finish(other, message_id)
        done += heads
    assert [each for each in done if each != "cold"] == ids
    assert await other.fetchval(HELD) == 0


async def test_a_discarded_one_lets_go_what_it_holds(inbox: Site) -> None:
    await fill(inbox, *(f"k{number}" for number in range(3)), key="k")
    assert await inbox.database.fetchval("SELECT inbox_failed('k0', 'permanent')") == "parked"
    await fill(inbox, "k3", key="k")
    assert await inbox.database.fetchval(HELD) == 3
    assert await inbox.database.fetchval("SELECT inbox_discard('k0')") is True
    assert await inbox.database.fetchval(HELD) == 0
    assert await claimed(inbox.database) == ["k1"]


async def test_copies_of_what_is_done_hold_nothing(inbox: Site) -> None:
    """A batch that comes again after a crash: there is nobody left to let the new one go."""
    done = [f"k{number}" for number in range(2 * FREE_ROWS)]
    await fill(inbox, *done, key="k")
    await inbox.database.execute("UPDATE inbox SET done_at = now()")
    await fill(inbox, *done, "new", key="k")
    assert await claimed(inbox.database) == ["new"]


async def test_messages_without_a_key_hold_nothing(inbox: Site) -> None:
    ids = [f"m{number}" for number in range(2 * FREE_ROWS)]
    await fill(inbox, *ids)
    assert await inbox.database.fetchval("SELECT inbox_failed('m0', 'permanent')") == "parked"
    assert await claimed(inbox.database, len(ids)) == ids[1:]


async def test_what_was_written_while_all_before_it_was_finished_is_let_go(
    inbox: Site, other: asyncpg.Connection
) -> None:
    await fill(inbox, "k0", key="k")
    assert await other.fetchval("SELECT inbox_failed('k0', 'permanent')") == "parked"
    async with inbox.database.transaction():
        await fill(inbox, "k1", "k2", key="k")
        assert await other.fetchval("SELECT inbox_discard('k0')") is True
    assert await claimed(other) == [], "held, and nobody is before it"
    await other.execute(RELEASE)
    assert await claimed(other) == ["k1"]
    await finish(other, "k1")
    assert await claimed(other) == ["k2"]


async def test_only_what_nobody_holds_is_let_go(inbox: Site) -> None:
    """One key's first rows were deleted by hand, another waits behind a parked one, a third behind one at work."""
    for key in ("deleted", "parked", "working"):
        await fill(inbox, *(f"{key}-{number}" for number in range(3 * FREE_ROWS)), key=key)
    assert await inbox.database.fetchval("SELECT inbox_failed('parked-0', 'permanent')") == "parked"
    await inbox.database.execute(
        "DELETE FROM inbox WHERE aggregate_id = 'deleted' AND seq <= (SELECT seq FROM inbox WHERE message_id = $1)",
        f"deleted-{FREE_ROWS}",
    )
    held = "SELECT aggregate_id, count(*) FROM inbox WHERE held GROUP BY 1 ORDER BY 1"
    assert await inbox.database.execute(RELEASE) == f"UPDATE {FREE_ROWS}"
    assert [tuple(each) for each in await inbox.database.fetch(held)] == [
        ("deleted", FREE_ROWS - 1),
        ("parked", 3 * FREE_ROWS - 1),
        ("working", 2 * FREE_ROWS),
    ]
    assert await inbox.database.execute(RELEASE) == "UPDATE 0"


@pytest.mark.parametrize("seed", range(3))
async def test_nothing_is_lost_or_out_of_order_whatever_happens_beside(inbox: Site, seed: int) -> None:
    """A sidecar, workers, failures, an operator, all at once; at the end all is done, in order per key but for what was discarded."""
    keys, rows = 3, 2 * FREE_ROWS
    chance = random.Random(seed)
    await inbox.database.execute("CREATE TABLE applied (seq bigint GENERATED ALWAYS AS IDENTITY, key text, number int)")
    is_written = asyncio.Event()

    async def write(connection: asyncpg.Connection) -> None:
        places = dict.fromkeys(range(keys), 0)
        while places:
            key = chance.choice(list(places))
            first, last = places[key], min(rows, places[key] + chance.randint(1, 20))
            await fill(inbox, *(f"{key}-{number}" for number in range(first, last)), key=str(key), by=connection)
            places[key] = last
            if last == rows:
                del places[key]
        is_written.set()

    async def is_over(connection: asyncpg.Connection) -> bool:
        return is_written.is_set() and not await connection.fetchval(
            "SELECT EXISTS (SELECT FROM inbox WHERE done_at IS NULL)"
        )

    async def work(connection: asyncpg.Connection) -> None:
        while not await is_over(connection):
            failed = None
            transaction = connection.transaction()
            await transaction.start()
            for message_id in await claimed(connection, chance.randint(1, 3)):
                key, _, number = message_id.partition("-")
                await connection.execute("INSERT INTO applied (key, number) VALUES ($1, $2)", key, int(number))
                if chance.random() < 0.1:
                    failed = message_id
                    break
                await connection.execute("SELECT inbox_done($1)", message_id)
            if failed is None:
                await transaction.commit()
            else:
                await transaction.rollback()
                kind = chance.choice(("transient", "permanent"))
                await connection.execute("SELECT inbox_failed($1, $2, '', '{1ms,1ms}')", failed, kind)

    async def operate(connection: asyncpg.Connection) -> None:
        while not await is_over(connection):
            for (message_id,) in await connection.fetch(
                "SELECT message_id FROM inbox WHERE parked_at IS NOT NULL AND done_at IS NULL"
            ):
                act = chance.choice(("inbox_redrive", "inbox_redrive", "inbox_discard"))
                await connection.execute(f"SELECT {act}($1)", message_id)
            await connection.execute(RELEASE)

    async def alone(what: Callable[[asyncpg.Connection], Awaitable[None]]) -> None:
        connection = await asyncpg.connect(inbox.database_url)
        try:
            await what(connection)
        finally:
            await connection.close(timeout=5)

    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        for what in (write, work, work, work, operate):
            group.create_task(alone(what))
    discarded = await inbox.database.fetch("SELECT message_id FROM inbox WHERE parked_at IS NOT NULL")
    for key in range(keys):
        found = await inbox.database.fetch("SELECT number FROM applied WHERE key = $1 ORDER BY seq", str(key))
        missing = {int(each[0].partition("-")[2]) for each in discarded if each[0].startswith(f"{key}-")}
        assert [row["number"] for row in found] == [number for number in range(rows) if number not in missing]
