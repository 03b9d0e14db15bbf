"""A consumer's site: its database with a business table, a queue with a ladder and a parking queue, and consumers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aio_pika
import asyncpg
from aio_pika.abc import AbstractIncomingMessage
from aiormq import spec

from relay.database import fill as fill_in
from relay.database import sql_file
from relay.inbox import Consumer, ConsumerSettings, Handler, Message, RetryPolicy, migrate
from relay.inbox.message import read
from relay.inbox.naming import names_of
from relay.inbox.outcome import RetryBudget
from relay.properties import ExactProperties, copied
from relay.topology import names
from tests.conftest import eventually

QUEUE = "inventory"
EXCHANGE = "events"
LADDER = (0.05, 0.1, 0.2)
BATCH = fill_in(sql_file("inbox/mailbox_insert.sql"), names_of(migrate.DEFAULT_TABLE))


async def apply(message: Message, connection: asyncpg.Connection) -> None:
    """The business effect: how often each message took effect, and in which order."""
    await connection.execute(
        "INSERT INTO effect (message_id, version) VALUES ($1, $2)", message.id, message.json()["v"]
    )


class _Anonymous(ExactProperties):
    """Without the message id that the library gives to every message."""

    def marshal(self) -> bytes:
        self.message_id = None
        return super().marshal()


@dataclass(slots=True)
class Site:
    """`consumers` that were started here are stopped at the end."""

    database_url: str
    amqp_url: str
    database: asyncpg.Connection
    connection: aio_pika.abc.AbstractConnection
    channel: aio_pika.abc.AbstractChannel
    running: dict[Consumer, asyncio.Task[None]] = field(default_factory=dict)

    # ---------------------------------------------------------------- the broker

    async def declare(
        self,
        delays_s: Sequence[float] = LADDER,
        *,
        queue: str = QUEUE,
        parks: bool = True,
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        """What `relay topology` makes of a queue with this ladder, by arguments."""
        exchange = await self.channel.declare_exchange(EXCHANGE, aio_pika.ExchangeType.TOPIC, durable=True)
        work = await self.channel.declare_queue(queue, durable=True, arguments=dict(arguments or {}))
        await work.bind(exchange, "order.#")
        for delay_s in delays_s:
            await self.channel.declare_queue(
                names.retry_queue(queue, delay_s),
                durable=True,
                arguments={
                    "x-message-ttl": names.delay_ms(delay_s),
                    "x-dead-letter-exchange": names.DEFAULT_EXCHANGE,
                    "x-dead-letter-routing-key": queue,
                },
            )
        if parks:
            await self.channel.declare_queue(names.parking_queue(queue), durable=True)

    async def publish(
        self, message_id: str | None, body: bytes = b'{"v":1}', *, type: str = "order.created", **properties: Any
    ) -> None:
        """One message as the relay publishes it; `headers` are given whole."""
        headers = properties.pop("headers", {"schema_version": 1})
        written = aio_pika.Message(
            body, message_id=message_id, type=type, delivery_mode=aio_pika.DeliveryMode.PERSISTENT, **properties
        ).properties
        channel = await self.channel.get_underlay_channel()
        as_given = copied(written, headers)
        await channel.basic_publish(
            body,
            exchange=EXCHANGE,
            routing_key=type,
            properties=as_given if message_id else _Anonymous(headers=headers),
        )

    async def get(self, queue: str, timeout_s: float = 10.0) -> AbstractIncomingMessage:
        """The next message of a queue, acknowledged."""
        source = await self.channel.get_queue(queue, ensure=False)

        async def one() -> AbstractIncomingMessage | None:
            return await source.get(fail=False)

        message = await eventually(one, timeout_s)
        assert message is not None
        await message.ack()
        return message

    async def parked(self, timeout_s: float = 10.0) -> AbstractIncomingMessage:
        """The next message of the parking queue."""
        return await self.get(names.parking_queue(QUEUE), timeout_s)

    async def ready(self, queue: str = QUEUE) -> int:
        """Messages ready in a queue."""
        found = await self.channel.declare_queue(queue, passive=True)
        return found.declaration_result.message_count or 0

    # ---------------------------------------------------------------- the database

    async def effects(self) -> dict[str, int]:
        """How often each message took effect."""
        rows = await self.database.fetch("SELECT message_id, count(*) AS n FROM effect GROUP BY message_id")
        return {row["message_id"]: row["n"] for row in rows}

    async def effects_are(self, wanted: Mapping[str, int], timeout_s: float = 15.0) -> None:
        """Wait until exactly these effects are there."""

        async def are() -> bool:
            return await self.effects() == wanted

        predicate: Callable[[], Awaitable[bool]] = are
        await eventually(predicate, timeout_s)

    async def versions(self) -> list[int]:
        """The versions that were applied, in order."""
        return [row["version"] for row in await self.database.fetch("SELECT version FROM effect ORDER BY seq")]

    async def reconnect(self) -> None:
        """A new session of the test's own, after the server was away."""
        self.database = await asyncpg.connect(self.database_url)

    # ---------------------------------------------------------------- consumers

    def consumer(
        self,
        handler: Handler = apply,
        *,
        retry: RetryBudget | None = None,
        amqp_url: str | None = None,
        database_url: str | None = None,
        queue: str = QUEUE,
        **settings: Any,
    ) -> Consumer:
        """One with a short ladder, without jitter."""
        settings.setdefault("gauge_interval_s", 0.1)
        settings.setdefault("version", "1.2.3")
        return Consumer(
            name="inventory",
            queue=queue,
            handler=handler,
            amqp_url=amqp_url or self.amqp_url,
            database_url=database_url or self.database_url,
            settings=ConsumerSettings(retry=retry or RetryPolicy(delays_s=LADDER, jitter=0.0), **settings),
        )

    async def start(self, consumer: Consumer, *, is_ready: bool = True) -> Consumer:
        """Run it; returns when it consumes."""
        self.running[consumer] = asyncio.create_task(consumer.run())
        if is_ready:
            await self.settled(consumer)
        return consumer

    async def settled(self, consumer: Consumer, timeout_s: float = 10.0) -> None:
        """Wait until it is ready."""

        def is_ready() -> bool:
            task = self.running[consumer]
            assert not task.done(), task
            return consumer.readiness.is_ready

        await eventually(is_ready, timeout_s)

    async def stop(self, consumer: Consumer) -> None:
        """Graceful; raises what `run` raised."""
        consumer.stop()
        await asyncio.wait_for(self.running.pop(consumer), 15.0)

    async def kill(self, consumer: Consumer) -> None:
        """Without any goodbye of its own."""
        task = self.running.pop(consumer)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@contextlib.asynccontextmanager
