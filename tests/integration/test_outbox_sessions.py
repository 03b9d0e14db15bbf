"""`relay.outbox` on a real PostgreSQL: the doorbell, losing a session, rights, plans."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import asyncpg
import pytest

from relay import migrate, sessions
from relay.core.ports.outbox import Armed, Writer
from relay.errors import (
    DatabaseLost,
    DatabaseUnavailable,
    SchemaMissing,
)
from relay.outbox_sql import texts
from relay.servers import PostgresServer
from relay.sessions import Group
from tests.conftest import eventually
from tests.integration.relay import ALL, Relay, insert, parked
from tests.proxy import Proxy, Side, Trap

# ---------------------------------------------------------------- the doorbell


async def test_the_doorbell_rings_while_somebody_sleeps(
    database: asyncpg.Connection, started: Callable[..., Relay]
) -> None:
    a, b = await started("a").start(), await started("b").start(0)
    await insert(database, "k")
    assert await a.arm(0.2) is Armed.GRANTED
    assert await a.arm(0.2) is Armed.GRANTED
    assert await b.arm(0.2) is Armed.ELSEWHERE
    assert (a.rings, b.rings) == (0, 0)
    await insert(database, "k")
    await eventually(lambda: (a.rings, b.rings) == (1, 1))
    await a.disarm()  # rings once for the others
    await eventually(lambda: b.rings == 2)
    await a.disarm()
    await insert(database, "k")
    assert await b.arm(0.2) is Armed.GRANTED
    await insert(database, "k")
    await eventually(lambda: (a.rings, b.rings) == (2, 3))


async def test_the_doorbell_waits_for_a_writer_that_did_not_ring(
    database: asyncpg.Connection, started: Callable[..., Relay]
) -> None:
    relay = await started().start()
    async with database.transaction():
        await insert(database, "k")
        assert await relay.arm(0.05) is Armed.TIMED_OUT
        arming = asyncio.ensure_future(relay.arm(0.5))

        async def is_waiting() -> bool:
            return bool(
                await database.fetchval(
                    "SELECT EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
                    " AND database = (SELECT oid FROM pg_database WHERE datname = current_database()))"
                )
            )

        await eventually(is_waiting)
    assert await arming is Armed.GRANTED


async def test_without_a_trigger_nobody_waits(
    database: asyncpg.Connection, database_url: str, started: Callable[..., Relay]
) -> None:
    await migrate.run(database_url, doorbell=False)
    relay = started()
    assert not (await relay.open(lambda: None, lambda why: None)).has_doorbell
    assert await relay.arm(0.2) is Armed.TIMED_OUT
    await relay.disarm()


# ---------------------------------------------------------------- losing a session


@pytest.mark.parametrize("group", list(Group))
async def test_the_loss_of_one_session_closes_all(
    database: asyncpg.Connection, started: Callable[..., Relay], group: Group
) -> None:
    relay = await started().start()
    await database.execute("SELECT pg_terminate_backend($1)", relay._sessions.pid(group))
    await eventually(lambda: len(relay.lost) == 1)
    for call in (relay.check(), relay.read(), relay.settle(relay.settlement()), relay.renew({}, available=True)):
        with pytest.raises(DatabaseLost):
            await call

    async def are_gone() -> bool:
        count = (
            "SELECT count(*) FROM pg_stat_activity"
            " WHERE application_name LIKE 'outbox-relay%' AND datname = current_database()"
        )
        return bool(await database.fetchval(count) == 0)

    await eventually(are_gone)
    assert len(relay.lost) == 1
    await relay.start(0)
    assert len((await relay.renew(relay.held(), available=True)).renewed) == ALL


async def test_a_call_in_flight_when_a_session_dies(
    database: asyncpg.Connection, started: Callable[..., Relay]
) -> None:
    relay = await started().start()
    await insert(database, "k")
    rows = await relay.read()
    async with database.transaction():
        await database.execute("SELECT FROM outbox_shard FOR UPDATE")
        settling = asyncio.ensure_future(relay.settle(relay.settlement(sent=rows)))

        async def is_waiting() -> bool:
            return bool(
                await database.fetchval(
                    "SELECT EXISTS (SELECT FROM pg_stat_activity"
                    " WHERE wait_event_type = 'Lock' AND datname = current_database())"
                )
            )

        await eventually(is_waiting)
        await database.execute("SELECT pg_terminate_backend($1)", relay._sessions.pid(Group.KEEPER))
        with pytest.raises(DatabaseLost):
            await settling
    assert len(relay.lost) == 1


async def test_a_server_that_answers_no_more(postgres_server: PostgresServer, started: Callable[..., Relay]) -> None:
    relay = await started(lease_s=1.0).start(1)
    postgres_server.freeze()
    try:
        assert relay._sessions.bound_s == 1.0
        async with asyncio.timeout(sessions.READ_DEADLINE_S / 2):
            with pytest.raises(DatabaseLost, match="no answer in time"):
                await relay.check()
        assert len(relay.lost) == 1
        await relay.close()
    finally:
        postgres_server.thaw()


async def test_sessions_are_what_the_relay_needs_whatever_the_database_says(
    database: asyncpg.Connection, started: Callable[..., Relay]
) -> None:
    """Idle ones are not ended, and a client that vanished is noticed: it may have the doorbell's lock."""
    name = await database.fetchval("SELECT quote_ident(current_database())")
    for setting in ("idle_session_timeout", "idle_in_transaction_session_timeout", "lock_timeout", "statement_timeout"):
        await database.execute(f"ALTER DATABASE {name} SET {setting} = '7s'")
    await database.execute(f"ALTER DATABASE {name} SET default_transaction_isolation = 'serializable'")
    relay = await started().start()
    expected = {
        "idle_session_timeout": "0",
        "idle_in_transaction_session_timeout": "0",
        "lock_timeout": "0",
        "statement_timeout": "24s",
        "default_transaction_isolation": "read committed",
        "tcp_keepalives_idle": "10",
        "tcp_keepalives_interval": "5",
        "tcp_keepalives_count": "3",
    }
    for group in Group:
        connection = relay._sessions.connection(group)
        assert {name: await connection.fetchval(f"SHOW {name}") for name in expected} == expected, group


