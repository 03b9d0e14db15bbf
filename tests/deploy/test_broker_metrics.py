"""The broker's metrics that alerts rest on, from a real RabbitMQ whose dead-lettering fails."""

from __future__ import annotations

import asyncio
import re
import urllib.request

import aio_pika
import pytest

from relay.servers import RabbitServer, free_port
from tests.conftest import eventually
from tests.deploy.test_rules import OTHERS

STRATEGY = 'dead_letter_strategy="at_least_once"'


@pytest.mark.long
async def test_dead_letters_that_nobody_takes_show() -> None:
    port = free_port()
    extra = f"prometheus.tcp.ip = 127.0.0.1\nprometheus.tcp.port = {port}"
    server = await asyncio.to_thread(RabbitServer.start, plugins=("rabbitmq_prometheus",), extra_config=extra)

    def series() -> dict[str, float]:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics/per-object", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line[:1] not in ("#", "")}

    with server:
        async with await aio_pika.connect(server.amqp_url()) as connection:
            channel = await connection.channel(publisher_confirms=True)
            await channel.declare_exchange("dlx", durable=True)
            queue = await channel.declare_queue(
                "orders.parking",
                durable=True,
                arguments={
                    "x-queue-type": "quorum",
                    "x-dead-letter-exchange": "dlx",
                    "x-dead-letter-strategy": "at-least-once",
                    "x-overflow": "reject-publish",
                },
            )
            for _ in range(3):
                await channel.default_exchange.publish(aio_pika.Message(b"x"), queue.name)
            for _ in range(2):
                await (await queue.get()).reject(requeue=False)
        quorum = f'{{queue_type="rabbit_quorum_queue",{STRATEGY}}}'

        def rejected() -> bool:
            return series()[f"rabbitmq_global_messages_dead_lettered_rejected_total{quorum}"] == 2

        await eventually(rejected, 20.0, interval_s=0.2)
        assert series()[f"rabbitmq_global_messages_dead_lettered_confirmed_total{quorum}"] == 0
        ready = 'rabbitmq_queue_messages_ready{vhost="/",queue="orders.parking"}'
        await eventually(lambda: series().get(ready) == 1, 20.0, interval_s=0.2)
        names = {re.split(r"[{ ]", name)[0] for name in series()}
        assert {name for name in OTHERS if name.startswith("rabbitmq_")} <= names
