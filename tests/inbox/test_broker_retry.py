"""Retries by the broker: RabbitMQ 4.3 and later delays and counts what is returned to a quorum queue.

An older server counts and does not delay. There the consumer is told that this will do, and its own wait for what comes
back too early stands in for the delay: everything but the broker's clock is the same.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import asyncpg
import pytest

from relay.errors import ConfigError
from relay.inbox import BrokerRetry, Message, Order, Permanent, Transient
from relay.inbox.outcome import Outcome
from relay.topology import names
from tests.conftest import eventually
from tests.inbox.site import QUEUE, Site, apply

DELAY_S = 0.3
RETRY = BrokerRetry(delay_min_s=DELAY_S, delay_max_s=2 * DELAY_S, retries_max=2)
PLAIN = {"x-queue-type": "quorum"}
DELAYING = PLAIN | {
    "x-delayed-retry-type": "all",
    "x-delayed-retry-min": names.delay_ms(RETRY.delay_min_s),
    "x-delayed-retry-max": names.delay_ms(RETRY.delay_max_s),
}


@pytest.fixture
def delays(inbox: Site, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether this server can; one that cannot is taken for one that can."""
    assert inbox.connection.transport is not None
    version = str(inbox.connection.transport.connection.server_properties["version"])
    can = tuple(int(part) for part in version.split(".")[:2]) >= names.BROKER_RETRY_VERSION_MIN
    if not can:
        monkeypatch.setattr(names, "BROKER_RETRY_VERSION_MIN", (3, 10))
    return can


class Attempts:
    """A handler that notes each try, and fails as it is told to."""

    def __init__(self, failures: Iterator[Exception | None]) -> None:
        self._failures = failures
        self.attempts: list[int] = []
        self.times: list[float] = []

    async def __call__(self, message: Message, connection: asyncpg.Connection) -> None:
        self.attempts.append(message.attempt)
        self.times.append(time.monotonic())
        if (failure := next(self._failures)) is not None:
            raise failure
        await apply(message, connection)

    @property
    def waits_s(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.times, self.times[1:], strict=False)]


async def test_what_fails_comes_back_after_the_delay_and_is_parked_with_its_diagnosis(
    inbox: Site, delays: bool
) -> None:
    handler = Attempts(iter([Transient("the warehouse sleeps"), Transient("still"), Transient("for good")]))
    await inbox.declare((), arguments=DELAYING if delays else PLAIN)
    consumer = await inbox.start(inbox.consumer(handler, retry=RETRY))
    await inbox.publish("m1", correlation_id="c", expiration=60)
    parked = await inbox.parked()
    assert handler.attempts == [0, 1, 2]
    assert all(wait_s > 0.9 * DELAY_S for wait_s in handler.waits_s), handler.waits_s
    if delays:
        assert handler.waits_s[1] > 1.8 * DELAY_S, "the second wait is twice as long, and the broker's"
        assert "retry" not in dict(consumer.readiness.reasons)
    headers: dict[str, Any] = dict(parked.headers)
    first_failure = datetime.fromisoformat(headers.pop(names.FIRST_FAILURE)).timestamp()
    assert time.time() - first_failure > 1.8 * DELAY_S, "of the first of its attempts"
    assert headers == {
        "schema_version": 1,
        names.RETRY_ATTEMPT: 2,
        names.LAST_ERROR: "after 3 attempts: for good",
        names.ERROR_CLASS: "transient",
        names.ORIGINAL_EXCHANGE: "events",
        names.ORIGINAL_ROUTING_KEY: "order.created",
        names.CONSUMER: "inventory",
        names.CONSUMER_VERSION: "1.2.3",
    }
    assert (parked.message_id, parked.correlation_id, parked.expiration) == ("m1", "c", None)
    await eventually(lambda: consumer.metrics.messages[Outcome.PARKED] == 1)
    assert consumer.metrics.messages[Outcome.RETRIED] == 2
    assert consumer.metrics.unacked_messages == 0 and await inbox.ready() == 0
    assert set(consumer.metrics.queue_messages) == {QUEUE, names.parking_queue(QUEUE)}