@pytest.mark.parametrize("amid", [b"BEGIN;", b"SELECT pg_backend_pid"], ids=["begin", "probe"])
async def test_a_session_that_hangs_while_it_is_opened(
    database_url: str, database: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch, amid: bytes
) -> None:
    """Half open: nobody closes it, and no request to cancel arrives either."""
    monkeypatch.setattr(sessions, "READ_DEADLINE_S", 0.5)
    async with Proxy(database_url) as proxy:
        relay = Relay(proxy.url, "a")
        sprung = proxy.trap(Trap(Side.CLIENT, amid, proxy.half_open))
        with pytest.raises(DatabaseUnavailable):
            await asyncio.wait_for(relay.start(), 20)
        assert sprung.is_set()
        proxy.heal()
        await relay.start()
        await relay.close()


async def test_a_call_that_is_given_up_midway_loses_the_sessions(
    database: asyncpg.Connection, started: Callable[..., Relay]
) -> None:
    relay = await started().start()
    async with database.transaction():
        await database.execute("SELECT FROM outbox_shard FOR UPDATE")
        settling = asyncio.ensure_future(relay.settle(relay.settlement()))

        async def is_waiting() -> bool:
            return bool(
                await database.fetchval(
                    "SELECT EXISTS (SELECT FROM pg_stat_activity"
                    " WHERE wait_event_type = 'Lock' AND datname = current_database())"
                )
            )

        await eventually(is_waiting)
        settling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await settling
    assert len(relay.lost) == 1
    with pytest.raises(DatabaseLost):
        await relay.check()


async def test_a_clean_close_tells_nobody(database: asyncpg.Connection, started: Callable[..., Relay]) -> None:
    relay = await started().start()
    await relay.close()
    await relay.close()
    with pytest.raises(DatabaseLost):
        await relay.check()
    assert relay.lost == []


async def test_a_dropped_table_is_noticed(
    database: asyncpg.Connection, database_url: str, started: Callable[..., Relay]
) -> None:
    relay = await started().start()
    await database.execute(
        "DROP TABLE outbox, outbox_shard, outbox_relay, outbox_fault, outbox_meta;"
        " DROP FUNCTION outbox_ring, outbox_bell_wait"
    )
    with pytest.raises(DatabaseLost):
        await relay.renew(relay.held(), available=True)
    with pytest.raises(SchemaMissing):
        await relay.start()
    await migrate.run(database_url)
    await relay.start()


async def test_a_table_that_is_altered_is_read_anew(
    database: asyncpg.Connection, started: Callable[..., Relay]
) -> None:
    """A prepared statement's result may not change its types: only new sessions help."""
    relay = await started().start()
    await insert(database, "k")
    assert len(await relay.read()) == 1
    await database.execute("ALTER TABLE outbox ALTER COLUMN event_type TYPE varchar(80)")
    with pytest.raises(DatabaseLost, match="cached plan"):
        await relay.read()
    await relay.start(0)
    assert len(await relay.read()) == 1


async def test_the_least_role_can_do_all_this(database_url: str, database: asyncpg.Connection) -> None:
    role = "relay_least"
    await database.execute(f"DROP ROLE IF EXISTS {role}; CREATE ROLE {role} LOGIN")
    await migrate.run(database_url, role=role)
    relay = await Relay(database_url.replace("postgres@", f"{role}@"), "a").start()
    try:
        await insert(database, *"kkks")
        one, two, three, other = await relay.read()
        await relay.settle(relay.settlement(setbacks=[parked(one)], followers=[two], tested=[three], scheduled=[other]))
        await relay.renew(relay.held(floor=4), available=True)
        await relay.check()
        await relay.backlog()
        await relay.due(dict.fromkeys(relay.epochs, 9), 9)
        await relay.purge(1.0, 10)
        await relay.search([(0, 0)], 10)
        await database.execute("UPDATE outbox SET parked_at = now() - interval '1 h' WHERE aside = 'parked'")
        assert (await relay.discard_parked(1.0, 10, [])).rows == 1
        assert await relay.arm(0.3) is Armed.GRANTED
        await relay.disarm()
        await relay.release(relay.held())
        await relay.leave()
    finally:
        await relay.close()
        await database.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")


