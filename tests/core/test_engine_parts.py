"""Keeper, reader, publisher, settler and runner, one at a time, over doubles that answer when told.

Each test states the fault that it guards in a sentence; the whole relay in bad weather is `tests/sim`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest

from relay.core.holding import HOLDING_KEYS_MAX
from relay.core.ports import (
    Armed,
    Backlog,
    Check,
    Claim,
    Closed,
    Discarded,
    Due,
    Held,
    HeldKey,
    HeldPage,
    Link,
    LinkListener,
    OutboxInfo,
    Page,
    PageRequest,
    Place,
    Publication,
    Rejection,
    Renewal,
    Returned,
    Searched,
    Settled,
    Settlement,
)
from relay.core.settings import EngineSettings
from relay.engine import DatabaseTime, Engine, Signal
from relay.errors import DatabaseRefused
from relay.http import Readiness
from relay.keeper import Keeper
from relay.logs import Log
from relay.message import Aside, PayloadType, Row, State
from relay.metrics import Metrics
from relay.publisher import NACKS_MAX, Publisher
from relay.reader import Reader
from relay.runner import Runner
from relay.settler import Settler

DEADLINE_S = 5.0
INFO = OutboxInfo(PayloadType.JSON, is_direct=True, has_doorbell=True)
EMPTY = Backlog(0, False, None, 0, 0, 0, 0, 0, 0)


# ---------------------------------------------------------------- doubles


def nothing_found(positions: Sequence[tuple[int, int]], limit: int) -> Searched:
    return Searched([None] * len(positions), 0, {})


class ManualClock:
    """Time moves when a test says so; a sleep gives up its turn and lets that much time pass."""

    def __init__(self) -> None:
        self.time = 1000.0

    def now(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0)
        self.time += seconds


class StillClock(ManualClock):
    """Time stands still: short sleeps give up their turn, long ones do not end."""

    async def sleep(self, seconds: float) -> None:
        if seconds < 0.5:
            await asyncio.sleep(0)
        else:
            await asyncio.get_running_loop().create_future()


@dataclass(eq=False)
class Call:
    """A call of the engine that waits for the test's answer."""

    name: str
    arguments: tuple[Any, ...]
    future: asyncio.Future[Any] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def answer(self, result: object = None) -> None:
        self.future.set_result(result)

    def fail(self, error: Exception) -> None:
        self.future.set_exception(error)