async def test_later_messages_pass_one_that_is_retried_and_it_takes_effect_once(inbox: Site, delays: bool) -> None:
    others: set[str] = set()

    async def handle(message: Message, connection: asyncpg.Connection) -> None:
        await apply(message, connection)
        if message.id != "m1":
            others.add(message.id)
        elif len(others) < 2:
            raise Transient("later")

    await inbox.declare((), arguments=DELAYING if delays else PLAIN)
    retry = BrokerRetry(DELAY_S, DELAY_S, retries_max=100)
    consumer = await inbox.start(inbox.consumer(handle, retry=retry, workers=2))
    await inbox.publish("m1")
    await eventually(lambda: consumer.metrics.messages[Outcome.RETRIED] == 1)
    for number in (2, 3):
        await inbox.publish(f"m{number}")
    await inbox.effects_are({"m1": 1, "m2": 1, "m3": 1})


async def test_a_permanent_failure_is_not_returned(inbox: Site, delays: bool) -> None:
    handler = Attempts(iter([Permanent("no such product")]))
    await inbox.declare((), arguments=DELAYING if delays else PLAIN)
    await inbox.start(inbox.consumer(handler, retry=RETRY))
    await inbox.publish("m1")
    assert (await inbox.parked()).headers[names.RETRY_ATTEMPT] == 0
    assert handler.attempts == [0]


async def test_under_the_order_policy_version_a_gap_waits_at_the_broker(inbox: Site, delays: bool) -> None:
    await inbox.declare((), arguments=DELAYING if delays else PLAIN)
    retry = BrokerRetry(DELAY_S, DELAY_S, retries_max=20)
    consumer = await inbox.start(inbox.consumer(retry=retry, order=Order.VERSION))
    for version in (3, 2, 1):
        aggregate = {"aggregate_type": "order", "aggregate_id": "42", "aggregate_version": version}
        await inbox.publish(f"m{version}", f'{{"v":{version}}}'.encode(), headers={"schema_version": 1} | aggregate)
        if version > 1:
            await eventually(lambda: consumer.metrics.messages[Outcome.RETRIED] >= 1)
    await inbox.effects_are({"m1": 1, "m2": 1, "m3": 1})
    assert await inbox.versions() == [1, 2, 3]


async def test_a_queue_that_does_not_delay_is_said_and_uses_up_no_retries_in_no_time(inbox: Site, delays: bool) -> None:
    """Its policy was never applied, or is another one: a reject comes straight back."""
    handler = Attempts(iter([Transient("later"), Transient("later"), None]))
    await inbox.declare((), arguments=PLAIN)
    consumer = await inbox.start(inbox.consumer(handler, retry=RETRY))
    await inbox.publish("m1")
    await eventually(lambda: "retry" in dict(consumer.readiness.reasons))
    await inbox.effects_are({"m1": 1})
    assert handler.attempts == [0, 1, 2]
    assert all(wait_s > 0.9 * DELAY_S for wait_s in handler.waits_s), handler.waits_s


async def test_a_stop_gives_back_what_it_has_not_tried_without_a_failure_counted(inbox: Site, delays: bool) -> None:
    """RabbitMQ 4.3 counts what is in a closed channel's hand as failed: twenty deployments would park good messages."""
    entered, leave = asyncio.Event(), asyncio.Event()

    async def handle(message: Message, connection: asyncpg.Connection) -> None:
        entered.set()
        await leave.wait()
        await apply(message, connection)

    await inbox.declare((), arguments=DELAYING if delays else PLAIN)
    consumer = await inbox.start(inbox.consumer(handle, retry=RETRY, workers=1))
    for number in range(3):
        await inbox.publish(f"m{number}")
    await asyncio.wait_for(entered.wait(), 10)
    await eventually(lambda: consumer.metrics.unacked_messages == 3)
    consumer.stop()
    leave.set()
    await inbox.stop(consumer)
    assert await inbox.effects() == {"m0": 1}
    for number in (1, 2):
        message = await inbox.get(QUEUE)
        assert (message.message_id, message.redelivered) == (f"m{number}", True)
        # Earlier servers count every return; there at least it is the only one.
        assert message.headers.get(names.DELIVERY_COUNT, 0) == (0 if delays else 1)


async def test_a_broker_that_cannot_delay_is_one_clear_error(inbox: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "BROKER_RETRY_VERSION_MIN", (99, 0))
    await inbox.declare((), arguments=PLAIN)
    consumer = inbox.consumer(retry=RETRY)
    with pytest.raises(
        ConfigError, match=r"RabbitMQ \d+\.\d+\.\d+ does not delay .*; allowed: RabbitMQ 99\.0 or later"
    ):
        await asyncio.wait_for(consumer.run(), 10)
