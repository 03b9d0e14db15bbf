"""The consumer's transaction over asyncpg: the message is recorded, the handler works, both commit together.

Owns: one connection for each message in work, kept for the next one. A connection that failed in any way is closed,
never handed on. Another driver or mapper gives a ledger of its own (docs/inbox.md has the recipes).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final, Protocol

import asyncpg
from asyncpg.transaction import Transaction

from relay.database import DRIVER_ERRORS, close, connect, literal, mapped_errors, sql_file
from relay.errors import DatabaseError, DatabaseUnavailable, SchemaMissing
from relay.inbox.message import Message
from relay.inbox.order import Order, Place, place
from relay.inbox.outcome import ErrorClass, Outcome, Permanent, Transient
from relay.urls import DatabaseTarget

Handler = Callable[[Message, Any], Awaitable[None]]
"""Does the effect in the transaction that it is given (whatever the ledger's driver calls one) and returns to have it
committed. It neither commits nor rolls back, and ends no transaction but its own savepoints.
"""

ROLLBACK_TIMEOUT_S: Final = 5.0
CHECK_TIMEOUT_S: Final = 10.0

STATEMENTS_MAX: Final = 100
"""Prepared ones that a connection keeps; the driver's own default."""


class Ledger(Protocol):
    """Who opens the transaction, records the message and runs the handler in it."""

    async def apply(self, message: Message, handler: Handler) -> Outcome:
        """HANDLED once the effect is committed; DUPLICATE or STALE without a call. Raises whatever failed, and then
        nothing was committed, or nobody knows: the next copy finds out.
        """
        ...

    async def check(self) -> None:
        """Asked before anything is consumed. Raises a RelayError while it could not work."""
        ...

    async def close(self) -> None:
        """Give back what is open."""
        ...


class WatchedConnection(asyncpg.Connection):  # type: ignore[misc]
    """Remembers what the last statement said (a COMMIT of a failed transaction succeeds, and says ROLLBACK), and sends a
    transaction's BEGIN together with its first statement: one round trip less for every message.
    """

    __slots__ = ("_first", "last_status")

    def begin_with(self, statement: str) -> None:
        """`statement`, without parameters, goes along with the next BEGIN; `last_status` is then what it said."""
        self._first: str | None = statement

    async def execute(self, query: str, *args: Any, timeout: float | None = None) -> str:
        """As the driver's, which begins, commits and rolls back by it."""
        if (first := getattr(self, "_first", None)) is not None:
            assert query.startswith("BEGIN"), "something came between the transaction and its first statement"
            query, self._first = f"{query} {first}", None
        self.last_status = status = str(await super().execute(query, *args, timeout=timeout))
        return status


class AsyncpgLedger:
    """`target` is a URL or a configured target, asked for at each connect. `first_version` as in `order.place`.

    `keeps_statements` False is for a transaction-pooling proxy: no statement stays prepared by name.
    """

    def __init__(
        self,
        target: Callable[[], DatabaseTarget | str],
        *,
        order: Order = Order.NONE,
        first_version: int | None = 1,
        keeps_statements: bool = True,
    ) -> None:
        self._target = target
        self._has_versions = order is Order.VERSION
        self._first_version = first_version
        self._statements_max = STATEMENTS_MAX if keeps_statements else 0
        self._idle: list[WatchedConnection] = []
        self._claim = sql_file("inbox/claim.sql")
        self._version_lock = sql_file("inbox/version_lock.sql")
        self._version_set = sql_file("inbox/version_set.sql")

    async def apply(self, message: Message, handler: Handler) -> Outcome:
        """See `Ledger.apply`; the handler gets the connection. Its settings stay for the next one: SET LOCAL only."""
        connection = await self._connection()
        transaction = connection.transaction()
        try:
            # Whatever the role's default is.
            connection.begin_with(f"SET TRANSACTION READ WRITE; {self._claim_of(message)}")
            await transaction.start()
            outcome = await self._work(connection, message, handler)
            await transaction.commit()
        except BaseException:
            await self._abandon(connection, transaction)
            raise
        self._idle.append(connection)
        if connection.last_status != "COMMIT":
            raise Transient(
                "the handler went on after an error of the database: nothing was committed",
                error_class=ErrorClass.UNKNOWN,
            )
        return outcome

    async def check(self) -> None:
        """See `Ledger.check`."""
        connection = await self._connection()
        try:
            wanted = ("processed_messages", "processed_versions") if self._has_versions else ("processed_messages",)
            with mapped_errors():
                missing = [
                    table
                    for table in wanted
                    if await connection.fetchval("SELECT to_regclass($1)", table, timeout=CHECK_TIMEOUT_S) is None
                ]
        except BaseException:
            connection.terminate()
            raise
        self._idle.append(connection)
        if missing:
            raise SchemaMissing(f"there is no table {missing[0]}", hint="relay inbox migrate")

    async def close(self) -> None:
        """Close the idle connections."""
        idle, self._idle = self._idle, []
        await asyncio.gather(*(close(connection) for connection in idle))

    async def _work(self, connection: WatchedConnection, message: Message, handler: Handler) -> Outcome:
        if connection.last_status == "INSERT 0 0":
            return Outcome.DUPLICATE
        if not self._has_versions:
            await handler(message, connection)
            return Outcome.HANDLED
        return await self._work_in_order(connection, message, handler)

    async def _work_in_order(self, connection: WatchedConnection, message: Message, handler: Handler) -> Outcome:
        version = message.aggregate_version
        if message.aggregate_id is None or version is None:
            raise Permanent("no aggregate_id or aggregate_version to order by", error_class=ErrorClass.MALFORMED)
        key = (message.consumer, message.aggregate_type or "", message.aggregate_id)
        applied = await connection.fetchval(self._version_lock, *key)
        match place(applied, version, self._first_version):
            case Place.STALE:
                return Outcome.STALE
            case Place.GAP:
                raise Transient(f"version {version} came after {max(applied, 0)}", error_class=ErrorClass.GAP)
            case Place.NEXT:
                await handler(message, connection)
                await connection.execute(self._version_set, *key, version)
                return Outcome.HANDLED

    def _claim_of(self, message: Message) -> str:
        """The claim with its values in it: what goes along with BEGIN has no parameters."""
        before, _, after = self._claim.partition("$2")
        return before.replace("$1", literal(message.consumer)) + literal(message.id) + after

    async def _connection(self) -> WatchedConnection:
        """One that was kept, unless the server has closed it meanwhile: no message climbs its ladder for that."""
        while self._idle:
            if not (connection := self._idle.pop()).is_closed():
                return connection
        return await self._open()

    async def _open(self) -> WatchedConnection:
        try:
            connection: WatchedConnection = await connect(
                self._target(),
                application_name="outbox-relay inbox",
                # A handler's statements are its own; the message's time limit holds for all of them.
                answer_timeout_s=None,
                statement_cache_size=self._statements_max,
                connection_class=WatchedConnection,
            )
        except DatabaseError as error:
            # Whatever the reason, a password too: no message is at fault.
            raise DatabaseUnavailable(error.message, hint=error.hint) from error
        return connection

    async def _abandon(self, connection: WatchedConnection, transaction: Transaction) -> None:
        """Roll back and keep the connection if that works; otherwise the server rolls back when it is gone."""
        try:
            if not connection.is_closed():
                async with asyncio.timeout(ROLLBACK_TIMEOUT_S):
                    await transaction.rollback()
                self._idle.append(connection)
                return
        except DRIVER_ERRORS:
            # Closed below: whatever it was, this connection is not used again.
            pass
        except BaseException:
            # Given up once more while it rolls back: the grace has run out.
            connection.terminate()
            raise
        connection.terminate()
