"""One worker of a consumer: a channel, at most `prefetch` messages in hand, one in work.

    delivered -> read -> attempt -> COMMIT -> ack
                            | failed
                            v
                   copy confirmed by the broker -> ack

Invariants: a message is acknowledged after its COMMIT or after its copy's confirm, never before; what is in hand when
the channel goes is delivered again, and the ledger knows it. Decisions are `outcome.decide`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Final

import aiormq
from aio_pika.abc import AbstractConnection
from aiormq.abc import AbstractChannel, DeliveredMessage

from relay.errors import BrokerUnavailable
from relay.http import Readiness
from relay.inbox.breaker import Breaker
from relay.inbox.copies import Copy, Origin, parked_copy, retry_copy
from relay.inbox.faults import classify, is_database_away
from relay.inbox.ledger import Handler, Ledger
from relay.inbox.message import Message, attempts_so_far, read
from relay.inbox.metrics import InboxMetrics
from relay.inbox.order import Order
from relay.inbox.outcome import ErrorClass, Failure, Outcome, Park, Permanent, Retry, decide
from relay.inbox.publisher import CopyImpossible, CopyUnavailable, Lane
from relay.inbox.settings import ConsumerSettings
from relay.logs import Log
from relay.topology import names

COPY_BACKOFF_MIN_S: Final = 0.5
COPY_BACKOFF_MAX_S: Final = 30.0
BROKER_TIMEOUT_S: Final = 10.0


class LifeOver(Exception):
    """The link ended or a stop was asked for: what is in hand stays unacknowledged."""


class Life:
    """From one connect to its end, shared by the workers of a consumer."""

    def __init__(self, workers: int, on_begin: Callable[[], None]) -> None:
        self._over = asyncio.Event()
        self._missing = workers
        self._on_begin = on_begin
        self.reason = ""

    def join(self) -> None:
        """A worker consumes; with the last of them the life has begun."""
        self._missing -= 1
        if self._missing == 0:
            self._on_begin()

    @property
    def is_over(self) -> bool:
        """Whether nothing new may begin."""
        return self._over.is_set()

    def end(self, reason: str) -> None:
        """Nothing new begins; the first reason stays."""
        if not self._over.is_set():
            self.reason = reason
            self._over.set()

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
    handler: Handler
    ledger: Ledger
    settings: ConsumerSettings
    breaker: Breaker
    metrics: InboxMetrics
    readiness: Readiness
    random: random.Random
    log: Log


class Worker:
    """Lives as long as its link."""

    def __init__(self, shared: Shared, life: Life, lane: Lane) -> None:
        self._shared = shared
        self._settings = shared.settings
        self._metrics = shared.metrics
        self._life = life
        self._lane = lane
        self._hand: asyncio.Queue[DeliveredMessage | None] = asyncio.Queue()
        self._in_hand = 0
        self._channel: AbstractChannel | None = None

    async def run(self, connection: AbstractConnection) -> None:
        """Consume until the life is over; ends with the message in work. Raises BrokerUnavailable."""
        waking = asyncio.ensure_future(self._wake())
        try:
            async with asyncio.timeout(BROKER_TIMEOUT_S):
                self._channel = await self._open(connection)
            self._life.join()
            while not self._life.is_over and (delivery := await self._hand.get()) is not None:
                self._metrics.busy_workers += 1
                try:
                    await self._settle(delivery)
                finally:
                    self._metrics.busy_workers -= 1
        except LifeOver:
            pass
        except (aiormq.AMQPError, RuntimeError, OSError, TimeoutError) as error:
            raise BrokerUnavailable(f"the channel of a worker failed: {str(error) or 'timeout'}") from error
        finally:
            waking.cancel()
            self._metrics.unacked_messages -= self._in_hand
            self._in_hand = 0

    async def _open(self, connection: AbstractConnection) -> AbstractChannel:
        channel = await (await connection.channel(publisher_confirms=False)).get_underlay_channel()
        channel.closing.add_done_callback(lambda _: self._life.end("the channel was closed"))
        channel.on_consumer_cancel_callbacks.add(self._on_cancel)
        await channel.basic_qos(prefetch_count=self._settings.prefetch)
        await channel.basic_consume(self._shared.queue, self._receive)
        return channel

    async def _receive(self, delivery: DeliveredMessage) -> None:
        # Bounded by the prefetch count.
        self._in_hand += 1
        self._metrics.unacked_messages += 1
        self._hand.put_nowait(delivery)

    def _on_cancel(self, _: object) -> None:
        self._metrics.cancellations += 1
        self._life.end("the broker cancelled the consumer")

    async def _wake(self) -> None:
        await self._life.wait()
        self._hand.put_nowait(None)

    # ---------------------------------------------------------------- one message

    async def _settle(self, delivery: DeliveredMessage) -> None:
        properties, frame = delivery.header.properties, delivery.delivery
        try:
            message = read(
                consumer=self._shared.consumer,
                body=delivery.body,
                properties=properties,
                exchange=frame.exchange,  # type: ignore[union-attr]
                routing_key=delivery.routing_key or "",
                is_redelivered=bool(delivery.redelivered),
            )
        except Permanent as error:
            failure = classify(error)
            self._metrics.failures[failure.error_class] += 1
            origin = self._origin(delivery, attempts_so_far(properties.headers or {}), _iso_now())
            await self._park(delivery, origin, Park(failure.text), failure)
            return
        failed_at = ""
        while isinstance(result := await self._attempt(message), Failure):
            failed_at = failed_at or _iso_now()
            decision = decide(
                result,
                self._settings.retry,
                attempt=message.attempt,
                age_s=_age_s(message),
                roll=self._shared.random.random(),
            )
            if isinstance(decision, Retry) and self._settings.order is Order.SINGLE_ACTIVE:
                # In place: the key's later messages, and everything else of this queue, wait behind it.
                await self._life.rest(decision.delay_s)
                message = replace(message, attempt=decision.attempt)
                continue
            origin = self._origin(delivery, message.attempt, failed_at)
            if isinstance(decision, Retry):
                await self._retry(delivery, origin, decision, result)
            else:
                await self._park(delivery, origin, decision, result)
            return
        self._metrics.attempts.observe(message.attempt + 1)
        await self._ack(delivery, result)

    async def _attempt(self, message: Message) -> Outcome | Failure:
        """One try, within the time limit. Raises LifeOver, CancelledError."""
        shared, breaker = self._shared, self._shared.breaker
        while (wait_s := breaker.wait_s(time.monotonic())) > 0:
            await self._life.rest(wait_s)
        began = time.monotonic()
        deadline = asyncio.timeout(self._settings.time_limit_s)
        try:
            self._check_schema_version(message)
            async with deadline:
                outcome = await shared.ledger.apply(message, shared.handler)
        except asyncio.CancelledError as error:
            breaker.gave_up()
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # Somebody else's cancellation, of something that the handler awaited.
            failure = classify(error)
        except Exception as error:  # noqa: BLE001 - a handler may raise anything; it is classed
            failure = classify(error)
            if deadline.expired():
                failure = Failure(ErrorClass.TIMEOUT, f"not done within {self._settings.time_limit_s:g} s")
            self._tell_breaker(is_away=is_database_away(failure, error), error=error)
        else:
            self._tell_breaker(is_away=False)
            self._metrics.processing_seconds.observe(time.monotonic() - began)
            return outcome
        self._metrics.processing_seconds.observe(time.monotonic() - began)
        self._metrics.failures[failure.error_class] += 1
        return failure

    def _check_schema_version(self, message: Message) -> None:
        known = self._settings.schema_versions
        if known is not None and message.schema_version not in known:
            raise Permanent(
                f"unknown schema_version {message.schema_version} of {message.type}",
                error_class=ErrorClass.SCHEMA_VERSION,
            )

    def _tell_breaker(self, *, is_away: bool, error: BaseException | None = None) -> None:
        shared, was_open = self._shared, self._shared.breaker.is_open
        if is_away:
            shared.breaker.failed(time.monotonic())
        else:
            shared.breaker.succeeded()
        self._metrics.connected["database"] = not is_away
        is_open = shared.breaker.is_open
        if is_open and not was_open:
            shared.readiness.add("database", "the consumer's database is away")
            shared.log.warning("breaker_opened", error=classify(error).text if error else None)
        elif was_open and not is_open:
            shared.readiness.remove("database")
            shared.log.info("breaker_closed")
        self._metrics.breaker_open = is_open

    # ---------------------------------------------------------------- the ends of a delivery

    async def _retry(self, delivery: DeliveredMessage, origin: Origin, retry: Retry, failure: Failure) -> None:
        if await self._send(retry_copy(origin, retry, failure)):
            await self._ack(delivery, Outcome.RETRIED)
        else:
            await self._reject(delivery, failure)

    async def _park(self, delivery: DeliveredMessage, origin: Origin, park: Park, failure: Failure) -> None:
        settings = self._settings
        queue = settings.parking_queue or names.parking_queue(self._shared.queue)
        if not await self._send(parked_copy(origin, park, failure, settings.parking_exchange, queue)):
            await self._reject(delivery, failure)
            return
        self._metrics.parked[failure.error_class] += 1
        self._metrics.attempts.observe(origin.attempt + 1)
        self._shared.log.warning(
            "message_parked",
            message_id=origin.properties.message_id,
            error_class=failure.error_class,
            attempts=origin.attempt + 1,
            queue=queue,
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
        await self._end(delivery, Outcome.REJECTED, self._open_channel.basic_reject(_tag(delivery), requeue=False))

    async def _ack(self, delivery: DeliveredMessage, outcome: Outcome) -> None:
        await self._end(delivery, outcome, self._open_channel.basic_ack(_tag(delivery), wait=False))

    async def _end(self, delivery: DeliveredMessage, outcome: Outcome, frame: Any) -> None:
        try:
            await frame
        except (aiormq.AMQPError, RuntimeError, OSError):
            # The broker delivers it again, and the ledger knows it.
            self._life.end("an acknowledgement could not be sent")
            raise LifeOver from None
        self._in_hand -= 1
        self._metrics.unacked_messages -= 1
        self._metrics.messages[outcome] += 1

    @property
    def _open_channel(self) -> AbstractChannel:
        assert self._channel is not None, "not open"
        return self._channel

    def _origin(self, delivery: DeliveredMessage, attempt: int, failed_at: str) -> Origin:
        return Origin(
            queue=self._shared.queue,
            exchange=delivery.delivery.exchange or "",  # type: ignore[union-attr]
            routing_key=delivery.routing_key or "",
            body=delivery.body,
            properties=delivery.header.properties,
            consumer=self._shared.consumer,
            consumer_version=self._settings.version,
            attempt=attempt,
            failed_at=failed_at,
        )


def _tag(delivery: DeliveredMessage) -> int:
    tag = delivery.delivery_tag
    assert tag is not None, "a delivery without a tag"
    return tag


def _iso_now() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds")


def _age_s(message: Message) -> float | None:
    moment = message.occurred_at
    return None if moment is None else (datetime.now(UTC) - moment).total_seconds()
