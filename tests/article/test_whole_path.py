"""The whole path of the picture, by the services of examples/, with both sides killed again and again.

orders DB -> outbox -> relay -> exchange -> queue -> consumer -> inventory DB -> its own outbox -> relay -> exchange -> queue
"""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

import aio_pika
import asyncpg
import pytest

from relay.servers import PostgresServer, RabbitServer
from tests.conftest import eventually
from tests.e2e.conftest import Daemon, command, environment

EXAMPLES: Final = Path(__file__).parents[2] / "examples"
ORDERS: Final = 240
KILLS: Final = 3
ON_HAND: Final = 40

LADDER: Final = 'retry = ["5s", "30s", "5m"]'
SHORT_LADDER: Final = 'retry = ["100ms", "300ms", "1s"]'


class Service:
    """One life of an example."""

    def __init__(self, log: Path, name: str, *arguments: str, settings: Mapping[str, str]) -> None:
        self._log = log.open("ab")
        self.process = subprocess.Popen(
            [sys.executable, str(EXAMPLES / name), *arguments],
            env={**environment(settings), "PYTHONPATH": str(EXAMPLES.parent)},
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    async def end(self, number: signal.Signals | None = None) -> int:
        """Its exit code, after a signal."""
        if number is not None:
            self.process.send_signal(number)
        return await asyncio.to_thread(self.process.wait, 30.0)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._log.close()


@pytest.fixture
def services() -> Iterator[list[Service | Daemon]]:
    started: list[Service | Daemon] = []
    yield started
    for service in started:
        service.close()


async def test_relay_and_consumer_killed_repeatedly_one_effect_per_order(
    postgres_server: PostgresServer,
    rabbit_server: RabbitServer,
    amqp_url: str,
    tmp_path: Path,
    services: list[Service | Daemon],
) -> None:
    orders_url, inventory_url = [
        await asyncio.to_thread(postgres_server.create_database, f"{name}_{os.getpid()}")
        for name in ("orders", "inventory")
    ]
    await _prepare(orders_url, inventory_url, amqp_url, rabbit_server, tmp_path)
    relays = {"RELAY_DATABASE_URL": orders_url, "RELAY_AMQP_URL": amqp_url, "RELAY_EXCHANGE": "orders"}
    consumers = {
        "INVENTORY_DATABASE_URL": inventory_url,
        "INVENTORY_AMQP_URL": amqp_url,
        "INVENTORY_RETRY_DELAYS_S": "0.1,0.3,1",
    }

    def start_relay() -> Daemon:
        services.append(relay := Daemon(relays, tmp_path / f"relay-{len(services)}.log"))
        return relay

    def start(name: str, *arguments: str, settings: Mapping[str, str]) -> Service:
        services.append(service := Service(tmp_path / f"{name}.log", name, *arguments, settings=settings))
        return service

    second = Daemon({**relays, "RELAY_DATABASE_URL": inventory_url, "RELAY_EXCHANGE": "stock"}, tmp_path / "second.log")
    services.append(second)
    relay, inventory = start_relay(), start("inventory.py", settings=consumers)
    shop = start("orders.py", str(ORDERS), settings={"ORDERS_DATABASE_URL": orders_url})
    database = await asyncpg.connect(inventory_url)
    for number in range(KILLS):
        await _count_reaches(database, (number + 1) * ORDERS // (KILLS + 2))
        await relay.kill()
        await inventory.end(signal.SIGKILL)
        relay, inventory = start_relay(), start("inventory.py", settings=consumers)
        await _count_reaches(database, (number + 1) * ORDERS // (KILLS + 2) + 5)
        # A hiccup of its database on top: the messages in work climb the ladder.
        await database.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
    assert await shop.end() == 0
    await _count_reaches(database, ORDERS)
    await relay.ready()
    assert await relay.stop() == 0
    assert await inventory.end(signal.SIGTERM) == 0
    await eventually(lambda: _all_is_sent(database), 30)
    assert await second.stop() == 0

    orders = await asyncpg.connect(orders_url)
    placed = {row["id"]: (row["sku"], row["quantity"]) for row in await orders.fetch("SELECT * FROM orders")}
    assert len(placed) == ORDERS
    assert await orders.fetchval("SELECT count(*) FROM outbox WHERE sent_at IS NULL") == 0
    reserved = await database.fetch("SELECT order_id, sku, quantity FROM reservation")
    told = await database.fetch("SELECT aggregate_id, event_type FROM outbox")
    verdicts = {row["aggregate_id"]: row["event_type"] for row in told}
    # One effect and one event per order, whatever was killed when.
    assert len(told) == len(verdicts) == ORDERS and verdicts.keys() == placed.keys()
    assert len(reserved) == len({row["order_id"] for row in reserved})
    assert {row["order_id"] for row in reserved} == {id for id, said in verdicts.items() if said == "stock.reserved"}
    assert all(placed[row["order_id"]] == (row["sku"], row["quantity"]) for row in reserved)
    for row in await database.fetch("SELECT sku, on_hand FROM stock"):
        taken = sum(each["quantity"] for each in reserved if each["sku"] == row["sku"])
        assert row["on_hand"] == ON_HAND - taken
    assert {"stock.reserved", "stock.rejected"} == set(verdicts.values()), "shelves ran empty: a business result"
    await orders.close(timeout=5)
    await database.close(timeout=5)
    for name in ("orders", "inventory"):
        await asyncio.to_thread(postgres_server.drop_database, f"{name}_{os.getpid()}")
    assert await _waiting(amqp_url, "orders.inventory.parking") == 0
    assert await _waiting(amqp_url, "stock.orders") >= ORDERS, "the consumer's own events"


async def _prepare(orders_url: str, inventory_url: str, amqp_url: str, rabbit: RabbitServer, directory: Path) -> None:
    vhost = unquote(urlsplit(amqp_url).path[1:])
    file = directory / "topology.toml"
    topology = (EXAMPLES / "topology.toml").read_text()
    assert LADDER in topology
    file.write_text(topology.replace(LADDER, SHORT_LADDER))
    steps = (
        (("migrate",), {"RELAY_DATABASE_URL": orders_url}),
        (("migrate",), {"RELAY_DATABASE_URL": inventory_url}),
        (("inbox", "migrate"), {"RELAY_INBOX_DATABASE_URL": inventory_url}),
        (("topology", "apply", str(file), "--vhost", vhost), {"RELAY_MANAGEMENT_URL": rabbit.management_url}),
    )
    for arguments, settings in steps:
        done = await asyncio.to_thread(functools.partial(command, *arguments, settings=settings))
        assert done.returncode == 0, done.stderr + done.stdout


async def _count_reaches(database: asyncpg.Connection, count: int) -> None:
    async def does() -> bool:
        # Each order leaves one event of the inventory's own.
        return bool(await database.fetchval("SELECT count(*) >= $1 FROM outbox", count))

    await eventually(does, 60)


async def _all_is_sent(database: asyncpg.Connection) -> bool:
    return not await database.fetchval("SELECT EXISTS (SELECT FROM outbox WHERE sent_at IS NULL)")


async def _waiting(amqp_url: str, queue_name: str) -> int:
    async with await aio_pika.connect(amqp_url) as connection:
        channel = await connection.channel()
        queue = await channel.declare_queue(queue_name, passive=True)
        return queue.declaration_result.message_count or 0
