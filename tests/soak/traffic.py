"""What goes in and what comes out of a soak: one writer, one consumer, a ledger of a byte a row."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import AsyncIterator
from datetime import datetime

import aiormq
import asyncpg
from aiormq.abc import AbstractConnection, DeliveredMessage

from relay.database import DRIVER_ERRORS
from tests.e2e.conftest import QUEUE

KEYS = 5000
COMMITS_S = 20
PREFETCH = 2000
ACK_S = 0.05
CONNECT_S = 5.0
BACKLOG_S = 20.0
LOST = (aiormq.AMQPError, OSError, TimeoutError, RuntimeError)
"""What the end of a connection looks like from aiormq."""
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
        self.redelivered = 0
        """Seen before, and the broker says that it gave them out before: a restart of the broker, not a relay's copy."""
        self.out_of_order = 0
        self._latencies_s: list[float] = []

    def answer(self, numbers: range) -> None:
        self.rows += len(numbers)
        if self.answered and self.answered[-1].stop == numbers.start:
            self.answered[-1] = range(self.answered[-1].start, numbers.stop)
        else:
            self.answered.append(numbers)

    def arrive(self, number: int, latency_s: float, *, is_redelivered: bool) -> None:
        if number >= len(self._seen):
            self._seen.extend(bytes(max(1 << 16, number + 1 - len(self._seen))))
        if self._seen[number]:
            self.redelivered += is_redelivered
            self.copies += not is_redelivered
            return
        self._seen[number] = 1
        self.arrived += 1
        key = number % KEYS
        self.out_of_order += number < self._highest[key]
        self._highest[key] = max(number, self._highest[key])
        self._latencies_s.append(latency_s)

    @property
    def until(self) -> int:
        """Above every row that is owed by now."""
        return self.answered[-1].stop if self.answered else 1

    def has_all(self, until: int) -> bool:
        """Nothing below it is owed any more."""
        return all(
            each.start >= until or self._missing(each.start, min(each.stop, until)) == 0 for each in self.answered
        )

    def lost(self) -> int:
        """Owed and not there."""
        return sum(self._missing(each.start, each.stop) for each in self.answered)

    def _missing(self, start: int, stop: int) -> int:
        return stop - start - self._seen.count(1, start, stop)

    def latencies_ms(self) -> tuple[float, float, float] | None:
        """Median, 99th percentile and the worst since the last call."""
        found, self._latencies_s = sorted(self._latencies_s), []
        if not found:
            return None
        p50, p99, worst = (
            round(each * 1e3, 2) for each in (statistics.median(found), found[int(len(found) * 0.99)], found[-1])
        )
        return p50, p99, worst


class Writer:
    """Commits about `rows_s` rows a second while the server takes them, and while not more than `BACKLOG_S` of them is on
    its way: where the machine has become too slow for the rate, the rate falls, and the backlog does not grow for hours.
    """

    def __init__(self, url: str, ledger: Ledger) -> None:
        self._url = url
        self._ledger = ledger
        self._next = 1
        self.rows_s = 0.0
        self.held_back_s = 0.0
        """How long it has waited for the backlog."""
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
            if self._ledger.rows - self._ledger.arrived > BACKLOG_S * self.rows_s:
                self.held_back_s += 1 / COMMITS_S
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
async def consuming(url: str, ledger: Ledger) -> AsyncIterator[asyncio.Task[None]]:
    """Reads the queue, connecting again whenever the broker goes. The task ends by nothing else."""
    task = asyncio.create_task(_consume(url, ledger))
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _consume(url: str, ledger: Ledger) -> None:
    while True:
        # aiormq cancels whoever waits on a connection that breaks: a task of its own, so that it is not this one.
        life = asyncio.create_task(_connected(url, ledger))
        try:
            await asyncio.wait([life])
        finally:
            life.cancel()
        if not life.cancelled() and not isinstance(error := life.exception(), (*LOST, type(None))):
            raise error
        await asyncio.sleep(0.5)


async def _connected(url: str, ledger: Ledger) -> None:
    """One connection's life. A plain channel, acknowledged in strides: the consumer must not be what limits the rate."""
    newest = acknowledged = 0

    async def take(message: DeliveredMessage) -> None:
        nonlocal newest
        properties = message.header.properties
        written_at = datetime.fromisoformat(str((properties.headers or {})["occurred_at"]))
        latency_s = max(0.0, time.time() - written_at.timestamp())
        ledger.arrive(int(properties.message_id or 0), latency_s, is_redelivered=bool(message.redelivered))
        newest = max(newest, message.delivery_tag or 0)

    async with asyncio.timeout(CONNECT_S):
        connection: AbstractConnection = await aiormq.connect(url)
    try:
        async with asyncio.timeout(CONNECT_S):
            channel = await connection.channel()
            await channel.basic_qos(prefetch_count=PREFETCH)
            await channel.basic_consume(QUEUE, take)
        while not (connection.is_closed or channel.is_closed):
            await asyncio.sleep(ACK_S)
            if newest > acknowledged:
                acknowledged = newest
                async with asyncio.timeout(CONNECT_S):
                    await channel.basic_ack(acknowledged, multiple=True, wait=False)
    finally:
        with contextlib.suppress(*LOST):
            async with asyncio.timeout(CONNECT_S):
                await connection.close()
