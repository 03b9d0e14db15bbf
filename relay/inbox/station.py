"""Where a queue is consumed: the link's lives, the hands of each, the end.

    starting -> consuming -> (link lost -> backoff -> consuming)* -> draining -> ended

Owns: the reconnects (bounded backoff, one at a time), the hands of one link's life, the gauges of the queues, the graceful
stop. What happens to a message is the hand's.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from enum import StrEnum
from typing import Final, Protocol, TypeVar

import aiormq

from relay.broker.losses import CONNECTION_ERRORS, named
from relay.broker.methods import messages_ready
from relay.errors import BrokerUnavailable, ConfigError, DrainIncomplete, RelayError
from relay.inbox.hand import BROKER_TIMEOUT_S, Hand, Life, LifeOver, Shared
from relay.inbox.publisher import Connection, Lane, Publisher, connect
from relay.topology import names

BACKOFF_MIN_S: Final = 0.1
BACKOFF_MAX_S: Final = 5.0
GAUGE_END_TIMEOUT_S: Final = 1.0

STEADY_S: Final = 10.0
"""A link that was consumed so long had come up; one that is lost sooner is one more failure in a row."""

LINKLESS_S: Final = 10.0
"""Whoever had no link for so long gives back the right that others wait for: the mailbox's lease."""

T = TypeVar("T")

Urls = Callable[[], Sequence[str]]


class Standby(RelayError):
    """Another one does this work already; it is taken over when that one ends."""


class Full(RelayError):
    """The backing has room for nothing more, for now."""


class Backing(Protocol):
    """What a station needs of its database."""

    async def check(self) -> None:
        """Asked before anything is consumed. Raises a RelayError while it could not work."""

    async def close(self) -> None:
        """Give back what is open."""


