"""The benchmark's writers and its consumer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from aiormq.abc import DeliveredMessage

from relay.benchmark.figures import Plan
from relay.benchmark.ground import ANSWER_TIMEOUT_S, Ground, answered
from relay.config import Config
from relay.database import close, connect, mapped_errors, writing
from relay.errors import explaining

WRITERS: Final = 4
ROWS_PER_STATEMENT: Final = 5_000
FILL_TIMEOUT_S: Final = 600.0

Insert = Callable[[str, str], Awaitable[None]]
"""Of one row, by its id and key, in a commit of its own. Raises DatabaseRefused, DatabaseLost."""


class _RolledBack(Exception):
    """Ends a transaction of which nothing is to stay."""


@dataclass(frozen=True, slots=True)
class Written:
    """One row, by the event loop's clock."""

    id: str
    due_at: float
    committed_at: float


@contextlib.asynccontextmanager
async def filled(ground: Ground, plan: Plan) -> AsyncIterator[None]:
    """The whole backlog in one transaction, which ends with the block: nothing of it is seen before all of it is. Rolled back
    where it is cut short. Raises DatabaseRefused, DatabaseLost.
    """
    text = ground.sql("fill")
    with mapped_errors():
        async with writing(ground.database):
            for first in range(1, plan.rows + 1, ROWS_PER_STATEMENT):
                last = min(first + ROWS_PER_STATEMENT - 1, plan.rows)
                await ground.database.execute(text, first, last, plan.keys, plan.payload_bytes, timeout=FILL_TIMEOUT_S)
            yield


async def trickle(ground: Ground, config: Config, plan: Plan) -> list[Written]:
    """Rows become due at a steady rate, whatever the servers do; one that finds all writers busy waits, and counts
    from when it was due. Raises DatabaseUnavailable, DatabaseRefused, DatabaseLost.
    """
    loop = asyncio.get_running_loop()
    count = plan.rate_per_s * plan.seconds
    due: asyncio.Queue[tuple[int, float] | None] = asyncio.Queue()
    written: list[Written] = []

    async def write(insert: Insert) -> None:
        while (next_one := await due.get()) is not None:
            number, due_at = next_one
            row_id = f"{ground.queue}-{number}"
            await insert(row_id, str(number % plan.keys))
            written.append(Written(row_id, due_at, loop.time()))

    async def schedule() -> None:
        began = loop.time()
        for number in range(count):
            due_at = began + number / plan.rate_per_s
            await asyncio.sleep(max(0.0, due_at - loop.time()))
            due.put_nowait((number, due_at))
        for _ in range(WRITERS):
            due.put_nowait(None)

    async with contextlib.AsyncExitStack() as stack:
        # All of them before the first row is due: how long it takes to connect is no row's latency.
        inserts = [await stack.enter_async_context(_writer(ground, config, plan)) for _ in range(WRITERS)]
        try:
            async with asyncio.TaskGroup() as group:
                for insert in inserts:
                    group.create_task(write(insert))
                group.create_task(schedule())
        except BaseExceptionGroup as failures:
            raise explaining(failures) from failures
    return written


@contextlib.asynccontextmanager
async def _writer(ground: Ground, config: Config, plan: Plan) -> AsyncIterator[Insert]:
    """A session of its own that has inserted before: what it compiles at its first insert is no row's latency either."""
    text = ground.sql("insert")
    connection = await connect(config.database(), application_name="outbox-relay bench writer")

    async def execute(row_id: str, key: str) -> None:
        await connection.execute(text, row_id, key, plan.payload_bytes, timeout=ANSWER_TIMEOUT_S)

    async def insert(row_id: str, key: str) -> None:
        # A statement of its own where that is enough: a writer far from its database has to make a row a round trip.
        with mapped_errors():
            async with writing(connection) if reads_only else contextlib.nullcontext():
                await execute(row_id, key)

    try:
        with mapped_errors():
            reads_only = await connection.fetchval("SELECT current_setting('default_transaction_read_only')::boolean")
            with contextlib.suppress(_RolledBack):
                async with writing(connection):
                    await execute(f"{ground.queue}-never", "0")
                    raise _RolledBack
        yield insert
    finally:
        await close(connection)


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
