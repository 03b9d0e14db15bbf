"""The `inbox` table of `relay inbox run`: each message of a queue once, in the queue's order.

Owns: one session, and the right to write, which is a lease on the queue's row among the writers: each batch's transaction
renews it first and writes nothing where another one has it. A second sidecar waits (`Standby`) until the lease is given back
or has run out by the database's clock, or its owner's session is gone. Nothing hangs on the session itself, so a
transaction-pooling proxy may stand in between.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import orjson

from relay.database import DRIVER_ERRORS, Connection, close, connect, fill, mapped_errors, sql_file, writing
from relay.errors import DatabaseUnavailable, SchemaMissing
from relay.inbox.faults import classify
from relay.inbox.message import Message
from relay.inbox.naming import channel_of, names_of
from relay.inbox.outcome import ErrorClass, Permanent
from relay.inbox.station import Full, Standby
from relay.urls import DatabaseTarget
from relay.values import TableName

ANSWER_TIMEOUT_S: Final = 30.0
"""For one command, BEGIN and COMMIT too: a batch waits no longer for a session that hangs."""

RELEASE_TIMEOUT_S: Final = 2.0

LEASE: Final = timedelta(seconds=10)
"""Renewed every two seconds by the gauges, and by each batch."""

PENDING_MAX: Final = 100_000
"""Unfinished rows at which nothing more is taken from the queue: the backlog stays where it can be seen and bounded."""


@dataclass(frozen=True, slots=True)
class Gauges:
    """What waits in the table. `pending` and `parked` are counted to `PENDING_MAX`; `due_age_s` is of the row that is next."""

    pending: int
    oldest_age_s: float
    due_age_s: float
    parked: int


class Mailbox:
    """`target` is asked for at each connect."""

    def __init__(self, target: Callable[[], DatabaseTarget | str], table: TableName, queue: str) -> None:
        self._target = target
        self._table = table
        self._queue = queue
        self._connection: Connection | None = None
        # One session, used by the writer and by the gauges.
        self._lock = asyncio.Lock()
        names = names_of(table)
        self._insert = fill(sql_file("inbox/mailbox_insert.sql"), names)
        self._gauges = fill(sql_file("inbox/mailbox_gauges.sql"), names)
        self._claim = fill(sql_file("inbox/mailbox_claim.sql"), names)
        self._release = fill(sql_file("inbox/mailbox_release.sql"), names)
        self._hold = fill(sql_file("inbox/mailbox_hold.sql"), names)
        self._tables = (names["table"], names["writer"])
        # Of this life: the next one waits until this one's lease is over.
        self._owner = secrets.token_hex(16)
        self._has_resigned = False

    async def check(self) -> None:
        """Have a session, and the right to write; claimed each time, for it may have been lost without our knowing.
        Raises SchemaMissing, Standby, Full, DatabaseError.
        """
        self._has_resigned = False
        await self.reopen()
        if (await self.gauges()).pending >= PENDING_MAX:
            raise full()

    async def reopen(self) -> None:
        """As `check`; whoever has resigned has the session only."""
        async with self._lock:
            connection = self._connection
            if connection is None or connection.is_closed():
                connection = await connect(
                    self._target(), application_name="outbox-relay inbox", answer_timeout_s=ANSWER_TIMEOUT_S
                )
            # Kept while another one has the right, and with it; after any other failure it is in doubt.
            self._connection = None
            try:
                with mapped_errors():
                    # In transactions all of them: a proxy keeps a server's connection no longer.
                    async with writing(connection):
                        await self._prepare(connection)
            except Standby:
                self._connection = connection
                raise
            except BaseException:
                await close(connection)
                raise
            self._connection = connection

    async def _prepare(self, connection: Connection) -> None:
        for name in self._tables:
            if await connection.fetchval("SELECT to_regclass($1)", name) is None:
                raise SchemaMissing(f"there is no table {name}", hint="relay inbox migrate")
        if self._has_resigned:
            return
        is_direct = connection.get_server_pid() == await connection.fetchval("SELECT pg_backend_pid()")
        said = await connection.execute(self._claim, self._queue, self._owner, LEASE, is_direct)
        self._demand_right(said)

    async def write(self, messages: Sequence[Message]) -> int:
        """In one transaction, with the doorbell where anything is new; returns how many are. Raises DatabaseError,
        Standby, and what PostgreSQL says of data that it cannot hold.
        """
        columns = _columns(messages)
        async with self._lock:
            connection = self._open_connection()
            async with writing(connection):
                await self._renew(connection)
                said = await connection.execute(self._insert, self._queue, *columns)
                fresh = int(str(said).rpartition(" ")[2])
                if fresh:
                    await connection.execute("SELECT pg_notify($1, '')", channel_of(self._table))
            return fresh

    async def gauges(self) -> Gauges:
        """What waits; a right that was not given back is renewed at the same time. Raises DatabaseError, Standby."""
        async with self._lock:
            connection = self._open_connection()
            with mapped_errors():
                if not self._has_resigned:
                    async with writing(connection):
                        await self._renew(connection)
                async with connection.transaction():
                    row = await connection.fetchrow(self._gauges, PENDING_MAX)
            return Gauges(row["pending"], row["oldest_age_s"], row["due_age_s"], row["parked"])

    async def release(self) -> None:
        """Let go what is held by nobody. Raises DatabaseError."""
        async with self._lock:
            connection = self._open_connection()
            with mapped_errors():
                async with writing(connection):
                    await connection.execute(self._release)

    async def resign(self) -> None:
        """Give the right back, and do not take it before the next `check`. Where the database is away it runs out by itself."""
        self._has_resigned = True
        async with self._lock:
            with contextlib.suppress(DatabaseUnavailable, *DRIVER_ERRORS, Standby):
                connection = self._open_connection()
                async with writing(connection):
                    await self._renew(connection, timedelta(0))

    async def close(self) -> None:
        """Give the right back, so that nobody has to wait for its end."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(*DRIVER_ERRORS, Standby):
                async with asyncio.timeout(RELEASE_TIMEOUT_S), writing(connection):
                    await self._renew(connection, timedelta(0))
            await close(connection)

    async def _renew(self, connection: Connection, lease: timedelta = LEASE) -> None:
        self._demand_right(await connection.execute(self._hold, self._queue, self._owner, lease))

    def _demand_right(self, said: object) -> None:
        """By what PostgreSQL said of the one row that would have been changed."""
        if not str(said).endswith(" 1"):
            raise Standby(f"another sidecar writes {self._queue} into {self._table}")

    async def abandon(self) -> None:
        """The session is in doubt: nothing more is written by it."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.terminate()

    def _open_connection(self) -> Connection:
        if self._connection is None or self._connection.is_closed():
            raise DatabaseUnavailable("the session that writes the inbox is gone")
        return self._connection


def full() -> Full:
    """As many rows wait as may."""
    return Full(
        f"{PENDING_MAX:,} rows wait in the table",
        hint="is the service at work? docs/operations.md: Rows wait in the inbox",
    )


def is_data_at_fault(error: BaseException) -> bool:
    """Whether PostgreSQL refused what a message holds, rather than failing to answer."""
    return classify(error).error_class in (ErrorClass.CONSTRAINT, ErrorClass.MALFORMED)


def _columns(messages: Sequence[Message]) -> list[list[Any]]:
    rows = [_row(message) for message in messages]
    return [list(column) for column in zip(*rows, strict=True)]


def _row(message: Message) -> tuple[Any, ...]:
    properties = message.properties
    return (
        message.id,
        message.type,
        message.schema_version,
        message.aggregate_type or "",
        message.aggregate_id,
        message.aggregate_version,
        message.body,
        properties.content_type,
        properties.content_encoding,
        _json(message.headers),
        message.exchange,
        message.routing_key,
        message.correlation_id,
        message.causation_id,
        message.producer,
        message.traceparent,
        message.tracestate,
        message.occurred_at,
    )


def _json(headers: Mapping[str, Any]) -> str:
    """Headers as JSON: what JSON has no type for becomes text."""
    try:
        return orjson.dumps(headers, default=_plain).decode()
    except orjson.JSONEncodeError as error:
        raise Permanent(f"the headers cannot be JSON: {error}", error_class=ErrorClass.MALFORMED) from error


def _plain(value: Any) -> str:
    return value.hex() if isinstance(value, bytes | bytearray) else str(value)
