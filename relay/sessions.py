"""The relay's three PostgreSQL sessions: they live and die together.

Owns: opening keeper, reader and settler on the same server; one call at a time on each; deadlines; how a
transaction begins and ends. Invariant (R5): when one session is lost, answers not in time, or a call on it is
given up midway, all are closed at once, `on_lost` is told once, and every call from then on raises
DatabaseLost. Knows nothing of the outbox's tables.

The settler's is given back after a while without a settlement, and opened again for the next one; that is no loss, for
nothing was under way on it. Where the server has no connection to give by then, settlements go over the reader's:
rows that are published must be settled somehow, or they are published again.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping
from enum import StrEnum
from typing import Any

import asyncpg

from relay.database import Connection, close, connect, mapped_errors
from relay.errors import DatabaseError, DatabaseLost, DatabaseRefused, DatabaseUnavailable
from relay.urls import DatabaseTarget

READ_DEADLINE_S = 30.0
"""For a read. A cold cache is slow and no fault; a session that is gone is noticed by the keeper long before."""

BOUND_S_MAX = 5.0
"""Transactions are bounded by the lease (L7), but by no more than this: longer only hides a fault."""

SETTLER_IDLE_S = 20.0
"""An idle relay keeps two connections: services with many replicas share one `max_connections`."""

SETTLER_RETRY_S = 5.0
"""So long after a vain try settlements go over the reader's session without another try."""

PLANS = (
    "SET {local} plan_cache_mode = force_generic_plan; SET {local} jit = off;"
    " SET {local} enable_seqscan = off; SET {local} enable_bitmapscan = off;"
    " SET {local} enable_hashjoin = off; SET {local} enable_mergejoin = off;"
    " SET {local} max_parallel_workers_per_gather = 0; SET {local} extra_float_digits = 1;"
)
"""Every statement has one right plan, nested loops over an index or by address; the statistics of a queue's
table are wrong most of the time and would choose others. The last one: times come as text in JSON."""


class Group(StrEnum):
    """Whose session: calls of one group never overlap."""

    KEEPER = "keeper"
    READER = "reader"
    SETTLER = "settler"


class Session:
    """One connection, for the time of one call; texts are sent prepared where the connection is direct."""

    __slots__ = (
        "_deadline",
        "_is_direct",
        "_statements",
        "_texts",
        "begin_read",
        "connection",
        "lock",
        "pid",
        "used_at",
    )

    def __init__(self, connection: Connection, pid: int, is_direct: bool, begin_read: str) -> None:
        self.connection = connection
        self.pid = pid
        self.lock = asyncio.Lock()
        self.begin_read = begin_read
        self._is_direct = is_direct
        self._texts: Mapping[str, str] = {}
        self._statements: dict[str, Any] = {}
        self._deadline = 0.0
        self.used_at = time.monotonic()
        """When the last call on it began, in monotonic seconds."""

    def know(self, texts: Mapping[str, str]) -> None:
        """The statements by name that `fetch` may be asked for."""
        self._texts = texts

    def set_deadline(self, seconds: float) -> None:
        """The call ends within so many seconds from now, or all sessions are lost."""
        self.used_at = time.monotonic()
        self._deadline = self.used_at + seconds

    async def fetch(self, name: str, *arguments: object) -> list[Any]:
        """All records of the statement `name`."""
        if not self._is_direct:
            records: list[Any] = await self.connection.fetch(self._texts[name], *arguments, timeout=self._left_s())
            return records
        statement = self._statements.get(name)
        if statement is None:
            statement = await self.connection.prepare(self._texts[name], name=f"relay_{name}", timeout=self._left_s())
            self._statements[name] = statement
        return await statement.fetch(*arguments, timeout=self._left_s())  # type: ignore[no-any-return]

    async def fetch_one(self, name: str, *arguments: object) -> Any:
        """The only record of the statement `name`."""
        records = await self.fetch(name, *arguments)
        assert len(records) == 1, f"{name} has one record, not {len(records)}"
        return records[0]

    async def read(self, name: str, *arguments: object) -> list[Any]:
        """A read-only statement by itself; behind a proxy in a transaction, which keeps it on one server."""
        if self._is_direct:
            return await self.fetch(name, *arguments)
        async with self.transaction(self.begin_read):
            return await self.fetch(name, *arguments)

    async def execute(self, text: str) -> str:
        """Statements without parameters, in one message; the last one's command tag."""
        tag: str = await self.connection.execute(text, timeout=self._left_s())
        return tag

    @contextlib.asynccontextmanager
    async def transaction(self, begin: str) -> AsyncIterator[None]:
        """`begin` (one text), the block, COMMIT; ROLLBACK where the server refused something."""
        try:
            await self.execute(begin)
            yield
            tag = await self.execute("COMMIT")
        except asyncpg.PostgresError:
            if not self.connection.is_closed() and self.connection.is_in_transaction():
                await self.execute("ROLLBACK")
            raise
        if tag != "COMMIT":
            raise DatabaseLost(f"COMMIT was answered {tag}")

    def _left_s(self) -> float:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left


