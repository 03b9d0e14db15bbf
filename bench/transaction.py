"""A transaction that stays open for the time of a block."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import asyncpg

from bench.load import patience_s

CONNECT_TIMEOUT_S: Final = 10.0


@contextmanager
def open_transaction(
    url: str, statement: str, *, isolation: str = "read_committed", rows: int = 0, commits: bool = False
) -> Iterator[None]:
    """One that has run this statement, which goes through so many `rows`; rolled back after the block, or committed."""
    loop = asyncio.new_event_loop()
    try:
        connect = asyncpg.connect(url, timeout=CONNECT_TIMEOUT_S, command_timeout=patience_s(rows))
        connection = loop.run_until_complete(connect)
        transaction = connection.transaction(isolation=isolation)
        loop.run_until_complete(transaction.start())
        loop.run_until_complete(connection.execute(statement))
        yield
        loop.run_until_complete(transaction.commit() if commits else transaction.rollback())
        loop.run_until_complete(connection.close(timeout=5.0))
    finally:
        loop.close()
