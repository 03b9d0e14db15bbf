"""The demo's consumers: an auditor that records every copy, and an inventory service over `relay.inbox`.

The inventory service applies each event once and each order's versions in their order. Some of its attempts fail on
purpose: a share of them for a moment (they climb the ladder), some events for good (they are parked), until the
catalogue is mended. One crash is played: everything stops between a COMMIT and its acknowledgement.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from pathlib import Path
from typing import Any, Final

import aio_pika
import asyncpg
from aio_pika.abc import AbstractIncomingMessage

from relay.demo.process import RelayFailed
from relay.inbox import (
    AsyncpgLedger,
    Consumer,
    ConsumerSettings,
    Handler,
    Message,
    Order,
    Outcome,
    Permanent,
    RetryPolicy,
    Transient,
)
from relay.logs import Log
from relay.topology import names

EXCHANGE: Final = "events"
QUEUE: Final = "inventory"
AUDIT: Final = "audit"
PREFETCH: Final = 5
"""Little in hand, so that few versions overtake each other between the workers."""

LADDER_S: Final = (0.2, 0.5, 1.0)
HICCUPS: Final = 0.02
POISONED: Final = 3

SCHEMA: Final = "CREATE TABLE stock (order_id text PRIMARY KEY, applied int NOT NULL)"

_APPLY: Final = """
    INSERT INTO stock AS s (order_id, applied) VALUES ($1, 1)
    ON CONFLICT (order_id) DO UPDATE SET applied = s.applied + 1
"""

_TOPOLOGY: Final = f"""\
[[exchange]]
name = "{EXCHANGE}"

[[queue]]
name = "{QUEUE}"
bind = [{{ exchange = "{EXCHANGE}", key = "order.#" }}]
retry = [{", ".join(f'"{names.delay_text(delay_s)}"' for delay_s in LADDER_S)}]

[[queue]]
name = "{AUDIT}"
bind = [{{ exchange = "{EXCHANGE}", key = "order.#" }}]
"""


def write_topology(file: Path) -> None:
    """What `relay topology apply` makes of it: two quorum queues, the inventory's with a ladder and a parking queue."""
    file.write_text(_TOPOLOGY)


def _quiet() -> Log:
    """The demo's screen shows what happens; lines of a log would break it."""
    logger = logging.getLogger("relay.demo")
    logger.addHandler(logging.NullHandler())
    logger.propagate = False
    for driver in ("aiormq", "aio_pika"):
        logging.getLogger(driver).setLevel(logging.CRITICAL)
    return Log(logger)


class Audit:
    """`arrivals`: ids of the copies received, in order, but for those the broker delivered again."""

    def __init__(self, amqp_url: str) -> None:
        self._amqp_url = amqp_url
        self.arrivals: list[str] = []
        self.distinct: set[str] = set()

    async def work(self) -> None:
        """Record until cancelled."""
        async with await aio_pika.connect(self._amqp_url) as connection:
            channel = await connection.channel()
            await channel.set_qos(prefetch_count=500)
            queue = await channel.get_queue(AUDIT)
            await queue.consume(self._receive)
            await asyncio.Event().wait()

    async def _receive(self, message: AbstractIncomingMessage) -> None:
        if not message.redelivered:
            self.arrivals.append(message.message_id or "")
            self.distinct.add(message.message_id or "")
        await message.ack()


class _Crashing(AsyncpgLedger):
    """Stops for ever after a COMMIT, once that is wanted."""

    def __init__(self, url: str, stock: Stock) -> None:
        super().__init__(lambda: url, order=Order.VERSION)
        self._stock = stock

    async def apply(self, message: Message, handler: Handler) -> Outcome:
        outcome = await super().apply(message, handler)
        # A duplicate too: the COMMIT before it may have been cut off from its answer.
        self._stock.applied.add(message.id)
        if self._stock.crash_wanted.is_set() and outcome is Outcome.HANDLED:
            self._stock.has_crashed.set()
            await asyncio.Event().wait()
        return outcome


class Stock:
    """The inventory service: `applied` are the ids whose effect was committed. The counts are over all of its lives."""

    def __init__(self, database_url: str, amqp_url: str) -> None:
        self._database_url = database_url
        self._amqp_url = amqp_url
        self._random = random.Random()
        self._poison: set[str] = set()
        self._past: list[Consumer] = []
        self._consumer: Consumer | None = None
        self.is_mended = False
        self.applied: set[str] = set()
        self.crash_wanted = asyncio.Event()
        self.has_crashed = asyncio.Event()

    async def work(self) -> None:
        """Consume until cancelled; after the crash that was asked for, another life begins."""
        while True:
            life = asyncio.create_task(self._begin().run())
            crash = asyncio.create_task(self.has_crashed.wait())
            try:
                await asyncio.wait((life, crash), return_when=asyncio.FIRST_COMPLETED)
                if life.done():
                    life.result()
                    raise RelayFailed("the inventory service ended by itself")
            finally:
                for task in (life, crash):
                    task.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        await task
            self.crash_wanted.clear()
            self.has_crashed.clear()

    def _begin(self) -> Consumer:
        if self._consumer is not None:
            self._past.append(self._consumer)
        self._consumer = Consumer(
            name="inventory",
            queue=QUEUE,
            handler=self._apply,
            amqp_url=self._amqp_url,
            ledger=_Crashing(self._database_url, self),
            log=_quiet(),
            settings=ConsumerSettings(
                order=Order.VERSION, prefetch=PREFETCH, retry=RetryPolicy(LADDER_S), version="demo", time_limit_s=10.0
            ),
        )
        return self._consumer

    async def _apply(self, message: Message, connection: Any) -> None:
        if not self.is_mended and message.type == "order.shipped":
            if len(self._poison) < POISONED:
                self._poison.add(message.id)
            if message.id in self._poison:
                raise Permanent("the catalogue does not know this product")
        if message.attempt == 0 and self._random.random() < HICCUPS:
            raise Transient("the warehouse is busy")
        await connection.execute(_APPLY, str(message.aggregate_id))

    def count(self, *outcomes: Outcome) -> int:
        """Deliveries that ended so, in all lives."""
        lives = [*self._past, *([self._consumer] if self._consumer else [])]
        return sum(life.metrics.messages[outcome] for life in lives for outcome in outcomes)

    async def effects(self) -> dict[str, int]:
        """How often each order was changed in the consumer's database."""
        database = await asyncpg.connect(self._database_url)
        try:
            return {row["order_id"]: row["applied"] for row in await database.fetch("SELECT * FROM stock")}
        finally:
            await database.close(timeout=5)

    async def ready(self, queue: str) -> int:
        """Messages ready in a queue."""
        async with await aio_pika.connect(self._amqp_url) as connection:
            found = await (await connection.channel()).declare_queue(queue, passive=True)
            return found.declaration_result.message_count or 0
