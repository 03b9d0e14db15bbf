"""Rows that the database lets nobody change, and rows that an application keeps locked: only they pay."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import pytest

from relay import config, migrate
from relay.core.ports.outbox import Held, Settled
from relay.errors import DatabaseRefused
from relay.message import Row
from relay.parked import Action, Filter, act
from tests.integration.relay import ALL, FUNCTION, REFUSALS, Relay, deferred, insert, parked, states


async def bad(connection: asyncpg.Connection, *keys: str | None) -> None:
    await insert(connection, *keys, event_type="bad")


async def faults(connection: asyncpg.Connection) -> list[tuple[int, str]]:
    """(seq, error) of what is recorded."""
    records = await connection.fetch("SELECT seq, failure_error FROM outbox_fault ORDER BY seq")
    return [(record[0], record[1]) for record in records]


def seqs(rows: list[Row]) -> list[int]:
    return sorted(row.seq for row in rows)


async def due(relay: Relay) -> list[int]:
    found = await relay.due(dict.fromkeys(range(ALL), 2**40), 100)
    assert not found.blocked
    return seqs(list(found.released))


# ---------------------------------------------------------------- the unmarkable row


@pytest.mark.parametrize(
    ("refusal", "marks_sent"),
    [(each, True) for each in REFUSALS if each != "foreign key"]
    + [(each, False) for each in REFUSALS if each != "check"],
)
async def test_the_culprit_is_recorded_and_the_others_are_settled(
    database: asyncpg.Connection, started: Callable[..., Relay], refusal: str, marks_sent: bool
) -> None:
    relay = await started(marks_sent=marks_sent).start()
    await insert(database, "a", "b", "k")
    await bad(database, "k")
    await insert(database, "k", "c", "d")
    await database.execute(REFUSALS[refusal])
    settled = await relay.settle(relay.settlement(sent=await relay.read()))
    assert seqs(settled.done) == [1, 2, 3, 4, 5, 6, 7]
    assert [(each.seq, each.attempts) for each in settled.faults] == [(4, 1)]
    left = ["sent", "sent", "sent", "pending", "sent", "sent", "sent"] if marks_sent else ["pending"]
    assert await states(database) == left
    ((seq, error),) = await faults(database)
    assert seq == 4
    assert error.startswith("published, but its mark is refused: ")
    assert ("suppressed" in error) == (refusal == "silence")
    assert (await database.fetchrow("SELECT failure_class, attempts, relay, relay_version FROM outbox_fault")) == (
        "unmarkable",
        1,
        "a",
        "0.0",
    )
    # Never again: not by this relay, not by the next owner.
    assert await relay.read() == []
    await relay.release(relay.held())
    other = await started("b", marks_sent=marks_sent).start()
    assert await other.read() == []


async def test_many_culprits_in_a_batch(database: asyncpg.Connection, started: Callable[..., Relay]) -> None:
    relay = await started().start()
    for number in range(400):
        await (bad if number % 10 == 3 else insert)(database, str(number))
    await database.execute(REFUSALS["trigger"])
    settled = await relay.settle(relay.settlement(sent=await relay.read()))
    while settled.locked:  # its time was used up
        settled = await relay.settle(relay.settlement(sent=settled.locked))
    assert (await states(database)).count("sent") == 360
    assert [seq for seq, _ in await faults(database)] == [number + 1 for number in range(3, 400, 10)]


async def test_nothing_is_recorded_without_the_shard(
    database: asyncpg.Connection, started: Callable[..., Relay]
) -> None:
    """S1: the fault is written under the same fence."""
    relay = await started().start()
    await bad(database, "k")
    rows = await relay.read()
    await database.execute(REFUSALS["trigger"])
    await database.execute("UPDATE outbox_shard SET owner = 'somebody else'")
    settled = await relay.settle(relay.settlement(sent=rows))
    assert settled.lost == set(range(ALL))
    assert await faults(database) == []


@pytest.mark.parametrize(
    ("refusal", "said"),
    [
        ("trigger", "not this one (P0001)"),
        ("silence", "the change is suppressed without an error (by a trigger that returns NULL?) (27000)"),
    ],
)
async def test_a_deferral_that_is_refused_frees_the_key(
    database: asyncpg.Connection, started: Callable[..., Relay], refusal: str, said: str
) -> None:
    """The failed row is recorded with both errors; its followers were held with it, and the first is due."""
    relay = await started().start()
    await bad(database, "k")
    await insert(database, "k", "k", "other")
    head, one, two, other = await relay.read()
    await database.execute(REFUSALS[refusal])
    settled = await relay.settle(
        relay.settlement(sent=[other], setbacks=[deferred(head, attempts=3)], followers=[one, two])
    )
    assert settled.promoted == {one.shard}
    assert await states(database) == ["pending", "deferred+", "held+", "sent"]
    assert await faults(database) == [(1, f"unroutable, and that it is deferred is refused: {said}; NO_ROUTE")]
    assert tuple(await database.fetchrow("SELECT attempts, exchange, routing_key FROM outbox_fault")) == (
        3,
        "events",
        "a.b",
    )
    assert await due(relay) == [one.seq]


@pytest.mark.parametrize("refusal", ["trigger", "silence"])
@pytest.mark.parametrize("what", ["followers", "tested", "scheduled"])
async def test_a_row_that_cannot_wait_aside_is_recorded(
    database: asyncpg.Connection, started: Callable[..., Relay], what: str, refusal: str
) -> None:
    relay = await started().start()
    await insert(database, "k")
    await bad(database, "k")
    await insert(database, "k")
    head, culprit, last = await relay.read()
    await database.execute(REFUSALS[refusal])
    settled = await relay.settle(
        relay.settlement(setbacks=[deferred(head)], followers=[last], **{what: [culprit]})
        if what != "followers"
        else relay.settlement(setbacks=[deferred(head)], followers=[culprit, last])
    )
    assert seqs(settled.done) == [1, 2, 3]
    assert [each.seq for each in settled.faults] == [2]
    assert await states(database) == ["deferred+", "pending", "held+"]
    assert (await faults(database))[0][1].startswith("not published: ")


async def test_a_recorded_row_that_is_aside_holds_nothing(
    database: asyncpg.Connection, started: Callable[..., Relay]
) -> None:
    """It was deferred, was sent when due, and cannot be marked: in the table it stays as it is."""
    relay = await started().start()
    await bad(database, "k")
    await insert(database, "k", "k")
    head, one, two = await relay.read()
    await relay.settle(relay.settlement(setbacks=[deferred(head, delay_s=0.0)], followers=[one]))
    (again,) = (await relay.due(dict.fromkeys(range(ALL), 9), 9)).released
    await database.execute(REFUSALS["trigger"])
    settled = await relay.settle(relay.settlement(sent=[again]))
    assert [each.seq for each in settled.faults] == [1]
    assert settled.promoted == {again.shard}
    assert await states(database) == ["deferred+", "deferred+", "pending"]
    backlog = await relay.backlog()
    assert (backlog.backlog_rows, backlog.deferred_rows, backlog.parked_rows) == (2, 1, 1)
    assert await due(relay) == [2]
    assert (await relay.renew(relay.held(), available=True)).next_due_in_s is not None
    await relay.settle(relay.settlement(sent=(await relay.due(dict.fromkeys(range(ALL), 9), 9)).released))
    assert (await relay.held_keys(range(ALL), None, 9)).keys == []
    assert (await relay.renew(relay.held(), available=True)).next_due_in_s is None
    settled = await relay.settle(relay.settlement(tested=[two]))
    assert settled.unblocked == [two]


@pytest.mark.parametrize("refusal", ["deferred", "silence"])
async def test_a_promotion_that_is_refused_promotes_the_next(
    database: asyncpg.Connection, started: Callable[..., Relay], refusal: str
) -> None:
    relay = await started().start()
    await insert(database, "k")
    await bad(database, "k", "k")
    await insert(database, "k")
    rows = await relay.read()
    await relay.settle(relay.settlement(setbacks=[deferred(rows[0], delay_s=0.0)], followers=rows[1:]))
    (head,) = (await relay.due(dict.fromkeys(range(ALL), 9), 9)).released
    await database.execute(REFUSALS[refusal])
    settled = await relay.settle(relay.settlement(sent=[head]))
    assert [(each.seq, each.shard) for each in settled.faults] == [(2, head.shard), (3, head.shard)]
    assert await states(database) == ["sent", "held+", "held+", "deferred+"]
    assert await due(relay) == [4]


async def test_a_broken_trigger_is_nobodys_row(database: asyncpg.Connection, started: Callable[..., Relay]) -> None:
    """It fails for every row: nothing is recorded, the settlement is tried again until it is mended."""
    relay = await started().start()
    await bad(database, "a", "b")
    rows = await relay.read()
    await database.execute(REFUSALS["broken branch"])
    with pytest.raises(DatabaseRefused, match="42703"):
        await relay.settle(relay.settlement(sent=rows))
    assert await faults(database) == []
    await database.execute("DROP TRIGGER no ON outbox")
    assert (await relay.settle(relay.settlement(sent=rows))).faults == []
    assert await states(database) == ["sent", "sent"]


@pytest.mark.parametrize("code", ["55P03", "53100", "25006", "40001", "57014"])
async def test_the_servers_fault_is_nobodys_row(
    database: asyncpg.Connection, started: Callable[..., Relay], code: str
) -> None:
    relay = await started().start()
    await bad(database, "a")
    await insert(database, "b")
    rows = await relay.read()
    await database.execute(
        FUNCTION.format(refuse=f"RAISE EXCEPTION 'not now' USING ERRCODE = '{code}'", returns="new")
        + "CREATE TRIGGER no BEFORE UPDATE ON outbox FOR EACH ROW EXECUTE FUNCTION no()"
    )
    with pytest.raises(Exception, match="not now"):
        await relay.settle(relay.settlement(sent=rows))
    assert await faults(database) == []
    assert await states(database) == ["pending", "pending"]


async def test_a_policy_refuses_a_row_a_missing_right_does_not(database_url: str, database: asyncpg.Connection) -> None:
    role = f"relay_{urlsplit(database_url).path[1:]}"
    await database.execute(f"CREATE ROLE {role} LOGIN")
    try:
        await migrate.run(database_url, role=role)
        await database.execute(
            "ALTER TABLE outbox ENABLE ROW LEVEL SECURITY; CREATE POLICY seen ON outbox USING (true)"
            " WITH CHECK (event_type <> 'bad')"
        )
        server = urlsplit(database_url)
        url = server._replace(netloc=f"{role}@{server.hostname}:{server.port}").geturl()
        relay = await Relay(url, "a").start()
        try:
            await bad(database, "a")
            await insert(database, "b")
            rows = await relay.read()
            await database.execute(f"REVOKE UPDATE ON outbox FROM {role}")
            with pytest.raises(DatabaseRefused, match="42501"):
                await relay.settle(relay.settlement(sent=rows))
            assert await faults(database) == []
            await database.execute(f"GRANT UPDATE ON outbox TO {role}")
            await relay.settle(relay.settlement(sent=rows))
            assert [seq for seq, _ in await faults(database)] == [1]
            assert await states(database) == ["pending", "sent"]
        finally:
            await relay.close()
    finally:
        await database.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")


# ---------------------------------------------------------------- the locked row


async def settle_beside_a_lock(
    database_url: str, relay: Relay, seq: int, settle: Callable[[], Any], *, locking: str = ""
) -> Settled:
    """Settle while an application keeps the row locked; it stays locked for as long as that takes, and no longer."""
    # Its lock_timeout is a fifth of that: whoever waited for the lock would wait for too long.
    relay._sessions.bound_s = 600.0
    application = await asyncpg.connect(database_url)
    try:
        async with application.transaction():
            await application.execute(locking or "SELECT FROM outbox WHERE seq = $1 FOR UPDATE", seq)
            async with asyncio.timeout(30):
                settled: Settled = await settle()
    finally:
        await application.close()
    return settled


@pytest.mark.parametrize("locking", ["", "UPDATE outbox SET tracestate = 'x' WHERE seq = $1"])
async def test_a_locked_row_alone_is_not_set_aside(
    database_url: str, database: asyncpg.Connection, started: Callable[..., Relay], locking: str
) -> None:
    relay = await started().start()
    await insert(database, "a", "b", "c", "d", "e", "a")
    a, b, c, d, e, _ = await relay.read()
    await relay.settle(relay.settlement(setbacks=[deferred(e)]))
    await insert(database, "e", "f")
    *_, f = await relay.read()
    settlement = relay.settlement(sent=[f], setbacks=[parked(b), deferred(a)], followers=[c], scheduled=[d])
    settled = await settle_beside_a_lock(database_url, relay, 1, lambda: relay.settle(settlement), locking=locking)
    assert (settled.locked, settled.changed) == ([a], [])
    assert seqs(settled.done) == [2, 3, 4, 8]
    assert (await states(database))[:4] == ["pending", "parked+", "deferred+", "scheduled"]


@pytest.mark.parametrize("what", ["setbacks", "followers", "tested", "scheduled"])
async def test_each_decision_about_a_locked_row_waits(
    database_url: str, database: asyncpg.Connection, started: Callable[..., Relay], what: str
) -> None:
    relay = await started().start()
    await insert(database, "k", "k")
    head, row = await relay.read()
    await relay.settle(relay.settlement(setbacks=[deferred(head)]))
    decision = [deferred(row)] if what == "setbacks" else [row]
    settled = await settle_beside_a_lock(
        database_url, relay, 2, lambda: relay.settle(relay.settlement(**{what: decision}))
    )
    assert settled.locked == [row]
    assert not settled.done
    settled = await relay.settle(relay.settlement(**{what: decision}))
    assert settled.done == [row]


async def test_a_locked_row_without_a_blocker_is_ready(
    database_url: str, database: asyncpg.Connection, started: Callable[..., Relay]
) -> None:
    """Nothing is written for it, so its lock stands in nobody's way."""
    relay = await started().start()
    await insert(database, "k")
    (row,) = await relay.read()
    settled = await settle_beside_a_lock(database_url, relay, 1, lambda: relay.settle(relay.settlement(tested=[row])))
    assert settled.unblocked == [row]


