"""The demo's consumer: an inventory service that applies each event once.

The inbox row and the business change commit together; messages are acknowledged after that COMMIT, so a crash
between the two brings them again and the inbox knows them. One such crash is played: the connection is
dropped with committed, unacknowledged messages.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

import aio_pika
import asyncpg
from aio_pika.abc import AbstractIncomingMessage

EXCHANGE: Final = "events"
QUEUE: Final = "inventory"
CONSUMER: Final = "inventory"
PREFETCH: Final = 500
BATCH_MAX: Final = 100

SCHEMA: Final = "CREATE TABLE stock (order_id text PRIMARY KEY, applied int NOT NULL)"

_APPLY: Final = """
    WITH fresh AS (
        INSERT INTO processed_messages (consumer_name, message_id)
        SELECT $1, m FROM unnest($2::text[]) m
        ON CONFLICT DO NOTHING RETURNING message_id),
    effects AS (
        SELECT o AS order_id, count(*) AS n
        FROM fresh JOIN unnest($2::text[], $3::text[]) t(m, o) ON m = message_id GROUP BY o)
    INSERT INTO stock AS s (order_id, applied) SELECT order_id, n FROM effects
    ON CONFLICT (order_id) DO UPDATE SET applied = s.applied + excluded.applied
"""


async def declare_topology(amqp_url: str) -> None:
    """The exchange, and a quorum queue that gets every order's events."""
    async with await aio_pika.connect(amqp_url) as connection:
        channel = await connection.channel()
        exchange = await channel.declare_exchange(EXCHANGE, aio_pika.ExchangeType.TOPIC, durable=True)
        queue = await channel.declare_queue(QUEUE, durable=True, arguments={"x-queue-type": "quorum"})
        await queue.bind(exchange, "order.#")


class Stock:
    """`arrivals`: ids of the copies received, in order, but for those the broker delivered again."""

    def __init__(self, database_url: str, amqp_url: str) -> None:
        self._database_url = database_url
        self._amqp_url = amqp_url
        self._received: asyncio.Queue[AbstractIncomingMessage] = asyncio.Queue()
        self.arrivals: list[str] = []
        self.distinct: set[str] = set()
        self.redeliveries = 0
        self.crash_wanted = asyncio.Event()

    async def work(self) -> None:
        """Consume until cancelled."""
        database = await asyncpg.connect(self._database_url)
        try:
            while True:
                await self._live(database)
        finally:
            await database.close(timeout=5)

    async def _live(self, database: Any) -> None:
        """One life of the consumer: returns after the crash that was asked for."""
        self._received = asyncio.Queue()
        connection = await aio_pika.connect(self._amqp_url)
        try:
            channel = await connection.channel()
            await channel.set_qos(prefetch_count=PREFETCH)
            queue = await channel.get_queue(QUEUE)
            await queue.consume(self._receive)
            while True:
                batch = await self._batch()
                await self._apply(database, batch)
                if self.crash_wanted.is_set():
                    self.crash_wanted.clear()
                    return
                await batch[-1].ack(multiple=True)
        finally:
            await connection.close()

    async def _receive(self, message: AbstractIncomingMessage) -> None:
        message_id = message.message_id or ""
        if message.redelivered:
            self.redeliveries += 1
        else:
            self.arrivals.append(message_id)
            self.distinct.add(message_id)
        self._received.put_nowait(message)

    async def _batch(self) -> list[AbstractIncomingMessage]:
        batch = [await self._received.get()]
        while len(batch) < BATCH_MAX and not self._received.empty():
            batch.append(self._received.get_nowait())
        return batch

    async def _apply(self, database: Any, batch: list[AbstractIncomingMessage]) -> None:
        # One copy of each: a statement cannot insert one key twice.
        orders = {message.message_id or "": str(message.headers["aggregate_id"]) for message in batch}
        async with database.transaction():
            await database.execute(_APPLY, CONSUMER, list(orders), list(orders.values()))

    async def effects(self) -> dict[str, int]:
        """How often each order was changed in the consumer's database."""
        database = await asyncpg.connect(self._database_url)
        try:
            return {row["order_id"]: row["applied"] for row in await database.fetch("SELECT * FROM stock")}
        finally:
            await database.close(timeout=5)

    async def waiting(self) -> int:
        """Messages ready in the queue, not counting those under way to the consumer."""
        async with await aio_pika.connect(self._amqp_url) as connection:
            channel = await connection.channel()
            queue = await channel.declare_queue(QUEUE, passive=True)
            return (queue.declaration_result.message_count or 0) + self._received.qsize()
