"""Scenario `consumer`: a consumer of `relay.inbox` by its defaults, against asyncpg alone with the same statements.

Each message is one transaction with the claim and one business row, on as many connections. The consumer has the queue, the
reading of messages and an acknowledgement for each on top.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

import aio_pika
import asyncpg

from bench import handling
from bench.children import run_module
from bench.errors import BenchFailed
from bench.procfs import us_per_message
from bench.proof import expect_no_complaints
from bench.rig import AMQP_TIMEOUT_S, QUEUE, Rig
from bench.step import Form, Run, Step
from relay.inbox import RetryPolicy, migrate
from relay.topology import names

TIMEOUT_S: Final = 600.0
BODY: Final = b'{"order_id": "' + b"x" * 233 + b'"}'
HEADERS: Final = {"aggregate_type": "order", "schema_version": 1, "occurred_at": "2026-11-29T18:00:00.123456Z"}
FILL_AT_ONCE: Final = 500


def steps(form: Form) -> Sequence[Step]:
    messages = form.rows(6_000, 30_000)
    return [
        Step("consumer", variant, 4.0 + messages / rate, lambda rig, v=variant: _measure(rig, v, messages))  # type: ignore[misc]
        for variant, rate in (("alone", 2_000), ("consumer", 800))
    ]


def _measure(rig: Rig, variant: str, messages: int) -> Sequence[Run]:
    with rig.fresh_database() as database, rig.fresh_queue():
        url = rig.postgres.url(database)
        asyncio.run(_prepare(url))
        if variant == "consumer":
            asyncio.run(_fill(rig.amqp_url, messages))
        rig.wait_until_quiet()
        before = rig.cpu()
        line = run_module(
            "bench.handling",
            variant,
            str(messages),
            timeout_s=TIMEOUT_S,
            RELAY_INBOX_DATABASE_URL=url,
            RELAY_INBOX_AMQP_URL=rig.amqp_url,
        )
        used = rig.cpu() - before
        found = rig.sql("select (select count(*) from effect), (select count(*) from processed_messages)", database)
        if found.strip() != f"{messages}|{messages}":
            raise BenchFailed(f"{found.strip()} effects and inbox rows where {messages} of each should be")
    expect_no_complaints(rig)
    return [
        {
            "variant": variant,
            "messages": messages,
            "seconds": round(line["seconds"], 6),
            "msgs_per_s": round(messages / line["seconds"], 1),
            "cpu_us_per_msg": {
                "consumer": us_per_message(line["cpu_s"], messages),
                "postgres": us_per_message(used.postgres_s, messages),
                "rabbitmq": us_per_message(used.rabbitmq_s, messages),
            },
        }
    ]


async def _prepare(url: str) -> None:
    await migrate.run(url)
    connection = await asyncpg.connect(url)
    await connection.execute(handling.SCHEMA)
    await connection.execute("CHECKPOINT")
    await connection.close()


async def _fill(amqp_url: str, messages: int) -> None:
    """The queue full of messages, beside it the queues that a consumer by its defaults expects."""
    async with await aio_pika.connect(amqp_url, timeout=AMQP_TIMEOUT_S) as connection:
        channel = await connection.channel()
        for queue in (
            *(names.retry_queue(QUEUE, delay_s) for delay_s in RetryPolicy().delays_s),
            names.parking_queue(QUEUE),
        ):
            await channel.declare_queue(queue, durable=True)
        exchange = channel.default_exchange
        for first in range(0, messages, FILL_AT_ONCE):
            numbers = range(first, min(messages, first + FILL_AT_ONCE))
            await asyncio.gather(*(exchange.publish(_message(number), QUEUE) for number in numbers))


def _message(number: int) -> aio_pika.Message:
    return aio_pika.Message(
        BODY,
        message_id=f"m{number}",
        type="order.created",
        content_type="application/json",
        delivery_mode=aio_pika.DeliveryMode.PERSISTENT,
        headers={**HEADERS, "aggregate_id": f"{number % 5_000}"},
    )