class TestedOutbox:
    """Answers at once as `answers` says by name, or, where it says nothing, when the test does."""

    __test__ = False

    def __init__(self, **answers: Any) -> None:
        empty = {
            "backlog": EMPTY,
            "purge": 0,
            "search": nothing_found,
            "held_keys": HeldPage([], None),
            "followers": [],
            "disarm": None,
        }
        self.answers: dict[str, Any] = empty | answers
        self.log: list[Call] = []
        self.on_lost: Callable[[str], None] = lambda why: None
        self._pending: dict[str, list[Call]] = {}
        self._arrived = asyncio.Event()

    async def _call(self, name: str, *arguments: Any) -> Any:
        call = Call(name, arguments)
        self.log.append(call)
        if name in self.answers:
            answer = self.answers[name]
            await asyncio.sleep(0)
            if isinstance(answer, Exception):
                raise answer
            return answer(*arguments) if callable(answer) else answer
        self._pending.setdefault(name, []).append(call)
        self._arrived.set()
        return await call.future

    async def called(self, name: str) -> Call:
        """The next call of that name that waits for its answer."""
        async with asyncio.timeout(DEADLINE_S):
            while not self._pending.get(name):
                self._arrived.clear()
                await self._arrived.wait()
        return self._pending[name].pop(0)

    def calls(self, name: str) -> list[Call]:
        return [call for call in self.log if call.name == name]

    async def open(self, on_ring: Callable[[], None], on_lost: Callable[[str], None]) -> OutboxInfo:
        self.on_lost = on_lost
        found: OutboxInfo = await self._call("open")
        return found

    async def close(self) -> None:
        await asyncio.sleep(0)

    async def claim(self, shards_max: int) -> Sequence[Claim]:
        return await self._call("claim", shards_max)  # type: ignore[no-any-return]

    async def renew(self, held: Mapping[int, Held], *, available: bool) -> Renewal:
        return await self._call("renew", held, available)  # type: ignore[no-any-return]

    async def release(self, held: Mapping[int, Held]) -> None:
        await self._call("release", held)

    async def leave(self) -> None:
        await self._call("leave")

    async def check(self) -> Check:
        return await self._call("check")  # type: ignore[no-any-return]

    async def page(self, request: PageRequest) -> Page:
        return await self._call("page", request)  # type: ignore[no-any-return]

    async def load(self, rows: Sequence[Row]) -> Sequence[Row]:
        return await self._call("load", rows)  # type: ignore[no-any-return]

    async def reload(self, rows: Sequence[Row]) -> Sequence[Row]:
        return await self._call("reload", rows)  # type: ignore[no-any-return]

    async def due(self, cursors: Mapping[int, int], limit: int) -> Due:
        return await self._call("due", cursors, limit)  # type: ignore[no-any-return]

    async def followers(self, heads: Sequence[Row], cursors: Mapping[int, int], limit: int) -> Sequence[Row]:
        return await self._call("followers", heads, cursors, limit)  # type: ignore[no-any-return]

    async def held_keys(self, shards: Sequence[int], after: Place | None, limit: int) -> HeldPage:
        return await self._call("held_keys", shards, after, limit)  # type: ignore[no-any-return]

    async def apply_policy(self, epochs: Mapping[int, int], limit: int) -> bool:
        return await self._call("apply_policy", epochs, limit)  # type: ignore[no-any-return]

    async def arm(self, wait_s: float) -> Armed:
        return await self._call("arm", wait_s)  # type: ignore[no-any-return]

    async def disarm(self) -> None:
        await self._call("disarm")

    async def settle(self, settlement: Settlement) -> Settled:
        return await self._call("settle", settlement)  # type: ignore[no-any-return]

    async def purge(self, older_than_s: float, limit: int) -> int:
        return await self._call("purge", older_than_s, limit)  # type: ignore[no-any-return]

    async def search(self, positions: Sequence[tuple[int, int]], limit: int) -> Searched:
        return await self._call("search", positions, limit)  # type: ignore[no-any-return]

    async def discard_parked(self, older_than_s: float, limit: int, spared: Sequence[int]) -> Discarded:
        return await self._call("discard_parked", older_than_s, limit, spared)  # type: ignore[no-any-return]

    async def backlog(self, starts: Mapping[int, int] | None = None) -> Backlog:
        return await self._call("backlog")  # type: ignore[no-any-return]


class TestedLink:
    """A link whose broker is the test."""

    __test__ = False

    def __init__(self, listener: LinkListener) -> None:
        self.listener = listener
        self.sent: list[Row] = []
        self.probes: list[Row] = []
        self.open: dict[str, Row] = {}
        self.takes_max = 1_000_000
        self.rejects: dict[str, str] = {}

    @property
    def in_flight(self) -> int:
        return len(self.open)

    def is_in_flight(self, message_id: str) -> bool:
        return message_id in self.open

    def publish(self, rows: Sequence[Row]) -> Publication:
        taken = rows[: self.takes_max]
        rejected = [Rejection(row, self.rejects[row.id], "no") for row in taken if row.id in self.rejects]
        for row in taken:
            if row.id not in self.rejects:
                assert row.id not in self.open, "a row is in flight at most once per link"
                self.open[row.id] = row
                self.sent.append(row)
        return Publication(len(taken), rejected)

    def probe(self, row: Row) -> Publication:
        self.probes.append(row)
        return self.publish([row])

    async def close(self) -> None:
        await asyncio.sleep(0)
        lost, self.open = list(self.open.values()), {}
        self.listener.on_closed(lost, Closed.CONNECTION, "closed by the relay")

    def ack(self, *rows: Row) -> None:
        self.listener.on_acked([self.open.pop(row.id) for row in rows])

    def nack(self, *rows: Row) -> None:
        self.listener.on_nacked([self.open.pop(row.id) for row in rows])

    def give_back(self, *rows: Row) -> None:
        self.listener.on_returned([Returned(self.open.pop(row.id), "312 NO_ROUTE", "x", "k") for row in rows])

    def cut(self) -> None:
        lost, self.open = list(self.open.values()), {}
        self.listener.on_closed(lost, Closed.CONNECTION, "reset")

    @property
    def ids(self) -> list[str]:
        return [row.id for row in self.sent]


