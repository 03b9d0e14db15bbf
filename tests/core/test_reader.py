"""The engine's reader, without a simulation: one call, one look at what became of it."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from relay.core.ports.outbox import (
    DUE_INLINE_BYTES,
    Armed,
    Check,
    Claim,
    Due,
    HeldKey,
    HeldPage,
    Page,
    PageRequest,
    PolicyApplied,
    Purged,
    Settled,
    Settlement,
    Spared,
    Writer,
)
from relay.core.settings import EngineSettings
from relay.errors import DatabaseRefused, RowUnreadable, StatementTooSlow
from relay.message import Aside, Row, State
from tests.core.parts import Parts, eventually, make_row, turns

# ---------------------------------------------------------------- the reader


def reading_parts(settings: EngineSettings | None = None, **answers: Any) -> Parts:
    """A reader whose database is empty unless told otherwise."""
    defaults: dict[str, Any] = {
        "check": Check(0, [], 5000.0),
        "page": Page([], []),
        "due": Due([], [], None),
        "arm": Armed.TIMED_OUT,
    }
    return Parts(settings, **(defaults | answers))


async def test_a_purge_that_is_refused_stops_no_reading() -> None:
    """A slow purge met its statement timeout in every turn: twenty of them, new sessions, and no row ever read."""
    row = make_row(1)
    parts = reading_parts(purge=DatabaseRefused("statement timeout"), check=Check(1, [], 0.0), page=Page([], [row]))
    await parts.reader._turn()
    assert row in parts.engine.chains
    parts.clock.time += 1.0
    await parts.reader._turn()
    assert len(parts.outbox.calls("purge")) == 1


async def test_a_purge_that_takes_too_long_takes_fewer_rows() -> None:
    """The same thousand ran into the time limit each time, and the table grew for ever."""
    asked: list[int] = []

    def purge(older_than_s: float, limit: int, spared: Sequence[int]) -> Purged:
        asked.append(limit)
        if limit > 100:
            raise StatementTooSlow("canceling statement due to statement timeout")
        return Purged(limit, ())

    parts = reading_parts(purge=purge, check=Check(1, [], 0.0))
    while len(asked) < 6:
        await parts.reader._housekeeping.turn()
        parts.clock.time += 1.0
    assert asked == [1000, 250, 62, 124, 31, 62]


async def test_the_policy_of_parked_rows_keeps_no_other_shard_from_being_read(caplog: pytest.LogCaptureFixture) -> None:
    asked: list[tuple[int, list[int]]] = []

    def apply(epochs: Mapping[int, int], limit: int, spared: Sequence[int]) -> PolicyApplied:
        asked.append((limit, list(spared)))
        if len(asked) == 1:
            raise StatementTooSlow("canceling statement due to statement timeout")
        if len(asked) == 2:
            return PolicyApplied(False, [Spared(7, "m7", "the period is closed")])
        return PolicyApplied(True)

    parts = reading_parts(apply_policy=apply, check=Check(1, [], 0.0), page=Page([], []))
    parts.engine.leases.on_claimed([Claim(1, 1, 0), Claim(2, 1, 0)], parts.clock.now())
    parts.engine.claimed = [Claim(1, 1, 0, has_other_policy=True), Claim(2, 1, 0)]
    with pytest.raises(StatementTooSlow):
        await parts.reader._turn()
    assert 2 in parts.engine.reading.cursors and 1 not in parts.engine.reading.cursors
    await parts.reader._turn()
    assert 1 not in parts.engine.reading.cursors
    await parts.reader._turn()
    assert 1 in parts.engine.reading.cursors
    assert asked == [(2000, []), (500, []), (1000, [7])]
    assert [record.getMessage() for record in caplog.records if "policy" in record.getMessage()] == ["policy_refused"]


async def test_a_relay_without_shards_says_nothing_of_writers() -> None:
    """It looks for none: the number of the last look stood there for as long as it had no broker."""
    parts = reading_parts(check=Check(1, [], 0.0))

    async def looked() -> tuple[int | None, float | None]:
        await parts.reader._turn()
        return parts.engine.metrics.late_commit_writers, parts.engine.metrics.oldest_writer_age_seconds

    assert await looked() == (0, 0.0)
    parts.engine.lose_shard(0)
    assert await looked() == (None, None)


async def test_a_page_that_is_too_much_for_its_timeout_is_asked_for_in_parts() -> None:
    """Five hundred compressed rows of 5 MiB on a busy machine: each page met its statement timeout, and no row was ever
    read."""

    def page(request: PageRequest) -> Page:
        asked = len(request.shards) * request.limit
        if asked > 20:
            raise DatabaseRefused("statement timeout")
        above = request.cursors[0]
        return Page([], [make_row(seq) for seq in range(above + 1, min(above + request.limit, 100) + 1)])

    parts = reading_parts(check=Check(100, [], 0.0), page=page)
    refused = 0
    while len(parts.engine.chains) < 100:
        try:
            await parts.reader._turn()
        except DatabaseRefused:
            parts.engine.reading.void_page()
            refused += 1
            assert refused < 20, "what the reader bears"


async def test_a_relay_that_may_not_read_is_not_ready() -> None:
    """A missing right, or a page that is cut off by its timeout each time: `/readyz` said 200 for as long as that lasted."""
    parts = reading_parts(check=DatabaseRefused("permission denied for table outbox"))
    reasons = parts.engine.readiness
    reasons.remove("database")
    refused = DatabaseRefused("permission denied for table outbox")
    for _ in range(2):  # the sessions' next life too
        reading = asyncio.get_running_loop().create_task(parts.reader.run())
        while not reading.done():
            # Or it waits for minutes, by the loop's own clock.
            parts.engine.to_read.set()
            await turns(1)
        with pytest.raises(DatabaseRefused):
            await reading
    assert ("reading", refused.message) in reasons.reasons
    parts.outbox.answers["check"] = Check(0, [], 5000.0)
    await parts.reader._turn()
    parts.reader._note_read()
    assert "reading" not in dict(reasons.reasons)


async def test_bodies_that_cannot_be_read_keep_nobody_waiting() -> None:
    """A damaged one, and one that is too much for a slow line: each load was refused, all that the relay read waited for it."""

    def load(rows: list[Row]) -> list[Row]:
        seqs = {row.seq for row in rows}
        if 3 in seqs:
            raise RowUnreadable("missing chunk number 0")
        if 5 in seqs:
            parts.clock.time += 0.02
            raise StatementTooSlow("statement timeout")
        for row in rows:
            row.is_loaded = True
        return []

    parts = reading_parts(load=load)
    rows = [make_row(seq, f"k{seq}", size=100_000, is_loaded=False) for seq in range(1, 21)]
    parts.engine.admit(rows)
    for _ in range(60):
        parts.turn()
        await parts.reader._turn()
        parts.clock.time += 0.05
    assert {row.seq for row in parts.link.sent} == set(range(1, 21)) - {3, 5}
    (setback,) = parts.engine.decisions.setbacks
    assert (setback.row.seq, setback.aside, setback.reason) == (3, Aside.PARKED, "invalid")
    assert setback.error == "the row cannot be read: missing chunk number 0"
    tries = [call for call in parts.outbox.calls("load") if call.arguments[0] == [rows[4]]]
    assert len(tries) == 2, "each 1.4 s"


@pytest.mark.parametrize("then", ["lost", "set back"])
async def test_a_row_that_goes_while_its_body_is_asked_for_is_nobodys_fault(then: str) -> None:
    """The relay ended with an AssertionError."""

    def load(rows: list[Row]) -> list[Row]:
        if then == "lost":
            parts.engine.lose_shard(0)
        else:
            parts.engine.chains.set_back(rows[0], holds=False)
        raise RowUnreadable("damaged")

    parts = reading_parts(load=load)
    parts.engine.admit([make_row(1, size=100_000, is_loaded=False)])
    parts.turn()
    assert not await parts.reader._load()
    assert parts.engine.decisions.setbacks == []


async def test_a_server_that_refuses_all_bodies_is_no_rows_fault() -> None:
    """A column that is gone, a right that is missing: pages without bodies would pass, and each row be put off, for ever and ready."""
    parts = reading_parts(load=DatabaseRefused("permission denied"))
    parts.engine.admit([make_row(1, size=100_000, is_loaded=False)])
    parts.turn()
    with pytest.raises(DatabaseRefused):
        await parts.reader._turn()


async def test_a_turn_that_asked_for_nothing_ends_no_refusal() -> None:
    """The first one of new sessions has no shards yet: /readyz said 200 for half a minute in each of their lives."""
    parts = reading_parts(check=DatabaseRefused("permission denied"))
    parts.engine.reading_refused_at = 0.0
    parts.engine.readiness.add("reading", "permission denied")
    parts.engine.lose_shard(0)
    async with parts.running(parts.reader.run()):
        await turns()
        assert "reading" in dict(parts.engine.readiness.reasons)


async def test_checks_that_raise_s_do_not_keep_a_relay_awake() -> None:
    """Other relays' rows: each made all shards of this one behind for a moment, and it polled a hundred times a second."""
    seqs = iter(range(1, 10_000))
    parts = reading_parts(check=lambda: Check(next(seqs), [], 5000.0))
    for _ in range(400):
        parts.clock.time += await parts.reader._turn()
    pages = len(parts.outbox.calls("page"))
    assert parts.clock.time - 1000.0 > 90.0
    assert pages < 900


