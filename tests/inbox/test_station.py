"""A station without servers: what it waits for, and how long, when its link is lost and when it is told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import aiormq
import pytest

from relay.errors import DrainIncomplete
from relay.http import Readiness
from relay.inbox import ConsumerSettings, RetryPolicy
from relay.inbox import hand as hand_module
from relay.inbox import publisher as publisher_module
from relay.inbox import station as station_module
from relay.inbox.breaker import Breaker
from relay.inbox.copies import Copy
from relay.inbox.hand import Hand, Life, LifeOver, Shared
from relay.inbox.metrics import InboxMetrics
from relay.inbox.publisher import Connection, CopyUnavailable, Lane, Publisher
from relay.inbox.station import STEADY_S, Station
from relay.logs import get_logger
from relay.properties import ExactProperties
from tests.conftest import eventually
from tests.losses import BY_ANY_LOSS, losing


class Link:
    """A connection on which nothing is ever answered."""

    def __init__(self) -> None:
        self.close_callbacks: set[Callable[..., None]] = set()

    async def channel(self, **_: Any) -> None:
        raise RuntimeError("closed")

    async def close(self) -> None:
        """At once."""

    def lose(self) -> None:
        """It is gone."""
        for callback in self.close_callbacks:
            callback()


class Backing:
    """A database that answers at once."""

    async def check(self) -> None:
        """It does."""

    async def close(self) -> None:
        """Nothing is open."""


class HangingHand(Hand):
    """A handler that hangs until it is cancelled."""

    async def run(self, connection: Connection) -> None:
        self.consumes = True
        self._life.join()
        self._metrics.busy_workers += 1
        try:
            await asyncio.Event().wait()
        finally:
            self._metrics.busy_workers -= 1

    async def _take(self, delivery: Any) -> None:
        """Never asked."""


class OpeningHand(HangingHand):
    """One that opens its channel, as all do."""

    run = Hand.run


class LosingHand(HangingHand):
    """Consumes, and its link is lost at once."""

    async def run(self, connection: Connection) -> None:
        self._life.join()
        cast("Link", connection).lose()


class Place:
    """A station over links that are handed out one after the other."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kind: type[HangingHand], **settings: Any) -> None:
        self.links: list[Link] = []

        async def connect(*_: Any) -> Link:
            self.links.append(Link())
            return self.links[-1]

        monkeypatch.setattr(station_module, "connect", connect)
        self.shared = Shared(
            "c",
            "q",
            ConsumerSettings(workers=1, retry=RetryPolicy(delays_s=()), **settings),
            Breaker(),
            InboxMetrics(),
            Readiness(),
            random.Random(1),
            get_logger(),
        )

        def hand(life: Life, lane: Lane) -> Hand:
            return kind(self.shared, life, lane)

        self.station = Station(self.shared, lambda: ("amqp://a",), Backing(), hand)


async def test_a_stop_while_a_lost_link_drains_is_bounded_by_the_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """How long to wait was chosen when the link was lost: a handler that hung held a stop up for its own time limit."""
    place = Place(monkeypatch, HangingHand, time_limit_s=3600.0, grace_s=0.05)
    running = asyncio.create_task(place.station.run())
    await eventually(lambda: place.shared.metrics.busy_workers == 1)
    draining = asyncio.Event()
    drain = place.station._drain

    async def noted(*given: Any) -> None:
        draining.set()
        await drain(*given)

    monkeypatch.setattr(place.station, "_drain", noted)
    place.links[0].lose()
    await draining.wait()
    place.station.stop()
    with pytest.raises(DrainIncomplete, match=r"the grace of 0\.05 s ran out with 1 messages in work"):
        await asyncio.wait_for(running, 10.0)
    assert place.shared.metrics.busy_workers == 0


@pytest.mark.parametrize("silent", ["database", "broker", "channel"])
async def test_a_stop_does_not_wait_for_a_server_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, silent: str
) -> None:
    """A connect that came to nothing for 10 s a URL held it up for longer than a container runtime waits."""
    place = Place(monkeypatch, HangingHand)
    asked = asyncio.Event()

    async def hang(*_: Any, **__: Any) -> Link:
        asked.set()
        await asyncio.Event().wait()
        raise AssertionError("never")

    if silent == "channel":
        place = Place(monkeypatch, OpeningHand, grace_s=3600.0)
        monkeypatch.setattr(Link, "channel", hang)
    elif silent == "broker":
        monkeypatch.setattr(station_module, "connect", hang)
    else:
        monkeypatch.setattr(place.station._backing, "check", hang)
    running = asyncio.create_task(place.station.run())
    await asked.wait()
    place.station.stop()
    await asyncio.wait_for(running, 10.0)