class TestedBroker:
    __test__ = False

    def __init__(self) -> None:
        self.links: list[TestedLink] = []

    async def connect(self, listener: LinkListener, payload_type: PayloadType) -> Link:
        await asyncio.sleep(0)
        self.links.append(TestedLink(listener))
        return self.links[-1]


# ---------------------------------------------------------------- a small world


def make_row(seq: int, key: str | None = "k", *, shard: int = 0, **columns: Any) -> Row:
    return Row(shard, seq, f"m{seq}", "ok", ctid=(0, seq), aggregate_id=key, created_at=0.0, **columns)


def renewal(
    mine: Mapping[int, tuple[int, int]] | None = None,
    *,
    renewed: Iterable[int] | None = None,
    claimable: int = 0,
    relays: int = 1,
    is_paused: bool = False,
    next_due_in_s: float | None = None,
) -> Renewal:
    mine = mine or {}
    return Renewal(
        frozenset(mine if renewed is None else renewed), mine, claimable, relays, is_paused, 5000.0, next_due_in_s
    )


class Parts:
    """An engine with shard 0 ours, read up to 0, and a link; the parts are started by the tests."""

    def __init__(self, settings: EngineSettings | None = None, **answers: Any) -> None:
        self.clock = ManualClock()
        self.outbox = TestedOutbox(**answers)
        self.engine = Engine(
            settings or EngineSettings(),
            self.outbox,
            self.clock,
            Random(1),
            Metrics(self.clock.now),
            Readiness(),
            Log(logging.getLogger("tests.parts")),
            DatabaseTime(self.clock),
        )
        self.engine.database_time.observe(5000.0, self.clock.now())
        self.engine.info = INFO
        self.publisher = Publisher(self.engine, TestedBroker())
        self.settler = Settler(self.engine)
        self.keeper = Keeper(self.engine)
        self.reader = Reader(self.engine, self.keeper)
        self.link = TestedLink(self.publisher)
        self.engine.link = self.link
        self.engine.broker_lost_at = None
        self.own(0)

    def own(self, shard: int, floor: int = 0) -> None:
        self.engine.leases.on_claimed([Claim(shard, 1, floor)], self.clock.now())
        self.engine.reading.add_shard(shard, floor)

    def check(self, last_seq: int, *writers: Any) -> None:
        self.engine.reading.on_check(Check(last_seq, writers, 5000.0))

    def pass_time(self, seconds: float) -> None:
        """Time passes, and the leases are renewed."""
        self.clock.time += seconds
        leases = self.engine.leases
        leases.on_renewal(renewal({each.shard: (each.epoch, each.floor) for each in leases.all()}), self.clock.now())

    def turn(self) -> None:
        """One turn of the publisher."""
        self.publisher._turn()

    async def settled(self) -> Settlement:
        """The settlement that waits for its answer."""
        call = await self.outbox.called("settle")
        settlement: Settlement = call.arguments[0]
        self._call = call
        return settlement

    def commit(self, **parts: Any) -> None:
        self._call.answer(Settled(**parts))

    @asynccontextmanager
    async def running(self, *works: Any) -> AsyncIterator[list[asyncio.Task[None]]]:
        tasks = [asyncio.get_running_loop().create_task(work) for work in works]
        try:
            yield tasks
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def eventually(holds: Callable[[], bool]) -> None:
    """Until it holds, turn by turn of the loop."""
    async with asyncio.timeout(DEADLINE_S):
        while not holds():
            await asyncio.sleep(0)


async def turns(count: int = 20) -> None:
    """Long enough for whatever is ready to happen."""
    for _ in range(count):
        await asyncio.sleep(0)


# ---------------------------------------------------------------- the settler


