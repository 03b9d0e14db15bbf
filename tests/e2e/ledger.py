"""The oracle: what was committed against what the queue holds.

Reads the queue to its end (messages stay unacknowledged and return at the close, or are acknowledged by
`drain`), and judges first copies: nothing lost, nothing invented, per key in the order of seq.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import aio_pika
import asyncpg
from aio_pika.abc import AbstractIncomingMessage

from tests.conftest import eventually


@dataclass(frozen=True, slots=True)
class Ledger:
    """`keys` are the committed rows by id, in the order of seq, with their ordering keys (None: no order)."""

    keys: dict[str, tuple[str, str] | None]
    arrivals: list[str]

    @property
    def duplicates(self) -> int:
        return len(self.arrivals) - len(set(self.arrivals))

    @property
    def lost(self) -> set[str]:
        return self.keys.keys() - set(self.arrivals)

    @property
    def invented(self) -> set[str]:
        return set(self.arrivals) - self.keys.keys()

    def overtaken(self) -> list[tuple[str, str]]:
        """(early, late): a first copy that arrived before one of its key with a lower seq."""
        place = {message_id: number for number, message_id in enumerate(self.keys)}
        newest: dict[tuple[str, str], str] = {}
        found = []
        for message_id in dict.fromkeys(self.arrivals):
            key = self.keys.get(message_id)
            if key is None:
                continue
            before = newest.get(key)
            if before is not None and place[before] > place[message_id]:
                found.append((before, message_id))
            else:
                newest[key] = message_id
        return found

    def assert_complete(self, *, duplicates_max: int = 0) -> None:
        """Every committed row arrived, once but for so many copies, in order per key."""
        assert not self.lost, f"lost {sorted(self.lost)[:10]} of {len(self.keys)}"
        assert not self.invented, f"invented {sorted(self.invented)[:10]}"
        assert not self.overtaken(), f"out of order: {self.overtaken()[:10]}"
        assert self.duplicates <= duplicates_max, Counter(self.arrivals).most_common(3)


async def committed(database: asyncpg.Connection[asyncpg.Record]) -> dict[str, tuple[str, str] | None]:
    """The outbox's rows by id, in the order of seq."""
    rows = await database.fetch("SELECT id, aggregate_type, aggregate_id FROM outbox ORDER BY seq")
    return {
        row["id"]: None if row["aggregate_id"] is None else (row["aggregate_type"] or "", row["aggregate_id"])
        for row in rows
    }


async def drain(
    amqp_url: str, count: int, *, queue: str = "q", timeout_s: float = 20.0, is_all: bool = True
) -> list[AbstractIncomingMessage]:
    """Take messages off the queue: at least `count` distinct ones, then (`is_all`: nobody publishes any more) whatever
    else is there. AssertionError once no new one has come for `timeout_s`, however many there are to come."""
    messages: list[AbstractIncomingMessage] = []
    ids: set[str] = set()
    newest_at = time.monotonic()

    async def take(message: AbstractIncomingMessage) -> None:
        # Counted once its acknowledgement is written: any other goes back to the queue, and would be counted twice.
        await message.ack()
        messages.append(message)
        if (message.message_id or "") not in ids:
            ids.add(message.message_id or "")
            nonlocal newest_at
            newest_at = time.monotonic()

    async with await aio_pika.connect(amqp_url) as connection:
        channel = await connection.channel()
        await channel.set_qos(prefetch_count=1000)
        source = await channel.declare_queue(queue, passive=True)
        tag = await source.consume(take)
        await eventually(lambda: len(ids) >= count or time.monotonic() - newest_at > timeout_s, math.inf)
        assert len(ids) >= count, f"{len(ids)} of {count} ids came, in {len(messages)} messages"
        await source.cancel(tag)
        while is_all and (message := await source.get(fail=False)) is not None:
            await take(message)
    return messages


async def ledger(
    database: asyncpg.Connection[asyncpg.Record],
    amqp_url: str,
    *,
    earlier: Sequence[str] = (),
    timeout_s: float = 20.0,
) -> Ledger:
    """Committed rows and the queue's content; `earlier` are arrivals that were taken off before."""
    keys = await committed(database)
    missing = len(keys.keys() - set(earlier))
    messages = await drain(amqp_url, missing, timeout_s=timeout_s)
    return Ledger(keys, [*earlier, *(message.message_id or "" for message in messages)])
