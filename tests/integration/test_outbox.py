"""`relay.outbox` on a real PostgreSQL: opening, leases, the check, reading."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import asyncpg
import pytest

from relay import migrate
from relay.core.ports.outbox import Check, Held, Page
from relay.errors import (
    DatabaseLost,
    DatabaseUnavailable,
    RowUnreadable,
    SchemaIncompatible,
    SchemaMissing,
)
from relay.message import PayloadType
from relay.servers import PostgresServer
from tests.conftest import eventually
from tests.integration.relay import ALL, Relay, deferred, insert, parked, request
from tests.roles import login_role

# ---------------------------------------------------------------- open


async def test_open_says_what_there_is(started: Callable[..., Relay]) -> None:
    info = await started().open(lambda: None, lambda why: None)
    assert info.payload_type is PayloadType.JSON
    assert info.is_direct
    assert info.has_doorbell


async def test_open_without_a_schema(database_url: str) -> None:
    relay = Relay(database_url, "a")
    with pytest.raises(SchemaMissing):
        await relay.open(lambda: None, lambda why: None)
    await migrate.run(database_url)
    await relay.open(lambda: None, lambda why: None)
    await relay.close()


async def test_open_without_a_server() -> None:
    relay = Relay("postgresql://postgres@127.0.0.1:1/none", "a")
    with pytest.raises(DatabaseUnavailable):
        await relay.open(lambda: None, lambda why: None)
    await relay.close()


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ("ALTER SEQUENCE outbox_seq_seq CACHE 20", "CACHE 20"),
        ("CREATE TABLE child () INHERITS (outbox)", "child tables"),
        (
            "INSERT INTO outbox (event_type) VALUES ('x'), ('y'); SELECT setval('outbox_seq_seq', 1)",
            "seq 2, but its sequence stands at 1",
        ),
        (
            "INSERT INTO outbox (event_type, aside, holds, parked_at) VALUES ('x', 'parked', true, now());"
            " INSERT INTO outbox (event_type, aside, due_at) VALUES ('y', 'scheduled', now());"
            " SELECT setval('outbox_seq_seq', 1)",
            "seq 2, but its sequence stands at 1",
        ),
        ("ALTER TABLE outbox DROP COLUMN failure_relay", "lacks the columns failure_relay"),
    ],
)
async def test_open_refuses_what_would_lose_rows(
    database: asyncpg.Connection, started: Callable[..., Relay], damage: str, said: str
) -> None:
    await database.execute(damage)
    with pytest.raises(SchemaIncompatible, match=said) as caught:
        await started().open(lambda: None, lambda why: None)
    assert caught.value.hint


# ---------------------------------------------------------------- leases


async def test_two_relays_claim_disjoint_shards(started: Callable[..., Relay]) -> None:
    a, b = await started("a").start(0), await started("b").start(0)
    first, second = await asyncio.gather(a.claim(40), b.claim(40))
    assert {claim.shard for claim in first}.isdisjoint(claim.shard for claim in second)
    assert len(first) + len(second) == ALL
    assert all(claim.epoch == 1 for claim in [*first, *second])
    assert await a.claim(64) == []


async def test_a_renewal_tells_what_there_is(database: asyncpg.Connection, started: Callable[..., Relay]) -> None:
    await insert(database, "k", "k")
    a, b = await started("a").start(10), await started("b").start(5)
    await b.renew(b.held(), available=True)
    found = await a.renew(a.held(floor=2), available=True)
    assert found.renewed == frozenset(a.epochs)
    assert found.mine == dict.fromkeys(a.epochs, (1, 2))
    assert (found.claimable, found.relays, found.is_paused) == (ALL - 15, 2, False)
    assert found.next_due_in_s is None
    assert abs(found.database_time - await database.fetchval("SELECT date_part('epoch', now())")) < 5.0
    # Without a floor the stored one stays; it never goes back.
    assert (await a.renew(a.held(), available=True)).mine == found.mine
    assert (await a.renew(a.held(floor=1), available=False)).mine == found.mine
    assert (await b.renew(b.held(), available=True)).relays == 1
    await database.execute("UPDATE outbox_meta SET paused_at = now()")
    assert (await a.renew(a.held(), available=True)).is_paused


async def test_a_renewal_skips_a_locked_shard(database: asyncpg.Connection, started: Callable[..., Relay]) -> None:
    """L2 skip: one locked shard row must not cost all leases."""
    relay = await started().start(3)
    async with database.transaction():
        await database.execute("SELECT FROM outbox_shard WHERE shard = 1 FOR UPDATE")
        found = await relay.renew(relay.held(), available=True)
    assert found.renewed == {0, 2}
    assert found.mine.keys() == {0, 1, 2}


async def test_a_settlement_does_not_stand_in_a_renewals_way(
    database: asyncpg.Connection, started: Callable[..., Relay]
) -> None:
    relay = await started().start()
    async with database.transaction():
        await database.execute("SELECT FROM outbox_shard FOR KEY SHARE")
        assert len((await relay.renew(relay.held(), available=True)).renewed) == ALL
    await database.execute("UPDATE outbox_shard SET leased_until = now() - interval '1 s', owner_pid = NULL")
    other = await started("c").start(0)
    async with database.transaction():
        await database.execute("SELECT FROM outbox_shard WHERE shard < 60 FOR KEY SHARE")
        assert [claim.shard for claim in await other.claim(ALL)] == [60, 61, 62, 63]


async def test_a_settlement_under_way_does_not_stand_in_a_renewals_way(
    database: asyncpg.Connection, started: Callable[..., Relay]
) -> None:
    """L2: with a stronger lock in its fence a busy relay would miss its own renewals."""
    relay = await started().start()
    await database.execute(
        "CREATE FUNCTION dawdle() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        " WHILE NOT pg_try_advisory_xact_lock(42) LOOP PERFORM pg_sleep(0.01); END LOOP; RETURN new; END $$;"
        " CREATE TRIGGER dawdle BEFORE UPDATE ON outbox FOR EACH ROW EXECUTE FUNCTION dawdle()"
    )
    await insert(database, *"abcd")
    rows = await relay.read()
    async with database.transaction():
        await database.execute("SELECT pg_advisory_xact_lock(42)")
        settling = asyncio.ensure_future(relay.settle(relay.settlement(sent=rows)))

        async def is_amid() -> bool:
            return bool(
                await database.fetchval(
                    "SELECT EXISTS (SELECT FROM pg_stat_activity"
                    " WHERE wait_event = 'PgSleep' AND datname = current_database())"
                )
            )

        await eventually(is_amid)
        assert len((await relay.renew(relay.held(), available=True)).renewed) == ALL
    assert (await settling).done == rows


async def test_a_session_of_another_role_is_not_taken_for_gone(
    database: asyncpg.Connection, database_url: str, postgres_server: PostgresServer
) -> None:
    """One login a pod: PostgreSQL hides from each when the sessions of the others began. Where one has ended shows."""
    name = database_url.rpartition("/")[2]
    async with login_role(database) as one, login_role(database) as other:
        a, b = (Relay(postgres_server.url(name, user=role), role) for role in (one, other))
        for role in (one, other):
            await migrate.run(database_url, role=role)
        try:
            await a.start()
            await b.start(0)
            assert len(a.epochs) == ALL
            assert (await b.renew({}, available=True)).claimable == 0
            assert await b.claim(ALL) == []
            await a.close()

            async def is_orphaned() -> bool:
                return (await b.renew({}, available=True)).claimable == ALL

            await eventually(is_orphaned)
            assert len(await b.claim(ALL)) == ALL
        finally:
            await a.close()
            await b.close()


async def test_only_ones_own_epoch_is_renewed(database: asyncpg.Connection, started: Callable[..., Relay]) -> None:
    relay = await started().start(2)
    await database.execute("UPDATE outbox_shard SET epoch = epoch + 1 WHERE shard = 0")
    await database.execute("UPDATE outbox_shard SET owner = 'other' WHERE shard = 1")
    found = await relay.renew(relay.held(), available=True)
    assert found.renewed == frozenset()
    assert found.mine == {0: (2, 0)}


async def test_takeover_when_the_owners_session_is_gone(
    database: asyncpg.Connection, started: Callable[..., Relay]
) -> None:
    a, b = await started("a").start(), await started("b").start(0)
    assert await b.claim(ALL) == []
    assert (await b.renew({}, available=True)).claimable == 0
    await a.close()

    async def is_orphaned() -> bool:
        return (await b.renew({}, available=True)).claimable == ALL

    await eventually(is_orphaned)
    claims = await b.claim(ALL)
    assert [claim.epoch for claim in claims] == [2] * ALL


async def test_a_pid_that_was_given_again_is_another_session(
    database: asyncpg.Connection, started: Callable[..., Relay]
) -> None:
    await started("a").start()
    await database.execute("UPDATE outbox_shard SET owner_backend_start = now() - interval '1 day'")
    assert len(await (await started("b").start(0)).claim(ALL)) == ALL


async def test_a_lease_that_ran_out_is_claimed(database: asyncpg.Connection, started: Callable[..., Relay]) -> None:
    await started("a").start()
    await database.execute("UPDATE outbox_shard SET leased_until = now() WHERE shard = 7")
    assert [claim.shard for claim in await (await started("b").start(0)).claim(ALL)] == [7]


async def test_release_and_leave(database: asyncpg.Connection, started: Callable[..., Relay]) -> None:
    await insert(database, *["k"] * 5)
    a, b = await started("a").start(), await started("b").start(0)
    await a.renew(a.held(floor=1), available=True)
    held = a.held(floor=3)
    held[5] = Held(99, 3)
    await a.release(held)
    claims = await b.claim(ALL)
    assert {claim.floor for claim in claims} == {3}
    assert sorted(claim.shard for claim in claims) == [shard for shard in range(ALL) if shard != 5]
    await a.leave()
    assert await database.fetchval("SELECT count(*) FROM outbox_relay") == 0


async def test_a_claim_clears_the_membership_of_the_long_gone(
    database: asyncpg.Connection, started: Callable[..., Relay]
) -> None:
    a, b = await started("a").start(0), await started("b").start(0)
    await a.renew({}, available=True)
    await b.renew({}, available=True)
    await database.execute("UPDATE outbox_relay SET heartbeat = now() - interval '60 s' WHERE instance = 'a-1'")
    await b.claim(1)
    assert await database.fetchval("SELECT string_agg(instance, ' ') FROM outbox_relay") == "b-1"


@pytest.mark.parametrize(
    "doubt",
    [
        "VACUUM FULL outbox",  # another filenode
        "TRUNCATE outbox RESTART IDENTITY",
        "DELETE FROM outbox; SELECT setval('outbox_seq_seq', 4)",  # below the floor
        "UPDATE outbox_shard SET last_seq = 1000",  # S has been higher
    ],
)
async def test_a_floor_counts_only_while_its_fingerprint_holds(
    database: asyncpg.Connection, started: Callable[..., Relay], doubt: str
) -> None:
    await insert(database, *["k"] * 9)
    a, b = await started("a").start(), await started("b").start(0)
    await a.renew(a.held(floor=7), available=True)
    await a.release(a.held(floor=7))
    claims = await b.claim(2)
    assert [(claim.floor, claim.floor_was_void) for claim in claims] == [(7, False)] * 2
    await b.release({claim.shard: Held(claim.epoch, None) for claim in claims})
    await b.close()
    await database.execute(doubt)
    c = await started("c").start(0)
    assert [(claim.floor, claim.floor_was_void) for claim in await c.claim(2)] == [(0, True)] * 2
    # Said once.
    await database.execute("UPDATE outbox_shard SET leased_until = now()")
    assert [(claim.floor, claim.floor_was_void) for claim in await c.claim(2)] == [(0, False)] * 2


async def test_a_table_that_is_rewritten_starts_everything_over(
    database: asyncpg.Connection, started: Callable[..., Relay]
) -> None:
    """A TRUNCATE … RESTART IDENTITY under a running relay, and the sequence past the cursors before anybody looks."""
    await insert(database, *["k"] * 9)
    relay = await started().start()
    await relay.renew(relay.held(floor=9), available=True)
    await database.execute("TRUNCATE outbox RESTART IDENTITY")
    await insert(database, *["k"] * 12)
    with pytest.raises(DatabaseLost, match="rewritten"):
        await relay.renew(relay.held(floor=9), available=True)
    assert len(relay.lost) == 1
    await relay.open(lambda: None, relay.lost.append)
    assert set((await relay.renew(relay.held(), available=True)).mine.values()) == {(1, 0)}


# ---------------------------------------------------------------- the check


async def test_s_of_a_sequence_that_was_never_called(
    database: asyncpg.Connection, started: Callable[..., Relay]
) -> None:
    relay = await started().start(0)
    assert (await relay.check()).last_seq == 0
    await insert(database, "k")
    assert (await relay.check()).last_seq == 1


async def test_the_check_sees_writers(
    database_url: str, database: asyncpg.Connection, started: Callable[..., Relay]
) -> None:
    relay = await started().start(0)
    other = await asyncpg.connect(database_url)
    try:
        async with database.transaction(), other.transaction():
            await database.execute("LOCK TABLE outbox IN ROW EXCLUSIVE MODE")  # an INSERT before its first row
            await other.execute("SAVEPOINT a; INSERT INTO outbox (event_type) VALUES ('x'); SAVEPOINT b")
            xid = int(await other.fetchval("SELECT pg_current_xact_id()::text"))
            await other.execute("INSERT INTO outbox (event_type) VALUES ('x')")
            found = await relay.check()
            assert sorted(writer.xid or 0 for writer in found.writers) == [0, xid]
            assert found.last_seq == 2
    finally:
        await other.close()
    assert (await relay.check()).writers == []


async def test_relays_are_no_writers(database: asyncpg.Connection, started: Callable[..., Relay]) -> None:
    """Their transactions carry a sign: a settlement under way would be watched as a writer otherwise."""
    await insert(database, "k")
    relay = await started().start()
    rows = await relay.read()
    seen: list[Check] = []

    await database.execute(
        "CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS"
        " $$BEGIN PERFORM pg_advisory_lock(4711); PERFORM pg_advisory_unlock(4711); RETURN new; END$$;"
        " CREATE TRIGGER slow BEFORE UPDATE ON outbox FOR EACH ROW EXECUTE FUNCTION slow();"
        " SELECT pg_advisory_lock(4711)"
    )
    settling = asyncio.ensure_future(relay.settle(relay.settlement(sent=rows)))

    async def is_waiting() -> bool:
        return bool(await database.fetchval("SELECT EXISTS (SELECT FROM pg_locks WHERE objid = 4711 AND NOT granted)"))

    await eventually(is_waiting)
    seen.append(await relay.check())
    await database.execute("SELECT pg_advisory_unlock(4711)")
    assert (await settling).done == rows
    assert seen[0].writers == []


# ---------------------------------------------------------------- reading


BODIES = {
    PayloadType.JSON: ('{ "a" :1,  "b": "ü" }', '{ "a" :1,  "b": "ü" }'.encode()),
    PayloadType.JSONB: ('{ "a" :1,  "b": "ü" }', '{"a": 1, "b": "ü"}'.encode()),
    PayloadType.TEXT: (" ü\n", " ü\n".encode()),
    PayloadType.BYTEA: (b"\0\xff\x80", b"\0\xff\x80"),
}


@pytest.mark.parametrize("payload_type", list(PayloadType))
async def test_bodies_come_as_stored(database_url: str, payload_type: PayloadType) -> None:
    await migrate.run(database_url, payload=payload_type)
    stored, expected = BODIES[payload_type]
    large = {PayloadType.BYTEA: b"\xfe" * 100_000}.get(payload_type, json.dumps("x" * 100_000))
    connection = await asyncpg.connect(database_url)
    relay = await Relay(database_url, "a").start()
    try:
        for payload in (stored, None, large):
            await connection.execute("INSERT INTO outbox (event_type, payload) VALUES ('x', $1)", payload)
        first, empty, left = await relay.read()
        assert (first.payload, first.size, first.is_loaded) == (expected, len(expected), True)
        assert (empty.payload, empty.size, empty.is_loaded) == (None, 0, True)
        size = len(large)
        assert (left.payload, left.size, left.is_loaded) == (None, size, False)
        assert await relay.load([left, first]) == []
        assert left.is_loaded
        assert left.payload == (large if isinstance(large, bytes) else large.encode())
        await relay.settle(relay.settlement(sent=[first]))
        assert await relay.load([left, first]) == [first]
        (again,) = [row for row in await relay.reload([left, first, empty]) if row.seq == left.seq]
        assert (again.id, again.ctid, again.is_loaded, again.size) == (left.id, left.ctid, False, size)
    finally:
        await relay.close()
        await connection.close()


async def test_a_row_as_it_is_read(database: asyncpg.Connection, started: Callable[..., Relay]) -> None:
    await database.execute(
        """INSERT INTO outbox (id, event_type) VALUES ('plain', 'e');
        INSERT INTO outbox (id, aggregate_type, aggregate_id, aggregate_version, event_type, schema_version, payload,
            content_type, content_encoding, headers, exchange, routing_key, correlation_id, causation_id, producer,
            traceparent, tracestate, priority, expires_at, mandatory, available_at, occurred_at, created_at)
        VALUES ('full', 't', 'a', 9007199254740993, 'e', 2, '1', 'c/t', 'gzip', '{"h": 1.50}', 'x', 'r', 'co', 'ca',
            'p', 'tp', 'ts', 0, 'infinity', false, '2001-02-03 04:05:06.789012Z', '-infinity',
            '2255-06-05 23:47:34.740991Z');
        INSERT INTO outbox (id, event_type, schema_version, headers, occurred_at, created_at, expires_at)
        VALUES ('nulls', 'e', NULL, NULL, NULL, NULL, '294276-12-31Z')"""
    )
    plain, full, nulls = await (await started().start()).read()
    assert (plain.id, plain.event_type, plain.rare, plain.headers, plain.key) == ("plain", "e", None, None, None)
    assert (plain.aggregate_type, plain.aggregate_id, plain.attempts, plain.aside) == (None, None, 0, None)
    assert (
        plain.occurred_at
        == plain.created_at
        == await database.fetchval("SELECT date_part('epoch', created_at) FROM outbox WHERE id = 'plain'")
    )
    assert full.rare == {
        "aggregate_version": 9007199254740993,
        "schema_version": 2,
        "content_type": "c/t",
        "content_encoding": "gzip",
        "exchange": "x",
        "routing_key": "r",
        "correlation_id": "co",
        "causation_id": "ca",
        "producer": "p",
        "traceparent": "tp",
        "tracestate": "ts",
        "priority": 0,
        "mandatory": False,
        "expires_at": math.inf,
        "available_at": 981173106.789012,
    }
    assert isinstance((full.rare or {})["expires_at"], float)
    assert (full.key, full.headers, full.payload) == (("t", "a"), '{"h": 1.50}', b"1")
    assert (full.occurred_at, full.created_at) == (-math.inf, 9007199254.740991)
    assert math.isnan(nulls.occurred_at) and math.isnan(nulls.created_at)
    assert nulls.headers is None
    assert nulls.rare == {"expires_at": 9224318016000.0 - 86400}


@pytest.mark.parametrize("payload_type", ["json", "jsonb"])
async def test_a_row_that_cannot_be_read_hides_no_others(
    database_url: str, database: asyncpg.Connection, started: Callable[..., Relay], payload_type: str
) -> None:
    """Its json value has no text, for PostgreSQL makes none above 1 GB, or it is damaged (here: a conversion that refuses it): every
    statement that met it was refused, and nothing behind it in its shard was ever read."""
    if payload_type != "json":
        await database.execute(f"ALTER TABLE outbox ALTER payload TYPE {payload_type}")
        await database.execute(f"UPDATE outbox_meta SET payload_type = '{payload_type}'")
    await insert(database, "a", payload='{"un": "readable"}', available_at=datetime(2020, 1, 1, tzinfo=UTC))
    await insert(database, *"bab")
    await insert(database, "c", payload='{"un": "readable"}')
    await insert(database, *"cd")
    await database.execute(
        """CREATE SCHEMA odd;
        CREATE FUNCTION odd.convert_to(given text, encoding name) RETURNS bytea LANGUAGE plpgsql AS $$ BEGIN
            IF given LIKE '%readable%' THEN RAISE 'string buffer exceeds maximum allowed length' USING ERRCODE = '54000'; END IF;
            RETURN pg_catalog.convert_to(given, encoding);
        END $$"""
    )
    await database.execute(
        f"ALTER DATABASE {await database.fetchval('SELECT current_database()')} SET search_path = odd, public, pg_catalog"
    )
    relay = await started().start()
    rows = await relay.read()
    assert [row.seq for row in rows] == list(range(1, 8))
    assert not any(row.is_loaded for row in rows)
    assert rows[0].rare is not None and rows[0].rare["available_at"] == 1577836800.0
    with pytest.raises(RowUnreadable, match="string buffer exceeds"):
        await relay.load([rows[0]])
    others = [row for row in rows if row.seq not in (1, 5)]
    assert await relay.load(others) == []
    assert all(row.payload == b"{}" for row in others)
    # The same where they are due, and behind one that is.
    await relay.settle(relay.settlement(setbacks=[parked(rows[0]), deferred(rows[5], delay_s=0.0)], followers=[]))
    await relay.settle(relay.settlement(setbacks=[deferred(rows[4], delay_s=0.0)], followers=[]))
    due = await relay.due(dict.fromkeys(range(ALL), 2**40), 100)
    assert sorted(row.seq for row in (*due.released, *due.blocked)) == [5, 6]


async def test_a_page_of_rows_with_large_headers_brings_little(
    database: asyncpg.Connection, started: Callable[..., Relay]
) -> None:
    """Headers and other texts were always there, whatever the bound: 3,000 rows of 100 KB, legal ones, were 286 MiB."""
    await database.execute(
        """INSERT INTO outbox (event_type, headers, tracestate, available_at)
        SELECT 'e', CASE WHEN n % 3 > 0 THEN jsonb_build_object('h', repeat('x', 100000)) END,
               CASE WHEN n % 3 < 2 THEN repeat('y', 100000) END, CASE WHEN n % 3 < 2 THEN to_timestamp(1000000000) END
          FROM generate_series(0, 299) n"""
    )
    relay = await started().start()
    rows = await relay.read(inline_bytes=8192)
    assert len(rows) == 300
    assert not any(row.is_loaded for row in rows)
    assert all(row.headers is None and row.size >= 100_000 for row in rows)
    dated = {"available_at": 1e9}
    assert [row.rare for row in rows[:3]] == [dated, dated, None], "what is asked for before a row is loaded"
    assert await relay.load(rows[:3]) == []
    for row, headers, texts in zip(rows, (None, 100_009, 100_009), (1, 2, 1), strict=False):
        assert row.is_loaded
        assert headers == (None if row.headers is None else len(row.headers))
        assert texts * 100_000 < row.size < texts * 100_000 + 100
    assert [row.rare for row in rows[:2]] == [dated | {"tracestate": "y" * 100_000}] * 2


async def test_texts_that_no_message_could_carry_are_not_read(
    database: asyncpg.Connection, started: Callable[..., Relay]
) -> None:
    """Megabytes of them, in a few rows, were in the driver's hands before any bound was looked at."""
    await database.execute(
        """INSERT INTO outbox (event_type, payload, headers, tracestate, exchange) VALUES
        ('e', '1', jsonb_build_object('h', repeat('x', 5242880)), NULL, 'mine'),
        ('e', '1', '{"h": 1}', repeat('y', 5242880), 'mine')"""
    )
    relay = await started().start()
    rows = await relay.read(inline_bytes=8192)
    for row, size in zip(rows, (5_242_889 + 19, 8 + 5_242_880 + 35), strict=True):
        assert (row.is_loaded, row.payload, row.headers) == (True, b"1", f"{size} bytes")
        assert row.size < 100
    # Its route is told where it is parked, if that is a short one.
    assert [row.rare for row in rows] == [{"exchange": "mine"}, {}]
    assert all(row.size < 100 for row in await relay.reload(rows))
    assert await relay.load(rows) == []
    assert [row.headers for row in rows] == ["5242908 bytes", "5242923 bytes"]


