"""The suite of links on RabbitMQ and on a file."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import aiormq
import pytest

from relay.broker.amqp import AmqpBroker
from relay.broker.file import FileBroker
from relay.core.ports import Link
from relay.message import PayloadType
from relay.route import Router

from . import link_suite
from .recorder import Recorder

NOW = 1_764_440_000.0
CASES = [*link_suite.LIVES, *link_suite.CONTENTS]


class Rabbit:
    """`link_suite.Place` over a vhost of the test's own."""

    def __init__(self, url: str, channel: aiormq.abc.AbstractChannel) -> None:
        self._url = url
        self._channel = channel

    async def connect(self, recorder: Recorder, *, routing_key: str = "{event_type}") -> Link:
        broker = AmqpBroker(lambda: [self._url], Router("ev", routing_key), database_now=lambda: NOW)
        return await broker.connect(recorder, PayloadType.JSON)

    async def arrived(self, count: int) -> Sequence[tuple[str, bytes, dict[str, Any]]]:
        found = []
        while (message := await self._channel.basic_get("q", no_ack=True)).header.properties.message_id is not None:
            properties = message.header.properties
            found.append((str(properties.message_id), message.body, dict(properties.headers or {})))
        assert len(found) == count
        return found


class File:
    """`link_suite.Place` over a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def connect(self, recorder: Recorder, *, routing_key: str = "{event_type}") -> Link:
        broker = FileBroker(str(self._path), Router("ev", routing_key), database_now=lambda: NOW)
        return await broker.connect(recorder, PayloadType.JSON)

    async def arrived(self, count: int) -> Sequence[tuple[str, bytes, dict[str, Any]]]:
        found = []
        for line in self._path.read_bytes().splitlines(keepends=True):
            assert line.endswith(b"\n")
            document = json.loads(line)
            found.append((document["id"], body_of(line), document["headers"]))
        assert len(found) == count
        return found


def body_of(line: bytes) -> bytes:
    """The message's body, as a reader of the file gets it."""
    document = json.loads(line)
    if "body_text" in document:
        return str(document["body_text"]).encode()
    if "body_base64" in document:
        return base64.b64decode(document["body_base64"])
    # The last member: everything between its name and the closing brace.
    return line.partition(b',"body":')[2].removesuffix(b"}\n")


@pytest.fixture
async def rabbit(amqp_url: str) -> AsyncIterator[Rabbit]:
    connection = await aiormq.connect(amqp_url)
    channel = await connection.channel()
    await channel.exchange_declare("ev", exchange_type="topic", durable=True)
    await channel.queue_declare("q", durable=True)
    await channel.queue_bind("q", "ev", "ok.#")
    yield Rabbit(amqp_url, channel)
    await connection.close()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
async def test_on_rabbitmq(rabbit: Rabbit, case: link_suite.Case) -> None:
    await case(rabbit)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
async def test_on_a_file(tmp_path: Path, case: link_suite.Case) -> None:
    await case(File(tmp_path / "events.jsonl"))