async def test_a_due_row_that_was_settled_meanwhile_is_not_taken_again() -> None:
    """R4 holds for rows aside as for a page: published twice, and nothing had failed."""
    parts = reading_parts()
    del parts.outbox.answers["due"]
    row = make_row(1, aside=Aside.DEFERRED)
    parts.engine.admit([row], known_until=-1)
    parts.turn()
    parts.engine.note_due(0.0)
    async with parts.running(parts.reader._turn(), parts.settler.run()):
        call = await parts.outbox.called("due")
        parts.link.ack(row)
        await parts.settled()
        parts.commit(done=[row])
        await eventually(lambda: row not in parts.engine.chains)
        call.answer(Due([make_row(1, aside=Aside.DEFERRED)], [], None))
        await turns()
        assert len(parts.engine.chains) == 0


async def test_rows_that_are_due_come_while_there_is_room_in_bytes() -> None:
    """I6: as many rows as may be in memory, each as large as one that falls due may come along, are far more than that."""
    rows = [make_row(seq, f"k{seq}", aside=Aside.DEFERRED, size=DUE_INLINE_BYTES) for seq in range(1, 2001)]
    limits: list[int] = []

    def due(cursors: object, limit: int, here: list[int]) -> Due:
        limits.append(limit)
        return Due([row for row in rows if row.seq not in here][:limit], [], None, has_more=True)

    parts = reading_parts(EngineSettings(bytes_max=2**20), due=due)
    parts.link.takes_max = 0
    parts.engine.note_due(0.0)
    for _ in range(20):
        await parts.reader._turn()
        parts.pass_time(0.1)
    assert parts.engine.chains.bytes == 2**20
    assert limits == [64], "and then waits for room"
    parts.engine.chains.finish(rows[:8])
    await parts.reader._turn()
    assert limits == [64, 8]


