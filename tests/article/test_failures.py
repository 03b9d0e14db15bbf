"""The article's own list of failures, by name, on real servers. Ladders are shortened by settings."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import aio_pika
import asyncpg
import pytest

from relay.inbox import Consumer, ErrorClass, Message, Order, Outcome, Permanent, RetryPolicy, Transient
from relay.inbox.copies import Copy
from relay.inbox.publisher import Lane
from relay.servers import PostgresServer
from relay.topology import names
from tests.conftest import eventually
from tests.inbox.site import LADDER, QUEUE, Site, apply
from tests.proxy import Proxy

DIES_BEFORE_ITS_ACK = """
import asyncio, os, signal, sys
from relay.inbox import Consumer, ConsumerSettings
from relay.inbox.worker import Worker

async def handle(message, connection):
    await connection.execute("INSERT INTO effect (message_id) VALUES ($1)", message.id)

async def die(self, delivery, outcome):
    os.kill(os.getpid(), signal.SIGKILL)

Worker._ack_soon = die
asyncio.run(Consumer(name="inventory", queue="inventory", handler=handle,
                     amqp_url=sys.argv[1], database_url=sys.argv[2]).run())
"""


async def test_consumer_killed_after_commit_before_its_ack(inbox: Site) -> None:
    await inbox.declare()
    await inbox.publish("m1")
    command = [sys.executable, "-c", DIES_BEFORE_ITS_ACK, inbox.amqp_url, inbox.database_url]
    died = await asyncio.to_thread(lambda: subprocess.run(command, capture_output=True, timeout=60, check=False))
    assert died.returncode == -signal.SIGKILL, died.stderr
    assert await inbox.effects() == {"m1": 1}
    consumer = await inbox.start(inbox.consumer())
    await eventually(lambda: consumer.metrics.messages[Outcome.DUPLICATE] == 1)
    assert await inbox.effects() == {"m1": 1}
    assert await inbox.ready() == 0


# ---------------------------------------------------------------- PostgreSQL away


@pytest.fixture
def postgres(postgres_server: PostgresServer) -> Iterator[PostgresServer]:
    """The session's server, running again at the end."""
    yield postgres_server
    if not postgres_server.is_running:
        postgres_server.restart()


async def test_postgres_away_longer_than_the_ladder(inbox: Site, postgres: PostgresServer) -> None:
    """Every step is taken, then it is parked; no hot loop; a redrive brings the effect, once."""
    await inbox.declare()
    consumer = await inbox.start(inbox.consumer())
    await asyncio.to_thread(postgres.stop)
    await inbox.publish("m1")
    parked = await inbox.parked()
    assert parked.headers[names.RETRY_ATTEMPT] == len(LADDER)
    assert parked.headers[names.ERROR_CLASS] == "database"
    assert consumer.metrics.messages[Outcome.RETRIED] == len(LADDER)
    assert consumer.metrics.failures[ErrorClass.DATABASE] == len(LADDER) + 1
    await asyncio.to_thread(postgres.restart)
    await inbox.reconnect()
    await inbox.publish("m1", parked.body)
    await inbox.effects_are({"m1": 1})


async def test_postgres_back_before_the_end_of_the_ladder(inbox: Site, postgres: PostgresServer) -> None:
    ladder = (0.05, 0.1, 5.0)
    await inbox.declare(ladder)
    consumer = await inbox.start(inbox.consumer(retry=RetryPolicy(ladder, jitter=0.0)))
    await asyncio.to_thread(postgres.stop)
    await inbox.publish("m1")
    await eventually(lambda: consumer.metrics.messages[Outcome.RETRIED] == 3)
    await asyncio.to_thread(postgres.restart)
    await inbox.reconnect()
    await inbox.effects_are({"m1": 1})
    assert await inbox.ready(names.parking_queue(QUEUE)) == 0


