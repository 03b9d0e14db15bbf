"""One worker of a consumer: one message in work, each in a transaction of its own.

    delivered -> read -> attempt -> COMMIT -> ack
                            | failed
                            v
                   copy confirmed by the broker -> ack
                   or returned to the broker, which delays and counts

Decisions are `outcome.decide`'s.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from datetime import UTC, datetime
from typing import Final

from aiormq.abc import DeliveredMessage

from relay.inbox.faults import classify, is_database_away
from relay.inbox.hand import Hand, Life, Shared, iso_now
from relay.inbox.ledger import Handler, Ledger
from relay.inbox.message import Message
from relay.inbox.order import Order
from relay.inbox.outcome import BrokerRetry, ErrorClass, Failure, Outcome, Park, Permanent, Retry, decide
from relay.inbox.publisher import Lane

EARLY_SHARE: Final = 0.5
"""Of the shortest delay: what comes back sooner was not delayed."""


class Worker(Hand):
    """See `relay.inbox.hand.Hand`."""

    def __init__(self, shared: Shared, life: Life, lane: Lane, ledger: Ledger, handler: Handler) -> None:
        super().__init__(shared, life, lane)
        self._ledger = ledger
        self._handler = handler

    async def _take(self, delivery: DeliveredMessage) -> None:
        message = self._read(delivery)
        if isinstance(message, Failure):
            await self._park_unread(delivery, message)
            return
        failed_at = await self._returned(message)
        while isinstance(result := await self._attempt(message), Failure):
            failed_at = failed_at or iso_now()
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
            if isinstance(decision, Park):
                await self._park(delivery, origin, decision, result)
            elif self._settings.returns_to_broker:
                await self._return(delivery, message, failed_at)
            else:
                await self._retry(delivery, origin, decision, result)
            return
        self._metrics.attempts.observe(message.attempt + 1)
        await self._ack_soon(delivery, result)

    async def _returned(self, message: Message) -> str:
        """When a message that was returned failed first, empty where that is not known. Raises LifeOver.

        One that comes back at once waits here: without the delay it would use up its retries in no time.
        """
        retry = self._settings.retry
        if not isinstance(retry, BrokerRetry) or (known := self._shared.returns.take(message.id)) is None:
            return ""
        passed_s = time.monotonic() - known.returned_at
        is_early = passed_s < retry.delay_min_s * EARLY_SHARE
        self._tell_delay(is_missing=is_early)
        if is_early:
            await self._life.rest(retry.delay_min_s - passed_s)
        return known.failed_at

    def _tell_delay(self, *, is_missing: bool) -> None:
        shared = self._shared
        was_missing = any(reason == "retry" for reason, _ in shared.readiness.reasons)
        if is_missing and not was_missing:
            shared.readiness.add("retry", f"{shared.queue} does not delay what is returned to it as the settings say")
            shared.log.warning(
                "retry_not_delayed", hint='relay topology apply, with retry = "broker" and this retry_min'
            )
        elif was_missing and not is_missing:
            shared.readiness.remove("retry")

    async def _attempt(self, message: Message) -> Outcome | Failure:
        """One try, within the time limit. Raises LifeOver, CancelledError."""
        breaker = self._shared.breaker
        try:
            self._check_schema_version(message)
        except Permanent as error:
            return self._failed(classify(error))
        while (wait_s := breaker.wait_s(time.monotonic())) > 0:
            await self._life.rest(wait_s)
        began = time.monotonic()
        deadline = asyncio.timeout(self._settings.time_limit_s)
        try:
            async with deadline:
                outcome = await self._ledger.apply(message, self._handler)
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
                # The handler hung, or the database did: neither is known.
                breaker.gave_up()
            else:
                self._tell_breaker(is_away=is_database_away(failure, error), error=error)
        else:
            self._tell_breaker(is_away=False)
            self._metrics.processing_seconds.observe(time.monotonic() - began)
            return outcome
        self._metrics.processing_seconds.observe(time.monotonic() - began)
        return self._failed(failure)

    def _failed(self, failure: Failure) -> Failure:
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


def _age_s(message: Message) -> float | None:
    moment = message.occurred_at
    return None if moment is None else (datetime.now(UTC) - moment).total_seconds()
