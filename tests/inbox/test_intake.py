"""The intake: deliveries put together from frames, and what it relies on in aiormq."""

from __future__ import annotations

import asyncio
import secrets
from typing import Any, cast

import aiormq
import asyncpg
import pytest
from aiormq import spec
from aiormq.abc import AbstractChannel, DeliveredMessage
from pamqp.body import ContentBody
from pamqp.header import ContentHeader

from relay.inbox import Message
from relay.inbox.intake import Intake
from tests.conftest import eventually
from tests.inbox.site import Site


class Channel:
    """As much of aiormq's as an intake touches."""

    def __init__(self) -> None:
        self.frames: asyncio.Queue[tuple[int, Any]] = asyncio.Queue()

    async def feed(self, *frames: Any) -> None:
        for frame in frames:
            await self.frames.put((1, frame))

    def passed_on(self) -> list[Any]:
        return [self.frames.get_nowait()[1] for _ in range(self.frames.qsize())]


def header(size: int) -> ContentHeader:
    return ContentHeader(body_size=size, properties=spec.Basic.Properties(message_id="m"))


async def test_deliveries_are_put_together_and_everything_else_goes_on_in_order() -> None:
    channel, received = Channel(), list[DeliveredMessage]()
    Intake(cast("AbstractChannel", channel), received.append).attach()
    first, second, third = (spec.Basic.Deliver(delivery_tag=tag) for tag in (1, 2, 3))
    consuming, cancel = spec.Basic.ConsumeOk("c"), spec.Basic.Cancel("c")
    await channel.feed(consuming, first, header(5), ContentBody(b"ab"), ContentBody(b"cde"), second, header(0))
    await channel.feed(third, header(1), ContentBody(b"x"), cancel)
    assert [(each.delivery_tag, each.body) for each in received] == [(1, b"abcde"), (2, b""), (3, b"x")]
    assert received[0].header.properties.message_id == "m"
    assert channel.passed_on() == [consuming, cancel]


async def test_a_delivery_that_is_cut_short_is_none() -> None:
    channel, received = Channel(), list[DeliveredMessage]()
    Intake(cast("AbstractChannel", channel), received.append).attach()
    closed = spec.Channel.Close(504, "x")
    await channel.feed(spec.Basic.Deliver(delivery_tag=1), header(5), ContentBody(b"ab"), closed)
    assert (received, channel.passed_on()) == ([], [closed])
    await channel.feed(spec.Basic.Deliver(delivery_tag=2), header(1), ContentBody(b"x"))
    assert [each.body for each in received] == [b"x"]


async def test_a_consumer_gets_its_messages_by_the_intake(inbox: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """An aiormq that hands its frames on in another way would be used in its own, slower one: nobody would notice."""
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
