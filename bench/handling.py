"""One run of the consumer's half, in a process of its own: `python -m bench.handling alone|consumer MESSAGES`.

Both do the same per message: BEGIN, the claim of `relay.inbox`, one business row, COMMIT, on as many connections as a consumer
has workers by its defaults. `alone` is asyncpg without a broker; `consumer` takes the messages of a full queue and
acknowledges each. Reads `RELAY_INBOX_DATABASE_URL` and `RELAY_INBOX_AMQP_URL`; ends with one JSON line.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence

import asyncpg
import uvloop

from bench.rig import QUEUE
from relay.database import sql_file
from relay.inbox import Consumer, ConsumerSettings, Message, Outcome
from relay.inbox.ledger import WatchedConnection

TIMEOUT_S = 120.0
CONSUMER = "bench"
SCHEMA = "create table effect (message_id text primary key, at timestamptz not null default now())"
EFFECT = "insert into effect (message_id) values ($1)"
LOOK_S = 0.005


async def alone(database_url: str, messages: int) -> float:
    """Seconds for so many transactions; every connection takes the next id from the same list."""
    ids = iter([f"m{number}" for number in range(messages)])
    connections = [await asyncpg.connect(database_url) for _ in range(ConsumerSettings().workers)]
    claim = sql_file("inbox/claim.sql")
    began = time.monotonic()

    async def work(connection: asyncpg.Connection) -> None:
        for message_id in ids:
            async with connection.transaction():
                await connection.execute(claim, CONSUMER, message_id)
                await connection.execute(EFFECT, message_id)

    await asyncio.gather(*(work(connection) for connection in connections))
    seconds = time.monotonic() - began
    await asyncio.gather(*(connection.close() for connection in connections))
    return seconds


async def consume(database_url: str, amqp_url: str, messages: int) -> float:
    """Seconds from the first claim to the last acknowledgement."""
    began = 0.0

    async def handle(message: Message, connection: WatchedConnection) -> None:
        nonlocal began
        began = began or time.monotonic()
        await connection.execute(EFFECT, message.id)

    consumer = Consumer(
        name=CONSUMER,
        queue=QUEUE,
        handler=handle,
        amqp_url=amqp_url,
        database_url=database_url,
        settings=ConsumerSettings(schema_versions=None),
    )
    running = asyncio.create_task(consumer.run())
    async with asyncio.timeout(TIMEOUT_S):
        while consumer.metrics.messages[Outcome.HANDLED] < messages:
            await asyncio.sleep(LOOK_S)
    seconds = time.monotonic() - began
    consumer.stop()
    await running
    return seconds


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 2 or arguments[0] not in ("alone", "consumer"):
        print("usage: python -m bench.handling alone|consumer MESSAGES", file=sys.stderr)
        return 2
    database_url, messages, cpu = os.environ["RELAY_INBOX_DATABASE_URL"], int(arguments[1]), time.process_time()
    if arguments[0] == "alone":
        work = alone(database_url, messages)
    else:
        work = consume(database_url, os.environ["RELAY_INBOX_AMQP_URL"], messages)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
        seconds = loop.run(work)
    print(json.dumps({"seconds": seconds, "cpu_s": time.process_time() - cpu}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