async def test_a_row_that_is_due_comes_where_the_bound_of_bytes_is_small() -> None:
    parts = reading_parts(EngineSettings(bytes_max=1000))
    parts.outbox.answers["due"] = Due([make_row(1, aside=Aside.DEFERRED, size=10)], [], None)
    parts.engine.note_due(0.0)
    await parts.reader._turn()
    assert len(parts.engine.chains) == 1


async def test_who_was_rung_and_is_idle_again_looks_once_more_before_it_sleeps() -> None:
    """A slow turn: the page came before the check that found more, and silence had lasted long enough by then (seed 300605)."""
    parts = reading_parts(arm=Armed.GRANTED)
    parts.reader._is_armed = True
    parts.reader.on_ring()
    parts.reader._wake()
    parts.clock.time += 1.0
    assert await parts.reader._next_wait(False, True) == 0.0
    assert parts.reader._must_check


async def test_rows_loaded_anew_do_not_enter_a_shard_that_is_given_away() -> None:
    """At a stop too: the shard would not be idle and keep its lease until it ran out."""
    parts = reading_parts()
    del parts.outbox.answers["page"]
    row = make_row(1)
    parts.engine.admit([row])
    parts.turn()
    parts.link.give_back(row)
    async with parts.running(parts.settler.run()):
        await parts.settled()
        parts.commit(changed=[row])
        await eventually(lambda: parts.engine.reread == [row])
    parts.keeper.give([0])
    assert not parts.engine.chains.is_idle(0), "its decision is still to be known"
    parts.outbox.answers["reload"] = [make_row(1)]
    await parts.reader._reread()
    assert parts.engine.chains.is_idle(0)