class Station:
    """`hands` makes one worker of a link's life. `errands` go on beside the work, until the end; they handle their own
    failures. `resign` gives back what only one can have, until the backing is checked again: called when there was no link
    for `LINKLESS_S`, and from then on the broker is tried first.
    """

    def __init__(
        self,
        shared: Shared,
        urls: Urls,
        backing: Backing,
        hands: Callable[[Life, Lane], Hand],
        errands: Sequence[Callable[[], Coroutine[None, None, None]]] = (),
        resign: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._shared = shared
        self._settings = shared.settings
        self._queue = shared.queue
        self._urls = urls
        self._backing = backing
        self._hands = hands
        self._errands = errands
        self._resign = resign
        self._has_resigned = False
        self._linked_at = time.monotonic()
        self.metrics = shared.metrics
        self.readiness = shared.readiness
        self.readiness.add("broker", "not connected yet")
        self._log = shared.log
        self._stopping = asyncio.Event()
        self._life: Life | None = None
        self._was_connected = False
        self._failures = 0

    @property
    def unsettled(self) -> int:
        """Messages in work: a stop waits for them."""
        return self.metrics.busy_workers

    def stop(self) -> None:
        """Take nothing new, finish what is in work; `run` returns then. May be called from a signal handler."""
        self._stopping.set()
        self.leave("stopped")

    def leave(self, reason: str) -> None:
        """Give up the link, if there is one. Another is made when the backing says again that it can work."""
        if self._life is not None:
            self._life.end(reason)

    async def run(self) -> None:
        """Consume until `stop`. Outages are waited for. Raises DrainIncomplete when the grace ran out, ConfigError for a
        broker that cannot do what the settings ask of it.
        """
        errands = [asyncio.ensure_future(errand()) for errand in self._errands]
        try:
            while not self._stopping.is_set():
                try:
                    if self._has_resigned:
                        await self._unless_stopped(self._try_broker())
                    await self._unless_stopped(self._check())
                    # A stop that came meanwhile had no life to end.
                    if not self._stopping.is_set():
                        await self._live()
                except (DrainIncomplete, ConfigError):
                    raise
                except RelayError as error:
                    self._failures += 1
                    self._tell(error)
                    await self._resign_without_link(error)
                await self._back_off()
        finally:
            for errand in errands:
                errand.cancel()
            await asyncio.gather(*errands, return_exceptions=True)
            await self._backing.close()

    async def _resign_without_link(self, error: RelayError) -> None:
        """Another one may have a broker: it takes over."""
        is_linkless = isinstance(error, BrokerUnavailable) and time.monotonic() - self._linked_at >= LINKLESS_S
        if self._resign is not None and is_linkless and not self._has_resigned:
            self._has_resigned = True
            await self._unless_stopped(self._give_back(self._resign))

    async def _give_back(self, resign: Callable[[], Awaitable[None]]) -> None:
        await resign()
        self._log.warning("right_given_back", queue=self._queue, hint="another sidecar that has a broker takes over")

    async def _try_broker(self) -> None:
        """Raises BrokerUnavailable."""
        await _close(await self._connect("consumer"))
        self._has_resigned = False
        self._linked_at = time.monotonic()

    async def _check(self) -> None:
        await self._backing.check()
        self._shared.tell_database()

    async def _live(self) -> None:
        """One life of the link: returns when it is over, and at a stop before it began. Raises BrokerUnavailable, DrainIncomplete."""
        life = self._life = Life(self._settings.workers, self._begin)
        connection = await self._unless_stopped(self._connect("consumer"))
        if connection is None:
            return
        if self._settings.returns_to_broker and (fault := _delay_fault(connection)) is not None:
            await _close(connection)
            raise ConfigError([fault])
        connection.close_callbacks.add(lambda *_: life.end("the connection was lost"))
        publisher = Publisher(lambda: self._connect("copies"))
        hands = [self._hands(life, publisher.lane()) for _ in range(self._settings.workers)]
        gauges = asyncio.ensure_future(self._watch_queues(connection, life))
        tasks = [asyncio.ensure_future(hand.run(connection)) for hand in hands]
        for task in tasks:
            task.add_done_callback(lambda _: life.end("a worker ended"))
        try:
            await life.wait()
            if life.lasted_s >= STEADY_S:
                self._failures = 0
            await self._drain(hands, tasks)
        finally:
            life.end("ended")
            # A question that is cut off in the middle is a warning in the driver's log.
            await asyncio.wait((gauges,), timeout=GAUGE_END_TIMEOUT_S)
            gauges.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(gauges, *tasks, return_exceptions=True)
            self._linked_at = time.monotonic()
            await publisher.close()
            await _close(connection)
        for task in tasks:
            if not task.cancelled() and (error := task.exception()) is not None:
                raise error
        if not self._stopping.is_set():
            raise BrokerUnavailable(life.reason)

    def _begin(self) -> None:
        """All workers consume."""
        self.metrics.connected["broker"] = True
        self.readiness.remove("broker")
        self._log.info("consuming", workers=self._settings.workers, prefetch=self._settings.prefetch)
        if self._was_connected:
            self.metrics.reconnects += 1
        self._was_connected = True

    async def _drain(self, hands: Sequence[Hand], tasks: Sequence[asyncio.Task[None]]) -> None:
        """The messages in work end: after a loss within their own time limit, after a stop, whenever it comes, within the
        grace. A hand that still waits for its channel then has nothing in work.
        """
        ended = asyncio.wait(tasks, timeout=self._settings.time_limit_s + 1.0)
        await self._unless_stopped(ended)
        if not self._stopping.is_set():
            return
        for hand, task in zip(hands, tasks, strict=True):
            if not hand.consumes:
                task.cancel()
        _, pending = await asyncio.wait(tasks, timeout=self._settings.grace_s)
        busy = self.metrics.busy_workers
        for task in pending:
            task.cancel()
        if busy:
            raise DrainIncomplete(
                f"the grace of {self._settings.grace_s:g} s ran out with {busy} messages in work",
                hint="they are delivered again; their transactions were rolled back",
            )

    async def _unless_stopped(self, work: Coroutine[None, None, T]) -> T | None:
        """What it gives; None, and it is left, where a stop comes first: no server that does not answer holds one up."""
        task, stopping = asyncio.ensure_future(work), asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait((task, stopping), return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else None
        finally:
            stopping.cancel()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _connect(self, purpose: str) -> Connection:
        return await connect(
            tuple(self._urls()), f"outbox-relay inbox {self._shared.consumer} {purpose}", BROKER_TIMEOUT_S
        )

    async def _back_off(self) -> None:
        if not self._stopping.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), backoff_s(self._failures, self._shared.random.random()))

    def _tell(self, error: RelayError) -> None:
        if isinstance(error, BrokerUnavailable):
            self._shared.tell_away("broker", error)
        elif isinstance(error, Standby):
            self._shared.tell_standby(error)
        elif isinstance(error, Full):
            self._shared.tell_full(error)
        else:
            self._shared.tell_away("database", error)

    # ---------------------------------------------------------------- beside the work

    async def _watch_queues(self, connection: Connection, life: Life) -> None:
        """How many messages are ready, queue by queue; a queue that is missing makes the consumer not ready."""
        wanted = (self._queue, *self._settings.queues_beside(self._queue))
        found: dict[str, int | Unseen] = {}
        patience = {queue: _Patience() for queue in wanted}
        while not life.is_over:
            for queue in wanted:
                if patience[queue].is_over():
                    found[queue] = await _messages_ready(connection, queue)
                    patience[queue].note(is_missing=found[queue] is Unseen.MISSING)
            self.metrics.queue_messages = {queue: ready for queue, ready in found.items() if isinstance(ready, int)}
            if not life.is_over:
                self._note_missing([queue for queue, ready in found.items() if ready is Unseen.MISSING])
            try:
                await life.rest(self._settings.gauge_interval_s)
            except LifeOver:
                return

    def _note_missing(self, missing: Sequence[str]) -> None:
        known = dict(self.readiness.reasons).get("queues")
        text = f"no such queue: {', '.join(missing)}"
        if not missing:
            self.readiness.remove("queues")
        elif known != text:
            self.readiness.add("queues", text)
            self._log.warning("queues_missing", queues=list(missing), hint="relay topology apply")


