"""The benchmark's writers and its consumer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Final

from aiormq.abc import DeliveredMessage

from relay.benchmark.figures import Plan
from relay.benchmark.ground import ANSWER_TIMEOUT_S, Ground, answered
from relay.config import Config
from relay.database import close, connect, mapped_errors
from relay.errors import explaining

WRITERS: Final = 4
ROWS_PER_STATEMENT: Final = 5_000
FILL_TIMEOUT_S: Final = 600.0


@dataclass(frozen=True, slots=True)
class Written:
    """One row, by the event loop's clock."""

    id: str
    due_at: float
    committed_at: float


async def fill(ground: Ground, plan: Plan) -> float:
    """The whole backlog in one commit: nothing of it is seen before all of it is. When the commit began."""
    text, loop = ground.sql("fill"), asyncio.get_running_loop()
    with mapped_errors():
        transaction = ground.database.transaction()
        await transaction.start()
        for first in range(0, plan.rows, ROWS_PER_STATEMENT):
            rows = min(ROWS_PER_STATEMENT, plan.rows - first)
            await ground.database.execute(text, rows, plan.keys, plan.payload_bytes, timeout=FILL_TIMEOUT_S)
        began = loop.time()
        await transaction.commit()
    return began


async def trickle(ground: Ground, config: Config, plan: Plan) -> list[Written]:
    """Rows become due at a steady rate, whatever the servers do; one that finds all writers busy waits, and counts
    from when it was due. Raises DatabaseUnavailable, DatabaseRefused, DatabaseLost.
    """
    loop = asyncio.get_running_loop()
    count = plan.rate_per_s * plan.seconds
    due: asyncio.Queue[tuple[int, float] | None] = asyncio.Queue()
    written: list[Written] = []
    text = ground.sql("insert")

    async def write() -> None:
        connection = await connect(config.database(), application_name="outbox-relay bench writer")
        try:
            while (next_one := await due.get()) is not None:
                number, due_at = next_one
                row_id = f"{ground.queue}-{number}"
                with mapped_errors():
                    await connection.execute(
                        text, row_id, str(number % plan.keys), plan.payload_bytes, timeout=ANSWER_TIMEOUT_S
                    )
                written.append(Written(row_id, due_at, loop.time()))
        finally:
            await close(connection)

    async def schedule() -> None:
        began = loop.time()
        for number in range(count):
            due_at = began + number / plan.rate_per_s
            await asyncio.sleep(max(0.0, due_at - loop.time()))
            due.put_nowait((number, due_at))
        for _ in range(WRITERS):
            due.put_nowait(None)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(WRITERS):
                group.create_task(write())
            group.create_task(schedule())
    except BaseExceptionGroup as failures:
        raise explaining(failures) from failures
    return written


@contextlib.asynccontextmanager
async def consuming(ground: Ground) -> AsyncIterator[dict[str, float]]:
    """During the block: when each message first arrived, by its id, by the event loop's clock."""
    loop, arrived = asyncio.get_running_loop(), dict[str, float]()

    async def on_message(message: DeliveredMessage) -> None:
        arrived.setdefault(message.header.properties.message_id or "", loop.time())

    answer = await answered(
        ground.channel.basic_consume(ground.queue, on_message, no_ack=True, timeout=ANSWER_TIMEOUT_S)
    )
    try:
        yield arrived
    finally:
        await answered(ground.channel.basic_cancel(answer.consumer_tag or "", timeout=ANSWER_TIMEOUT_S))
