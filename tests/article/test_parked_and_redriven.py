"""The whole of the consumer's side: a declared topology, a library that retries and parks, an operator who redrives.

Three parts that know each other only by names: the message must come back to the one queue, as if for the first time.
"""

from __future__ import annotations

from pathlib import Path

import asyncpg

from relay.inbox import Message, RetryPolicy, Transient
from relay.servers import RabbitServer
from relay.topology import names
from tests.conftest import eventually
from tests.inbox.site import QUEUE, Site, apply
from tests.vhost import Vhost

TOPOLOGY = f"""\
[[exchange]]
name = "events"

[[queue]]
name = "{QUEUE}"
bind = [{{ exchange = "events", key = "order.#" }}]
retry = ["50ms", "100ms"]

[[queue]]
name = "audit"
bind = [{{ exchange = "events", key = "#" }}]
"""


async def test_parked_by_the_consumer_and_redriven_by_the_operator(
    inbox: Site, rabbit_server: RabbitServer, tmp_path: Path
) -> None:
    broker = Vhost(rabbit_server, inbox.amqp_url, tmp_path)
    await broker.apply(TOPOLOGY)
    seen: list[tuple[int, str, str]] = []
    is_mended = False

    async def handle(message: Message, connection: asyncpg.Connection) -> None:
        seen.append((message.attempt, message.exchange, message.routing_key))
        if not is_mended:
            raise Transient("the catalogue is away")
        await apply(message, connection)

    retry = RetryPolicy(delays_s=(0.05, 0.1), jitter=0.0)
    await inbox.start(inbox.consumer(handle, retry=retry, parking_exchange="events.dlx"))
    await inbox.publish("m1")
    await eventually(lambda: inbox.ready(names.parking_queue(QUEUE)))
    parked = await broker.relay("redrive", names.parking_queue(QUEUE), "--dry-run")
    assert "events order.created" in parked.stdout
    assert "transient: " in parked.stdout
    assert "the catalogue is away" in parked.stdout
    assert seen == [(number, "events", "order.created") for number in range(3)]

    is_mended = True
    done = await broker.relay("redrive", names.parking_queue(QUEUE), "--where", "x-error-class=transient")
    assert done.returncode == 0, done.stdout + done.stderr
    await inbox.effects_are({"m1": 1})
    assert seen[3:] == [(0, "events", "order.created")]
    # Retries went to one queue only; a redrive by the original route reaches all that are bound, once each.
    assert await inbox.ready("audit") == 2
    assert await inbox.ready(names.parking_queue(QUEUE)) == 0