async def test_a_shard_that_is_full_is_not_asked_for_again_and_again() -> None:
    """A hot key keeps its shard behind; every settlement wakes the reader, and a page of the others brings nothing."""
    parts = reading_parts(EngineSettings(read_ahead_max=40), check=Check(1000, [], 0.0))
    parts.own(1)
    parts.outbox.answers["page"] = lambda request: Page(
        [], [make_row(s) for s in range(1, 11)] if 0 in request.shards else []
    )
    await parts.reader._turn()
    assert parts.engine.chains.count(0) == 10
    parts.clock.time += 1.0
    await parts.reader._turn()
    before = len(parts.outbox.calls("page"))
    for _ in range(5):
        assert await parts.reader._turn() > 0.0
    assert len(parts.outbox.calls("page")) == before


async def test_few_rows_at_a_time_reach_every_shard_without_a_poll_between() -> None:
    """With room for one row and rows in the last of 64 shards, a page a poll interval took half a minute."""
    parts = reading_parts(EngineSettings(read_ahead_max=1), check=Check(1000, [], 0.0))
    for shard in range(1, 64):
        parts.own(shard)
    last = make_row(7, shard=63)
    parts.outbox.answers["page"] = lambda request: Page([], [last] if 63 in request.shards else [])
    for _ in range(64):
        if last not in parts.engine.chains:
            assert await parts.reader._turn() == 0.0 or last in parts.engine.chains
    assert last in parts.engine.chains


async def test_a_settlement_wakes_only_a_reader_that_waits_for_room() -> None:
    """Every settlement brought a page of all shards with it, however full the hot one still was."""
    parts = reading_parts(EngineSettings(read_ahead_max=64), check=Check(1000, [], 0.0), settle=Settled())
    parts.own(1)
    parts.outbox.answers["page"] = lambda request: Page(
        [], [make_row(s) for s in range(1, 17)] if 0 in request.shards else []
    )
    engine = parts.engine
    await parts.reader._turn()
    assert engine.chains.count(0) == 16
    await parts.reader._turn()
    assert engine.is_full, "shard 0 has more rows"
    for seq in range(1, 6):
        engine.to_read._is_set = False
        engine.chains.finish([row for row in engine.chains.rows() if row.seq == seq])
        parts.settler._apply(Settlement(), Settled(), 0)
        assert engine.to_read._is_set
        pages = len(parts.outbox.calls("page"))
        await parts.reader._turn()
        read = [call.arguments[0].shards for call in parts.outbox.calls("page")[pages:]]
        # By a quarter of what the shard may have, not a row at a time.
        assert any(0 in shards for shards in read) == (seq == 5)
    engine.is_full = engine.to_read._is_set = False
    parts.settler._apply(Settlement(), Settled(), 0)
    assert not engine.to_read._is_set


async def test_a_keys_backlog_keeps_no_relay_polling() -> None:
    """Its shard was full and read on every quarter of a second: each time counted as rows that had come, and all other shards were
    looked at a hundred times a second, beside a broker on the same cores."""
    parts = reading_parts(EngineSettings(read_ahead_max=64), settle=Settled(), arm=Armed.GRANTED)
    parts.own(1)
    clock, engine = parts.clock, parts.engine
    parts.outbox.answers["check"] = lambda: Check(1000, [], clock.now())

    def page(request: PageRequest) -> Page:
        cursors = dict(zip(request.shards, request.cursors, strict=True))
        last = min(cursors.get(0, 1000) + request.limit, 1000)
        return Page([], [make_row(seq) for seq in range(cursors.get(0, 1000) + 1, last + 1)])

    parts.outbox.answers["page"] = page
    polls = []
    for step in range(300):
        until = clock.time + 0.02
        while clock.time < until:
            pages = len(parts.outbox.calls("page"))
            wait_s = await parts.reader._turn()
            polls += [step for call in parts.outbox.calls("page")[pages:] if 1 in call.arguments[0].shards]
            clock.time = min(until, clock.time + max(wait_s, 0.001))
        engine.chains.finish(sorted(engine.chains.rows(), key=lambda row: row.seq)[:2])
        parts.settler._apply(Settlement(), Settled(), 0)
        engine.to_read._is_set = False
    assert len({row.seq for row in engine.chains.rows()}) > 8, "its backlog goes on"
    assert parts.reader._is_armed, "an insert rings"
    assert len([step for step in polls if step > 50]) <= 20, "by the poll interval, five seconds long"


