"""A channel that consumes, what it has in hand, and the ends that a delivery can come to: ack, retry, return, parking,
reject.

Invariants: a message is acknowledged after its COMMIT or after its copy's confirm, never before; what is in hand when
the channel goes is delivered again, and the database knows it.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final

from aiormq.abc import AbstractChannel, DeliveredMessage

from relay.broker.deliveries import Deliveries, Undecodable
from relay.broker.losses import CONNECTION_ERRORS, named
from relay.broker.methods import consume
from relay.errors import BrokerUnavailable, RelayError
from relay.http import Readiness
from relay.inbox.breaker import Breaker
from relay.inbox.copies import Copy, Origin, parked_copy, retry_copy
from relay.inbox.faults import classify
from relay.inbox.message import Message, attempts_so_far, read
from relay.inbox.metrics import InboxMetrics
from relay.inbox.outcome import ErrorClass, Failure, Outcome, Park, Permanent, Retry
from relay.inbox.publisher import Connection, CopyImpossible, CopyUnavailable, Lane
from relay.inbox.returns import Returns
from relay.inbox.seldom import Seldom
from relay.inbox.settings import ConsumerSettings
from relay.logs import Log

COPY_BACKOFF_MIN_S: Final = 0.5
COPY_BACKOFF_MAX_S: Final = 30.0
BROKER_TIMEOUT_S: Final = 10.0
GIVE_BACK_TIMEOUT_S: Final = 2.0

CONSUMER_TAG: Final = "outbox-relay"
"""The one consumer of its channel."""

ACKS_TOGETHER: Final = 10
ACK_DELAY_S: Final = 0.02
"""An acknowledgement may wait for its neighbours' so long: each costs the consumer as much as a statement."""


class LifeOver(Exception):
    """The link ended or a stop was asked for: what is in hand stays unacknowledged."""


