"""A vhost of the session's RabbitMQ as an operator has it: its API, its queues, and the commands that work on it."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import aio_pika
from aio_pika.abc import AbstractChannel, AbstractIncomingMessage

from relay.management import ManagementApi
from relay.servers import RabbitServer
from tests.conftest import eventually
from tests.e2e.conftest import command


@dataclass(slots=True)
class Vhost:
    """One vhost of the session's node."""

    server: RabbitServer
    url: str
    directory: Path

    @property
    def vhost(self) -> str:
        return unquote(urlsplit(self.url).path[1:])

    @property
    def api(self) -> ManagementApi:
        return ManagementApi(self.server.management_url)

    @property
    def settings(self) -> Mapping[str, str]:
        return {"RELAY_MANAGEMENT_URL": self.server.management_url, "RELAY_AMQP_URL": self.url}

    def write(self, text: str) -> str:
        """A topology file of this vhost; returns its path."""
        path = self.directory / "topology.toml"
        path.write_text(f"vhost = {json.dumps(self.vhost)}\n{text}")
        return str(path)

    async def relay(
        self, *arguments: str, settings: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        chosen = self.settings if settings is None else settings
        return await asyncio.to_thread(lambda: command(*arguments, settings=chosen))

    async def apply(self, text: str) -> str:
        """Apply a topology that must go; returns the file's path."""
        path = self.write(text)
        done = await self.relay("topology", "apply", path)
        assert done.returncode == 0, done.stdout + done.stderr
        return path


async def message_of(channel: AbstractChannel, queue: str, timeout_s: float = 10.0) -> AbstractIncomingMessage:
    """The next message of a queue, once there is one; not acknowledged."""
    source = await channel.get_queue(queue, ensure=False)
    ask: Callable[[], Awaitable[Any]] = lambda: source.get(fail=False)  # noqa: E731
    found: AbstractIncomingMessage = await eventually(ask, timeout_s)
    return found


async def send(channel: AbstractChannel, exchange: str, key: str, id: str, **properties: Any) -> None:
    """One confirmed, persistent, mandatory message."""
    message = aio_pika.Message(b"{}", message_id=id, delivery_mode=2, **properties)
    to = channel.default_exchange if not exchange else await channel.get_exchange(exchange, ensure=False)
    await to.publish(message, key, mandatory=True)


async def count(channel: AbstractChannel, queue: str) -> int:
    """Ready messages."""
    found = await channel.declare_queue(queue, passive=True)
    return found.declaration_result.message_count or 0