async def test_decisions_of_a_settlement_that_was_cancelled_are_kept() -> None:
    """The keeper lost its session first: the settler is cancelled within `settle`, and what was sent must be settled
    again in the next life of the sessions (S3), not stay SETTLING for ever with the floor and the drain behind it."""
    parts = Parts()
    row = make_row(1)
    parts.engine.admit([row])
    parts.turn()
    parts.link.ack(row)
    async with parts.running(parts.settler.run()):
        assert (await parts.settled()).sent == [row]
    parts.engine.lose_sessions()
    assert parts.engine.decisions.sent == [row]
    async with parts.running(parts.settler.run()):
        assert (await parts.settled()).sent == [row]
        parts.commit(done=[row])
        await eventually(lambda: len(parts.engine.chains) == 0)


async def test_what_else_a_cancelled_settlement_carried_is_dropped_with_its_rows() -> None:
    """A deferral and its followers under way when the session is lost: none of them stays SETTLING in memory."""
    parts = Parts()
    rows = [make_row(1), make_row(2), make_row(3, "other")]
    parts.engine.admit(rows)
    parts.turn()
    parts.link.give_back(rows[0])
    async with parts.running(parts.settler.run()):
        settlement = await parts.settled()
        assert [each.row for each in settlement.setbacks] == rows[:1]
        assert settlement.followers == rows[1:2]
    parts.engine.lose_sessions()
    assert [row.state for row in rows] == [State.FORGOTTEN, State.FORGOTTEN, State.IN_FLIGHT]
    assert len(parts.engine.decisions) == 0


async def test_a_refused_settlement_is_tried_again_with_the_same_decisions() -> None:
    parts = Parts()
    rows = [make_row(1), make_row(2, "other")]
    parts.engine.admit(rows)
    parts.turn()
    parts.link.ack(rows[0])
    async with parts.running(parts.settler.run()):
        assert (await parts.settled()).sent == rows[:1]
        parts.link.ack(rows[1])
        parts._call.fail(DatabaseRefused("lock timeout"))
        assert (await parts.settled()).sent == rows
        parts.commit(done=rows)
        await eventually(lambda: len(parts.engine.chains) == 0)


async def test_a_row_that_somebody_changed_keeps_its_place_until_it_is_loaded_anew() -> None:
    """1 was returned, its deferral missed (somebody touched the row); 2, read since and without a blocker in the table,
    must not go before 1 has been loaded again (I3)."""
    parts = Parts()
    one, two = make_row(1), make_row(2)
    parts.engine.admit([one])
    parts.turn()
    parts.link.give_back(one)
    parts.engine.admit([two])
    assert two.state is State.TESTING
    async with parts.running(parts.settler.run(), parts.publisher.run()):
        settlement = await parts.settled()
        assert settlement.tested == [two]
        parts.commit(changed=[one], unblocked=[two])
        await eventually(lambda: parts.engine.reread == [one])
        await turns()
        assert parts.link.ids == ["m1"]
        again = make_row(1)
        parts.outbox.answers["reload"] = [again]
        await parts.reader._reread()
        await eventually(lambda: parts.link.sent[1:] == [again])
        parts.link.ack(again)
        await eventually(lambda: parts.link.ids == ["m1", "m1", "m2"])


async def test_an_old_fence_does_not_cost_the_lease_that_was_claimed_since() -> None:
    """Shard 0 was lost and claimed again while a settlement under the old epoch was under way."""
    parts = Parts()
    row = make_row(1)
    parts.engine.admit([row])
    parts.turn()
    parts.link.ack(row)
    async with parts.running(parts.settler.run()):
        assert (await parts.settled()).fences == {0: 1}
        parts.engine.lose_shard(0)
        parts.engine.leases.on_claimed([Claim(0, 3, 0)], parts.clock.now())
        parts.commit(lost={0})
        await eventually(lambda: parts.engine.applied_serial == 0)
        assert 0 in parts.engine.leases


# ---------------------------------------------------------------- the keeper


async def test_a_new_session_takes_up_what_is_kept_and_lets_go_what_was_being_given() -> None:
    """A shard being handed over when the sessions were lost: read again, it would never be idle, and a relay that has
    left the fair share (no broker) would keep it for ever (L6)."""
    parts = Parts(renew=renewal({0: (1, 0), 1: (1, 7)}), release=None)
    parts.own(1, 7)
    parts.engine.broker_lost_at = parts.clock.now()
    parts.keeper.give([0])
    parts.engine.lose_sessions()
    keeper = Keeper(parts.engine)
    await keeper._renew()
    assert [claim.shard for claim in parts.engine.claimed] == [1]
    assert parts.outbox.calls("release")[0].arguments[0].keys() == {0}


