"""A consumer: its workers, its connections, its end.

    starting -> consuming -> (link lost -> backoff -> consuming)* -> draining -> ended

Owns: the reconnects (bounded backoff, one at a time), the workers of one link's life, the gauges, the retention, the
graceful stop. What happens to a message is the worker's.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Final

import aiormq
from aio_pika.abc import AbstractConnection
from prometheus_client.registry import Collector

from relay.errors import BrokerUnavailable, ConfigError, DrainIncomplete, RelayError
from relay.http import Readiness, TableCollector
from relay.inbox import retention
from relay.inbox.breaker import Breaker
from relay.inbox.ledger import AsyncpgLedger, Handler, Ledger
from relay.inbox.metrics import METRICS, InboxMetrics
from relay.inbox.publisher import Publisher, connect
from relay.inbox.settings import ConsumerSettings
from relay.inbox.worker import BROKER_TIMEOUT_S, Life, Shared, Worker
from relay.logs import Log, get_logger
from relay.topology import names
from relay.urls import DatabaseTarget, amqp_urls, database_target

BACKOFF_MIN_S: Final = 0.1
BACKOFF_MAX_S: Final = 5.0
RETENTION_INTERVAL_S: Final = 3600.0

Urls = Callable[[], Sequence[str]]
Target = Callable[[], DatabaseTarget | str]


class Consumer:
    """Consumes `queue` under the name `name`, which is what its inbox rows are recorded under: it never changes.

    `amqp_url` and `database_url` are texts, or functions that are asked at each connect (rotated credentials).
    Instead of `database_url` a `ledger` of one's own brings another driver. Raises ConfigError.
    """

    def __init__(
        self,
        *,
        name: str,
        queue: str,
        handler: Handler,
        amqp_url: str | Urls,
        database_url: str | Target | None = None,
        ledger: Ledger | None = None,
        settings: ConsumerSettings | None = None,
        log: Log | None = None,
    ) -> None:
        self._settings = settings or ConsumerSettings()
        self._queue = queue
        self._urls = _urls(amqp_url)
        self._target = None if database_url is None else _target(database_url)
        if (self._target is None) == (ledger is None):
            raise ConfigError(["database_url, ledger: exactly one of them is given"])
        if self._target is None and self._settings.retention_s is not None:
            raise ConfigError(["retention_s: needs database_url; with a ledger of your own the purge is yours too"])
        self.metrics = InboxMetrics()
        self.readiness = Readiness()
        self.readiness.add("broker", "not connected yet")
        self._name = name
        self._log = (log or get_logger()).bind(consumer=name, queue=queue)
        self._ledger = ledger or self._own_ledger()
        # The system's own randomness: consumers that start together must not back off together.
        self._random = random.Random(random.SystemRandom().getrandbits(64))
        self._shared = Shared(
            name,
            queue,
            handler,
            self._ledger,
            self._settings,
            Breaker(),
            self.metrics,
            self.readiness,
            self._random,
            self._log,
        )
        self._stopping = asyncio.Event()
        self._life: Life | None = None
        self._was_connected = False

    def collector(self) -> Collector:
        """The metrics for a registry of prometheus-client."""
        return TableCollector(METRICS, self.metrics)

    def stop(self) -> None:
        """Take nothing new, finish what is in work; `run` returns then. May be called from a signal handler."""
        self._stopping.set()
        if self._life is not None:
            self._life.end("stopped")

    async def run(self) -> None:
        """Consume until `stop`. Outages are waited for. Raises DrainIncomplete when the grace ran out."""
        purge = asyncio.ensure_future(self._forget())
        failures = 0
        try:
            while not self._stopping.is_set():
                try:
                    await self._ledger.check()
                    self.metrics.connected["database"] = True
                    self.readiness.remove("database")
                    await self._live()
                except DrainIncomplete:
                    raise
                except RelayError as error:
                    failures = 1 if self.metrics.connected["broker"] else failures + 1
                    self._tell(error, is_first=failures == 1)
                if not self._stopping.is_set():
                    await self._back_off(failures)
        finally:
            purge.cancel()
            await self._ledger.close()

    async def _live(self) -> None:
        """One life of the link: returns when it is over. Raises BrokerUnavailable, DrainIncomplete."""
        life = self._life = Life(self._settings.workers, self._begin)
        connection = await self._connect("consumer")
        connection.close_callbacks.add(lambda *_: life.end("the connection was lost"))
        publisher = Publisher(lambda: self._connect("copies"))
        workers = [Worker(self._shared, life, publisher.lane()) for _ in range(self._settings.workers)]
        gauges = asyncio.ensure_future(self._watch_queues(connection, life))
        tasks = [asyncio.ensure_future(worker.run(connection)) for worker in workers]
        for task in tasks:
            task.add_done_callback(lambda _: life.end("a worker ended"))
        try:
            await life.wait()
            await self._drain(tasks)
        finally:
            gauges.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(gauges, *tasks, return_exceptions=True)
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

    async def _drain(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        """The messages in work end: after a stop within the grace, after a loss within their own time limit."""
        limit_s = self._settings.grace_s if self._stopping.is_set() else self._settings.time_limit_s + 1.0
        _, pending = await asyncio.wait(tasks, timeout=limit_s)
        if pending and self._stopping.is_set():
            for task in pending:
                task.cancel()
            raise DrainIncomplete(
                f"the grace of {limit_s:g} s ran out with {len(pending)} messages in work",
                hint="they are delivered again; their transactions were rolled back",
            )

    async def _connect(self, purpose: str) -> AbstractConnection:
        return await connect(tuple(self._urls()), f"outbox-relay inbox {self._name} {purpose}", BROKER_TIMEOUT_S)

    async def _back_off(self, failures: int) -> None:
        ceiling_s = min(BACKOFF_MAX_S, BACKOFF_MIN_S * 2.0 ** min(failures, 10))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), ceiling_s * (0.5 + 0.5 * self._random.random()))

    def _tell(self, error: RelayError, *, is_first: bool) -> None:
        """Not ready, and one line for the first of several failures in a row."""
        reason = "broker" if isinstance(error, BrokerUnavailable) else "database"
        self.metrics.connected[reason] = False
        self.readiness.add(reason, error.message)
        if is_first:
            self._log.warning("consumer_waits", reason=reason, error=error, hint=error.hint)

    # ---------------------------------------------------------------- beside the work

    async def _watch_queues(self, connection: AbstractConnection, life: Life) -> None:
        """How many messages are ready, queue by queue; a queue that is missing makes the consumer not ready."""
        settings = self._settings
        delays = [names.retry_queue(self._queue, delay_s) for delay_s in settings.retry.delays_s]
        wanted = (self._queue, *delays, settings.parking_queue or names.parking_queue(self._queue))
        while not life.is_over:
            found = {queue: await _messages_ready(connection, queue) for queue in wanted}
            self.metrics.queue_messages = {queue: ready for queue, ready in found.items() if isinstance(ready, int)}
            if not life.is_over:
                self._note_missing([queue for queue, ready in found.items() if ready is Unseen.MISSING])
            await asyncio.sleep(settings.gauge_interval_s)

    def _note_missing(self, missing: Sequence[str]) -> None:
        known = dict(self.readiness.reasons).get("queues")
        text = f"no such queue: {', '.join(missing)}"
        if not missing:
            self.readiness.remove("queues")
        elif known != text:
            self.readiness.add("queues", text)
            self._log.warning("queues_missing", queues=list(missing), hint="relay topology apply")

    async def _forget(self) -> None:
        retention_s, target = self._settings.retention_s, self._target
        if retention_s is None or target is None:
            return
        while True:
            try:
                await retention.forget(target(), self._name, retention_s, on_batch=self._count_forgotten)
            except RelayError as error:
                self._log.warning("retention_failed", error=error)
            await asyncio.sleep(RETENTION_INTERVAL_S)

    def _count_forgotten(self, count: int) -> None:
        self.metrics.forgotten += count

    def _own_ledger(self) -> Ledger:
        assert self._target is not None
        return AsyncpgLedger(self._target, order=self._settings.order, first_version=self._settings.first_version)


class Unseen(StrEnum):
    """Why there is no number of messages."""

    MISSING = "missing"
    UNANSWERED = "unanswered"


async def _messages_ready(connection: AbstractConnection, queue: str) -> int | Unseen:
    """A queue that does not exist costs the channel of the question: each has one of its own."""
    try:
        async with asyncio.timeout(BROKER_TIMEOUT_S):
            channel = await (await connection.channel(publisher_confirms=False)).get_underlay_channel()
            answer = await channel.queue_declare(queue, passive=True)
            await channel.close()
            return answer.message_count or 0
    except aiormq.exceptions.ChannelNotFoundEntity:
        return Unseen.MISSING
    except (aiormq.AMQPError, RuntimeError, OSError, TimeoutError):
        return Unseen.UNANSWERED


async def _close(connection: AbstractConnection) -> None:
    with contextlib.suppress(aiormq.AMQPError, RuntimeError, OSError, TimeoutError):
        await asyncio.wait_for(connection.close(), 5.0)


def _urls(given: str | Urls) -> Urls:
    if not isinstance(given, str):
        return given
    try:
        urls = amqp_urls(given)
    except ValueError as error:
        raise ConfigError([f"amqp_url: {error}"]) from None
    return lambda: urls


def _target(given: str | Target) -> Target:
    if not isinstance(given, str):
        return given
    try:
        target = database_target(given)
    except ValueError as error:
        raise ConfigError([f"database_url: {error}"]) from None
    return lambda: target
