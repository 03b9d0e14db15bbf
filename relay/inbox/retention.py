"""Forgetting: what is older than any replay goes, in small batches, and no faster than that."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Final

from relay.database import close, connect, mapped_errors, writing
from relay.urls import DatabaseTarget

INTERVAL_S: Final = 3600.0
BATCH_ROWS: Final = 1000
STATEMENT_TIMEOUT_S: Final = 30.0
PAUSE_S: Final = 0.2
"""Between two batches: what others do goes first."""


async def forget(
    target: DatabaseTarget | str, statement: str, values: Sequence[Any], *, on_batch: Callable[[int], None]
) -> int:
    """Run a DELETE with `values` and the batch's size behind them until nothing is left; returns how many rows went.
    Raises DatabaseError.
    """
    connection = await connect(target, application_name="outbox-relay inbox retention")
    total = 0
    try:
        while True:
            with mapped_errors():
                async with writing(connection):
                    said = await connection.execute(statement, *values, BATCH_ROWS, timeout=STATEMENT_TIMEOUT_S)
            count = int(str(said).rpartition(" ")[2])
            total += count
            on_batch(count)
            if count < BATCH_ROWS:
                return total
            await asyncio.sleep(PAUSE_S)
    finally:
        await close(connection)