async def test_a_hand_over_is_not_held_up_by_rows_that_came_back_unsent() -> None:
    """In flight when the shard was given; then nacked, or its link closed: it goes with the shard (L5)."""
    parts = Parts(renew=renewal({0: (1, 0)}), release=None)
    nacked, lost = make_row(1, "a"), make_row(2, "b")
    parts.engine.admit([nacked, lost])
    parts.turn()
    parts.keeper.give([0])
    await parts.keeper._renew()
    assert not parts.outbox.calls("release"), "two are in flight"
    parts.link.nack(nacked)
    parts.link.cut()
    await parts.keeper._renew()
    assert parts.outbox.calls("release")[0].arguments[0] == {0: Held(1, None)}
    assert 0 not in parts.engine.leases


async def test_a_hand_over_that_ends_writes_the_floor_of_when_it_began() -> None:
    """What was read ahead and dropped lies above it; the row in flight may still fail."""
    parts = Parts(renew=renewal({0: (1, 0)}), release=None)
    parts.check(9)
    request = parts.engine.reading.request([0], 100, 100)
    rows = [make_row(4, "a"), make_row(6, "b")]
    parts.engine.admit(parts.engine.reading.on_page(request, Page([], rows)))
    assert [row.seq for row in parts.engine.chains.take(1, 100, [True] * 64)] == [4]
    parts.keeper.give([0])
    assert rows[1].state is State.FORGOTTEN
    parts.publisher.on_acked([rows[0]])
    parts.engine.chains.finish([rows[0]])
    await parts.keeper._renew()
    assert parts.outbox.calls("release")[0].arguments[0] == {0: Held(1, 3)}


async def test_without_a_broker_for_some_leases_time_the_shards_go() -> None:
    parts = Parts(renew=renewal({0: (1, 0)}), release=None)
    parts.engine.broker_lost_at = parts.clock.now()
    parts.clock.time += 100.0
    await parts.keeper._renew()
    assert parts.outbox.calls("renew")[0].arguments[1] is False
    assert len(parts.engine.leases) == 0


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


async def test_a_shard_that_held_too_many_keys_is_looked_at_again() -> None:
    """Every row of it was tested until somebody else claimed it, though nothing was held any more."""
    parts = reading_parts(check=Check(1, [], 0.0), page=Page([], [make_row(1)]))
    parts.engine.applied_serial = 7
    for n in range(HOLDING_KEYS_MAX):
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


async def test_a_shard_is_read_when_its_parked_rows_have_our_policy() -> None:
    parts = reading_parts(apply_policy=False, check=Check(1, [], 0.0), page=Page([], [make_row(1, shard=1)]))
    parts.engine.leases.on_claimed([Claim(1, 1, 0)], parts.clock.now())
    parts.engine.claimed = [Claim(1, 1, 0, has_other_policy=True)]
    await parts.reader._turn()
    assert 1 not in parts.engine.reading.cursors
    parts.outbox.answers["apply_policy"] = True
    await parts.reader._turn()
    assert 1 in parts.engine.reading.cursors
    assert [call.arguments[0] for call in parts.outbox.calls("apply_policy")] == [{1: 1}, {1: 1}]


# ---------------------------------------------------------------- the settler's locked rows


async def test_a_locked_row_is_settled_again_though_others_are_locked_meanwhile() -> None:
    """Each locked row put the next try off for all: an application that walks through the table kept them unsettled."""
    parts = Parts()
    rows = [make_row(seq, f"k{seq}") for seq in range(1, 40)]
    parts.engine.admit(rows)
    parts.turn()
    async with parts.running(parts.settler.run()):
        for row in rows:
            parts.link.ack(row)
            settlement = await parts.settled()
            if rows[0] in settlement.sent and row is not rows[0]:
                return
            parts.commit(locked=[row])
            parts.clock.time += 0.02
    raise AssertionError("the first row was never tried again")


# ---------------------------------------------------------------- the publisher


