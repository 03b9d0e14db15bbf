"""What goes in and what comes out of a soak: one writer, one consumer, a ledger of a byte a row."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import AsyncIterator
from datetime import datetime

import aio_pika
import asyncpg
from aio_pika.abc import AbstractIncomingMessage

from relay.database import DRIVER_ERRORS
from tests.e2e.conftest import QUEUE

KEYS = 500
COMMITS_S = 20
PREFETCH = 2000
_INSERT = """
    INSERT INTO outbox (id, event_type, aggregate_type, aggregate_id, payload)
    SELECT n::text, 'ok.x', 'order', (n % $3)::text, json_build_object('n', n)
    FROM generate_series($1::int, $2::int) n
"""


class Ledger:
    """Rows are numbers from 1 on. What was answered is owed; of what arrives, the first copies of a key ascend."""

    def __init__(self) -> None:
        self.answered: list[range] = []
        self._seen = bytearray()
        self._highest = [0] * KEYS
        self.rows = 0
        self.arrived = 0
        self.copies = 0
        self.out_of_order = 0
        self._latencies_s: list[float] = []

    def answer(self, numbers: range) -> None:
        self.rows += len(numbers)
        if self.answered and self.answered[-1].stop == numbers.start:
            self.answered[-1] = range(self.answered[-1].start, numbers.stop)
        else:
            self.answered.append(numbers)

    def arrive(self, number: int, latency_s: float) -> None:
        if number >= len(self._seen):
            self._seen.extend(bytes(max(1 << 16, number + 1 - len(self._seen))))
        if self._seen[number]:
            self.copies += 1
            return
        self._seen[number] = 1
        self.arrived += 1
        key = number % KEYS
        self.out_of_order += number < self._highest[key]
        self._highest[key] = max(number, self._highest[key])
        self._latencies_s.append(latency_s)

    def lost(self) -> int:
        """Owed and not there."""
        return sum(len(each) - self._seen.count(1, each.start, each.stop) for each in self.answered)

    def latencies_ms(self) -> tuple[float, float] | None:
        """Median and 99th percentile since the last call."""
        found, self._latencies_s = sorted(self._latencies_s), []
        if not found:
            return None
        return round(statistics.median(found) * 1e3, 2), round(found[int(len(found) * 0.99)] * 1e3, 2)


class Writer:
    """Commits about `rows_s` rows a second while the server takes them."""

    def __init__(self, url: str, ledger: Ledger) -> None:
        self._url = url
        self._ledger = ledger
        self._next = 1
        self.rows_s = 0.0
        self.is_stopped = False

    async def run(self) -> None:
        connection: asyncpg.Connection[asyncpg.Record] | None = None
        due = time.monotonic()
        while not self.is_stopped:
            due = max(due + 1 / COMMITS_S, time.monotonic() - 1.0)
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            count = round(self.rows_s / COMMITS_S)
            if count == 0:
                continue
            try:
                if connection is None or connection.is_closed():
                    connection = await asyncpg.connect(self._url, timeout=3)
                # A transaction whose answer was lost is not owed, and its numbers are not used again.
                first, self._next = self._next, self._next + count
                await connection.execute(_INSERT, first, self._next - 1, KEYS, timeout=10)
                self._ledger.answer(range(first, self._next))
            except DRIVER_ERRORS:
                if connection is not None:
                    connection.terminate()
                    connection = None
                await asyncio.sleep(0.2)
        if connection is not None:
            connection.terminate()


@contextlib.asynccontextmanager
async def consuming(url: str, ledger: Ledger) -> AsyncIterator[None]:
    """Reads the queue, connecting again whenever the broker goes."""
    task = asyncio.create_task(_consume(url, ledger))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _consume(url: str, ledger: Ledger) -> None:
    async def take(message: AbstractIncomingMessage) -> None:
        written_at = datetime.fromisoformat(str(message.headers["occurred_at"]))
        ledger.arrive(int(message.message_id or 0), max(0.0, time.time() - written_at.timestamp()))
        await message.ack()

    while True:
        try:
            connection = await aio_pika.connect(url, timeout=5)
            async with connection:
                channel = await connection.channel()
                await channel.set_qos(prefetch_count=PREFETCH)
                await (await channel.get_queue(QUEUE)).consume(take)
                await asyncio.wait([asyncio.ensure_future(connection.closed())])
        except (aio_pika.exceptions.AMQPError, OSError, TimeoutError, RuntimeError):
            await asyncio.sleep(0.5)
