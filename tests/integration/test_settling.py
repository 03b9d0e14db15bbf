"""`relay.outbox` on a real PostgreSQL: what a settlement writes, and the histories of docs/protocol.md that its SQL decides."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import asyncpg
import pytest

from relay import arrays, migrate, outbox
from relay.core.holding import Walk
from relay.core.ports.outbox import PolicyApplied
from relay.errors import (
    DatabaseRefused,
    StatementTooSlow,
)
from relay.message import Aside, Key, Row
from relay.outbox_sql import texts
from relay.sessions import Group
from tests.integration.relay import ALL, Relay, deferred, id_of, insert, parked, states

# ---------------------------------------------------------------- settling what was sent


@pytest.mark.parametrize("settle_commit", [True, False])
async def test_a_settlement_waits_for_the_disk_unless_it_is_told_not_to(
    database: asyncpg.Connection, started: Callable[..., Relay], settle_commit: bool
) -> None:
    """I4 is wider by what a crash of the database forgets only where RELAY_SETTLE_COMMIT=off says so; claims always wait."""
    await database.execute(
        "CREATE TABLE said (of text, value text);"
        " CREATE FUNCTION say() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        " INSERT INTO said VALUES (tg_table_name, current_setting('synchronous_commit')); RETURN NULL; END $$;"
        " CREATE TRIGGER say AFTER UPDATE OR DELETE ON outbox FOR EACH STATEMENT EXECUTE FUNCTION say();"
        " CREATE TRIGGER say AFTER UPDATE ON outbox_shard FOR EACH STATEMENT EXECUTE FUNCTION say()"
    )
    relay = await started(settle_commit=settle_commit).start()
    await insert(database, *"ab")
    one, two = await relay.read()
    await relay.settle(relay.settlement(sent=[one], setbacks=[parked(two)]))
    said = await database.fetch("SELECT DISTINCT of, value FROM said ORDER BY 1")
    expected = "on" if settle_commit else "off"
    assert [tuple(each) for each in said] == [("outbox", expected), ("outbox_shard", "on")]


@pytest.mark.parametrize("marks_sent", [True, False])
async def test_sent_rows(database: asyncpg.Connection, started: Callable[..., Relay], marks_sent: bool) -> None:
    relay = await started(marks_sent=marks_sent).start()
    await insert(database, *"abcd")
    rows = await relay.read()
    rows[1].ctid = None  # its session was lost
    settled = await relay.settle(relay.settlement(sent=rows[:2]))
    assert (settled.done, settled.locked, settled.lost) == ([rows[0], rows[1]], [], set())
    assert await states(database) == (["sent", "sent"] if marks_sent else []) + ["pending", "pending"]
    # An unknown COMMIT that did happen: settled again, nothing is left to do (S3).
    assert (await relay.settle(relay.settlement(sent=rows[:2]))).done == rows[:2]
    # The addresses are all wrong by now.
    await database.execute("VACUUM FULL outbox")
    assert (await relay.settle(relay.settlement(sent=rows[2:]))).done == rows[2:]
    assert await states(database) == (["sent"] * 4 if marks_sent else [])
    assert await relay.read() == []


async def test_a_seq_alone_is_no_identity(database: asyncpg.Connection, started: Callable[..., Relay]) -> None:
    """40 rows read, then lost in a crash; a new row has the seq, even the address, of one of them."""
    relay = await started().start()
    await insert(database, "k")
    (row,) = await relay.read()
    for ctid in (row.ctid, None):
        stranger = Row(row.shard, row.seq, "another", "e", ctid=ctid, aggregate_type="order", aggregate_id="k")
        assert (await relay.settle(relay.settlement(sent=[stranger]))).done == [stranger]
        assert (await relay.settle(relay.settlement(setbacks=[deferred(stranger)]))).changed == [stranger]
    assert await states(database) == ["pending"]


@pytest.mark.parametrize("marks_sent", [True, False])
async def test_a_row_that_an_application_keeps_locked_stalls_no_batch(
    database: asyncpg.Connection, started: Callable[..., Relay], marks_sent: bool
) -> None:
    relay = await started(marks_sent=marks_sent).start()
    await insert(database, *"abc")
    rows = await relay.read()
    async with database.transaction():
        await database.execute("SELECT FROM outbox WHERE seq = 2 FOR UPDATE")
        settled = await relay.settle(relay.settlement(sent=rows))
    assert (settled.done, settled.locked) == ([rows[0], rows[2]], [rows[1]])
    assert (await relay.settle(relay.settlement(sent=settled.locked))).done == [rows[1]]


async def test_the_fence(database: asyncpg.Connection, started: Callable[..., Relay]) -> None:
    """S1: of a shard under another epoch, or of another owner, nothing is settled."""
    relay = await started().start()
    await insert(database, *"abcdefghijkl")
    rows = await relay.read()
    lost = {rows[0].shard, rows[1].shard}
    await database.execute("UPDATE outbox_shard SET epoch = epoch + 1 WHERE shard = $1", rows[0].shard)
    # A rewound database gives two instances the same epoch.
    await database.execute("UPDATE outbox_shard SET owner = 'other' WHERE shard = $1", rows[1].shard)
    settled = await relay.settle(
        relay.settlement(sent=rows[3:], setbacks=[deferred(rows[0])], followers=[rows[1]], tested=[rows[2]])
    )
    assert settled.lost == lost
    kept = [row for row in rows[2:] if row.shard not in lost]
    assert sorted(row.seq for row in [*settled.done, *settled.unblocked]) == [row.seq for row in kept]
    for state, row in zip(await states(database), rows, strict=True):
        assert state == ("pending" if row.shard in lost or row is rows[2] else "sent")


async def test_a_refused_settlement_changes_nothing_and_keeps_the_sessions(
    database: asyncpg.Connection, started: Callable[..., Relay]
) -> None:
    relay = await started().start()
    await insert(database, *"ab")
    rows = await relay.read()
    await database.execute(
        "CREATE FUNCTION no() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN RAISE EXCEPTION 'not this one' USING ERRCODE = '55P03'; END$$;"
        " CREATE TRIGGER no BEFORE UPDATE ON outbox FOR EACH ROW WHEN (old.seq = 2) EXECUTE FUNCTION no()"
    )
    with pytest.raises(DatabaseRefused, match=r"not this one \(55P03\)"):
        await relay.settle(relay.settlement(sent=rows))
    assert await states(database) == ["pending", "pending"]
    assert (await relay.settle(relay.settlement(sent=rows[:1]))).done == rows[:1]
    await database.execute(
        "DROP TRIGGER no ON outbox; CREATE CONSTRAINT TRIGGER no AFTER UPDATE ON outbox"
        " DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION no()"
    )
    with pytest.raises(DatabaseRefused, match="not this one"):  # at COMMIT
        await relay.settle(relay.settlement(sent=rows[1:]))
    assert await states(database) == ["sent", "pending"]
    assert relay.lost == []


async def test_an_operator_and_a_settlement_exclude_each_other(
    database: asyncpg.Connection, started: Callable[..., Relay]
) -> None:
    relay = await started(lease_s=1.0).start()
    await insert(database, "k")
    rows = await relay.read()
    async with database.transaction():
        await database.execute("SELECT FROM outbox_shard WHERE shard = $1 FOR UPDATE", rows[0].shard)
        with pytest.raises(DatabaseRefused, match="lock timeout"):
            await relay.settle(relay.settlement(sent=rows))
    assert (await relay.settle(relay.settlement(sent=rows))).done == rows


# ---------------------------------------------------------------- setting aside


async def test_a_setback_takes_its_followers_along(database: asyncpg.Connection, started: Callable[..., Relay]) -> None:
    """H1, and what is noted of a failure."""
    relay = await started().start()
    await insert(database, *"kkko")
    one, two, three, other = await relay.read()
    settled = await relay.settle(
        relay.settlement(
            setbacks=[deferred(one, attempts=3, error="bad\0 \udc80 bytes")], followers=[two, three], sent=[other]
        )
    )
    assert sorted(settled.done, key=lambda row: row.seq) == [one, two, three, other]
    assert (settled.promoted, settled.changed) == (set(), [])
    assert await states(database) == ["deferred+", "held+", "held+", "sent"]
    found = await database.fetchrow(
        "SELECT attempts, failure_class, failure_error, failure_exchange, failure_routing_key, failure_relay,"
        " failure_relay_version, first_failed_at = last_failed_at AS is_first, parked_at,"
        " date_part('epoch', due_at - now()) AS due FROM outbox WHERE seq = 1"
    )
    assert 50 < found["due"] <= 60
    assert tuple(found)[:-1] == (
        3, "unroutable", "bad\ufffd ? bytes", "events", "a.b", "a", "0.0", True, None,
    )  # fmt: skip
    assert await relay.read() == []


async def test_a_nack_is_no_failure_of_the_rows(database: asyncpg.Connection, started: Callable[..., Relay]) -> None:
    """A row that was parked later showed the time of a full queue as that of its first failure."""
    relay = await started().start()
    await insert(database, "k")
    (row,) = await relay.read()
    await relay.settle(relay.settlement(setbacks=[replace(deferred(row, error="basic.nack"), reason="nacked")]))
    found = await database.fetchrow("SELECT failure_class, first_failed_at, last_failed_at FROM outbox")
    assert (found["failure_class"], found["first_failed_at"]) == ("nacked", None)
    assert found["last_failed_at"] is not None


async def test_a_miss_when_setting_aside_is_a_change(
    database: asyncpg.Connection, started: Callable[..., Relay]
) -> None:
    """S2: by address only. A park committed, its answer lost, an operator discarded: not undone."""
    relay = await started().start()
    await insert(database, *"abcd")
    rows = await relay.read()
    await database.execute("UPDATE outbox SET event_type = 'changed'")
    settled = await relay.settle(
        relay.settlement(setbacks=[parked(rows[0])], followers=[rows[1]], tested=[rows[2]], scheduled=[rows[3]])
    )
    assert sorted(settled.changed, key=lambda row: row.seq) == rows
    assert await states(database) == ["pending"] * 4
    again = await relay.reload(rows)
    assert [row.event_type for row in again] == ["changed"] * 4
    for row in rows:
        row.ctid = None
    assert (await relay.settle(relay.settlement(setbacks=[deferred(rows[0])]))).changed == rows[:1]


async def test_a_key_is_never_held_by_nothing(database: asyncpg.Connection, started: Callable[..., Relay]) -> None:
    """H3, H4: of a key only the lowest goes, and each that is sent makes the next one due."""
    relay = await started().start()
    await insert(database, *"kkk")
    one, two, three = await relay.read()
    await relay.settle(relay.settlement(setbacks=[deferred(one, delay_s=0.0)], followers=[two, three]))
    cursors = {one.shard: 10}
    for left in (["deferred+", "held+"], ["deferred+"], []):
        due = await relay.due(cursors, 10)
        assert (len(due.released), due.blocked) == (1, [])
        (row,) = due.released
        assert row.aside is Aside.DEFERRED
        settled = await relay.settle(relay.settlement(sent=[row]))
        assert settled.done == [row]
        assert settled.promoted == ({row.shard} if left else set())
        assert await states(database) == ["sent"] * (3 - len(left)) + left
    assert (await relay.due(cursors, 10)).released == []


async def test_keys_are_compared_by_value(database: asyncpg.Connection, started: Callable[..., Relay]) -> None:
    relay = await started().start()
    for kind, key in (("a", "k"), (None, "k"), ("", "k"), ("b", "k")):
        await database.execute(
            "INSERT INTO outbox (aggregate_type, aggregate_id, event_type) VALUES ($1, $2, 'e')", kind, key
        )
    of_a, of_null, of_empty, of_b = await relay.read()
    assert of_null.key == of_empty.key
    settled = await relay.settle(
        relay.settlement(setbacks=[deferred(of_a), deferred(of_null)], tested=[of_empty, of_b])
    )
    assert settled.unblocked == [of_b]
    assert await states(database) == ["deferred+", "deferred+", "held+", "pending"]
    found = await relay.held_keys([of_a.shard, of_null.shard], None, 10)
    assert {held.key for held in found.keys} == {("a", "k"), ("", "k")}


async def test_a_tested_row_without_a_blocker_comes_back(
    database: asyncpg.Connection, started: Callable[..., Relay]
) -> None:
    """H2. Blockers are lower and hold; what is scheduled or parked under `continue` does not."""
    relay = await started().start()
    await insert(database, *"kkkkkk")
    rows = await relay.read()
    await relay.settle(
        relay.settlement(
            setbacks=[parked(rows[0], holds=False), deferred(rows[3])],
            scheduled=[rows[1]],
        )
    )
    settled = await relay.settle(relay.settlement(tested=[rows[2], rows[4], rows[5]]))
    assert settled.unblocked == [rows[2]]
    assert settled.done == [rows[4], rows[5]]
    assert await states(database) == ["parked", "scheduled", "pending", "deferred+", "held+", "held+"]


async def test_a_tested_row_is_freed_by_what_the_same_settlement_sends(
    database: asyncpg.Connection, started: Callable[..., Relay]
) -> None:
    relay = await started().start()
    await insert(database, *"kk")
    one, two = await relay.read()
    await relay.settle(relay.settlement(setbacks=[deferred(one, delay_s=0.0)]))
    (one,) = (await relay.due({one.shard: 9}, 9)).released
    settled = await relay.settle(relay.settlement(sent=[one], tested=[two]))
    assert (settled.done, settled.unblocked) == ([one], [two])


async def test_due_rows(database: asyncpg.Connection, started: Callable[..., Relay]) -> None:
    """H4, H6: at or below the cursor; a scheduled row with a holding row of its key below is blocked."""
    relay = await started().start()
    await insert(database, "k", "k", "s")
    one, two, free = await relay.read()
    await relay.settle(relay.settlement(scheduled=[two, free], setbacks=[deferred(one, delay_s=60.0)]))
    every = dict.fromkeys(relay.epochs, 10)
    due = await relay.due(every, 10)
    assert [row.seq for row in due.released] == [free.seq]
    assert [row.seq for row in due.blocked] == [two.seq]
    assert due.released[0].aside is Aside.SCHEDULED
    assert due.next_due_in_s is not None
    assert 50 < due.next_due_in_s <= 60
    renewal = await relay.renew(relay.held(), available=True)
    assert renewal.next_due_in_s is not None
    assert renewal.next_due_in_s <= 0
    settled = await relay.settle(relay.settlement(tested=due.blocked))
    assert settled.done == due.blocked
    assert await states(database) == ["deferred+", "held+", "scheduled"]
    # Not above the cursor, and no more than asked for.
    assert (await relay.due(dict.fromkeys(relay.epochs, free.seq - 1), 10)).released == []
    assert (await relay.due(every, 0)).released == []
    assert (await relay.settle(relay.settlement(sent=due.released))).done == due.released
    assert await states(database) == ["deferred+", "held+", "sent"]


async def test_a_scheduled_row_waits_for_its_time(database: asyncpg.Connection, started: Callable[..., Relay]) -> None:
    relay = await started().start()
    await database.execute(
        "INSERT INTO outbox (event_type, available_at) VALUES ('e', now() + interval '1 hour'), ('e', 'infinity')"
    )
    rows = await relay.read()
    assert (await relay.settle(relay.settlement(scheduled=rows))).done == rows
    due = await relay.due(dict.fromkeys(relay.epochs, 9), 9)
    assert (due.released, due.blocked) == ([], [])
    assert due.next_due_in_s is not None
    assert 3500 < due.next_due_in_s <= 3600
    await database.execute("DELETE FROM outbox WHERE seq = 1")
    assert (await relay.due(dict.fromkeys(relay.epochs, 9), 9)).next_due_in_s is None
    assert (await relay.renew(relay.held(), available=True)).next_due_in_s is None


async def test_redriven_and_discarded(database: asyncpg.Connection, started: Callable[..., Relay]) -> None:
    """O1 as an operator's transaction does it; the relay does the rest."""
    relay = await started().start()
    await insert(database, *"kkk")
    one, two, three = await relay.read()
    await relay.settle(relay.settlement(setbacks=[parked(one)], followers=[two, three]))
    assert await states(database) == ["parked+", "held+", "held+"]
    await database.execute("UPDATE outbox SET aside = 'deferred', due_at = now() WHERE aside = 'parked'")
    (again,) = (await relay.due({one.shard: 9}, 9)).released
    assert again.seq == one.seq
    await relay.settle(relay.settlement(setbacks=[parked(again, attempts=2)]))
    schema = await migrate.read_schema(database)
    async with database.transaction():
        await database.execute("DELETE FROM outbox WHERE aside = 'parked'")
        await database.execute(texts(schema, "")["promote"], ["order"], ["k"])
    assert await states(database) == ["deferred+", "held+"]
    (again,) = (await relay.due({one.shard: 9}, 9)).released
    assert again.seq == two.seq