async def test_an_orphans_return_lets_its_row_go_at_once() -> None:
    """The row was kept back behind its orphan (P1); the orphan's last word must wake the publisher."""
    parts = Parts()
    old = make_row(1)
    parts.engine.admit([old])
    parts.turn()
    parts.engine.chains.forget(old)
    again = make_row(1)
    parts.engine.admit([again])
    async with parts.running(parts.publisher.run()):
        await turns()
        assert parts.link.sent == [old]
        parts.link.give_back(old)
        await eventually(lambda: parts.link.sent == [old, again])


async def test_what_the_link_does_not_take_goes_first_when_it_has_room() -> None:
    parts = Parts()
    rows = [make_row(seq, f"k{seq}") for seq in range(1, 6)]
    parts.engine.admit(rows)
    parts.link.takes_max = 2
    parts.turn()
    parts.link.takes_max = 10
    parts.publisher.on_writable()
    parts.turn()
    assert parts.link.sent == rows


async def test_nacks_use_no_attempt_and_make_room_in_the_end() -> None:
    """P2: again after a backoff, in memory; nacked time and again the row goes aside, attempts unchanged."""
    parts = Parts()
    row, follower = make_row(1, attempts=1), make_row(2)
    parts.engine.admit([row, follower])
    for _ in range(NACKS_MAX):
        parts.pass_time(60.0)
        parts.turn()
        parts.link.nack(row)
    decisions = parts.engine.decisions
    assert [(each.row, each.aside, each.attempts) for each in decisions.setbacks] == [(row, Aside.DEFERRED, 1)]
    assert decisions.followers == [follower]
    assert parts.link.ids == ["m1"] * NACKS_MAX


async def test_a_returned_row_climbs_the_ladder_and_parks_at_its_end() -> None:
    parts = Parts(EngineSettings(retry_delays_s=(1.0,)))
    first, last = make_row(1, "a", attempts=0), make_row(2, "b", attempts=1)
    parts.engine.admit([first, last])
    parts.turn()
    parts.link.give_back(first, last)
    setbacks = parts.engine.decisions.setbacks
    assert [(each.aside, each.attempts, each.reason) for each in setbacks] == [
        (Aside.DEFERRED, 1, "unroutable"),
        (Aside.PARKED, 2, "unroutable"),
    ]
    assert 0.8 <= setbacks[0].delay_s <= 1.2
    assert all(each.holds for each in setbacks)


async def test_a_row_that_cannot_be_encoded_parks_at_once_and_harms_nobody() -> None:
    parts = Parts()
    bad, good = make_row(1, "a"), make_row(2, "b")
    parts.link.rejects = {"m1": "invalid"}
    parts.engine.admit([bad, good])
    parts.turn()
    assert parts.link.sent == [good]
    assert [(each.row, each.aside) for each in parts.engine.decisions.setbacks] == [(bad, Aside.PARKED)]


async def test_an_expired_row_holds_nobody() -> None:
    """docs/schema.md: its followers go on, once its park is committed (H7)."""
    parts = Parts()
    late, follower = make_row(1), make_row(2)
    parts.link.rejects = {"m1": "expired"}
    parts.engine.admit([late, follower])
    parts.turn()
    parts.turn()
    assert parts.link.sent == []
    parts.engine.chains.finish([late])
    parts.turn()
    assert parts.link.sent == [follower]


async def test_blocked_publishes_nothing_and_settles_late_confirms() -> None:
    parts = Parts()
    rows = [make_row(1, "a"), make_row(2, "b")]
    parts.engine.admit(rows[:1])
    parts.turn()
    parts.publisher.on_blocked("low on memory")
    parts.engine.admit(rows[1:])
    parts.turn()
    assert parts.link.sent == rows[:1]
    parts.link.ack(rows[0])
    assert parts.engine.decisions.sent == rows[:1]
    parts.pass_time(3600.0)
    parts.publisher.watch()
    assert "stalled" not in dict(parts.engine.readiness.reasons), "blocked is no timeout"
    parts.publisher.on_unblocked()
    parts.turn()
    assert parts.link.sent == rows


