"""Where the suites of links take place: a vhost of RabbitMQ behind a proxy, and a file on a disk of the test's own."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from aiormq.abc import AbstractChannel

from relay.broker.amqp import AmqpBroker
from relay.broker.file import FileBroker
from relay.core.ports.broker import Link
from relay.message import PayloadType
from relay.route import Router
from relay.servers import RabbitServer
from tests.proxy import Proxy

from .disk import Disk
from .recorder import Recorder

NOW: Final = 1_764_440_000.0
ROOM: Final = 1 << 40


class RabbitPlace:
    """`outcome_suite.BrokerPlace` over a vhost of the test's own, with `ev` bound to `q` with `ok.#`.

    `server` is needed for alarms and rights only. `heal` puts back what outlives the vhost.
    """

    refused = "refused.x"

    def __init__(self, url: str, channel: AbstractChannel, proxy: Proxy, server: RabbitServer | None) -> None:
        self._url = url
        self._channel = channel
        self._proxy = proxy
        self._server = server

    async def set_up(self) -> None:
        await self._channel.exchange_declare("ev", exchange_type="topic", durable=True)
        await self._channel.queue_declare("q", durable=True)
        await self._channel.queue_bind("q", "ev", "ok.#")
        if self._server is not None:
            # Writing to the topic of refused rows is forbidden: the channel is closed over such a row alone.
            vhost = unquote(urlsplit(self._url).path[1:])
            names = ", ".join(f'<<"{text}">>' for text in ("guest", vhost, "ev", "^(?!refused)", ".*", "test"))
            await self._eval(f"rabbit_auth_backend_internal:set_topic_permissions({names})")

    async def heal(self) -> None:
        self._proxy.heal()
        if self._server is not None:
            await asyncio.to_thread(self._server.memory_alarm, False)

    async def connect(
        self, recorder: Recorder, *, routing_key: str = "{event_type}", is_mandatory: bool = True
    ) -> Link:
        broker = AmqpBroker(
            lambda: [self._proxy.url],
            Router("ev", routing_key),
            database_now=lambda: NOW,
            is_mandatory=is_mandatory,
        )
        return await broker.connect(recorder, PayloadType.JSON)

    async def arrived(self, count: int) -> Sequence[tuple[str, bytes, dict[str, Any]]]:
        found = []
        while (message := await self._channel.basic_get("q", no_ack=True)).header.properties.message_id is not None:
            properties = message.header.properties
            found.append((str(properties.message_id), message.body, dict(properties.headers or {})))
        assert len(found) == count
        return found

    async def mute(self, on: bool) -> None:
        if on:
            self._proxy.freeze()
        else:
            self._proxy.thaw()

    async def cut(self) -> None:
        self._proxy.reset()

    async def block(self, on: bool) -> None:
        assert self._server is not None
        await asyncio.to_thread(self._server.memory_alarm, on)

    async def route(self, event_type: str, exists: bool) -> None:
        if exists:
            await self._channel.queue_bind("q", "ev", event_type)
        else:
            await self._channel.queue_unbind("q", "ev", event_type)

    async def fill(self, event_type: str, on: bool) -> None:
        if not on:
            await self._channel.queue_purge("full")
            return
        arguments: dict[str, Any] = {"x-max-length": 1, "x-overflow": "reject-publish"}
        await self._channel.queue_declare("full", durable=True, arguments=arguments)
        await self._channel.queue_bind("full", "ev", event_type)
        await self._channel.basic_publish(b"it is full of this", routing_key="full")

    async def refuse_connections(self, on: bool) -> None:
        self._proxy.refuses = on

    async def delete_exchange(self) -> None:
        await self._channel.exchange_delete("ev")

    async def _eval(self, expressions: str) -> None:
        assert self._server is not None
        await asyncio.to_thread(self._server.eval, expressions)


class FilePlace:
    """`outcome_suite.FaultyPlace` over a file."""

    def __init__(self, path: Path, disk: Disk) -> None:
        self._path = path
        self._disk = disk

    async def connect(
        self, recorder: Recorder, *, routing_key: str = "{event_type}", is_mandatory: bool = True
    ) -> Link:
        assert is_mandatory, "a file is a route"
        self._disk.sync_error = None
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

    async def mute(self, on: bool) -> None:
        if on:
            self._disk.answers.clear()
        else:
            self._disk.answers.set()

    async def cut(self) -> None:
        """The sync that hangs fails."""
        self._disk.fail_sync()

    async def block(self, on: bool) -> None:
        self._disk.room = 0 if on else ROOM


def body_of(line: bytes) -> bytes:
    """The message's body, as a reader of the file gets it."""
    document = json.loads(line)
    if "body_text" in document:
        return str(document["body_text"]).encode()
    if "body_base64" in document:
        return base64.b64decode(document["body_base64"])
    # The last member: everything between its name and the closing brace.
    return line.partition(b',"body":')[2].removesuffix(b"}\n")
