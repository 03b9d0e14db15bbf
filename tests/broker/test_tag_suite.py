"""The suite of single frames on the AMQP adapter, before a broker that speaks by script."""

from __future__ import annotations

import pytest

from relay.core.ports.broker import Link
from relay.message import PayloadType

from . import tag_suite
from .recorder import Recorder, make_broker
from .stub import Peer, StubBroker


class StubSpeaker:
    """`tag_suite.Speaker` over the stub."""

    def __init__(self, stub: StubBroker) -> None:
        self._stub = stub
        self._peer: Peer

    async def connect(self, recorder: Recorder) -> Link:
        link = await make_broker(self._stub.url).connect(recorder, PayloadType.JSON)
        self._peer = await self._stub.peer()
        return link

    async def published(self, count: int) -> None:
        await self._peer.published(count)

    def ack(self, tag: int, *, multiple: bool = False) -> None:
        self._peer.ack(tag, multiple)

    def nack(self, tag: int, *, multiple: bool = False) -> None:
        self._peer.nack(tag, multiple)

    def give_back(self, message_id: str) -> None:
        (message,) = (each for each in self._peer.messages if each.message_id == message_id)
        self._peer.give_back(message)

    def cut(self) -> None:
        self._peer.cut()

    def refuse(self, *, alone: bool) -> None:
        close = self._peer.close_connection if alone else self._peer.close_channel
        close(403, "ACCESS_REFUSED - it says so")


@pytest.fixture
def speaker(stub: StubBroker) -> StubSpeaker:
    return StubSpeaker(stub)


@pytest.mark.parametrize("case", tag_suite.TAGS, ids=lambda case: case.__name__)
async def test_on_the_adapter(speaker: StubSpeaker, case: tag_suite.Case) -> None:
    await case(speaker)