@pytest.mark.parametrize(("lasted_s", "failures"), [(STEADY_S / 2, [1, 2, 3, 4]), (STEADY_S, [1, 1, 1, 1])])
async def test_a_link_that_never_lasts_is_built_ever_more_slowly(
    monkeypatch: pytest.MonkeyPatch, lasted_s: float, failures: list[int]
) -> None:
    """It had come up, so each loss was the first one: seven reconnects a second, for ever."""
    place = Place(monkeypatch, LosingHand)
    clock = iter(range(1000))
    monkeypatch.setattr(hand_module, "time", SimpleNamespace(monotonic=lambda: next(clock) * lasted_s))
    counted: list[int] = []

    def backoff_s(count: int, _: float) -> float:
        counted.append(count)
        if len(counted) == len(failures):
            place.station.stop()
        return 0.0

    monkeypatch.setattr(station_module, "backoff_s", backoff_s)
    await asyncio.wait_for(place.station.run(), 10.0)
    assert counted == failures


@BY_ANY_LOSS
async def test_peers_that_hang_up_in_the_handshake_are_an_outage(
    monkeypatch: pytest.MonkeyPatch, loss: BaseException
) -> None:
    """A proxy before a broker that was down ended the consumer with a traceback: StopAsyncIteration, by the driver."""
    waits: list[int] = []

    def backoff_s(failures: int, _: float) -> float:
        waits.append(failures)
        return 0.0

    place = Place(monkeypatch, HangingHand)
    monkeypatch.setattr(station_module, "connect", publisher_module.connect)
    monkeypatch.setattr(station_module, "backoff_s", backoff_s)
    monkeypatch.setattr(aiormq.Connection, "connect", losing(loss))
    running = asyncio.create_task(place.station.run())
    await eventually(lambda: len(waits) > 3 or running.done())
    place.station.stop()
    await asyncio.wait_for(running, 10.0)
    assert waits[:3] == [1, 2, 3]
    assert dict(place.station.readiness.reasons)["broker"].startswith("RabbitMQ cannot be reached: ")


@BY_ANY_LOSS
async def test_a_link_that_goes_while_it_opens_or_closes_is_built_anew(
    monkeypatch: pytest.MonkeyPatch, loss: BaseException
) -> None:
    """The driver's own failures, which it gives to all who wait, ended the consumer."""
    place = Place(monkeypatch, OpeningHand)
    monkeypatch.setattr(Link, "channel", losing(loss))
    monkeypatch.setattr(Link, "close", losing(loss))
    monkeypatch.setattr(station_module, "backoff_s", lambda *_: 0.0)
    running = asyncio.create_task(place.station.run())
    await eventually(lambda: len(place.links) > 3 or running.done())
    place.station.stop()
    await asyncio.wait_for(running, 10.0)
    assert dict(place.station.readiness.reasons)["broker"].startswith("cannot consume q: ")


@BY_ANY_LOSS
async def test_an_acknowledgement_whose_connection_goes_ends_the_life(
    monkeypatch: pytest.MonkeyPatch, loss: BaseException
) -> None:
    """The same while an acknowledgement is sent; the broker delivers the message again."""
    life = Life(1, lambda: None)
    hand = HangingHand(Place(monkeypatch, HangingHand).shared, life, Lane(losing(loss)))
    with pytest.raises(LifeOver):
        await hand._send_end(losing(loss)())
    assert life.reason == "an acknowledgement could not be sent"


@BY_ANY_LOSS
async def test_a_copy_whose_connection_goes_is_made_again(monkeypatch: pytest.MonkeyPatch, loss: BaseException) -> None:
    """The same while a copy is published, and while its connection ends."""
    with pytest.raises(CopyUnavailable, match=r"no confirm for the copy to q\.parking"):
        await Lane(losing(loss)).publish(Copy("", "q.parking", b"", ExactProperties()))
    publisher = Publisher(losing(loss))
    monkeypatch.setattr(publisher, "_connection", SimpleNamespace(close=losing(loss)))
    await publisher.close()


async def test_a_stop_is_not_taken_for_a_lost_connection() -> None:
    """Who is cancelled ends, also where he waits for the driver."""
    asked = asyncio.Event()

    async def hang() -> Any:
        asked.set()
        await asyncio.Event().wait()

    publishing = asyncio.create_task(Lane(hang).publish(Copy("", "q.parking", b"", ExactProperties())))
    await asked.wait()
    publishing.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await publishing
    assert publishing.cancelled()