async def test_thousands_due_together_do_not_overrun_a_recovering_database(
    inbox: Site, postgres: PostgresServer
) -> None:
    """They come back from a retry queue at one moment while PostgreSQL is away: the breaker lets probes through and
    nothing else, and afterwards no more work at once than there are workers.
    """
    count, workers = 2000, 4
    at_work = most_at_work = 0

    async def handle(message: Message, connection: asyncpg.Connection) -> None:
        nonlocal at_work, most_at_work
        at_work += 1
        most_at_work = max(most_at_work, at_work)
        try:
            await apply(message, connection)
        finally:
            at_work -= 1

    ladder = (1.0, 60.0)
    await inbox.declare(ladder)
    consumer = await inbox.start(inbox.consumer(handle, workers=workers, retry=RetryPolicy(ladder, jitter=0.0)))
    await asyncio.to_thread(postgres.stop)
    retrying = names.retry_queue(QUEUE, ladder[0])
    messages = [aio_pika.Message(b'{"v":1}', message_id=f"m{number}") for number in range(count)]
    await asyncio.gather(*(inbox.channel.default_exchange.publish(message, retrying) for message in messages))
    await eventually(lambda: consumer.metrics.breaker_open, 20)
    await eventually(lambda: consumer.metrics.unacked_messages == workers * 20, 20)
    assert "database" in dict(consumer.readiness.reasons)
    await asyncio.to_thread(postgres.restart)
    await inbox.reconnect()

    async def applied() -> bool:
        # Those that were probes wait on the next step.
        waiting = await inbox.ready(names.retry_queue(QUEUE, ladder[1]))
        found = await inbox.effects()
        return len(found) + waiting == count and set(found.values()) == {1}

    await eventually(applied, 60, interval_s=0.2)
    assert consumer.metrics.messages[Outcome.RETRIED] < 30
    assert most_at_work <= workers
    assert consumer.metrics.messages[Outcome.PARKED] == 0
    assert not consumer.metrics.breaker_open


# ---------------------------------------------------------------- messages that nobody can read


async def test_not_json_is_parked_at_once(inbox: Site) -> None:
    await inbox.declare()
    consumer = await inbox.start(inbox.consumer())
    await inbox.publish("m1", b"{not-json}")
    await inbox.publish("m2")
    parked = await inbox.parked()
    assert (parked.message_id, parked.body) == ("m1", b"{not-json}")
    assert parked.headers[names.ERROR_CLASS] == "malformed"
    assert parked.headers[names.RETRY_ATTEMPT] == 0
    await inbox.effects_are({"m2": 1})
    assert consumer.metrics.messages[Outcome.RETRIED] == 0


# ---------------------------------------------------------------- the broker between copy and acknowledgement


