"""The engine's parts with an outbox, a link and a clock that a test holds in its hand."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from relay.core.ports.broker import Closed, Link, LinkListener, Publication, Rejection, Returned
from relay.core.ports.outbox import (
    Armed,
    Backlog,
    Check,
    Claim,
    Discarded,
    Due,
    Held,
    HeldPage,
    OutboxInfo,
    Page,
    PageRequest,
    Place,
    PolicyApplied,
    Purged,
    Renewal,
    Searched,
    Settled,
    Settlement,
)
from relay.core.settings import EngineSettings
from relay.engine import DatabaseTime, Engine
from relay.http import Readiness
from relay.keeper import Keeper
from relay.logs import Log
from relay.message import PayloadType, Row
from relay.metrics import Metrics
from relay.publisher import Publisher
from relay.reader import Reader
from relay.settler import Settler

DEADLINE_S = 30.0
"""Of what takes a few turns of the loop: a machine may stand still."""
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
            "purge": Purged(0, ()),
            "search": nothing_found,
            "held_keys": HeldPage([], None),
            "followers": [],
            "disarm": None,
            "release": frozenset(),
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

    async def release(self, held: Mapping[int, Held]) -> frozenset[int]:
        return await self._call("release", held)  # type: ignore[no-any-return]

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

    async def due(self, cursors: Mapping[int, int], limit: int, here: Sequence[int] = ()) -> Due:
        return await self._call("due", cursors, limit, list(here))  # type: ignore[no-any-return]

    async def followers(self, heads: Sequence[Row], cursors: Mapping[int, int], limit: int) -> Sequence[Row]:
        return await self._call("followers", heads, cursors, limit)  # type: ignore[no-any-return]

    async def held_keys(self, shards: Sequence[int], after: Place | None, limit: int) -> HeldPage:
        return await self._call("held_keys", shards, after, limit)  # type: ignore[no-any-return]

    async def apply_policy(self, epochs: Mapping[int, int], limit: int, spared: Sequence[int] = ()) -> PolicyApplied:
        return await self._call("apply_policy", epochs, limit, spared)  # type: ignore[no-any-return]

    async def arm(self, wait_s: float) -> Armed:
        return await self._call("arm", wait_s)  # type: ignore[no-any-return]

    async def disarm(self) -> None:
        await self._call("disarm")

    async def settle(self, settlement: Settlement) -> Settled:
        return await self._call("settle", settlement)  # type: ignore[no-any-return]

    async def purge(self, older_than_s: float, limit: int, spared: Sequence[int] = ()) -> Purged:
        return await self._call("purge", older_than_s, limit, spared)  # type: ignore[no-any-return]

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
        self.unverified: dict[str, str] = {}
        """Exchanges that are being asked for, by their rows' ids."""

    @property
    def in_flight(self) -> int:
        return len(self.open)

    def route_of(self, row: Row) -> tuple[str, str]:
        return "events", row.event_type

    @property
    def oldest(self) -> Row | None:
        return next(iter(self.open.values()), None)

    @property
    def in_doubt(self) -> int:
        return len(self.open)

    def is_in_flight(self, message_id: str) -> bool:
        return message_id in self.open

    def publish(self, rows: Sequence[Row]) -> Publication:
        taken = rows[: self.takes_max]
        unknown = next((at for at, row in enumerate(taken) if row.id in self.unverified), None)
        if unknown is not None:
            return replace(self.publish(rows[:unknown]), unverified=self.unverified[rows[unknown].id])
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
        self.listener.on_writable()

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


def make_row(seq: int, key: str | None = "k", *, shard: int = 0, event_type: str = "ok", **columns: Any) -> Row:
    return Row(shard, seq, f"m{seq}", event_type, ctid=f"(0,{seq})", aggregate_id=key, created_at=0.0, **columns)


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

    def confirm(self, row: Row) -> None:
        """The row is read, published, and confirmed."""
        self.engine.admit([row])
        self.turn()
        self.link.ack(row)

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