async def test_a_promotion_behind_a_lock_is_owed(
    database_url: str, database: asyncpg.Connection, started: Callable[..., Relay]
) -> None:
    """H3: it is named, waited for by nobody, made up for; by the next owner if need be."""
    relay = await started().start()
    await insert(database, "k", "k", "k", "z", "z")
    one, two, three, z1, z2 = await relay.read()
    await relay.settle(
        relay.settlement(setbacks=[deferred(one, delay_s=0.0), deferred(z1, delay_s=0.0)], followers=[two, three, z2])
    )
    released = (await relay.due(dict.fromkeys(range(ALL), 9), 9)).released
    settled = await settle_beside_a_lock(
        database_url, relay, two.seq, lambda: relay.settle(relay.settlement(sent=list(released)))
    )
    assert seqs(settled.done) == [1, 4]
    assert settled.unpromoted == [(two.shard, two.key)]
    assert settled.promoted == {z2.shard}
    assert await states(database) == ["sent", "held+", "held+", "sent", "deferred+"]
    await relay.close()
    other = await started("b").start()
    stuck = await other.stuck()
    assert stuck == [(two.shard, two.key)]
    settled = await settle_beside_a_lock(
        database_url, other, two.seq, lambda: other.settle(other.settlement(promotions=list(stuck)))
    )
    assert settled.unpromoted == stuck
    settled = await other.settle(other.settlement(promotions=list(stuck)))
    assert settled.promoted == {two.shard}
    assert await other.stuck() == []
    assert await due(other) == [2, 5]


