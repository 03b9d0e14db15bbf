"""The preflight's look at a pooling proxy: does a prepared statement with a name outlive its transaction there?

Relays send such statements only over direct connections, so that nothing fails; behind a proxy without them each
statement is sent whole and planned anew.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, Final

import asyncpg

from relay.database import close, connect, mapped_errors
from relay.errors import DatabaseError
from relay.preflight.finding import Finding, not_checked, ok, warning
from relay.urls import DatabaseTarget

if TYPE_CHECKING:
    from relay.database import Connection

TIMEOUT_S: Final = 5.0
CHECK: Final = "prepared statements"
NAME: Final = "outbox_relay_check"

HOLDERS_MAX: Final = 8
"""So many server connections are taken to find the one on which the statement was prepared."""


async def check(target: DatabaseTarget) -> Finding:
    """One finding, by sessions of its own."""
    try:
        async with asyncio.timeout(TIMEOUT_S), contextlib.AsyncExitStack() as stack:
            survives = await _survives(target, stack)
    except (DatabaseError, TimeoutError):
        survives = None
    if survives is None:
        return not_checked(CHECK, "the proxy gave no second server connection")
    if survives:
        return ok(CHECK, "named ones outlive their transaction behind this proxy")
    return warning(
        CHECK,
        "named ones are lost behind this proxy: relays send and plan each statement anew, which costs PostgreSQL more CPU",
        "PgBouncer 1.21 or later with max_prepared_statements, or name PostgreSQL itself in RELAY_DATABASE_URL",
    )


async def _survives(target: DatabaseTarget, stack: contextlib.AsyncExitStack) -> bool | None:
    """Prepare, have somebody else keep that server connection, execute. None: nobody got hold of it."""

    async def session() -> Connection:
        opened = await connect(target, application_name="outbox-relay check")
        stack.push_async_callback(close, opened)
        return opened

    first = await session()
    with mapped_errors():
        async with first.transaction():
            pid = await first.fetchval("SELECT pg_backend_pid()")
            statement = await first.prepare("SELECT 1", name=NAME)
    others: list[Any] = []
    for _ in range(HOLDERS_MAX):
        other = await session()
        with mapped_errors():
            transaction = other.transaction()
            await transaction.start()
            if await other.fetchval("SELECT pg_backend_pid()") == pid:
                break
            others.append(transaction)
    else:
        return None
    with mapped_errors():
        for waiting in others:
            await waiting.rollback()
        try:
            await statement.fetchval()
        except asyncpg.InvalidSQLStatementNameError:
            return False
        finally:
            await transaction.rollback()
    return True