async def test_without_order_nothing_is_blocked(database: asyncpg.Connection, started: Callable[..., Relay]) -> None:
    relay = await started(is_ordered=False).start()
    await insert(database, *"kk")
    rows = await relay.read()
    await relay.settle(relay.settlement(setbacks=[deferred(row, delay_s=0.0, holds=False) for row in rows]))
    due = await relay.due({rows[0].shard: 9}, 9)
    assert ([row.seq for row in due.released], due.blocked) == ([1, 2], [])


@pytest.mark.parametrize(("before", "after"), [(True, False), (False, True)])
async def test_a_new_owner_has_its_own_policy_of_parked_rows(
    database: asyncpg.Connection, started: Callable[..., Relay], before: bool, after: bool
) -> None:
    """Parked rows store whether they hold; who claims rewrites that, but for expired ones, then H3."""
    a = await started("a", holds_when_parked=before).start()
    await insert(database, "k", "k", "e", None)
    one, two, expired, keyless = await a.read()
    await a.settle(
        a.settlement(
            setbacks=[
                parked(one, holds=before),
                parked(expired, reason="expired", holds=False),
                parked(keyless, holds=False),
            ],
            followers=[two],
        )
    )
    await a.release(a.held())
    b = await started("b", holds_when_parked=after).start(0)
    claims = await b.claim(ALL)
    assert all(claim.has_other_policy for claim in claims)
    b.take(claims)
    assert (await b.apply_policy(b.epochs, 1)).is_done is False, "there may be more"
    assert (await b.apply_policy(b.epochs, 1)).is_done is True
    stuck = await b.stuck()
    assert stuck == ([(two.shard, two.key)] if before else [])
    settled = await b.settle(b.settlement(promotions=list(stuck)))
    assert settled.promoted == {shard for shard, _ in stuck}
    # Under `continue` the follower is first of its key; one that the newly holding row blocks stays what it is.
    assert await states(database) == (
        ["parked", "deferred+", "parked", "parked"] if before else ["parked+", "deferred+", "parked", "parked"]
    )
    await b.release(b.held())
    assert not any(claim.has_other_policy for claim in await started("c", holds_when_parked=after).claims())