async def open_site(database_url: str, amqp_url: str) -> AsyncIterator[Site]:
    """A site whose databases, queues and consumers end with the block."""
    await migrate.run(database_url)
    database = await asyncpg.connect(database_url)
    await database.execute(
        "CREATE TABLE effect (seq bigint GENERATED ALWAYS AS IDENTITY, message_id text NOT NULL, version bigint)"
    )
    async with await aio_pika.connect(amqp_url) as connection:
        here = Site(database_url, amqp_url, database, connection, await connection.channel())
        try:
            yield here
        finally:
            for consumer in list(here.running):
                await here.kill(consumer)
            await here.database.close(timeout=5)


def message_of(message_id: str) -> Message:
    """As the sidecar reads one off the queue."""
    return read(
        consumer="inbox",
        body=b"{}",
        properties=spec.Basic.Properties(message_id=message_id),
        exchange="",
        routing_key=QUEUE,
        is_redelivered=False,
    )


async def fill(inbox: Site, *ids: str, key: str | None = None, by: asyncpg.Connection | None = None) -> None:
    """A batch of the sidecar, into the inbox table; `by` another session than the site's."""
    many = len(ids)
    texts, numbers, nothing = [""] * many, [1] * many, [None] * many
    # message_id event_type schema_version aggregate_type, _id, _version payload content_type, _encoding headers exchange routing_key …
    columns = (
        ids,
        texts,
        numbers,
        texts,
        [key] * many,
        nothing,
        [b""] * many,
        nothing,
        nothing,
        ["{}"] * many,
        texts,
        texts,
    )
    await (by or inbox.database).execute(BATCH, "q", *columns, *[nothing] * 6)