@pytest.mark.parametrize("how", ["given away", "lost"])
async def test_a_shard_that_goes_wakes_a_reader_that_waits_for_room(how: str) -> None:
    """Or the rows of other shards wait for the next poll."""
    parts = reading_parts()
    parts.own(1)
    parts.engine.admit([make_row(seq) for seq in range(1, 5)])
    parts.engine.is_full = True
    parts.engine.to_read._is_set = False
    if how == "lost":
        parts.engine.lose_shard(0)
    else:
        parts.keeper.give([0])
    assert parts.engine.to_read._is_set


async def test_what_wakes_the_reader_before_its_time_brings_no_page() -> None:
    """Settlements, due rows and bodies wake it too; each cost a page of all shards."""
    parts = reading_parts(page=Page([], [make_row(1)]))
    assert await parts.reader._turn() > 0.0
    for _ in range(3):
        assert await parts.reader._turn() > 0.0
    assert len(parts.outbox.calls("page")) == 1
    parts.clock.time += 0.02
    await parts.reader._turn()
    assert len(parts.outbox.calls("page")) == 2


async def test_a_poll_that_came_due_during_something_else_is_not_put_off() -> None:
    """Each such turn backed off further, without having looked: rows waited for 20 ms."""
    parts = reading_parts(page=Page([], [make_row(1)]))
    assert await parts.reader._turn() == pytest.approx(0.001)

    def slow(*_: object) -> Due:
        parts.clock.time += 0.002
        return Due([], [], None)

    parts.outbox.answers["due"] = slow
    parts.engine.note_due(0.0)
    assert await parts.reader._turn() == 0.0
    assert len(parts.outbox.calls("page")) == 1
    await parts.reader._turn()
    assert len(parts.outbox.calls("page")) == 2


async def test_less_than_a_timer_can_wait_is_no_wait() -> None:
    """A timer of 0.4 ms ends at once: twenty turns of the loop that found nothing went before each page."""
    parts = reading_parts(page=Page([], [make_row(1)]))
    assert await parts.reader._turn() == pytest.approx(0.001)
    parts.clock.time += 0.0006
    await parts.reader._turn()
    assert len(parts.outbox.calls("page")) == 2


async def test_a_writer_without_an_xid_is_looked_at_again_at_once_then_less_and_less_often() -> None:
    """R3: meanwhile fresh rows wait. Most such writers are about to insert; one may be there for hours."""
    parts = reading_parts(check=Check(1, [Writer("3/7", None)], 0.0), page=Page([], [make_row(1)]))
    waits = []
    for _ in range(9):
        waits.append(await parts.reader._turn())
        parts.reader._last_news_at = parts.clock.now()
        parts.clock.time += waits[-1]
    assert waits[:6] == pytest.approx([0.002, 0.004, 0.008, 0.016, 0.032, 0.05], abs=1e-4)
    assert waits[6:] == pytest.approx([0.05] * 3, abs=1e-4)
    assert len(parts.outbox.calls("check")) == 9


async def test_a_page_takes_its_own_time_as_a_pause() -> None:
    """On a busy machine polls as often as on an idle one would keep it busy."""
    parts = reading_parts()

    def slow(request: object) -> Page:
        parts.clock.time += 0.008
        return Page([], [])

    parts.outbox.answers["page"] = slow
    await parts.reader._turn()
    parts.clock.time += 0.02
    assert await parts.reader._turn() == pytest.approx(0.008)


async def test_known_rows_are_read_without_the_other_shards() -> None:
    """The others are looked at only when it is time to look for fresh rows."""
    parts = reading_parts(EngineSettings(read_ahead_max=64), check=Check(1000, [], 0.0))
    for shard in range(1, 8):
        parts.own(shard, floor=1000)
    parts.outbox.answers["page"] = lambda request: Page([], [make_row(s) for s in range(1, 1 + request.limit)])
    assert await parts.reader._turn() == 0.0
    await parts.reader._turn()
    assert [list(call.arguments[0].shards) for call in parts.outbox.calls("page")] == [list(range(8)), [0]]


async def test_a_ring_is_answered_by_a_page_first() -> None:
    """One round trip to the row that rang: rows that are due, the check of the writers, the doorbell's lock come after it."""
    parts = reading_parts(arm=Armed.GRANTED)
    while not parts.reader._is_armed:
        parts.clock.time += 1.0
        await parts.reader._turn()
    await parts.reader._turn()
    parts.outbox.answers |= {"check": Check(1, [], 0.0), "page": Page([], [make_row(1)])}
    parts.outbox.log.clear()
    parts.reader.on_ring()
    await parts.reader._turn()
    assert [call.name for call in parts.outbox.log if call.name in ("page", "due", "check", "disarm")] == [
        "page",
        "due",
        "check",
        "disarm",
    ]
    assert len(parts.engine.chains) == 1