async def test_a_policy_that_was_not_applied_to_the_end_is_begun_again(
    database: asyncpg.Connection, started: Callable[..., Relay]
) -> None:
    """Some rows are changed, then the owner dies: neither the old policy nor the new one is what the shard has."""
    a = await started("a", holds_when_parked=True).start()
    await insert(database, *"kkk")
    await a.settle(a.settlement(setbacks=[parked(row) for row in await a.read()]))
    await a.release(a.held())
    b = await started("b", holds_when_parked=False).start()
    assert (await b.apply_policy(b.epochs, 2)).is_done is False
    await b.release(b.held())
    c = await started("c", holds_when_parked=True).start(0)
    claims = await c.claim(ALL)
    assert all(claim.has_other_policy for claim in claims)
    c.take(claims)
    assert (await c.apply_policy(c.epochs, 10)).is_done is True
    assert await states(database) == ["parked+"] * 3


@pytest.mark.parametrize("refusal", ["RAISE EXCEPTION 'the period is closed'", "RETURN NULL"])
async def test_one_row_that_refuses_the_policy_keeps_neither_its_shard_nor_the_others(
    database: asyncpg.Connection, started: Callable[..., Relay], refusal: str
) -> None:
    """All that were left kept the old policy for good, and nobody said so."""
    a = await started("a", holds_when_parked=True).start()
    await insert(database, *"abcdefgh")
    await a.settle(a.settlement(setbacks=[parked(row) for row in await a.read()]))
    await a.release(a.held())
    await database.execute(
        f"CREATE FUNCTION closed() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {refusal}; RETURN new; END $$;"
        " CREATE TRIGGER closed BEFORE UPDATE ON outbox FOR EACH ROW WHEN (old.seq = 3) EXECUTE FUNCTION closed()"
    )
    b = await started("b", holds_when_parked=False).start()
    applied = await b.apply_policy(b.epochs, 100)
    assert applied.is_done, "all that can be"
    assert [(each.seq, each.id) for each in applied.refused] == [(3, await id_of(database, 3))]
    assert await states(database) == ["parked" if seq != 3 else "parked+" for seq in range(1, 9)]