class Life:
    """From one connect to its end, shared by the workers of a consumer."""

    def __init__(self, workers: int, on_begin: Callable[[], None]) -> None:
        self._over = asyncio.Event()
        self._missing = workers
        self._on_begin = on_begin
        self._began_at: float | None = None
        self._ended_at: float | None = None
        self.reason = ""

    def join(self) -> None:
        """A worker consumes; with the last of them the life has begun."""
        self._missing -= 1
        if self._missing == 0:
            self._began_at = time.monotonic()
            self._on_begin()

    @property
    def is_over(self) -> bool:
        """Whether nothing new may begin."""
        return self._over.is_set()

    def end(self, reason: str) -> None:
        """Nothing new begins; the first reason stays."""
        if not self._over.is_set():
            self.reason = reason
            self._ended_at = time.monotonic()
            self._over.set()

    @property
    def lasted_s(self) -> float:
        """From when all workers consumed to its end, 0 where it has not begun or not ended."""
        if self._began_at is None or self._ended_at is None:
            return 0.0
        return self._ended_at - self._began_at

    async def wait(self) -> None:
        """Until it is over."""
        await self._over.wait()

    async def rest(self, seconds: float) -> None:
        """Wait so long. Raises LifeOver as soon as it is over."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._over.wait(), seconds)
        if self._over.is_set():
            raise LifeOver


@dataclass(frozen=True, slots=True)
class Shared:
    """What the workers of a consumer have in common."""

    consumer: str
    queue: str
    settings: ConsumerSettings
    breaker: Breaker
    metrics: InboxMetrics
    readiness: Readiness
    random: random.Random
    log: Log
    parkings: Seldom = field(default_factory=Seldom)
    returns: Returns = field(default_factory=Returns)

    def tell_away(self, reason: str, error: RelayError) -> None:
        """Not ready, and one line for each new reason, however often it is met."""
        if reason in self.metrics.connected:
            self.metrics.connected[reason] = False
        is_news = (reason, error.message) not in self.readiness.reasons
        self.readiness.add(reason, error.message)
        if is_news:
            self.log.warning("consumer_waits", reason=reason, error=error, hint=error.hint)

    def tell_standby(self, error: RelayError) -> None:
        """Another one works: the database has said so, and there is no link any more."""
        self.metrics.connected.update(database=True, broker=False)
        self.metrics.queue_messages = {}
        for reason in "database", "queues":
            self.readiness.remove(reason)
        self.readiness.add("broker", "not connected while it stands by")
        self.tell_away("standby", error)

    def tell_full(self, error: RelayError) -> None:
        """There is no room, and no link any more."""
        self.metrics.connected.update(database=True, broker=False)
        self.metrics.queue_messages = {}
        self.readiness.add("broker", "not connected while there is no room")
        self.tell_away("full", error)

    def tell_database(self) -> None:
        """It answers, and has room."""
        self.metrics.connected["database"] = True
        for reason in "database", "standby", "full":
            self.readiness.remove(reason)


class Hand(ABC):
    """Lives as long as its link; what it does with a delivery is its subclass's `_take`."""

    def __init__(self, shared: Shared, life: Life, lane: Lane) -> None:
        self._shared = shared
        self._settings = shared.settings
        self._metrics = shared.metrics
        self._life = life
        self._lane = lane
        # Bounded by the prefetch count. None: the life is over.
        self._hand: asyncio.Queue[DeliveredMessage | None] = asyncio.Queue()
        self._in_hand = 0
        self._channel: AbstractChannel | None = None
        self._owed: DeliveredMessage | None = None
        self._owed_outcomes: list[Outcome] = []
        self._late: asyncio.Task[None] | None = None
        self._gives_back = shared.settings.returns_to_broker
        self.consumes = False
        """It has its channel; before that there is nothing in hand."""

    async def run(self, connection: Connection) -> None:
        """Consume until the life is over; ends with what is in work. Raises BrokerUnavailable, and what `_take` does."""
        waking = asyncio.ensure_future(self._wake())
        try:
            await self._open(connection)
            self.consumes = True
            self._life.join()
            while not self._life.is_over and (delivery := await self._hand.get()) is not None:
                self._metrics.busy_workers += 1
                try:
                    await self._take(delivery)
                finally:
                    self._metrics.busy_workers -= 1
            await self._ack_owed()
        except LifeOver:
            pass
        finally:
            waking.cancel()
            self._owed = None
            if self._late is not None:
                self._late.cancel()
            if self._gives_back:
                await self._give_back()
            self._metrics.unacked_messages -= self._in_hand
            self._in_hand = 0

    @abstractmethod
    async def _take(self, delivery: DeliveredMessage) -> None:
        """Bring a delivery to its end. Raises LifeOver."""

    async def _open(self, connection: Connection) -> None:
        try:
            async with asyncio.timeout(BROKER_TIMEOUT_S):
                self._channel = await named(self._consume(connection))
        except CONNECTION_ERRORS as error:
            raise BrokerUnavailable(
                f"cannot consume {self._shared.queue}: {str(error) or 'no answer in time'}"
            ) from error

    async def _consume(self, connection: Connection) -> AbstractChannel:
        channel = await (await connection.channel(publisher_confirms=False)).get_underlay_channel()
        channel.closing.add_done_callback(lambda _: self._life.end("the channel was closed"))
        channel.on_consumer_cancel_callbacks.add(self._on_cancel)
        await channel.basic_qos(prefetch_count=self._settings.prefetch)
        connection.wire.deliver(Deliveries(channel, self._receive), channel.number)
        await consume(channel, self._shared.queue, CONSUMER_TAG)
        return channel

    def _receive(self, delivery: DeliveredMessage) -> None:
        self._in_hand += 1
        self._metrics.unacked_messages += 1
        self._hand.put_nowait(delivery)

    def _on_cancel(self, _: object) -> None:
        self._metrics.cancellations += 1
        self._life.end("the broker cancelled the consumer")

    async def _wake(self) -> None:
        await self._life.wait()
        self._hand.put_nowait(None)

    def _read(self, delivery: DeliveredMessage) -> Message | Failure:
        try:
            if isinstance(delivery, Undecodable):
                raise Permanent(delivery.fault, error_class=ErrorClass.MALFORMED)
            return read(
                consumer=self._shared.consumer,
                body=delivery.body,
                properties=delivery.header.properties,
                exchange=delivery.exchange or "",
                routing_key=delivery.routing_key or "",
                is_redelivered=bool(delivery.redelivered),
                counts_returns=self._settings.returns_to_broker,
            )
        except Permanent as error:
            failure = classify(error)
            self._metrics.failures[failure.error_class] += 1
            return failure

    async def _park_unread(self, delivery: DeliveredMessage, failure: Failure) -> None:
        headers = delivery.header.properties.headers or {}
        attempt = attempts_so_far(headers, counts_returns=self._settings.returns_to_broker)
        await self._park(delivery, self._origin(delivery, attempt, iso_now()), Park(failure.text), failure)

    # ---------------------------------------------------------------- the ends of a delivery

    async def _retry(self, delivery: DeliveredMessage, origin: Origin, retry: Retry, failure: Failure) -> None:
        if await self._send(retry_copy(origin, retry, failure)):
            await self._ack(delivery, Outcome.RETRIED)
        else:
            await self._reject(delivery, failure)

    async def _return(self, delivery: DeliveredMessage, message: Message, failed_at: str) -> None:
        """The queue delays it and counts it: `basic.nack` would not count (RabbitMQ 4.3, quorum queues)."""
        self._shared.returns.note(message.id, failed_at, time.monotonic())
        await self._end(Outcome.RETRIED, self._open_channel.basic_reject(tag_of(delivery), requeue=True))

    async def _give_back(self) -> None:
        """What is in hand was not tried: a nack says so, while the channel's end would count as a failure of each."""
        channel = self._channel
        if self._in_hand == 0 or channel is None or channel.is_closed:
            return
        with contextlib.suppress(*CONNECTION_ERRORS):
            async with asyncio.timeout(GIVE_BACK_TIMEOUT_S):
                # First, or the broker would deliver them here again.
                await named(channel.basic_cancel(CONSUMER_TAG))
                await named(channel.basic_nack(0, multiple=True, requeue=True, wait=False))

    async def _park(self, delivery: DeliveredMessage, origin: Origin, park: Park, failure: Failure) -> None:
        settings = self._settings
        queue = settings.parking_queue_of(self._shared.queue)
        if not await self._send(parked_copy(origin, park, failure, settings.parking_exchange, queue)):
            await self._reject(delivery, failure)
            return
        self._metrics.parked[failure.error_class] += 1
        self._metrics.attempts.observe(origin.attempt + 1)
        if count := self._shared.parkings.count(failure.error_class, time.monotonic()):
            self._shared.log.warning(
                "message_parked",
                messages=count,
                last_message_id=origin.properties.message_id,
                error_class=failure.error_class,
                attempts=origin.attempt + 1,
                parking_queue=queue,
            )
        await self._ack(delivery, Outcome.PARKED)

    async def _send(self, copy: Copy) -> bool:
        """Until the broker has confirmed it; False when it cannot be. The original waits unacknowledged meanwhile:
        with all workers here, nothing more is taken from the queue. Raises LifeOver.
        """
        failures = 0
        try:
            while True:
                try:
                    await self._lane.publish(copy)
                    return True
                except CopyImpossible as error:
                    self._shared.log.error("copy_impossible", routing_key=copy.routing_key, error=error)
                    return False
                except CopyUnavailable as error:
                    self._metrics.copies_failed += 1
                    failures += 1
                    if failures == 1:
                        self._begin_waiting(copy, error)
                backoff_s = min(COPY_BACKOFF_MAX_S, COPY_BACKOFF_MIN_S * 2.0 ** (failures - 1))
                await self._life.rest(backoff_s * (0.5 + 0.5 * self._shared.random.random()))
        finally:
            if failures:
                self._end_waiting()

    def _begin_waiting(self, copy: Copy, error: CopyUnavailable) -> None:
        self._metrics.waiting_copies += 1
        if self._metrics.waiting_copies == 1:
            self._shared.log.warning("copies_wait", routing_key=copy.routing_key, error=error)
        self._shared.readiness.add("copies", error.message)

    def _end_waiting(self) -> None:
        self._metrics.waiting_copies -= 1
        if self._metrics.waiting_copies == 0:
            self._shared.readiness.remove("copies")
            self._shared.log.info("copies_flow")

    async def _reject(self, delivery: DeliveredMessage, failure: Failure) -> None:
        """The last resort: the queue's own dead letter policy takes it, without a diagnosis."""
        self._shared.log.error(
            "message_rejected", message_id=delivery.header.properties.message_id, error_class=failure.error_class
        )
        await self._end(Outcome.REJECTED, self._open_channel.basic_reject(tag_of(delivery), requeue=False))

    async def _ack(self, delivery: DeliveredMessage, outcome: Outcome) -> None:
        await self._end(outcome, self._open_channel.basic_ack(tag_of(delivery), wait=False))

    async def _ack_soon(self, delivery: DeliveredMessage, outcome: Outcome) -> None:
        """With those that follow, in one frame: up to ACKS_TOGETHER of them, as long as there is more in hand."""
        self._owed = delivery
        self._owed_outcomes.append(outcome)
        if len(self._owed_outcomes) >= ACKS_TOGETHER or self._hand.empty():
            await self._ack_owed()
        elif len(self._owed_outcomes) == 1:
            asyncio.get_running_loop().call_later(ACK_DELAY_S, self._ack_late)

    def _ack_late(self) -> None:
        # The message in work takes longer than its neighbours should have to wait.
        if self._owed is not None and self._channel is not None and not self._channel.is_closed:
            self._late = asyncio.create_task(self._ack_owed())
            # A failure has ended the life already; it is nobody's to raise.
            self._late.add_done_callback(lambda task: task.cancelled() or task.exception())

    async def _ack_owed(self) -> None:
        owed, outcomes = self._owed, self._owed_outcomes
        if owed is not None:
            self._owed, self._owed_outcomes = None, []
            await self._ack_batch(owed, Counter(outcomes))

    async def _ack_batch(self, last: DeliveredMessage, outcomes: Mapping[Outcome, int]) -> None:
        """One frame for `last` and everything older that this channel has in hand."""
        await self._send_end(self._open_channel.basic_ack(tag_of(last), multiple=True, wait=False))
        for outcome, count in outcomes.items():
            self._count_end(outcome, count)

    async def _end(self, outcome: Outcome, frame: Awaitable[None]) -> None:
        await self._send_end(frame)
        self._count_end(outcome, 1)

    async def _send_end(self, frame: Awaitable[None]) -> None:
        try:
            await named(frame)
        except CONNECTION_ERRORS:
            # The broker delivers it again, and the database knows it.
            self._life.end("an acknowledgement could not be sent")
            raise LifeOver from None

    def _count_end(self, outcome: Outcome, count: int) -> None:
        self._in_hand -= count
        self._metrics.unacked_messages -= count
        self._metrics.messages[outcome] += count

    @property
    def _open_channel(self) -> AbstractChannel:
        assert self._channel is not None, "not open"
        return self._channel

    def _origin(self, delivery: DeliveredMessage, attempt: int, failed_at: str) -> Origin:
        return Origin(
            queue=self._shared.queue,
            exchange=delivery.exchange or "",
            routing_key=delivery.routing_key or "",
            body=delivery.body,
            properties=delivery.header.properties,
            consumer=self._shared.consumer,
            consumer_version=self._settings.version,
            attempt=attempt,
            failed_at=failed_at,
        )


def tag_of(delivery: DeliveredMessage) -> int:
    tag = delivery.delivery_tag
    assert tag is not None, "a delivery without a tag"
    return tag


def iso_now() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds")