async def test_a_page_is_by_shard_and_seq_up_to_its_limit(
    database: asyncpg.Connection, started: Callable[..., Relay]
) -> None:
    relay = await started().start()
    await insert(database, *"abcdefgh" * 3)
    rows = (await relay.page(request(range(ALL)))).rows
    assert [(row.shard, row.seq) for row in rows] == sorted((row.shard, row.seq) for row in rows)
    assert sorted(row.seq for row in rows) == list(range(1, 25))
    shard = rows[0].shard
    mine = [row.seq for row in rows if row.shard == shard]

    async def seqs(**changes: Any) -> list[int]:
        return [row.seq for row in (await relay.page(request([shard], **changes))).rows]

    assert await seqs(limit=2) == mine[:2]
    assert await seqs(cursor=mine[0]) == mine[1:]
    assert await seqs(last_seq=mine[1]) == mine[:2]
    assert await seqs(last_seq=mine[1], beyond=True) == mine
    assert await relay.page(request([])) == Page((), [])


async def test_a_page_tells_in_its_own_snapshot_who_ended(
    database: asyncpg.Connection, started: Callable[..., Relay]
) -> None:
    relay = await started().start()
    await insert(database, "k", "k")
    transaction = database.transaction()
    await transaction.start()
    await insert(database, "k")
    (writer,) = (await relay.check()).writers
    assert writer.xid is not None
    listed: dict[str, Any] = {
        "numbers": [8, 9],
        "lows": [1, 0],
        "xids": [writer.xid, writer.xid + 1000],
        "gone": [False, False],
        "asked": [True, True],
        "cursor": 5,
    }
    page = await relay.page(request(relay.epochs, **listed))
    assert (page.ended, page.rows) == ((), [])
    await transaction.commit()
    page = await relay.page(request(relay.epochs, **listed))
    assert (page.ended, [row.seq for row in page.rows]) == ([8], [2, 3])
    # One without an xid counts as ended when it is asked, one that is gone always.
    listed |= {"xids": [None, None], "asked": [True, False]}
    assert (await relay.page(request(relay.epochs, **listed))).ended == [8]
    listed |= {"gone": [False, True], "asked": [False, False]}
    page = await relay.page(request(relay.epochs, **listed))
    assert (page.ended, len(page.rows)) == ([9], 3)


async def test_rows_in_the_faults_table_are_not_read(
    database: asyncpg.Connection, started: Callable[..., Relay]
) -> None:
    await insert(database, "k", "k")
    await database.execute(
        "INSERT INTO outbox_fault (seq, id, failure_class) SELECT seq, id, 'unmarkable' FROM outbox WHERE seq = 1"
    )
    relay = await started().start()
    rows = await relay.read()
    assert [row.seq for row in rows] == [2]
    await database.execute("TRUNCATE outbox_fault")
    await relay.renew(relay.held(), available=True)
    assert len(await relay.read()) == 2
    await database.execute(
        "INSERT INTO outbox_fault (seq, id, failure_class) SELECT seq, id, 'unmarkable' FROM outbox WHERE seq = 2"
    )
    await relay.renew(relay.held(), available=True)
    assert await relay.reload(rows) == []
