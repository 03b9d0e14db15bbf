"""The outbox suite on PostgreSQL: what the fake promises, the real adapter keeps."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING

import asyncpg
import pytest

from relay.core.ports.outbox import Outbox, OutboxInfo
from relay.migrate import migrate
from relay.outbox import PostgresOutbox
from relay.rows import shard_sql
from relay.urls import database_target
from relay.values import table_name

from . import chores_suite, outbox_suite
from .outbox_suite import Seen

if TYPE_CHECKING:
    from asyncpg.transaction import Transaction


class PostgresWriter:
    def __init__(self, connection: asyncpg.Connection, transaction: Transaction) -> None:
        self._connection = connection
        self._transaction = transaction

    async def insert(self, key: str | None, count: int = 1) -> list[str]:
        return [await _insert(self._connection, key, None, 10) for _ in range(count)]

    async def commit(self) -> None:
        await self._transaction.commit()
        await self._connection.close()

    async def rollback(self) -> None:
        await self._transaction.rollback()
        await self._connection.close()


async def _insert(
    connection: asyncpg.Connection, key: str | None, available_in_s: float | None, size: int, headers_size: int = 0
) -> str:
    id_: str = await connection.fetchval(
        "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload, available_at, headers)"
        " VALUES ('t', $1, 'ok', to_json(repeat('x', $2)), clock_timestamp() + $3 * interval '1 s',"
        " CASE WHEN $4 = 0 THEN '{}' ELSE jsonb_build_object('h', repeat('x', $4 - 9)) END) RETURNING id",
        key,
        size,
        available_in_s,
        headers_size,
    )
    return id_


class PostgresTable:
    """`outbox_suite.Table` over a database of the test's own."""

    def __init__(self, url: str, connection: asyncpg.Connection, *, marks_sent: bool) -> None:
        self._url = url
        self._connection = connection
        self._marks_sent = marks_sent
        self.relays: list[PostgresOutbox] = []
        self.rings: Counter[str] = Counter()
        self.losses: list[tuple[str, str]] = []

    async def begin(self) -> PostgresWriter:
        connection = await asyncpg.connect(self._url)
        transaction = connection.transaction()
        await transaction.start()
        return PostgresWriter(connection, transaction)

    async def insert(
        self,
        key: str | None,
        count: int = 1,
        *,
        available_in_s: float | None = None,
        size: int = 10,
        headers_size: int = 0,
    ) -> list[str]:
        async with self._connection.transaction():
            return [await _insert(self._connection, key, available_in_s, size, headers_size) for _ in range(count)]

    async def relay(self, name: str, *, holds_when_parked: bool = True) -> Outbox:
        outbox = PostgresOutbox(
            lambda: database_target(self._url),
            table_name("outbox"),
            instance=name,
            name=name,
            version="0",
            lease_s=5.0,
            marks_sent=self._marks_sent,
            holds_when_parked=holds_when_parked,
            is_ordered=True,
            settle_commit=True,
            poll_interval_s=0.5,
        )
        await self.open(outbox, name)
        self.relays.append(outbox)
        return outbox

    async def open(self, relay: Outbox, name: str) -> OutboxInfo:
        return await relay.open(lambda: self.rings.update([name]), lambda why: self.losses.append((name, why)))

    async def sever(self, name: str) -> None:
        ended = await self._connection.fetchval(
            "SELECT pg_terminate_backend(owner_pid) FROM outbox_shard WHERE owner = $1 LIMIT 1", name
        )
        assert ended, "its keeper's session"

    async def drop(self, relay: Outbox) -> None:
        await relay.close()

    async def row(self, id_: str) -> Seen | None:
        found = await self._connection.fetchrow(
            f"SELECT seq, {shard_sql()}, aside, attempts, sent_at IS NOT NULL FROM outbox o WHERE id = $1", id_
        )
        return None if found is None else Seen(*found)

    async def touch(self, id_: str) -> None:
        await self._connection.execute("UPDATE outbox SET tracestate = 'seen' WHERE id = $1", id_)

    async def lock(self, id_: str) -> Callable[[], Awaitable[None]]:
        writer = await self.begin()
        await writer._connection.execute("SELECT 1 FROM outbox WHERE id = $1 FOR UPDATE", id_)
        return writer.rollback

    async def lock_shard(self, shard: int) -> Callable[[], Awaitable[None]]:
        writer = await self.begin()
        await writer._connection.execute("SELECT 1 FROM outbox_shard WHERE shard = $1 FOR UPDATE", shard)
        return writer.rollback

    async def delete(self, id_: str) -> None:
        await self._connection.execute("DELETE FROM outbox WHERE id = $1", id_)

    async def refuse(self, id_: str) -> None:
        await self._connection.execute(
            "CREATE FUNCTION no() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN"
            f" IF old.id = '{id_}' THEN RAISE EXCEPTION 'refused'; END IF; RETURN coalesce(new, old); END$$;"
            "CREATE TRIGGER no BEFORE UPDATE OR DELETE ON outbox FOR EACH ROW EXECUTE FUNCTION no()"
        )

    async def run_out(self, shard: int) -> None:
        await self._connection.execute("UPDATE outbox_shard SET leased_until = 'epoch' WHERE shard = $1", shard)

    async def set_back(self, last_seq: int) -> None:
        await self._connection.execute("SELECT setval('outbox_seq_seq', $1)", last_seq)

    async def pause(self, on: bool) -> None:
        at = "clock_timestamp()" if on else "NULL"
        await self._connection.execute(f"UPDATE outbox_meta SET paused_at = {at}")

    async def steal(self, shard: int) -> None:
        await self._connection.execute("UPDATE outbox_shard SET owner = 'somebody else' WHERE shard = $1", shard)


@pytest.fixture
async def table(database_url: str, request: pytest.FixtureRequest) -> AsyncIterator[PostgresTable]:
    connection = await asyncpg.connect(database_url)
    await migrate(connection)
    table = PostgresTable(database_url, connection, marks_sent=request.param == "mark")
    yield table
    for relay in table.relays:
        await relay.close()
    await connection.close()


@pytest.mark.parametrize("table", ["mark", "delete"], indirect=True)
@pytest.mark.parametrize("case", outbox_suite.CASES, ids=lambda case: case.__name__)
async def test_outbox_suite(case: outbox_suite.Case, table: PostgresTable) -> None:
    await case(table)


@pytest.mark.parametrize("table", ["mark"], indirect=True)
@pytest.mark.parametrize("case", chores_suite.CASES, ids=lambda case: case.__name__)
async def test_chores_suite(case: outbox_suite.Case, table: PostgresTable) -> None:
    await case(table)
