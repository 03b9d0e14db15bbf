"""Messages that RabbitMQ hands on and the driver cannot decode: each is parked alone, as any other malformed one."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import aiormq
import asyncpg
import pytest

from relay.inbox import Message
from relay.inbox.outcome import ErrorClass, Outcome
from relay.topology import names
from tests import foreign
from tests.conftest import eventually
from tests.foreign import APP_ID, HEADERS, MESSAGE_ID, MICROSECONDS, TIMESTAMP, TYPE, entry, long, short, stamp
from tests.inbox.site import EXCHANGE, QUEUE, Site
from tests.inbox.test_sidecar import Sidecar, rows

POISON = {
    "timestamp": (MESSAGE_ID | TIMESTAMP, short(b"timestamp") + stamp(MICROSECONDS)),
    "header": (HEADERS | MESSAGE_ID, long(entry(b"at", b"T", stamp(MICROSECONDS))) + short(b"header")),
    "name": (HEADERS | MESSAGE_ID, long(entry(b"\xe9", b"V", b"")) + short(b"name")),
    "type": (MESSAGE_ID | TYPE, short(b"type") + short(b"caf\xe9")),
    "app": (MESSAGE_ID | APP_ID, short(b"app") + short(b"caf\xe9")),
    "key": (MESSAGE_ID, short(b"key")),
}


async def publish_poison(inbox: Site, which: Iterable[str] = POISON) -> None:
    for name in which:
        key = b"order.caf\xe9" if name == "key" else b"order.created"
        await foreign.publish(inbox.amqp_url, EXCHANGE.encode(), key, *POISON[name], name.encode())


async def test_a_consumer_gets_its_messages_from_the_wire(inbox: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """An upgrade of aiormq that takes the wire's place would be slower, and end with the first of the messages below."""
    bodies = {"none": b"", "small": b"{}", "frames": secrets.token_bytes(300_000)}
    taken: dict[str, bytes] = {}

    async def handle(message: Message, connection: asyncpg.Connection) -> None:
        taken[message.id] = message.body

    def not_by_its_own_way(*_: object) -> None:
        raise AssertionError("aiormq read a delivery itself")

    monkeypatch.setattr(aiormq.channel.Channel, "_on_deliver_frame", not_by_its_own_way)
    await inbox.declare()
    await inbox.start(inbox.consumer(handle))
    for message_id, body in bodies.items():
        await inbox.publish(message_id, body)
    await eventually(lambda: taken == bodies)


@pytest.mark.parametrize("kind", ["classic", "quorum"])
async def test_a_consumer_parks_them_and_disturbs_nobody(inbox: Site, kind: str) -> None:
    """The connection went with all that was in hand, and again at each delivery: a quorum queue gave innocents up."""
    go_on = asyncio.Event()
    seen: dict[str, Message] = {}

    async def handle(message: Message, connection: asyncpg.Connection) -> None:
        seen[message.id] = message
        await go_on.wait()

    await inbox.declare(arguments={"x-queue-type": kind})
    await inbox.publish("innocent")
    consumer = await inbox.start(inbox.consumer(handle, workers=2, prefetch=1))
    await eventually(lambda: "innocent" in seen)
    await publish_poison(inbox)
    parked = {message.body.decode(): message for message in [await inbox.parked() for _ in POISON]}
    go_on.set()
    await eventually(lambda: consumer.metrics.messages[Outcome.HANDLED] == 1)
    assert not seen["innocent"].is_redelivered
    assert parked.keys() == POISON.keys()
    for name, message in parked.items():
        assert message.message_id == name
        assert message.headers[names.ERROR_CLASS] == ErrorClass.MALFORMED
        assert str(message.headers[names.LAST_ERROR]).startswith("cannot be decoded: ")
        assert message.headers[names.ORIGINAL_EXCHANGE] == EXCHANGE
    said = {name: str(message.headers[names.LAST_ERROR]) for name, message in parked.items()}
    assert said["timestamp"] == "cannot be decoded: timestamp 1764439200000000: year 57882 is out of range"
    assert said["type"] == r"cannot be decoded: type b'caf\xe9': not UTF-8"
    assert parked["key"].headers[names.ORIGINAL_ROUTING_KEY] == r"order.caf\xe9"
    metrics = consumer.metrics
    assert metrics.failures[ErrorClass.MALFORMED] == metrics.parked[ErrorClass.MALFORMED] == len(POISON)
    await eventually(lambda: metrics.unacked_messages == 0)
    assert metrics.reconnects == 0 and await inbox.ready() == 0


async def test_one_of_which_there_can_be_no_copy_goes_by_the_queues_own_policy(inbox: Site) -> None:
    """Its headers fill a frame, a copy's would not fit."""
    parking = names.parking_queue(QUEUE)
    await inbox.declare(arguments={"x-dead-letter-exchange": "", "x-dead-letter-routing-key": f"{parking}.2"})
    await inbox.channel.declare_queue(f"{parking}.2", durable=True)
    consumer = await inbox.start(inbox.consumer())
    table = long(entry(b"long", b"S", long(b"x" * 130_900)))
    flags = HEADERS | MESSAGE_ID | TIMESTAMP
    properties = table + short(b"m1") + stamp(MICROSECONDS)
    await foreign.publish(inbox.amqp_url, EXCHANGE.encode(), b"order.created", flags, properties)
    await eventually(lambda: consumer.metrics.messages[Outcome.REJECTED] == 1)

    async def is_dead_lettered() -> bool:
        return await inbox.ready(f"{parking}.2") == 1

    await eventually(is_dead_lettered)
    assert consumer.metrics.reconnects == 0


async def test_a_sidecar_parks_them_alone(inbox: Site, tmp_path: Path) -> None:
    await inbox.declare(())
    await inbox.publish("first")
    await publish_poison(inbox)
    await inbox.publish("last")
    sidecar = Sidecar(
        {
            "RELAY_INBOX_DATABASE_URL": inbox.database_url,
            "RELAY_INBOX_AMQP_URL": inbox.amqp_url,
            "RELAY_INBOX_QUEUE": QUEUE,
        },
        tmp_path / "sidecar.log",
    )
    try:
        await sidecar.ready()
        parked = [await inbox.parked() for _ in POISON]
        assert {message.message_id for message in parked} == set(POISON)

        async def are_there() -> bool:
            return await rows(inbox) == ["first", "last"]

        await eventually(are_there)
        await eventually(lambda: sidecar.metric("relay_inbox_unacked_messages") == 0)
        assert sidecar.metric("relay_inbox_reconnects_total") == 0
        assert await sidecar.stop() == 0
        warnings: list[dict[str, Any]] = [event for event in sidecar.events() if event["level"] != "info"]
        assert {event["event"] for event in warnings} == {"message_parked"}, "no other line"
    finally:
        sidecar.close()
