"""One run of `relay redrive`: through a queue once, each message to work, left, or reported.

Owns: when a run ends. It looks at as many messages as were ready when it began, so what comes back behind them is not its
business; it stops at the limit, at a full queue, when it is told to stop. A route that led nowhere is not tried again. Every
message that was not confirmed goes back to its place.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from relay.config import Config
from relay.errors import BrokerError
from relay.redrive.carrier import Carrier
from relay.redrive.choice import Order, Route, Taken, copy_of, matches, route_of, was_seen
from relay.redrive.sender import Carried, Verdict
from relay.topology import names

SAMPLES: Final = 100
"""Messages that an outcome shows: failures, or what a dry run found."""

STOP_INTERVAL_S: Final = 0.25
"""How soon a wait for the rate's sake notices that it is to stop."""

NO_ROUTE: Final = "no_route"
"""A reason beside the verdicts: the message remembers no route and none was said."""

UNDECODABLE: Final = "undecodable"
"""Another one: a property or a header cannot be decoded, so there is no exact copy."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One message for people; `reason` and `text` None where it would go, or went."""

    id: str
    type: str
    route: Route | None
    error: str
    reason: str | None = None
    text: str | None = None


@dataclass(slots=True)
class Outcome:
    """Counts of messages. `stopped` says why a run ended before its time, None where it did not."""

    queue: str
    run: str
    is_dry: bool
    ready: int = 0
    looked_at: int = 0
    matched: int = 0
    redriven: int = 0
    failed: dict[str, int] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)
    returned_max: int = 0
    """How often the broker had given out one of the messages before and got it back."""
    stopped: str | None = None


Progress = Callable[[Outcome], None]


async def redrive(
    config: Config,
    order: Order,
    stop: asyncio.Event,
    on_progress: Progress = lambda _: None,
    on_end: Progress = lambda _: None,
) -> Outcome:
    """Run once; ends early, in good order, when `stop` is set. `on_end` is told in any case what was done.

    Raises BrokerUnavailable, BrokerRefused (no such queue, no rights, a lost connection): what was confirmed until then is
    done, everything else is in the queue.
    """
    carrier = await Carrier.open(config.amqp_urls(), order.queue, "outbox-relay redrive")
    outcome = Outcome(order.queue, secrets.token_hex(8), order.is_dry, ready=carrier.ready)
    try:
        await _Run(carrier, order, outcome, stop, on_progress).run()
    finally:
        await carrier.close()
        on_end(outcome)
    return outcome


class _Run:
    def __init__(
        self, carrier: Carrier, order: Order, outcome: Outcome, stop: asyncio.Event, on_progress: Progress
    ) -> None:
        self._carrier = carrier
        self._order = order
        self._outcome = outcome
        self._stop = stop
        self._on_progress = on_progress
        self._dead: dict[Route | str, str] = {}
        """Routes, and exchanges by name, that a message did not get through: the broker's words."""
        self._next_at = time.monotonic()
        self._under_way = 0

    async def run(self) -> None:
        outcome = self._outcome
        try:
            while outcome.looked_at < outcome.ready and not self._is_over():
                if (taken := await self._carrier.take()) is None:
                    break
                outcome.looked_at += 1
                await self._look_at(taken)
                await self._account()
            await self._carrier.settle()
        except BrokerError:
            with contextlib.suppress(BrokerError):
                await self._account()
            raise
        await self._account()

    def _is_over(self) -> bool:
        outcome, limit = self._outcome, self._order.limit
        if self._stop.is_set():
            outcome.stopped = outcome.stopped or "interrupted"
        done = outcome.matched if self._order.is_dry else outcome.redriven + self._under_way
        return outcome.stopped is not None or (limit is not None and done >= limit)

    async def _look_at(self, taken: Taken) -> None:
        outcome = self._outcome
        if was_seen(taken, outcome.run) or not matches(taken, self._order.where):
            self._carrier.leave()
            return
        outcome.matched += 1
        count = taken.headers.get("x-delivery-count")
        outcome.returned_max = max(outcome.returned_max, count if isinstance(count, int) else 0)
        if taken.fault is not None:
            self._carrier.leave()
            self._failed(taken, None, UNDECODABLE, taken.fault)
            return
        route = route_of(taken, self._order)
        if route is not None and not self._is_dead(taken, route) and not self._order.is_dry and await self._is_time():
            self._under_way += 1
            await self._carrier.carry(taken, route, copy_of(taken, outcome.run, self._carrier.user))
            return
        self._carrier.leave()
        if route is None:
            self._failed(taken, None, NO_ROUTE, "it remembers none; say --to-exchange and --routing-key")
        elif self._order.is_dry:
            self._sample(Sample(taken.id, taken.properties.message_type or "", route, _error(taken)))

    def _is_dead(self, taken: Taken, route: Route) -> bool:
        """Whether that route led nowhere before; counts the message as failed then."""
        for found, verdict in (
            (self._dead.get(route), Verdict.RETURNED),
            (self._dead.get(route.exchange), Verdict.REFUSED),
        ):
            if found is not None:
                self._failed(taken, route, verdict, found)
                return True
        return False

    async def _is_time(self) -> bool:
        """Wait for the rate's sake; False where the run was stopped meanwhile."""
        if self._order.rate_per_s is None:
            return True
        while (wait_s := self._next_at - time.monotonic()) > 0 and not self._is_over():
            # At a slow rate the confirm of the last message must not wait for the next; nor must a stop.
            await self._carrier.rest(min(wait_s, STOP_INTERVAL_S))
            await self._account()
        self._next_at = max(self._next_at, time.monotonic() - 1.0) + 1.0 / self._order.rate_per_s
        return not self._is_over()

    async def _account(self) -> None:
        """Count what has a verdict."""
        for one in await self._carrier.carried():
            self._under_way -= 1
            self._count(one)
        self._on_progress(self._outcome)

    def _count(self, one: Carried) -> None:
        if one.verdict is Verdict.SENT:
            self._outcome.redriven += 1
            return
        if one.verdict is Verdict.RETURNED:
            self._dead[one.route] = one.text
        elif one.is_of_exchange:
            self._dead[one.route.exchange] = one.text
        elif one.verdict is Verdict.NACKED:
            self._outcome.stopped = f"{one.route}: {one.text}"
        self._failed(one.taken, one.route, one.verdict, one.text)

    def _failed(self, taken: Taken, route: Route | None, reason: str, text: str) -> None:
        failed = self._outcome.failed
        failed[str(reason)] = failed.get(str(reason), 0) + 1
        self._sample(Sample(taken.id, taken.properties.message_type or "", route, _error(taken), str(reason), text))

    def _sample(self, sample: Sample) -> None:
        if len(self._outcome.samples) < SAMPLES:
            self._outcome.samples.append(sample)


def _error(taken: Taken) -> str:
    """Why it was parked, in the words that it carries."""
    found = (taken.headers.get(names.ERROR_CLASS), taken.headers.get(names.LAST_ERROR))
    said = ": ".join(str(part) for part in found if part)
    return said or str(taken.headers.get("x-first-death-reason") or "")
