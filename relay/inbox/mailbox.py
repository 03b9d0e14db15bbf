"""The `inbox` table of `relay inbox run`: each message of a queue once, in the queue's order.

Owns: one session, which holds the lock that makes it this queue's only writer, and writes: when it is lost, so is the
right to write. A second sidecar waits for that lock (`Standby`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import orjson

from relay.database import Connection, close, connect, fill, mapped_errors, sql_file
from relay.errors import DatabaseUnavailable, SchemaMissing
from relay.inbox.faults import classify
from relay.inbox.message import Message
from relay.inbox.naming import channel_of, names_of
from relay.inbox.outcome import ErrorClass, Permanent
from relay.inbox.station import Standby
from relay.urls import DatabaseTarget
from relay.values import TableName

STATEMENT_TIMEOUT_S: Final = 30.0

PENDING_MAX: Final = 100_000
"""Unfinished rows at which nothing more is taken from the queue: the backlog stays where it can be seen and bounded."""


@dataclass(frozen=True, slots=True)
class Gauges:
    """What waits in the table. `pending` and `parked` are counted to `PENDING_MAX`."""

    pending: int
    oldest_age_s: float
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
        self._take_lock = sql_file("inbox/mailbox_lock.sql")

    async def check(self) -> None:
        """Have a session with the lock. Raises SchemaMissing, Standby, DatabaseError."""
        async with self._lock:
            connection = self._connection
            if connection is not None and not connection.is_closed():
                return
            connection = await connect(self._target(), application_name="outbox-relay inbox")
            try:
                with mapped_errors():
                    await self._prepare(connection)
            except BaseException:
                await close(connection)
                raise
            self._connection = connection

    async def _prepare(self, connection: Connection) -> None:
        name = self._table.quoted
        if await connection.fetchval("SELECT to_regclass($1)", name, timeout=STATEMENT_TIMEOUT_S) is None:
            raise SchemaMissing(f"there is no table {self._table}", hint="relay inbox migrate")
        if not await connection.fetchval(self._take_lock, name, self._queue, timeout=STATEMENT_TIMEOUT_S):
            raise Standby(f"another sidecar writes {self._queue} into {self._table}")

    async def write(self, messages: Sequence[Message]) -> int:
        """In one transaction, with the doorbell where anything is new; returns how many are. Raises DatabaseError, and
        what PostgreSQL says of data that it cannot hold.
        """
        columns = _columns(messages)
        async with self._lock:
            connection = self._open_connection()
            async with connection.transaction():
                said = await connection.execute(self._insert, self._queue, *columns, timeout=STATEMENT_TIMEOUT_S)
                fresh = int(str(said).rpartition(" ")[2])
                if fresh:
                    await connection.execute("SELECT pg_notify($1, '')", channel_of(self._table))
            return fresh

    async def gauges(self) -> Gauges:
        """What waits. Raises DatabaseError."""
        async with self._lock:
            with mapped_errors():
                row = await self._open_connection().fetchrow(self._gauges, PENDING_MAX, timeout=STATEMENT_TIMEOUT_S)
            return Gauges(row["pending"], row["oldest_age_s"], row["parked"])

    async def close(self) -> None:
        """Give the lock back."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await close(connection)

    async def abandon(self) -> None:
        """The session is in doubt: nothing more is written by it."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.terminate()

    def _open_connection(self) -> Connection:
        if self._connection is None or self._connection.is_closed():
            raise DatabaseUnavailable("the session that holds the inbox's lock is gone")
        return self._connection


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