async def test_a_ring_that_brought_nothing_gives_the_lock_back() -> None:
    """Another relay's rows ring too: they would ring for ever."""
    parts = reading_parts(arm=Armed.GRANTED)
    while not parts.reader._is_armed:
        parts.clock.time += 1.0
        await parts.reader._turn()
    parts.reader.on_ring()
    await parts.reader._turn()
    assert len(parts.outbox.calls("disarm")) == 1


async def test_a_writer_that_will_not_ring_is_looked_at_after_a_part_of_its_age() -> None:
    """It inserted before the bell could be armed: once the relay was idle its rows waited for the poll interval, and those of
    transactions of 0.3 s for as long at the median."""
    parts = reading_parts()
    clock, began, looks = parts.clock, 1001.0, [0.0]

    def check() -> Check:
        looks.append(clock.time - began)
        return Check(1, [Writer("3/1", 700)] if clock.time >= began else [], clock.time)

    parts.outbox.answers["check"] = check
    while looks[-1] < 8.0:
        clock.time += max(0.001, await parts.reader._turn())
    ages = looks[looks.index(min(look for look in looks if look > 0.0)) :]
    assert ages[0] < 0.51, "at the latest when it kept the bell from being armed"
    for before, after in itertools.pairwise(ages):
        assert after - before < max(0.05, 0.125 * (before - ages[0])) + 0.002
    assert len(ages) < 60, "an old one costs no more than a poll"


async def test_a_row_that_came_without_a_ring_sends_the_reader_back_to_the_bell() -> None:
    """Another relay held the lock and died: no insert rings, and whoever trusts it polls for ever."""
    parts = reading_parts(arm=Armed.ELSEWHERE)
    parts.clock.time += 1.0
    await parts.reader._turn()
    await parts.reader._turn()
    assert len(parts.outbox.calls("arm")) == 1
    parts.outbox.answers |= {"check": Check(1, [], 0.0), "page": Page([], [make_row(1)]), "arm": Armed.GRANTED}
    parts.clock.time += 1.0
    await parts.reader._turn()
    parts.outbox.answers["page"] = Page([], [])
    parts.clock.time += 1.0
    await parts.reader._turn()
    assert len(parts.outbox.calls("arm")) == 2


async def test_holds_that_are_being_written_when_a_shard_is_taken_up_are_remembered() -> None:
    """1 came back unroutable while there was no session; its deferral is not written yet when the new session asks which
    keys are held. 2 must not overtake it."""
    parts = reading_parts()
    one, two = make_row(1), make_row(2)
    parts.engine.admit([one])
    parts.turn()
    parts.engine.lose_sessions()
    parts.link.give_back(one)
    parts.engine.claimed = [Claim(0, 1, 0)]
    parts.outbox.answers |= {"check": Check(2, [], 0.0), "page": Page([], [make_row(1), two])}
    await parts.reader._turn()
    assert two.state is State.TESTING
    parts.turn()
    assert parts.link.ids == ["m1"]


async def test_a_shard_that_held_too_many_keys_is_looked_at_again(caplog: pytest.LogCaptureFixture) -> None:
    """Every row of it was tested until somebody else claimed it, though nothing was held any more."""
    caplog.set_level(logging.INFO, "tests.parts")
    parts = reading_parts(check=Check(1, [], 0.0), page=Page([], [make_row(1)]))
    parts.engine.applied_serial = 7
    for n in range(parts.engine.settings.held_keys_max):
        parts.engine.chains.note_holding(make_row(n, f"k{n}"), serial=7)
    held = HeldKey(0, 0, ("", "k"), 3, is_lowest_held=True)
    parts.outbox.answers["held_keys"] = lambda shards, after, limit: HeldPage([held], None if after else (5, 5))
    await parts.reader._turn()
    assert parts.engine.chains.holding.incomplete == [0], "the walk has one more page"
    assert parts.engine.decisions.promotions == [(0, ("", "k"))]
    parts.clock.time += 1.0
    await parts.reader._turn()
    assert parts.engine.chains.holding.incomplete == []
    assert not parts.engine.chains.holding.may_hold(0, ("", "other"), None)
    assert parts.engine.chains.holding.may_hold(0, ("", "k"), None)
    parts.clock.time += 60.0
    await parts.reader._turn()
    assert len(parts.outbox.calls("held_keys")) == 2, "nobody asks while all is known"
    parts.engine.chains.holding.take_up(0)
    parts.clock.time += 60.0
    await parts.reader._turn()
    parts.clock.time += 1.0
    await parts.reader._turn()
    assert len(parts.outbox.calls("held_keys")) == 4
    (line,) = [record for record in caplog.records if record.message == "held_keys_known"]
    assert line.__dict__["fields"] == {"keys": 1, "shards_asked": 0, "seconds": 1.0}