async def test_readiness_does_not_repeat_what_a_broker_says_of_a_row() -> None:
    """Its text may name the row's exchange or routing key, and anybody may ask /readyz."""
    parts = Parts()
    text = "403 ACCESS_REFUSED - access to topic 'patient.4711' in exchange 'events' in vhost '/' refused"
    parts.publisher.on_closed([], Closed.REFUSED, text)
    assert parts.engine.readiness.reasons == (("broker", "closed over a message that it refuses"),)
    parts.publisher.on_closed([], Closed.CONNECTION, "connection reset by peer")
    assert parts.engine.readiness.reasons == (("broker", "connection reset by peer"),)


async def test_spans_are_told_of_every_outcome() -> None:
    told: list[tuple[str, list[str], str]] = []

    class Spans:
        def end(self, outcome: str, rows: Sequence[Row], now: float, error: str = "") -> None:
            assert all(row.published_at <= now for row in rows)
            told.append((outcome, [row.id for row in rows], error))

    parts = Parts()
    parts.engine.spans = Spans()
    rows = [make_row(seq, key=f"k{seq}") for seq in (1, 2, 3, 4)]
    parts.engine.admit(rows)
    parts.turn()
    parts.link.ack(rows[0])
    parts.link.nack(rows[1])
    parts.link.give_back(rows[2])
    parts.link.cut()
    assert told == [
        ("acked", ["m1"], ""),
        ("nacked", ["m2"], "basic.nack"),
        ("returned", ["m3"], "no route"),
        ("lost", ["m4"], "reset"),
    ]


async def test_a_mute_broker_is_stalled_and_much_later_its_link_is_rebuilt_with_doubling() -> None:
    parts = Parts(EngineSettings(confirm_timeout_s=30.0))
    row = make_row(1)
    parts.engine.admit([row])
    parts.turn()
    waited = []
    for _ in range(2):
        began = parts.clock.now()
        parts.link.open = {"m1": row}
        parts.engine.link = parts.link
        while parts.link.open:
            parts.clock.time += 10.0
            parts.publisher.watch()
            await turns(3)
            if parts.clock.now() - began == 30.0:
                assert "stalled" in dict(parts.engine.readiness.reasons)
        waited.append(parts.clock.now() - began)
        assert "stalled" not in dict(parts.engine.readiness.reasons)
    assert waited == [300.0, 600.0]


async def test_a_link_on_which_everything_is_nacked_is_rebuilt_with_doubling_and_without_copies() -> None:
    """RabbitMQ 3.10 nacks all that a channel sends which met a quorum queue without a leader, long after it has one."""
    parts = Parts()
    waited = []

    def has_link() -> bool:
        return parts.engine.link is not None

    for _ in range(2):
        parts.engine.link = parts.link
        began = parts.clock.now()
        parts.publisher.on_nacked([])
        parts.link.open = {"m1": make_row(1)}
        for _ in range(30):
            parts.pass_time(1.0)
            parts.publisher.watch()
            parts.publisher.on_nacked([])
        await turns(3)
        assert has_link(), "a message is in flight"
        parts.link.open = {}
        parts.publisher.watch()
        await turns(3)
        assert not has_link()
        waited.append(parts.publisher._nacked_rebuild_s)
        assert parts.clock.now() - began == 30.0
    assert waited == [20.0, 40.0]
    parts.engine.link = parts.link
    parts.publisher.on_nacked([])
    parts.publisher.on_acked([])
    parts.pass_time(1000.0)
    parts.publisher.watch()
    await turns(3)
    assert has_link(), "it confirms something"
    assert parts.publisher._nacked_rebuild_s == 10.0


async def test_an_exchange_that_is_refused_again_and_again_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """Without the right to write, each link opens and is closed over its first message: two lines a try, for ever."""
    caplog.set_level(logging.INFO, "tests.parts")
    parts = Parts()
    for _ in range(3):
        parts.publisher._note_up()
        parts.publisher.on_closed([], Closed.EXCHANGE, "403 ACCESS_REFUSED")
    parts.publisher._note_up()
    parts.publisher.on_acked([])
    assert [record.getMessage() for record in caplog.records] == [
        "broker_connected",
        "broker_lost",
        "exchange_accepted",
    ]
    parts.publisher.on_closed([], Closed.EXCHANGE, "403 ACCESS_REFUSED")
    assert caplog.records[-1].getMessage() == "broker_lost"


