"""The demo's producer: a small order service that writes business rows and events in one transaction.

Several connections work at once, on the same orders; a row's lock makes the transactions of one order follow
each other, so that the versions of an order are the order that must arrive. Some transactions are rolled
back.
"""

from __future__ import annotations

import asyncio
import json
import random
import uuid
from typing import Any, Final

import asyncpg

from relay.demo.verdict import Event

WRITERS: Final = 4
IMPORTS: Final = 1
"""Transactions with which each writer begins, of ORDERS_PER_IMPORT orders with their whole life: a backlog.
"""
ORDERS_PER_IMPORT: Final = 100
PAUSE_S: Final = 0.02
"""After each change: the consumer works message by message, and the demo stays well below a minute on two cores."""

LIFE: Final = ("order.created", "order.paid", "order.picked", "order.packed", "order.shipped")
ROLLBACK_SHARE: Final = 0.1

SCHEMA: Final = "CREATE TABLE orders (id text PRIMARY KEY, version int NOT NULL, status text NOT NULL)"

_ORDER: Final = """
    INSERT INTO orders AS o (id, version, status) VALUES ($1, 1, $2)
    ON CONFLICT (id) DO UPDATE SET version = o.version + 1, status = excluded.status
    RETURNING version
"""
_EVENT: Final = """
    INSERT INTO outbox (id, event_type, aggregate_type, aggregate_id, aggregate_version, payload, producer)
    VALUES ($1, $2, 'order', $3, $4, $5, 'shop')
"""


class _Rollback(Exception):
    """The business changed its mind."""


class Shop:
    """The writers and what they know: `committed` and `rolled_back` ids of events."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._random = random.Random()
        self._orders: list[str] = []
        self.committed: set[str] = set()
        self.rolled_back: set[str] = set()

    async def trade(self, seconds: float, is_enough: asyncio.Event) -> None:
        """Import a stock of orders, then change some until the time is over and nobody needs more: on a slow
        machine the scenes last longer. Raises asyncpg's errors as they are.
        """
        until = asyncio.get_running_loop().time() + seconds
        async with asyncio.TaskGroup() as group:
            for _ in range(WRITERS):
                group.create_task(self._write(until, is_enough))

    async def _write(self, until: float, is_enough: asyncio.Event) -> None:
        connection = await asyncpg.connect(self._url)
        try:
            for _ in range(IMPORTS):
                await self._import(connection)
            while asyncio.get_running_loop().time() < until or not is_enough.is_set():
                await self._change(connection)
                await asyncio.sleep(PAUSE_S)
        finally:
            await connection.close(timeout=5)

    async def _import(self, connection: Any) -> None:
        orders = [uuid.uuid4().hex for _ in range(ORDERS_PER_IMPORT)]
        rows = [
            (str(uuid.uuid4()), kind, order, version, _payload(order, kind))
            for order in orders
            for version, kind in enumerate(LIFE, start=1)
        ]
        async with connection.transaction():
            await connection.executemany(
                "INSERT INTO orders (id, version, status) VALUES ($1, $2, $3)",
                [(order, len(LIFE), LIFE[-1]) for order in orders],
            )
            await connection.executemany(_EVENT, rows)
        self._orders.extend(orders)
        self.committed.update(row[0] for row in rows)

    async def _change(self, connection: Any) -> None:
        """One transaction: a new or a known order, one to three events of it, committed or rolled back."""
        is_new = self._random.random() < 0.2
        # The last few: so that writers meet on an order and wait for each other.
        order = uuid.uuid4().hex if is_new else self._random.choice(self._orders[-200:])
        events: list[Event] = []
        try:
            async with connection.transaction():
                for _ in range(self._random.randint(1, 3)):
                    kind = self._random.choice(LIFE)
                    version = await connection.fetchval(_ORDER, order, kind)
                    event = Event(str(uuid.uuid4()), order, version)
                    events.append(event)
                    await connection.execute(_EVENT, event.id, kind, order, version, _payload(order, kind))
                if self._random.random() < ROLLBACK_SHARE:
                    raise _Rollback
        except _Rollback:
            self.rolled_back.update(event.id for event in events)
            return
        self.committed.update(event.id for event in events)
        if is_new:
            self._orders.append(order)


def _payload(order: str, kind: str) -> str:
    return json.dumps({"order_id": order, "status": kind.partition(".")[2], "note": "x" * 120})


async def committed_events(url: str) -> tuple[list[Event], int]:
    """What the outbox holds when all is over: its events, and how many of them are marked sent."""
    connection = await asyncpg.connect(url)
    try:
        rows = await connection.fetch(
            "SELECT id, aggregate_id, aggregate_version, sent_at IS NOT NULL AS is_sent FROM outbox"
        )
    finally:
        await connection.close(timeout=5)
    events = [Event(row["id"], row["aggregate_id"], row["aggregate_version"]) for row in rows]
    return events, sum(row["is_sent"] for row in rows)