async def test_retry_published_and_the_ack_lost(inbox: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy is confirmed, then the connection goes before the original's ack: two copies, one effect."""
    calls: list[int] = []

    async def handle(message: Message, connection: asyncpg.Connection) -> None:
        calls.append(message.attempt)
        if len(calls) == 1:
            raise Transient("not yet")
        await apply(message, connection)

    async with Proxy(inbox.amqp_url) as proxy:
        publish = Lane.publish

        async def publish_and_lose_the_link(self: Lane, copy: Copy) -> None:
            await publish(self, copy)
            proxy.reset()

        monkeypatch.setattr(Lane, "publish", publish_and_lose_the_link)
        await inbox.declare()
        consumer = await inbox.start(inbox.consumer(handle, amqp_url=proxy.url))
        await inbox.publish("m1")
        await eventually(lambda: consumer.metrics.messages[Outcome.DUPLICATE] == 1)
        assert await inbox.effects() == {"m1": 1}
        assert len(calls) == 2, "the original once more or its copy, and then the other one is a duplicate"
        assert consumer.metrics.reconnects >= 1
        await inbox.stop(consumer)


async def test_binding_removed(inbox: Site) -> None:
    """The copy is returned: the original is not acknowledged, nothing reconnects; bound again, it is parked."""

    async def handle(message: Message, connection: asyncpg.Connection) -> None:
        raise Permanent("no such product")

    await inbox.declare()
    exchange = await inbox.channel.declare_exchange("dlx", aio_pika.ExchangeType.DIRECT, durable=True)
    consumer = await inbox.start(inbox.consumer(handle, parking_exchange="dlx"))
    await inbox.publish("m1")
    await eventually(lambda: consumer.metrics.copies_failed >= 2)
    assert consumer.metrics.unacked_messages == 1 and consumer.metrics.reconnects == 0
    assert "no queue takes" in dict(consumer.readiness.reasons)["copies"]
    parking = await inbox.channel.get_queue(names.parking_queue(QUEUE), ensure=False)
    await parking.bind(exchange, names.parking_queue(QUEUE))
    parked = await inbox.parked()
    assert parked.message_id == "m1"
    await inbox.settled(consumer)
    assert consumer.metrics.reconnects == 0 and consumer.metrics.copies_failed < 20


async def test_parking_unavailable(inbox: Site) -> None:
    """Its queue is full and refuses: the source keeps every message, and the backpressure is visible."""

    async def handle(message: Message, connection: asyncpg.Connection) -> None:
        raise Permanent("no such product")

    await inbox.declare(parks=False)
    parking = names.parking_queue(QUEUE)
    full: dict[str, Any] = {"x-max-length": 1, "x-overflow": "reject-publish"}
    await inbox.channel.declare_queue(parking, durable=True, arguments=full)
    await inbox.channel.default_exchange.publish(aio_pika.Message(b"first"), parking)
    consumer = await inbox.start(inbox.consumer(handle, workers=2, prefetch=1))
    for number in range(5):
        await inbox.publish(f"m{number}")
    await eventually(lambda: consumer.metrics.waiting_copies == 2)
    await eventually(lambda: consumer.metrics.queue_messages.get(QUEUE) == 3)
    assert consumer.metrics.unacked_messages == 2
    assert "refused the copy" in dict(consumer.readiness.reasons)["copies"]
    await inbox.stop(consumer)
    assert await inbox.ready() == 5
    await inbox.channel.queue_delete(parking)
    await inbox.declare()
    await inbox.start(inbox.consumer(handle))
    assert {(await inbox.parked()).message_id for _ in range(5)} == {f"m{number}" for number in range(5)}


# ---------------------------------------------------------------- v7 is retried while v8 passes


def versioned(version: int) -> dict[str, Any]:
    return {
        "body": b'{"v":%d}' % version,
        "headers": {"aggregate_type": "order", "aggregate_id": "42", "aggregate_version": version},
    }


async def v7_fails_once_before_v8(inbox: Site, consumer_of: Any) -> list[int]:
    """The versions in the order in which they took effect."""

    async def handle(message: Message, connection: asyncpg.Connection) -> None:
        if message.id == "v7" and message.attempt == 0:
            raise Transient("not yet")
        await apply(message, connection)

    consumer: Consumer = consumer_of(handle)
    await inbox.publish("v7", **versioned(7))
    await inbox.publish("v8", **versioned(8))
    await inbox.start(consumer)
    await inbox.effects_are({"v7": 1, "v8": 1})
    return await inbox.versions()


async def test_v7_retried_while_v8_passes_without_an_order(inbox: Site) -> None:
    await inbox.declare()
    found = await v7_fails_once_before_v8(inbox, lambda handle: inbox.consumer(handle, workers=1))
    assert found == [8, 7], "a retry is a change of order"


async def test_v7_retried_while_v8_waits_by_version(inbox: Site) -> None:
    await inbox.declare()
    await inbox.database.execute("INSERT INTO processed_versions VALUES ('inventory', 'order', '42', 6)")
    found = await v7_fails_once_before_v8(inbox, lambda handle: inbox.consumer(handle, workers=1, order=Order.VERSION))
    assert found == [7, 8]


async def test_v7_retried_in_place_by_a_single_active_consumer(inbox: Site) -> None:
    await inbox.declare(arguments={"x-single-active-consumer": True})
    found = await v7_fails_once_before_v8(
        inbox, lambda handle: inbox.consumer(handle, workers=1, order=Order.SINGLE_ACTIVE)
    )
    assert found == [7, 8]
    assert await inbox.ready(names.retry_queue(QUEUE, LADDER[0])) == 0
