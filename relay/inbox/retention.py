"""Forgetting: what is older than any replay goes, in small batches, and no faster than that."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta
from typing import Final

from relay.database import close, connect, mapped_errors, sql_file
from relay.urls import DatabaseTarget

BATCH_ROWS: Final = 1000
STATEMENT_TIMEOUT_S: Final = 30.0
PAUSE_S: Final = 0.2
"""Between two batches: what others do goes first."""


async def forget(
    target: DatabaseTarget | str, consumer: str, retention_s: float, *, on_batch: Callable[[int], None] = lambda _: None
) -> int:
    """Delete what `consumer` processed longer than `retention_s` ago; returns how much. Raises DatabaseError."""
    statement = sql_file("inbox/forget.sql")
    connection = await connect(target, application_name="outbox-relay inbox retention")
    total = 0
    try:
        while True:
            with mapped_errors():
                said = await connection.execute(
                    statement, consumer, timedelta(seconds=retention_s), BATCH_ROWS, timeout=STATEMENT_TIMEOUT_S
                )
            count = int(str(said).rpartition(" ")[2])
            total += count
            on_batch(count)
            if count < BATCH_ROWS:
                return total
            await asyncio.sleep(PAUSE_S)
    finally:
        await close(connection)