# ---------------------------------------------------------------- plans


async def test_no_statement_reads_the_whole_table(database: asyncpg.Connection, started: Callable[..., Relay]) -> None:
    """I6. The plans that the relay's sessions choose, with statistics that are out of date."""
    relay = await started().start()
    await database.execute(
        "INSERT INTO outbox (aggregate_id, event_type) SELECT 'k' || n % 50, 'e' FROM generate_series(1, 2000) n"
    )
    session = relay._sessions.connection(Group.SETTLER)
    schema = await migrate.read_schema(database)
    statements = texts(schema, "")
    used = {
        "page": "outbox_read",
        "due": "outbox_aside_due",
        "due_later": "outbox_aside_due",
        "renew": "outbox_aside_due",
        "promote": "outbox_aside_key",
        "test": "outbox_aside_key",
        "park_policy": "outbox_aside_parked",
        "retention_lock": "outbox_aside_parked",
        "retention_rows": "outbox_aside_parked",
        "retention_faults": "outbox_pkey",
        "parked_discard": "outbox_pkey",  # parked_redrive has the same shape
        "held_keys": "outbox_aside_key",
        "followers": "outbox_aside_key",
        "mark": "Tid Scan on outbox",
        "delete": "Tid Scan on outbox",
        "set_back": "Tid Scan on outbox",
        "hold": "Tid Scan on outbox",
        "schedule": "Tid Scan on outbox",
        "mark_by_id": "outbox_pkey",
        "delete_by_id": "outbox_pkey",
        "unsent": "outbox_pkey",
        "load": "outbox_pkey",
        "reload": "outbox_pkey",
        "purge": "outbox_read",
        "search": "outbox_read",
        "lower_floors": "outbox_shard",
        "inspect": "outbox_read",
        "backlog": "outbox_read",
        "backlog_aside": "Index Only Scan using outbox_aside_parked",
        "claim": "outbox_shard",
        "fence": "outbox_shard",
        "release": "outbox_shard",
    }
    for name, index in used.items():
        count = max((n for n in range(14) if f"${n}" in statements[name]), default=0)
        await session.execute(f"PREPARE explained AS {statements[name]}")
        arguments = f"({', '.join(['NULL'] * count)})" if count else ""
        plan = "\n".join(line[0] for line in await session.fetch(f"EXPLAIN EXECUTE explained{arguments}"))
        await session.execute("DEALLOCATE explained")
        assert index in plan, f"{name}:\n{plan}"
        assert "Seq Scan on outbox o" not in plan, f"{name}:\n{plan}"


@pytest.mark.parametrize("name", ["page", "page_probed", "load", "reload", "due", "followers"])
async def test_seldom_used_columns_are_made_into_json_once(
    database: asyncpg.Connection, started: Callable[..., Relay], name: str
) -> None:
    """Where a subselect was flattened ten times: 170 us of PostgreSQL for a row that has one of them and is due."""
    await started().start()
    statement = texts(await migrate.read_schema(database), "")[name]
    count = max(n for n in range(15) if f"${n}" in statement)
    await database.execute(f"PREPARE explained AS {statement}")
    records = await database.fetch(f"EXPLAIN (VERBOSE) EXECUTE explained({', '.join(['NULL'] * count)})")
    made = [line.count('"aggregate_version":') for (line,) in records]
    # A node above the one that makes it may show what it takes from there by the whole expression.
    assert min(filter(None, made)) == 1, "\n".join(line for (line,) in records)


async def test_marks_are_hot(database: asyncpg.Connection, started: Callable[..., Relay]) -> None:
    """A mark changes no column that an index or its predicate names."""
    relay = await started().start()
    await database.execute("ALTER TABLE outbox SET (autovacuum_enabled = false)")
    await database.execute(
        "INSERT INTO outbox (aggregate_id, event_type, payload)"
        " SELECT 'k' || n % 50, 'e', to_json(repeat('x', 200)) FROM generate_series(1, 2000) n"
    )
    rows = await relay.read()
    for start in range(0, 2000, 500):
        await relay.settle(relay.settlement(sent=rows[start : start + 500]))
    await relay.close()  # its backend reports what it did when it ends
    statistics = "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables WHERE relname = 'outbox'"

    async def counted() -> Sequence[int] | None:
        found = await database.fetchrow(statistics)
        return tuple(found) if found[0] >= 2000 else None

    updates, hot = await eventually(counted) or (0, 0)
    assert hot >= updates * 0.98


def test_a_xid_is_widened_to_the_nearest() -> None:
    from relay.outbox import _writer

    assert _writer("3/7|", 5) == Writer("3/7", None)
    assert _writer("3/7|90", 100) == Writer("3/7", 90)
    assert _writer("3/7|105", 100) == Writer("3/7", 105)
    assert _writer(f"3/7|{2**32 - 1}", 2**32 + 5) == Writer("3/7", 2**32 - 1)
    assert _writer("3/7|3", 2**33 - 2) == Writer("3/7", 2**33 + 3)
