"""Queues and exchanges of names that the driver thinks odd, from the topology to the operator's redrive."""

from __future__ import annotations

from pathlib import Path

import asyncpg

from relay.inbox import Message, RetryPolicy, Transient
from relay.servers import RabbitServer
from relay.topology import names
from tests.conftest import eventually
from tests.inbox.site import Site, apply
from tests.inbox.test_sidecar import Sidecar
from tests.vhost import Vhost

QUEUE = "bestände (tot)|1"
PARKING = names.parking_queue(QUEUE)
RETRY = names.retry_queue(QUEUE, 0.05)
BACK = "zurück | \N{LEFTWARDS ARROW}" + "x" * 150

TOPOLOGY = f"""\
[[exchange]]
name = "events"

[[exchange]]
name = "{BACK}"

[[queue]]
name = "{QUEUE}"
bind = [{{ exchange = "events", key = "order.#" }}, {{ exchange = "{BACK}", key = "#" }}]
dead_letter = "events.dlx"
retry = ["50ms"]
"""


async def test_a_sidecar_of_a_queue_of_any_name(inbox: Site, rabbit_server: RabbitServer, tmp_path: Path) -> None:
    """`relay inbox run` ended with the driver's ValueError, and began again, and ended."""
    await Vhost(rabbit_server, inbox.amqp_url, tmp_path).apply(TOPOLOGY)
    sidecar = Sidecar(
        {
            "RELAY_INBOX_DATABASE_URL": inbox.database_url,
            "RELAY_INBOX_AMQP_URL": inbox.amqp_url,
            "RELAY_INBOX_QUEUE": QUEUE,
        },
        tmp_path / "sidecar.log",
    )
    try:
        await inbox.publish("m1")
        await inbox.publish(None)
        await sidecar.ready()
        await eventually(lambda: sidecar.metrics().get(f'relay_inbox_queue_messages{{queue="{PARKING}"}}') == 1, 30)
        await eventually(lambda: sidecar.metric("relay_inbox_pending_rows") == 1)
        assert sidecar.metric("relay_inbox_reconnects_total") == 0
        assert await sidecar.stop() == 0
    finally:
        sidecar.close()


async def test_a_queue_of_any_name_is_consumed_counted_retried_parked_and_redriven(
    inbox: Site, rabbit_server: RabbitServer, tmp_path: Path
) -> None:
    """RabbitMQ takes every UTF-8 name; the driver refused most with a ValueError, which ended the consumer, and which a
    redrive took for a connection that could not be made."""
    broker = Vhost(rabbit_server, inbox.amqp_url, tmp_path)
    path = await broker.apply(TOPOLOGY)
    planned = await broker.relay("topology", "check", path)
    assert planned.returncode == 0, planned.stdout + planned.stderr
    attempts: list[int] = []
    is_mended = False

    async def handle(message: Message, connection: asyncpg.Connection) -> None:
        attempts.append(message.attempt)
        if not is_mended:
            raise Transient("the catalogue is away")
        await apply(message, connection)

    retry = RetryPolicy(delays_s=(0.05,), jitter=0.0)
    consumer = await inbox.start(inbox.consumer(handle, retry=retry, queue=QUEUE))
    await inbox.publish("m1")
    await eventually(lambda: consumer.metrics.queue_messages == {QUEUE: 0, RETRY: 0, PARKING: 1})
    assert attempts == [0, 1]

    is_mended = True
    dry = await broker.relay("redrive", PARKING, "--dry-run")
    assert "events order.created" in dry.stdout, dry.stderr
    done = await broker.relay("redrive", PARKING, "--to-exchange", BACK, "--routing-key", "k")
    assert done.returncode == 0, done.stdout + done.stderr
    await inbox.effects_are({"m1": 1})
    await eventually(lambda: consumer.metrics.queue_messages[PARKING] == 0)
    assert consumer.metrics.reconnects == 0

    missing = await broker.relay("redrive", "orders(dead)")
    assert "the queue 'orders(dead)' cannot be used: 404 NOT_FOUND" in missing.stderr