class Sessions:
    """Keeper, reader and settler. `is_direct`: no pooling proxy in between."""

    def __init__(self, lease_s: float, *, settle_commit: bool) -> None:
        self.bound_s = min(lease_s, BOUND_S_MAX)
        """How long a call that writes may take at the client; the server's own bounds lie below."""
        self.is_direct = True
        self.server_version = 0
        self._settle_commit = settle_commit
        self._sessions: dict[Group, Session] = {}
        self._why = "not open"
        self._on_lost: Callable[[str], None] | None = None
        self._database: Callable[[], DatabaseTarget] | None = None
        self._name = ""
        self._server = ""
        self._texts: Mapping[str, str] = {}
        self._settler_retry_at = 0.0
        self._goodbyes: set[asyncio.Task[None]] = set()

    # ------------------------------------------------------------ open and close

    async def open(self, database: Callable[[], DatabaseTarget], name: str) -> None:
        """Open all three; nobody is told of their loss before `watch`. `database` gives the target anew for each
        opening. Raises DatabaseUnavailable, DatabaseRefused."""
        assert not self._sessions, "opened twice"
        target = database()
        opened: list[Connection] = []
        try:
            found: dict[Group, Any] = {}
            for group in Group:
                connection = await _connect(target, group, name)
                opened.append(connection)
                with mapped_errors(connecting=True):
                    found[group] = await self._probe(connection)
            records = list(found.values())
            if any(record["is_standby"] for record in records):
                raise DatabaseUnavailable(f"the PostgreSQL server at {target.address} is a standby")
            if len({record["server"] for record in records}) > 1:
                raise DatabaseUnavailable(f"{target.address} led to different PostgreSQL servers")
            self.server_version = records[0]["version"]
            self.is_direct = all(
                connection.get_server_pid() == record["pid"] for connection, record in zip(opened, records, strict=True)
            )
            sessions = {}
            for group, connection in zip(Group, opened, strict=True):
                sessions[group] = await self._session(connection, found[group]["pid"])
        except BaseException:
            for connection in opened:
                connection.terminate()
            raise
        self._database, self._name, self._server = database, name, records[0]["server"]
        self._sessions = sessions
        self._settler_retry_at = 0.0
        for group, session in sessions.items():
            session.connection.add_termination_listener(self._listener(group, session))

    async def _session(self, connection: Connection, pid: int) -> Session:
        if self.is_direct:
            with mapped_errors(connecting=True):
                await connection.execute(self._session_settings())
        return Session(connection, pid, self.is_direct, self.begin_read(READ_DEADLINE_S * 0.8))

    def watch(self, on_lost: Callable[[str], None]) -> None:
        """From now on the loss of the sessions is told, once. Raises DatabaseLost when they are lost already."""
        if not self._sessions:
            raise DatabaseLost(self._why)
        self._on_lost = on_lost

    async def _probe(self, connection: Connection) -> Any:
        """Which server and session this is. The arguments make the driver ask now for the types that it does not know:
        it sets `jit` off and on around that question, and inside our transactions would leave it off for good."""
        async with connection.transaction():  # behind a proxy, all of it on one server
            return await connection.fetchrow(
                "SELECT pg_backend_pid() AS pid, pg_is_in_recovery() AS is_standby,"
                " pg_postmaster_start_time()::text AS server, current_setting('server_version_num')::int AS version,"
                " $1::tid[], $2::bool[], $3::smallint[], $4::int[], $5::bigint[], $6::float8[]",
                *([[]] * 6),
            )

    def _listener(self, group: Group, session: Session) -> Callable[[Connection], None]:
        def on_terminated(_: Connection) -> None:
            if self._sessions.get(group) is session:
                self.lose(f"the {group}'s PostgreSQL session ended")

        return on_terminated

    def know(self, texts: Mapping[str, str]) -> None:
        self._texts = texts
        for session in self._sessions.values():
            session.know(texts)

    def connection(self, group: Group) -> Connection:
        return self._sessions[group].connection

    def pid(self, group: Group) -> int:
        return self._sessions[group].pid

    def lose(self, why: str) -> None:
        """All sessions are void from now on (R5)."""
        sessions, self._sessions = self._sessions, {}
        if not sessions:
            return
        self._why = why
        for session in sessions.values():
            session.connection.terminate()
        on_lost, self._on_lost = self._on_lost, None
        if on_lost is not None:
            on_lost(why)

    async def close(self) -> None:
        """Close all sessions; never raises, safe to repeat. Calls under way raise DatabaseLost."""
        sessions, self._sessions = self._sessions, {}
        self._on_lost = None
        if sessions:
            self._why = "closed"
        goodbyes = []
        for session in sessions.values():
            if session.lock.locked():
                session.connection.terminate()
            else:
                goodbyes.append(close(session.connection))
        await asyncio.gather(*goodbyes, *self._goodbyes)

    # ------------------------------------------------------------ the settler's comes and goes

    def _retire_settler(self) -> None:
        """Give an idle settler's connection back."""
        session = self._sessions.get(Group.SETTLER)
        if session is None or session.lock.locked() or time.monotonic() - session.used_at < SETTLER_IDLE_S:
            return
        del self._sessions[Group.SETTLER]
        goodbye = asyncio.get_running_loop().create_task(close(session.connection))
        self._goodbyes.add(goodbye)
        goodbye.add_done_callback(self._goodbyes.discard)

    async def _settler(self) -> Session | None:
        """The settler's session, opened again where it was given back; else the reader's. None when all are lost."""
        sessions = self._sessions
        session = sessions.get(Group.SETTLER)
        if session is None and sessions and time.monotonic() >= self._settler_retry_at:
            session = await self._opened_settler()
            if self._sessions is not sessions:
                if session is not None:
                    session.connection.terminate()
                return None
            if session is None:
                self._settler_retry_at = time.monotonic() + SETTLER_RETRY_S
            else:
                session.connection.add_termination_listener(self._listener(Group.SETTLER, session))
                sessions[Group.SETTLER] = session
        return session or sessions.get(Group.READER)

    async def _opened_settler(self) -> Session | None:
        """None where the server gives none, or it is not the same server any more."""
        assert self._database is not None, "opened before"
        connection: Connection | None = None
        try:
            connection = await _connect(self._database(), Group.SETTLER, self._name)
            with mapped_errors(connecting=True):
                record = await self._probe(connection)
            is_same = record["server"] == self._server and not record["is_standby"]
            if is_same and self.is_direct == (connection.get_server_pid() == record["pid"]):
                session = await self._session(connection, record["pid"])
                session.know(self._texts)
                return session
        except DatabaseError:
            pass  # The reader's session does it meanwhile; a server that is gone shows there, with its words.
        except BaseException:
            if connection is not None:
                connection.terminate()
            raise
        if connection is not None:
            connection.terminate()
        return None

    # ------------------------------------------------------------ calls

    @contextlib.asynccontextmanager
    async def call(self, group: Group, deadline_s: float) -> AsyncIterator[Session]:
        """The group's session for one call of at most `deadline_s`. Raises DatabaseLost, DatabaseRefused."""
        session = await self._settler() if group is Group.SETTLER else self._sessions.get(group)
        if session is None:
            raise DatabaseLost(self._why)
        async with session.lock:
            if session not in self._sessions.values():
                raise DatabaseLost(self._why)
            if group is Group.KEEPER:
                # About once a second, whatever else happens.
                self._retire_settler()
            session.set_deadline(deadline_s)
            try:
                with mapped_errors():
                    yield session
            except DatabaseRefused as refused:
                if not _means_lost(refused):
                    raise
                self._lose_of(session, str(refused))
                raise DatabaseLost(str(refused)) from refused.__cause__
            except DatabaseError as error:
                self._lose_of(session, str(error))
                raise
            except BaseException as error:
                # Given up midway: a transaction may be open, an answer may be on its way.
                self._lose_of(session, f"a call was given up: {type(error).__name__}")
                raise

    def _lose_of(self, session: Session, why: str) -> None:
        if session in self._sessions.values():
            self.lose(why)

    # ------------------------------------------------------------ how transactions begin

    def begin_write(self, *, sign: tuple[int, int] | None = None, is_settlement: bool = False) -> str:
        """A writing transaction, bounded below the lease (L7). `sign`: it touches the outbox, and says that it is
        a relay's; the lock is never waited for."""
        bound_ms = int(self.bound_s * 1000)
        parts = [
            "BEGIN ISOLATION LEVEL READ COMMITTED, READ WRITE",
            f"SET LOCAL lock_timeout = {bound_ms // 5}",
            f"SET LOCAL statement_timeout = {bound_ms * 3 // 5}",
            f"SET LOCAL idle_in_transaction_session_timeout = {bound_ms * 3 // 5}",
        ]
        if self.server_version >= 170000:
            parts.append(f"SET LOCAL transaction_timeout = {bound_ms * 9 // 10}")
        if is_settlement and not self._settle_commit:
            parts.append("SET LOCAL synchronous_commit = off")
        if not self.is_direct:
            parts.append(PLANS.format(local="LOCAL").rstrip(";"))
        if sign is not None:
            parts.append(f"SELECT pg_try_advisory_xact_lock_shared({sign[0]}, {sign[1]})")
        return "; ".join(parts)

    def begin_read(self, timeout_s: float) -> str:
        """A reading transaction whose statements take at most `timeout_s`."""
        parts = [
            "BEGIN ISOLATION LEVEL READ COMMITTED, READ ONLY",
            f"SET LOCAL statement_timeout = {int(timeout_s * 1000)}",
            f"SET LOCAL idle_in_transaction_session_timeout = {int(self.bound_s * 600)}",
        ]
        if not self.is_direct:
            parts.append(PLANS.format(local="LOCAL").rstrip(";"))
        return "; ".join(parts)

    def _session_settings(self) -> str:
        """Where no proxy is in between, a session's settings are its own."""
        return (
            f"{PLANS.format(local='SESSION')}"
            " SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL READ COMMITTED;"
            f" SET SESSION statement_timeout = {int(READ_DEADLINE_S * 800)};"
            # A client that vanished without a word must not keep the doorbell's lock for hours.
            " SET SESSION tcp_keepalives_idle = 10; SET SESSION tcp_keepalives_interval = 5;"
            " SET SESSION tcp_keepalives_count = 3;"
            " SET SESSION lock_timeout = 0; SET SESSION idle_in_transaction_session_timeout = 0;"
            " SET SESSION idle_session_timeout = 0"
        )


async def _connect(target: DatabaseTarget, group: Group, name: str) -> Connection:
    return await connect(target, application_name=f"outbox-relay {group} {name}", answer_timeout_s=READ_DEADLINE_S)


def _means_lost(refused: DatabaseRefused) -> bool:
    """Refusals after which only a new session helps, or whose effect is unknown."""
    return isinstance(
        refused.__cause__,
        asyncpg.StatementCompletionUnknownError  # may have happened
        | asyncpg.InvalidCachedStatementError  # somebody altered a table: prepare anew
        | asyncpg.OutdatedSchemaCacheError
        | asyncpg.ReadOnlySQLTransactionError  # the server is a standby now
        | asyncpg.UndefinedTableError,  # dropped: another one may come
    )
