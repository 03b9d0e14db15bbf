"""The producer of the pair: an order and its event, in one transaction.

    ORDERS_DATABASE_URL=postgresql://… python examples/orders.py 100

The database has the outbox of `relay migrate`. Nothing here knows the broker: a relay beside this service publishes.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import uuid

import asyncpg

SCHEMA = """
    CREATE TABLE IF NOT EXISTS orders (
        id text PRIMARY KEY, sku text NOT NULL, quantity int NOT NULL CHECK (quantity > 0)
    )
"""


async def place_order(connection: asyncpg.Connection, sku: str, quantity: int) -> str:
    """One order: both rows are there, or neither. Returns its id."""
    order_id = uuid.uuid4().hex
    async with connection.transaction():
        await connection.execute("INSERT INTO orders VALUES ($1, $2, $3)", order_id, sku, quantity)
        await connection.execute(
            "INSERT INTO outbox (event_type, aggregate_type, aggregate_id, aggregate_version, producer, payload)"
            " VALUES ('order.created', 'order', $1, 1, 'orders', $2)",
            order_id,
            json.dumps({"order_id": order_id, "sku": sku, "quantity": quantity}),
        )
    return order_id


async def main(count: int) -> None:
    connection = await asyncpg.connect(os.environ["ORDERS_DATABASE_URL"])
    try:
        await connection.execute(SCHEMA)
        for number in range(count):
            await place_order(connection, f"sku-{number % 10}", 1 + number % 3)
    finally:
        await connection.close(timeout=5)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