# ---------------------------------------------------------------- the operator


@pytest.mark.parametrize("why", ["locked", "refused"])
async def test_a_promotion_that_an_operator_cannot_make_is_the_next_owners(
    database_url: str, database: asyncpg.Connection, started: Callable[..., Relay], why: str
) -> None:
    """H3: a discarded row's follower is locked, or refuses: the shard's owner is unseated, the next one looks."""
    relay = await started().start()
    await insert(database, "k")
    await bad(database, "k")
    await insert(database, "k")
    head, follower, last = await relay.read()
    await relay.settle(relay.settlement(setbacks=[parked(head)], followers=[follower, last]))
    settings, _ = config.load({"RELAY_DATABASE_URL": database_url})
    application = await asyncpg.connect(database_url)
    try:
        async with application.transaction():
            if why == "locked":
                await application.execute("SELECT FROM outbox WHERE seq = 2 FOR UPDATE")
            else:
                await database.execute(REFUSALS["trigger"])
            outcome = await act(settings, Action.DISCARD, Filter())
            assert outcome.done == 1
    finally:
        await application.close()
    assert await states(database) == ["held+", "held+"]
    await relay.release({head.shard: Held(relay.epochs[head.shard] + 1, None)})
    relay.take(await relay.claim(ALL))
    stuck = await relay.stuck()
    assert stuck == [(follower.shard, follower.key)]
    settled = await relay.settle(relay.settlement(promotions=list(stuck)))
    assert [each.seq for each in settled.faults] == ([2] if why == "refused" else [])
    assert await due(relay) == ([3] if why == "refused" else [2])
