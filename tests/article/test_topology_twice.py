"""The article's topology, applied twice: the second time there is nothing to do, and nothing was taken away."""

from __future__ import annotations

import json
from pathlib import Path

import aio_pika

from relay.servers import RabbitServer
from tests.vhost import Vhost, count, send

EXAMPLE = Path(__file__).parents[2] / "examples" / "topology.toml"


async def test_apply_twice(rabbit_server: RabbitServer, amqp_url: str, tmp_path: Path) -> None:
    broker = Vhost(rabbit_server, amqp_url, tmp_path)
    path = broker.write(EXAMPLE.read_text())
    before = await broker.relay("topology", "plan", path, "--json")
    planned = json.loads(before.stdout)["changes"]
    assert before.returncode == 4
    assert {change["action"] for change in planned} == {"create"}

    first = await broker.relay("topology", "apply", path, "--json")
    assert first.returncode == 0, first.stdout + first.stderr
    assert json.loads(first.stdout)["done"] == planned
    async with await aio_pika.connect(amqp_url) as connection:
        channel = await connection.channel()
        await send(channel, "orders", "order.paid", "m", headers={"aggregate_id": "42"})
        await send(channel, "", "orders.inventory.retry.5m", "waits")

        second = await broker.relay("topology", "apply", path, "--json")
        assert second.returncode == 0
        assert json.loads(second.stdout) == {
            "vhost": broker.vhost,
            "differs": False,
            "changes": [],
            "commands": [],
            "done": [],
        }
        for action in ("plan", "check"):
            assert (await broker.relay("topology", action, path)).returncode == 0
        assert await count(channel, "orders.inventory") == 1
        assert await count(channel, "orders.inventory.retry.5m") == 1
        assert sum([await count(channel, f"orders.billing.{shard}") for shard in range(8)]) == 1
