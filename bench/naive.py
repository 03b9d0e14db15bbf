"""The relay that one writes in an afternoon, as a peer to measure against: correct, simple, and not fast.

    python -m bench.naive one|gathered ROWS

reads `RELAY_DATABASE_URL` and `RELAY_AMQP_URL`, publishes the first ROWS rows by `seq` and ends with one JSON line. In one
transaction a batch: SELECT … FOR UPDATE SKIP LOCKED, aio-pika's `publish` for each row, awaited one by one (`one`) or
together (`gathered`), UPDATE, COMMIT. A return or a nack raises, and the batch rolls back. It keeps one transaction open
across the broker, knows no ladder, and several of them keep no order: what it leaves out is what the relay is for. It runs on
uvloop, as the relay does.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from datetime import UTC

import aio_pika
import asyncpg
import uvloop

from bench.rig import EXCHANGE

BATCH_ROWS = 500
TIMEOUT_S = 60.0

SELECT = """select id, aggregate_type, aggregate_id, event_type, schema_version, payload::text as payload, occurred_at
            from outbox where sent_at is null order by seq limit $1 for update skip locked"""
UPDATE = "update outbox set sent_at = now() where id = any($1::text[])"
INDEX = "create index if not exists outbox_naive on outbox (seq) where sent_at is null"
"""What its author would create beforehand; without it every read walks all sent rows."""


async def drain(database_url: str, amqp_url: str, rows: int, *, gathered: bool) -> dict[str, float | str]:
    """Publish and mark `rows` rows; seconds from the first read to the last commit, the CPU seconds of this process, and whose
    event loop it had."""
    database = await asyncpg.connect(database_url, timeout=TIMEOUT_S, command_timeout=TIMEOUT_S)
    broker = await aio_pika.connect(amqp_url, timeout=TIMEOUT_S)
    channel = await broker.channel(publisher_confirms=True, on_return_raises=True)
    exchange = await channel.get_exchange(EXCHANGE)
    started, cpu, sent = time.monotonic(), time.process_time(), 0
    while sent < rows:
        async with database.transaction():
            batch = await database.fetch(SELECT, min(BATCH_ROWS, rows - sent))
            if not batch:
                raise RuntimeError(f"only {sent} of {rows} rows are there")
            if gathered:
                await asyncio.gather(*(_publish(exchange, row) for row in batch))
            else:
                for row in batch:
                    await _publish(exchange, row)
            await database.execute(UPDATE, [row["id"] for row in batch])
        sent += len(batch)
    result = {
        "seconds": time.monotonic() - started,
        "cpu_s": time.process_time() - cpu,
        "loop": type(asyncio.get_running_loop()).__module__,
    }
    await broker.close()
    await database.close()
    return result


async def _publish(exchange: aio_pika.abc.AbstractExchange, row: asyncpg.Record) -> None:
    message = aio_pika.Message(
        row["payload"].encode(),
        message_id=row["id"],
        type=row["event_type"],
        timestamp=row["occurred_at"],
        content_type="application/json",
        delivery_mode=aio_pika.DeliveryMode.PERSISTENT,
        headers={
            "aggregate_type": row["aggregate_type"],
            "aggregate_id": row["aggregate_id"],
            "schema_version": row["schema_version"],
            "occurred_at": row["occurred_at"].astimezone(UTC).isoformat(timespec="microseconds"),
        },
    )
    await exchange.publish(message, row["event_type"], mandatory=True, timeout=TIMEOUT_S)


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 2 or arguments[0] not in ("one", "gathered"):
        print("usage: python -m bench.naive one|gathered ROWS", file=sys.stderr)
        return 2
    database_url, amqp_url = os.environ["RELAY_DATABASE_URL"], os.environ["RELAY_AMQP_URL"]
    work = drain(database_url, amqp_url, int(arguments[1]), gathered=arguments[0] == "gathered")
    print(json.dumps(uvloop.run(work)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
