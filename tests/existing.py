"""A RabbitMQ that `RELAY_TEST_AMQP_URL` names: its one vhost is every test's, one test at a time, and empty for each of them."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import aiormq

from relay.servers import RabbitServer

NAMES: Final = (
    "dlx",
    "ev",
    "events",
    "full",
    "inner",
    "inner0",
    "inner1",
    "inner2",
    "inner3",
    "inventory",
    "inventory.parking",
    "inventory.parking.2",
    "inventory.retry.1m",
    "inventory.retry.1s",
    "inventory.retry.5s",
    "inventory.retry.100ms",
    "inventory.retry.200ms",
    "inventory.retry.50ms",
    "later",
    "limited",
    "limited.parking",
    "many",
    "orders",
    "q",
    "relay_bench_taken",
    "short",
    "work",
)
"""The queues and exchanges that tests leave. AMQP lists none, and a broker that exists may lack the management plugin; with a
private one the fixture `amqp_url` fails the test that leaves another."""


@contextlib.asynccontextmanager
async def lent(url: str) -> AsyncIterator[None]:
    """The vhost for the block alone, whichever process of this user wants it, without what others left there."""
    with lock_of(url).open("w") as lock:
        # For as long as another worker's test takes. Nothing else runs in this process meanwhile.
        fcntl.flock(lock, fcntl.LOCK_EX)
        await _clear(url)
        yield
        await _clear(url)


def lock_of(url: str) -> Path:
    digest = hashlib.sha256(url.encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir(), f"relay-test-vhost-{os.getuid()}-{digest}")


async def _clear(url: str) -> None:
    async with await aiormq.connect(url) as connection:
        channel = await connection.channel()
        for name in NAMES:
            # To delete what is not there succeeds.
            await channel.queue_delete(name)
            await channel.exchange_delete(name)


def left_in(server: RabbitServer, vhost: str) -> set[str]:
    """The names of its queues and exchanges, but for the broker's own."""
    here = f"<<{','.join(map(str, vhost.encode()))}>>"
    names = f"[element(4, Name) || Name <- rabbit_amqqueue:list_names({here})]"
    names += f" ++ [element(4, element(2, Exchange)) || Exchange <- rabbit_exchange:list({here})]"
    found = {bytes(map(int, codes.split(","))).decode() for codes in re.findall(r"#Bin<([\d,]+)>", server.eval(names))}
    return {name for name in found if not name.startswith("amq.")}
