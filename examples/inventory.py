"""The consumer of the pair: reserves stock once per order, and says so by an event of its own.

    INVENTORY_DATABASE_URL=postgresql://… INVENTORY_AMQP_URL=amqp://… python examples/inventory.py

The database has the tables of `relay inbox migrate`, an outbox of `relay migrate`; the broker has the topology
of examples/topology.toml. SIGTERM ends it: what is in work is finished, the rest goes to the next one.
"""

from __future__ import annotations

import asyncio
import os
import signal

import asyncpg

from relay.inbox import Consumer, ConsumerSettings, Message, Outgoing, Permanent, RetryPolicy

SCHEMA = """
    CREATE TABLE IF NOT EXISTS stock (sku text PRIMARY KEY, on_hand int NOT NULL CHECK (on_hand >= 0));
    CREATE TABLE IF NOT EXISTS reservation (order_id text NOT NULL, sku text NOT NULL, quantity int NOT NULL);
"""


async def reserve(message: Message, connection: asyncpg.Connection) -> None:
    """`order.created`: everything here commits together with the inbox row, or not at all."""
    if message.type != "order.created":
        raise Permanent(f"nobody here knows {message.type}")
    order = message.json()
    outgoing = Outgoing(connection, message)
    taken = await connection.execute(
        "UPDATE stock SET on_hand = on_hand - $2 WHERE sku = $1 AND on_hand >= $2", order["sku"], order["quantity"]
    )
    if taken == "UPDATE 0":
        # A business result, not a failure: no retry, no parking, an event.
        await outgoing.add("stock.rejected", {"order_id": order["order_id"]}, aggregate_id=order["order_id"])
        return
    await connection.execute(
        "INSERT INTO reservation VALUES ($1, $2, $3)", order["order_id"], order["sku"], order["quantity"]
    )
    await outgoing.add("stock.reserved", {"order_id": order["order_id"]}, aggregate_id=order["order_id"])


def delays_s() -> tuple[float, ...]:
    """The retry ladder, the one of the topology file: `INVENTORY_RETRY_DELAYS_S=5,30,300`."""
    return tuple(float(part) for part in os.environ.get("INVENTORY_RETRY_DELAYS_S", "5,30,300").split(","))


async def stock_up(database_url: str) -> None:
    """Shelves for the ten products of orders.py, filled once."""
    connection = await asyncpg.connect(database_url)
    try:
        await connection.execute(SCHEMA)
        await connection.execute(
            "INSERT INTO stock SELECT 'sku-' || n, 40 FROM generate_series(0, 9) n ON CONFLICT DO NOTHING"
        )
    finally:
        await connection.close(timeout=5)


async def main() -> None:
    await stock_up(os.environ["INVENTORY_DATABASE_URL"])
    consumer = Consumer(
        name="inventory",
        queue="orders.inventory",
        handler=reserve,
        amqp_url=os.environ["INVENTORY_AMQP_URL"],
        database_url=os.environ["INVENTORY_DATABASE_URL"],
        settings=ConsumerSettings(version="1.0", retry=RetryPolicy(delays_s()), parking_exchange="orders.dlx"),
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, consumer.stop)
    await consumer.run()


if __name__ == "__main__":
    asyncio.run(main())
