"""The bystander rule, end to end: good rows of other keys stand before and after a row at fault, in the same transaction.

All of them arrive, once, apart from one repeat where the broker closed its channel under them, and are charged nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

import aio_pika
import pytest
from aio_pika.abc import AbstractChannel, AbstractIncomingMessage

from tests.conftest import eventually
from tests.e2e.conftest import Daemon, Site
from tests.e2e.ledger import drain

ONE_OR_TWO: Final = pytest.mark.parametrize("relays", [1, 2])
BYSTANDERS: Final = 20


@asynccontextmanager
async def channel_of(site: Site) -> AsyncIterator[AbstractChannel]:
    async with await aio_pika.connect(site.amqp_url) as connection:
        yield await connection.channel()


async def start(site: Site, relays: int, **settings: str) -> list[Daemon]:
    """Each has its share: poison that changes hands closes a link of both, and bystanders are repeated for either."""
    daemons = [await site.start(name=f"r{number}", **settings).ready() for number in range(relays)]
    await eventually(lambda: all(daemon.metric("relay_shards_owned") == 64 / relays for daemon in daemons), 30.0)
    return daemons


async def insert_among(site: Site, poison: Sequence[dict[str, Any]], **columns: Any) -> list[str]:
    """One transaction: bystanders, the poison, bystanders; returns the bystanders' ids. `columns` are theirs."""
    good = [f"good{number}" for number in range(2 * BYSTANDERS)]
    async with site.database.transaction():
        for each in good[:BYSTANDERS]:
            await site.insert(each, key=each, **columns)
        for row in poison:
            await site.insert(**row)
        for each in good[BYSTANDERS:]:
            await site.insert(each, key=each, **columns)
    return good


async def arrived(
    site: Site, good: Sequence[str], *, others: int = 0, copies_max: int = 1
) -> dict[str, AbstractIncomingMessage]:
    """The bystanders arrive, and were not tried again; returns what `came_once` does."""
    ids = "ARRAY[" + ", ".join(f"'{each}'" for each in good) + "]"
    await site.until(f"(SELECT count(*) = {len(good)} FROM outbox WHERE sent_at IS NOT NULL AND id = ANY ({ids}))")
    attempts = await site.database.fetchval(f"SELECT sum(attempts) FROM outbox WHERE id = ANY ({ids})")
    assert attempts == 0, "bystanders are charged nothing"
    return await came_once(site, good, others=others, copies_max=copies_max)


async def came_once(
    site: Site, good: Sequence[str], *, others: int = 0, copies_max: int = 1
) -> dict[str, AbstractIncomingMessage]:
    """Empty the queue: each bystander came so often at most; returns whatever else came, once each, in its order, and
    waits for at least so many of those."""
    messages = await drain(site.amqp_url, len(good) + others)
    counts = Counter(message.message_id or "" for message in messages)
    assert all(1 <= counts[each] <= copies_max for each in good), counts.most_common(3)
    assert all(count == 1 for each, count in counts.items() if each not in good), counts.most_common(3)
    return {message.message_id or "": message for message in messages if message.message_id not in good}