async def test_a_walk_goes_on_at_its_own_pace_while_nothing_comes() -> None:
    """A page a poll: over 300,000 rows aside it took five minutes, and a key that was to be promoted waited for that."""
    parts = reading_parts(EngineSettings(poll_interval_s=60.0), check=Check(1, [], 0.0), page=Page([], []))
    parts.outbox.answers |= {"held_keys": HeldPage([], (5, 5)), "arm": Armed.GRANTED}
    parts.reader._housekeeping.begin_walk()
    parts.engine.chains.holding.take_up(0)
    parts.clock.time += 10.0
    for pages in (1, 2, 3):
        while (wait_s := await parts.reader._turn()) == 0.0:
            pass
        assert parts.reader._is_armed
        assert wait_s <= 0.1
        assert len(parts.outbox.calls("held_keys")) == pages
        parts.clock.time += wait_s


async def test_a_shard_that_holds_too_many_keys_asks_for_its_own_rows_only() -> None:
    """Every row of it waited for a settlement's test. Now the page that brings it says whether something holds it; what it
    saw free goes, unless its key was held since."""
    parts = reading_parts(EngineSettings(held_keys_max=3))
    parts.own(1)
    parts.engine.applied_serial = 7
    for n in range(3):
        parts.engine.chains.note_holding(make_row(n, f"k{n}"), serial=7)
    parts.engine.chains.note_holding(make_row(4, "since"), serial=8)
    free, held, since = make_row(11, "free"), make_row(12, "held"), make_row(13, "since")
    other = make_row(14, "other", shard=1)
    parts.outbox.answers["check"] = Check(20, [], 0.0)
    parts.outbox.answers["page"] = Page([], [free, held, since, other], blocked={12})
    # The walk is under way, for all that the reader knows.
    parts.outbox.answers["held_keys"] = lambda shards, after, limit: HeldPage([], (5, 5))
    await parts.reader._turn()
    request = parts.outbox.calls("page")[0].arguments[0]
    assert (request.shards, request.probed) == ([0, 1], [0])
    assert [row.state for row in (free, held, since, other)] == [
        State.READY,
        State.TESTING,
        State.TESTING,
        State.READY,
    ]
    assert parts.engine.decisions.tested == [since, held]


async def test_a_shard_is_read_when_its_parked_rows_have_our_policy() -> None:
    parts = reading_parts(
        apply_policy=PolicyApplied(False), check=Check(1, [], 0.0), page=Page([], [make_row(1, shard=1)])
    )
    parts.engine.leases.on_claimed([Claim(1, 1, 0)], parts.clock.now())
    parts.engine.claimed = [Claim(1, 1, 0, has_other_policy=True)]
    await parts.reader._turn()
    assert 1 not in parts.engine.reading.cursors
    parts.outbox.answers["apply_policy"] = PolicyApplied(True)
    await parts.reader._turn()
    assert 1 in parts.engine.reading.cursors
    assert [call.arguments[0] for call in parts.outbox.calls("apply_policy")] == [{1: 1}, {1: 1}]


async def test_a_row_is_not_early_by_half_of_a_slow_answer() -> None:
    """H6: when in its second of waiting the database told its time nobody knows; the row goes by the later guess."""
    parts = reading_parts(check=Check(1, [], 0.0), page=Page([], [make_row(1, rare={"available_at": 5000.3})]))
    database_time = parts.engine.database_time
    database_time.observe(5000.0, parts.clock.now() - 1.0)
    assert (database_time.at_least(), database_time.now()) == (5000.0, 5000.5)
    await parts.reader._turn()
    assert [row.seq for row in parts.engine.decisions.scheduled] == [1]
    assert parts.engine.chains.ready == 0