async def test_a_policy_whose_time_is_used_up_is_not_done(
    database: asyncpg.Connection, started: Callable[..., Relay], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was noted as done where nobody had been refused by then, and what was left kept the old one for good."""
    a = await started("a", holds_when_parked=True).start()
    await insert(database, *"abc")
    await a.settle(a.settlement(setbacks=[parked(row) for row in await a.read()]))
    await a.release(a.held())
    b = await started("b", holds_when_parked=False).start()
    with monkeypatch.context() as hurried:
        hurried.setattr(outbox, "HUNT_SHARE", 0.0)
        assert await b.apply_policy(b.epochs, 100) == PolicyApplied(False, [])
    assert (await b.apply_policy(b.epochs, 100)).is_done
    assert await states(database) == ["parked"] * 3


async def test_a_change_that_takes_too_long_is_a_refusal_of_its_own(
    database: asyncpg.Connection, started: Callable[..., Relay]
) -> None:
    """With fewer rows it goes well: who asks has to know that it was the time."""
    a = await started("a", holds_when_parked=True, lease_s=1.0).start()
    await insert(database, *"abcdefgh")
    rows = await a.read()
    await database.execute(
        "CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(0.15); RETURN new; END $$;"
        " CREATE TRIGGER slow BEFORE UPDATE OR DELETE ON outbox FOR EACH ROW EXECUTE FUNCTION slow()"
    )
    with pytest.raises(StatementTooSlow):
        await a.settle(a.settlement(sent=rows))
    assert len((await a.settle(a.settlement(sent=rows[:2]))).done) == 2


async def test_a_shard_that_was_lost_keeps_its_policy(
    database: asyncpg.Connection, started: Callable[..., Relay]
) -> None:
    a = await started("a", holds_when_parked=False).start()
    await insert(database, "k")
    await a.settle(a.settlement(setbacks=[parked(row, holds=False) for row in await a.read()]))
    await a.apply_policy(a.epochs, 10)
    await database.execute("UPDATE outbox_shard SET epoch = epoch + 1")
    b = await started("b", holds_when_parked=True).start(0)
    b.epochs = a.epochs
    assert (await b.apply_policy(b.epochs, 10)).is_done is True
    assert await states(database) == ["parked"]
    assert await database.fetchval("SELECT count(*) FROM outbox_shard WHERE parked_hold") == 0


async def test_followers_come_without_a_gap(database: asyncpg.Connection, started: Callable[..., Relay]) -> None:
    """Up to the first holding row that is not held, or lies above the cursor; a row of the fault table is none."""
    relay = await started().start()
    await insert(database, *"kkkkkkk", *"jjj")
    rows = await relay.read()
    await relay.settle(
        relay.settlement(setbacks=[deferred(rows[0], delay_s=0.0), parked(rows[5]), deferred(rows[7], delay_s=0.0)])
    )
    held = [rows[n] for n in (1, 2, 3, 4, 6, 8, 9)]
    await relay.settle(relay.settlement(tested=await relay.reload(held)))
    assert await states(database) == ["deferred+", *["held+"] * 4, "parked+", "held+", "deferred+", "held+", "held+"]
    await database.execute("INSERT INTO outbox_fault (seq, id, failure_class) VALUES (3, $1, 'x')", rows[2].id)
    cursors = {rows[0].shard: 10, rows[7].shard: 10}
    heads = (await relay.due(cursors, 10)).released
    assert sorted(row.seq for row in heads) == [1, 8]
    found = await relay.followers(heads, cursors, 100)
    assert [(row.seq, row.aside, row.payload) for row in found] == [
        (seq, Aside.HELD, b"{}") for seq in (2, 4, 5, 9, 10)
    ]
    assert [row.seq for row in await relay.followers(heads, cursors, 1)] == [2, 9]
    low = cursors | {rows[0].shard: 4, rows[7].shard: 8}
    assert [row.seq for row in await relay.followers(heads, low, 100)] == [2, 4]


@pytest.mark.parametrize("marks_sent", [True, False])
async def test_a_sent_row_that_was_aside_frees_its_key_whatever_memory_says(
    database: asyncpg.Connection, started: Callable[..., Relay], marks_sent: bool
) -> None:
    """H3: it was read as an ordinary row, and deferred since by a COMMIT whose answer was lost; by address and by id."""
    relay = await started(marks_sent=marks_sent).start()
    await insert(database, *"aab")
    one, two, other = await relay.read()
    await relay.settle(relay.settlement(setbacks=[deferred(one)], followers=[two]))
    ctid = await database.fetchval("SELECT ctid::text FROM outbox WHERE seq = 1")
    assert one.aside is None
    one.ctid = ctid if marks_sent else None
    settled = await relay.settle(relay.settlement(sent=[one, other]))
    assert settled.promoted == {two.shard}
    assert settled.moved == {2: await database.fetchval("SELECT ctid::text FROM outbox WHERE seq = 2")}
    assert (await states(database))[-1 if not marks_sent else 1] == "deferred+"


@pytest.mark.parametrize("page_rows", [1, 7, 100, 1000])
async def test_a_walk_finds_every_held_key(
    database: asyncpg.Connection, started: Callable[..., Relay], page_rows: int
) -> None:
    """Whatever the size of its pages; a key that holds nothing, one of another shard and one without order are none."""
    relay = await started().start()
    await insert(database, *(f"k{number}" for number in range(40)))
    await insert(database, *(f"k{number}" for number in range(40)))
    await insert(database, *["hot"] * 12, "expired", None)
    rows = {row.seq: row for row in await relay.read()}
    setbacks = [deferred(rows[seq]) for seq in range(1, 41)]
    setbacks += [parked(rows[81]), parked(rows[93], holds=False), parked(rows[94], holds=False)]
    followers = [rows[seq] for seq in (*range(41, 81), *range(82, 93))]
    await relay.settle(relay.settlement(setbacks=setbacks, followers=followers))
    await database.execute("DELETE FROM outbox WHERE seq IN (5, 7)")
    mine = sorted({row.shard for row in rows.values() if row.shard != rows[2].shard})
    walk = Walk(mine, 0, 500)
    stuck: list[tuple[int, Key]] = []
    pages = 0
    while not walk.is_over:
        stuck += walk.take(await relay.held_keys(mine, walk.after, page_rows))
        pages += 1
    assert pages >= 90 // page_rows
    wanted: dict[int, dict[Key, int]] = {shard: {} for shard in mine}
    for seq in (*range(41, 81), 92):
        row = rows[seq]
        if row.shard in wanted and row.key is not None:
            wanted[row.shard][row.key] = seq
    assert {shard: len(found) for shard, found in walk.found.items()} == {s: len(keys) for s, keys in wanted.items()}
    for shard, keys in wanted.items():
        assert {key: walk.found[shard].get(key) for key in keys} == {key: (-1, seq) for key, seq in keys.items()}
    assert sorted(stuck) == sorted((rows[s].shard, rows[s].key) for s in (5, 7) if rows[s].shard in mine)


async def test_a_page_of_the_walk_costs_the_same_whatever_there_is_aside(
    database: asyncpg.Connection, started: Callable[..., Relay]
) -> None:
    """Taking up a shard scanned all rows aside: 0.4 to 0.7 s with 100,000 of them. By the rows that the plan visits."""
    relay = await started().start()
    await database.execute(
        "INSERT INTO outbox (aggregate_id, event_type, aside, holds, parked_at)"
        " SELECT 'k' || n % 700, 'e', CASE WHEN n <= 700 THEN 'parked' ELSE 'held' END, true, now()"
        " FROM generate_series(1, 6000) n"
    )
    session = relay._sessions.connection(Group.READER)
    statement = texts(await migrate.read_schema(database), "")["held_keys"]
    await session.execute(f"PREPARE explained AS {statement}")
    (record,) = await session.fetch(
        "EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON)"
        f" EXECUTE explained('{{{','.join(map(str, range(ALL)))}}}', {-(2**63)}, {-(2**63)}, 500)"
    )
    plan = json.loads(record[0])[0]["Plan"]
    visited = [
        node["Actual Rows"] * node["Actual Loops"]
        for node in _nodes(plan)
        if "outbox_aside_key" in str(node.get("Index Name"))
    ]
    assert visited == [500]
    assert plan["Shared Hit Blocks"] + plan["Shared Read Blocks"] < 1500


async def test_a_page_costs_the_same_whatever_there_is_aside(
    database: asyncpg.Connection, started: Callable[..., Relay]
) -> None:
    """I6: parked and held rows are in no index that a page reads. By the blocks that it touches."""
    relay = await started().start()
    session = relay._sessions.connection(Group.READER)
    statement = texts(await migrate.read_schema(database), "")["page"]
    await database.execute(
        "ALTER TABLE outbox SET (autovacuum_enabled = false);"
        "INSERT INTO outbox (aggregate_id, event_type) SELECT 'p' || n, 'e' FROM generate_series(1, 300) n"
    )
    await session.execute(f"PREPARE explained AS {statement}")
    shards = f"'{{{','.join(map(str, range(ALL)))}}}', '{{{','.join(['0'] * ALL)}}}'"
    arguments = f"'{{}}', '{{}}', '{{}}', '{{}}', '{{}}', {shards}, {2**40}, 4, {2**40}, 16384, '{relay._instance}', 0"

    async def blocks() -> int:
        (record,) = await session.fetch(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) EXECUTE explained({arguments})")
        plan = json.loads(record[0])[0]["Plan"]
        assert any(node.get("Index Name") == "outbox_read" for node in _nodes(plan))
        return int(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"])

    await blocks()  # the first one also reads the catalogs
    empty = await blocks()
    await database.execute(
        "INSERT INTO outbox (aggregate_id, event_type, aside, holds, parked_at)"
        " SELECT 'k' || n % 500, 'e', CASE WHEN n <= 500 THEN 'parked' ELSE 'held' END, true, now()"
        " FROM generate_series(1, 10000) n"
    )
    assert await blocks() <= empty * 1.1


def _nodes(plan: dict[str, Any]) -> Iterable[dict[str, Any]]:
    yield plan
    for child in plan.get("Plans", ()):
        yield from _nodes(child)


async def test_any_id_survives_the_text_of_an_array(database: asyncpg.Connection[asyncpg.Record]) -> None:
    ids = [
        "plain",
        "",
        " ",
        "NULL",
        "null",
        "{}",
        "a,b",
        'quo"te',
        "back\\slash",
        '\\"',
        "\n\t",
        "ключ",
        "{a,{b}}",
        '"',
    ]
    for some in ([], ids, ids[:1], ids[1:2], ["\\"], ['"']):
        assert await database.fetchval("SELECT $1::text::text[]", arrays.texts(some)) == some