async def test_the_rate_is_kept() -> None:
    parts = Parts(EngineSettings(rate_max=100.0))
    parts.engine.admit([make_row(seq, f"k{seq}") for seq in range(1, 400)])
    start = parts.clock.now()
    while parts.clock.now() < start + 2.0:
        parts.turn()
        parts.pass_time(0.01)
    assert 180 <= len(parts.link.sent) <= 210


# ---------------------------------------------------------------- the runner


class RunningRelay:
    """A whole runner over the doubles; the test answers what `answers` leaves open."""

    def __init__(self, **answers: Any) -> None:
        self.clock = StillClock()
        defaults = {
            "open": INFO,
            "renew": lambda held, _: renewal(dict.fromkeys(held, (1, 0)), claimable=0 if held else 1),
            "claim": [Claim(0, 1, 0)],
            "due": Due([], [], None),
            "arm": Armed.TIMED_OUT,
        }
        self.outbox = TestedOutbox(**(defaults | answers))
        self.broker = TestedBroker()
        self.readiness = Readiness()
        self.runner = Runner(
            EngineSettings(),
            self.outbox,
            self.broker,
            self.clock,
            Random(1),
            Metrics(self.clock.now),
            self.readiness,
            Log(logging.getLogger("tests.parts")),
        )

    @property
    def engine(self) -> Engine:
        return self.runner.engine

    @property
    def link(self) -> TestedLink:
        return self.broker.links[-1]

    async def started(self, *rows: Row) -> None:
        """Shard 0 claimed, and these rows read."""
        (await self.outbox.called("page")).answer(Page([], list(rows)))
        await eventually(lambda: len(self.engine.chains) == len(rows))


@asynccontextmanager
async def relay_running(relay: RunningRelay) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.get_running_loop().create_task(relay.runner.run())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_an_answer_that_has_come_when_the_sessions_are_lost_is_void() -> None:
    """R5, L3: a renewal that arrived in the same turn must not let the publisher write."""
    relay = RunningRelay(check=Check(1, [], 5000.0))
    async with relay_running(relay):
        await eventually(lambda: len(relay.broker.links) == 1)
        relay.link.takes_max = 0
        await relay.started(make_row(1))
        del relay.outbox.answers["renew"]
        relay.engine.to_renew.set()
        call = await relay.outbox.called("renew")
        relay.link.takes_max = 100
        call.answer(renewal({0: (1, 0)}))
        relay.outbox.on_lost("the server went away")
        relay.engine.to_publish.set()
        await eventually(lambda: len(relay.outbox.calls("open")) == 2)
        assert relay.link.sent == []


async def test_a_stop_settles_what_is_in_flight_and_gives_the_shards_back() -> None:
    relay = RunningRelay(check=Check(2, [], 5000.0), release=None, leave=None)
    one, two = make_row(1), make_row(2)
    async with relay_running(relay) as task:
        await relay.started(one, two)
        await eventually(lambda: relay.link.sent == [one])
        relay.runner.stop()
        await turns()
        relay.link.ack(one)
        call = await relay.outbox.called("settle")
        assert call.arguments[0].sent == [one]
        assert not relay.outbox.calls("release")
        call.answer(Settled(done=[one]))
        async with asyncio.timeout(DEADLINE_S):
            await task
    assert relay.link.sent == [one], "2 was read ahead and stays for the next owner"
    assert relay.outbox.calls("release")[0].arguments[0] == {0: Held(1, 0)}
    assert len(relay.outbox.calls("leave")) == 1


async def test_a_stop_without_servers_ends() -> None:
    relay = RunningRelay()
    del relay.outbox.answers["open"]
    async with relay_running(relay) as task:
        await relay.outbox.called("open")
        relay.runner.stop()
        async with asyncio.timeout(DEADLINE_S):
            await task


# ---------------------------------------------------------------- the signal


async def test_a_signal_that_came_before_the_wait_is_not_lost() -> None:
    signal = Signal()
    signal.set()
    assert await signal.wait(None)
    assert not await signal.wait(0.0)


async def test_a_signal_wakes_a_wait() -> None:
    signal = Signal()
    waiting = asyncio.get_running_loop().create_task(signal.wait(None))
    await turns(2)
    signal.set()
    async with asyncio.timeout(DEADLINE_S):
        assert await waiting
