"""The engine's runner and the signal, without a simulation: one call, one look at what became of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import pytest

from relay import runner
from relay.core.ports.outbox import Armed, Check, Claim, Due, Held, OutboxInfo, Page, Settled
from relay.core.settings import EngineSettings
from relay.engine import Engine, Signal
from relay.errors import DatabaseUnavailable
from relay.http import Readiness
from relay.logs import Log
from relay.message import Row
from relay.metrics import Metrics
from relay.runner import Runner
from tests.core.parts import (
    DEADLINE_S,
    INFO,
    StillClock,
    TestedBroker,
    TestedLink,
    TestedOutbox,
    eventually,
    make_row,
    renewal,
    turns,
)

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


async def test_a_reconnect_counts_once_it_is_made() -> None:
    relay = RunningRelay(check=Check(1, [], 5000.0), page=Page([], []))
    reconnects = relay.engine.metrics.reconnects
    async with relay_running(relay):
        await eventually(lambda: len(relay.broker.links) == 1)
        assert reconnects == {"database": 0, "broker": 0}
        del relay.outbox.answers["open"]
        relay.outbox.on_lost("the server went away")
        call = await relay.outbox.called("open")
        assert reconnects["database"] == 0, "it is away still"
        call.answer(INFO)
        await eventually(lambda: reconnects["database"] == 1)
        relay.link.cut()
        assert reconnects["broker"] == 0
        await eventually(lambda: len(relay.broker.links) == 2)
        assert reconnects == {"database": 1, "broker": 1}


async def test_what_is_in_flight_shows_in_messages_and_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "WATCH_INTERVAL_S", 0.1)
    relay = RunningRelay(check=Check(2, [], 5000.0), settle=lambda settlement: Settled(done=settlement.sent))
    metrics = relay.engine.metrics
    async with relay_running(relay):
        await eventually(lambda: len(relay.broker.links) == 1)
        rows = [make_row(1, "a", size=1000), make_row(2, "b", size=30)]
        await relay.started(*rows)
        await eventually(lambda: metrics.in_flight_messages == 2)
        assert metrics.in_flight_bytes == 1030
        relay.link.ack(rows[0])
        await eventually(lambda: metrics.in_flight_messages == 1)
        assert metrics.in_flight_bytes == 30
        relay.link.ack(rows[1])
        await eventually(lambda: metrics.in_flight_messages == 0)
        assert metrics.in_flight_bytes == 0


async def test_a_database_that_stays_away_is_tried_less_and_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """Never a storm: as the ladder has it (tests/core/test_ladder.py), also where each session is lost as soon as it is open."""
    relay = RunningRelay(check=Check(1, [], 5000.0), page=Page([], []))
    failures: list[int] = []
    tries = 0

    def backoff(count: int, roll: float) -> float:
        failures.append(count)
        return 0.1

    async def open_(on_ring: object, on_lost: Callable[[str], None]) -> OutboxInfo:
        nonlocal tries
        tries += 1
        await asyncio.sleep(0)
        if tries < 8:
            raise DatabaseUnavailable("nobody listens")
        asyncio.get_running_loop().call_soon(on_lost, "gone again")
        return INFO

    monkeypatch.setattr(runner, "reconnect_backoff", backoff)
    monkeypatch.setattr(relay.outbox, "open", open_)
    async with relay_running(relay):
        await eventually(lambda: tries >= 16)
    assert failures[:14] == list(range(1, 15))


async def test_the_broker_is_not_said_to_be_away_before_it_was_tried() -> None:
    """A sidecar that waited for its schema for a minute left the fair share at once: `fair_share_left`, reason broker."""
    relay = RunningRelay(check=Check(1, [], 5000.0), page=Page([], []))
    del relay.outbox.answers["open"]
    async with relay_running(relay):
        call = await relay.outbox.called("open")
        assert dict(relay.readiness.reasons)["broker"] == "waits for the database"
        relay.clock.time += 3600.0
        call.answer(INFO)
        await eventually(lambda: bool(relay.outbox.calls("renew")))
        assert relay.engine.is_available
        await eventually(lambda: relay.readiness.is_ready)


async def test_a_stop_settles_what_is_in_flight_and_gives_the_shards_back() -> None:
    relay = RunningRelay(check=Check(2, [], 5000.0), leave=None)
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