class Unseen(StrEnum):
    """Why there is no number of messages."""

    MISSING = "missing"
    UNANSWERED = "unanswered"


class _Patience:
    """How many turns to leave out before a queue is asked for again: each question for a missing one is two lines in the
    broker's log.
    """

    __slots__ = ("_missed", "_turns")

    def __init__(self) -> None:
        self._missed = 0
        self._turns = 0

    def is_over(self) -> bool:
        """Whether to ask in this turn."""
        self._turns -= 1
        return self._turns < 0

    def note(self, *, is_missing: bool) -> None:
        """What the answer was."""
        self._missed = min(self._missed + 1, 5) if is_missing else 0
        self._turns = 2**self._missed - 1 if is_missing else 0


def backoff_s(failures: int, roll: float) -> float:
    """How long to wait after so many in a row; `roll` in [0, 1)."""
    return min(BACKOFF_MAX_S, BACKOFF_MIN_S * 2.0 ** min(failures, 10)) * (0.5 + 0.5 * roll)


async def _messages_ready(connection: Connection, queue: str) -> int | Unseen:
    try:
        async with asyncio.timeout(BROKER_TIMEOUT_S):
            return await named(_ask_for_messages(connection, queue))
    except aiormq.exceptions.ChannelNotFoundEntity:
        return Unseen.MISSING
    except CONNECTION_ERRORS:
        return Unseen.UNANSWERED


async def _ask_for_messages(connection: Connection, queue: str) -> int:
    """A queue that does not exist costs the channel of the question: each has one of its own."""
    channel = await (await connection.channel(publisher_confirms=False)).get_underlay_channel()
    ready = await messages_ready(channel, queue)
    await channel.close()
    return ready


def _delay_fault(connection: Connection) -> str | None:
    """Why the broker cannot delay what is returned to it; each return would come back at once."""
    assert connection.transport is not None, "not connected"
    said = connection.transport.connection.server_properties.get("version", "")
    version = said.decode(errors="replace") if isinstance(said, bytes) else str(said)
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) >= names.BROKER_RETRY_VERSION_MIN:
        return None
    needed = ".".join(map(str, names.BROKER_RETRY_VERSION_MIN))
    return (
        f"retry=BrokerRetry: RabbitMQ {version} does not delay what is returned to it; allowed: RabbitMQ {needed} or later, "
        "or a RetryPolicy with retry queues"
    )


async def _close(connection: Connection) -> None:
    with contextlib.suppress(*CONNECTION_ERRORS):
        await asyncio.wait_for(named(connection.close()), 5.0)
