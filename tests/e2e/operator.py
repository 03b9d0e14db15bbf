"""An operator beside relays that work: commands, states, what arrives. Shared by the tests of `relay parked`."""

from __future__ import annotations

import asyncio
import json
import subprocess
from typing import Any

import aio_pika

from tests.conftest import eventually
from tests.e2e import bystanders
from tests.e2e.conftest import Daemon, Site, command
from tests.e2e.ledger import drain

FEW_TRIES = {"retry_delays": "100ms", "lease": "2s"}


async def relay(site: Site, *arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """A command to its end; without a terminal."""
    extra = {f"RELAY_{name.upper()}": value for name, value in settings.items()}
    return await asyncio.to_thread(lambda: command(*arguments, settings={**site.settings, **extra}))


async def document(site: Site, *arguments: str) -> dict[str, Any]:
    done = await relay(site, *arguments, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


async def start(site: Site, relays: int, **settings: str) -> list[Daemon]:
    """So many relays that share the shards and soon park."""
    return await bystanders.start(site, relays, **{**FEW_TRIES, **settings})


async def bind(site: Site, pattern: str) -> None:
    """The operator mends the route."""
    async with await aio_pika.connect(site.amqp_url) as connection:
        channel = await connection.channel()
        queue = await channel.declare_queue("q", passive=True)
        await queue.bind("events", pattern)


async def state(site: Site, id_: str) -> str:
    return str(
        await site.database.fetchval(
            "SELECT CASE WHEN sent_at IS NOT NULL THEN 'sent' ELSE coalesce(aside, 'pending') END"
            " FROM outbox WHERE id = $1", id_,
        )
    )  # fmt: skip


async def until_state(site: Site, id_: str, wanted: str) -> None:
    async def is_so() -> bool:
        return await state(site, id_) == wanted

    await eventually(is_so, 20)


async def arrivals(site: Site, count: int) -> list[str]:
    return [message.message_id or "" for message in await drain(site.amqp_url, count)]
