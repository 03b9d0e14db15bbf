"""One read-only statement of the preflight: a transaction of its own, bounded in time, also behind a pooling proxy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import asyncpg

from relay.database import mapped_errors
from relay.errors import DatabaseRefused

if TYPE_CHECKING:
    from relay.database import Connection

TIMEOUT_S: Final = 10
"""For a statement; what takes longer is not checked."""


async def fetch(connection: Connection, text: str, *arguments: object) -> list[Any]:
    """All records. Raises DatabaseLost, DatabaseRefused (rights, `is_too_slow`)."""
    with mapped_errors():
        # In a transaction, so that a pooling proxy keeps a statement's parts on one server.
        async with connection.transaction(readonly=True):
            await connection.execute(f"SET LOCAL statement_timeout = '{TIMEOUT_S}s'")
            records: list[Any] = await connection.fetch(text, *arguments, timeout=2 * TIMEOUT_S)
    return records


async def fetch_one(connection: Connection, text: str, *arguments: object) -> Any:
    """The only record. Raises as `fetch`."""
    (record,) = await fetch(connection, text, *arguments)
    return record


def is_too_slow(refused: DatabaseRefused) -> bool:
    """Whether the statement only ran out of its time."""
    return isinstance(refused.__cause__, asyncpg.QueryCanceledError)
