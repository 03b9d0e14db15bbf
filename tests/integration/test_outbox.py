"""`relay.outbox` on a real PostgreSQL: every call of the port, and the histories of docs/protocol.md that its SQL decides."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

import asyncpg
import pytest

from relay import migrate
from relay.core.holding import Walk
from relay.core.ports import (
    Armed,
    Check,
    Claim,
    Discarded,
    Held,
    Page,
    PageRequest,
    Searched,
    Setback,
    Settlement,
    Writer,
)
from relay.errors import (
    DatabaseLost,
    DatabaseRefused,
    DatabaseUnavailable,
    SchemaIncompatible,
    SchemaMissing,
)
from relay.message import Aside, Key, PayloadType, Row
from relay.outbox import PostgresOutbox
from relay.outbox_sql import texts
from relay.servers import PostgresServer
from relay.sessions import Group
from relay.urls import DatabaseTarget
from relay.values import table_name
from tests.conftest import eventually

ALL = 64


class Relay(PostgresOutbox):
    """A relay's outbox with what a test needs: who rang, what was lost, its claims."""

    def __init__(self, url: str, instance: str, **changes: Any) -> None:
        settings: dict[str, Any] = {
            "instance": f"{instance}-1",
            "name": instance,
            "version": "0.0",
            "lease_s": 5.0,
            "marks_sent": True,
            "holds_when_parked": True,
            "is_ordered": True,
            "settle_commit": True,
            "poll_interval_s": 0.5,
        }
        table = changes.pop("table", "outbox")
        super().__init__(lambda: DatabaseTarget(url, "test"), table_name(table), **(settings | changes))
        self.rings = 0
        self.lost: list[str] = []
        self.epochs: dict[int, int] = {}

    async def start(self, shards: int = ALL) -> Relay:
        await self.open(self._on_ring, self.lost.append)
        if shards:
            self.take(await self.claim(shards))
        return self

    def _on_ring(self) -> None:
        self.rings += 1

    def take(self, claims: Iterable[Claim]) -> None:
        self.epochs.update({claim.shard: claim.epoch for claim in claims})

    async def claims(self) -> Sequence[Claim]:
        await self.start(0)
        return await self.claim(ALL)

    async def stuck(self) -> list[tuple[int, Key]]:
        """Keys whose lowest holding row is held."""
        page = await self.held_keys(range(ALL), None, 1000)
        assert page.reached is None
        return [(held.shard, held.key) for held in page.keys if held.is_lowest_held]

    def held(self, floor: int | None = None) -> dict[int, Held]:
        return {shard: Held(epoch, floor) for shard, epoch in self.epochs.items()}

    async def read(self, **changes: Any) -> list[Row]:
        """All rows of its shards, by seq."""
        return sorted((await self.page(request(self.epochs, **changes))).rows, key=lambda row: row.seq)

    def settlement(self, **decisions: Any) -> Settlement:
        return Settlement(fences=dict(self.epochs), **decisions)


def request(shards: Iterable[int], cursor: int = 0, **changes: Any) -> PageRequest:
    wanted = list(shards)
    values: dict[str, Any] = {
        "numbers": [],
        "lows": [],
        "xids": [],
        "gone": [],
        "asked": [],
        "shards": wanted,
        "cursors": [cursor] * len(wanted),
        "last_seq": 2**40,
        "beyond": False,
        "limit": 1000,
        "inline_bytes": 16384,
    }
    return PageRequest(**(values | changes))


def deferred(row: Row, **changes: Any) -> Setback:
    values: dict[str, Any] = {
        "aside": Aside.DEFERRED,
        "delay_s": 60.0,
        "holds": True,
        "attempts": 1,
        "reason": "unroutable",
        "error": "NO_ROUTE",
        "exchange": "events",
        "routing_key": "a.b",
    }
    return Setback(row=row, **(values | changes))


def parked(row: Row, **changes: Any) -> Setback:
    return deferred(row, **({"aside": Aside.PARKED, "delay_s": 0.0} | changes))


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[asyncpg.Connection]:
    """A superuser's session in a database with an outbox."""
    await migrate.run(database_url)
    connection = await asyncpg.connect(database_url)
    yield connection
    await connection.close(timeout=5)


@pytest.fixture
async def started(database_url: str, database: asyncpg.Connection) -> AsyncIterator[Callable[..., Relay]]:
    """Makes relays; closes them."""
    relays: list[Relay] = []

    def make(instance: str = "a", **changes: Any) -> Relay:
        relays.append(Relay(database_url, instance, **changes))
        return relays[-1]

    yield make
    for relay in relays:
        await relay.close()


async def insert(connection: asyncpg.Connection, *keys: str | None, **columns: Any) -> None:
    """One row a key, in one transaction each."""
    columns = {"event_type": "order.created", "payload": "{}"} | columns
    names = ", ".join(["aggregate_type", "aggregate_id", *columns])
    marks = ", ".join(f"${number}" for number in range(1, len(columns) + 3))
    for key in keys:
        await connection.execute(
            f"INSERT INTO outbox ({names}) VALUES ({marks})", "order" if key else None, key, *columns.values()
        )


async def states(connection: asyncpg.Connection) -> list[str]:
    """Each row's state by seq: its `aside` (with + where it holds), sent, or pending."""
    return [
        record[0]
        for record in await connection.fetch(
            "SELECT CASE WHEN sent_at IS NOT NULL THEN 'sent'"
            " ELSE coalesce(aside || CASE WHEN holds THEN '+' ELSE '' END, 'pending') END FROM outbox ORDER BY seq"
        )
    ]


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
    assert (nulls.occurred_at, nulls.created_at, nulls.headers) == (0.0, 0.0, None)
    assert nulls.rare == {"expires_at": 9224318016000.0 - 86400}


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


# ---------------------------------------------------------------- settling what was sent


@pytest.mark.parametrize("marks_sent", [True, False])
async def test_sent_rows(database: asyncpg.Connection, started: Callable[..., Relay], marks_sent: bool) -> None:
    relay = await started(marks_sent=marks_sent).start()
    await insert(database, *"abcd")
    rows = await relay.read()
    rows[1].ctid = None  # its session was lost
    settled = await relay.settle(relay.settlement(sent=rows[:2]))
    assert (settled.done, settled.locked, settled.lost) == ([rows[0], rows[1]], [], set())
    assert await states(database) == (["sent", "sent"] if marks_sent else []) + ["pending", "pending"]
    # An unknown COMMIT that did happen: settled again, nothing is left to do (S3).
    assert (await relay.settle(relay.settlement(sent=rows[:2]))).done == rows[:2]
    # The addresses are all wrong by now.
    await database.execute("VACUUM FULL outbox")
    assert (await relay.settle(relay.settlement(sent=rows[2:]))).done == rows[2:]
    assert await states(database) == (["sent"] * 4 if marks_sent else [])
    assert await relay.read() == []


async def test_a_seq_alone_is_no_identity(database: asyncpg.Connection, started: Callable[..., Relay]) -> None:
    """40 rows read, then lost in a crash; a new row has the seq, even the address, of one of them."""
    relay = await started().start()
    await insert(database, "k")
    (row,) = await relay.read()
    for ctid in (row.ctid, None):
        stranger = Row(row.shard, row.seq, "another", "e", ctid=ctid, aggregate_type="order", aggregate_id="k")
        assert (await relay.settle(relay.settlement(sent=[stranger]))).done == [stranger]
        assert (await relay.settle(relay.settlement(setbacks=[deferred(stranger)]))).changed == [stranger]
    assert await states(database) == ["pending"]


@pytest.mark.parametrize("marks_sent", [True, False])
async def test_a_row_that_an_application_keeps_locked_stalls_no_batch(
    database: asyncpg.Connection, started: Callable[..., Relay], marks_sent: bool
) -> None:
    relay = await started(marks_sent=marks_sent).start()
    await insert(database, *"abc")
    rows = await relay.read()
    async with database.transaction():
        await database.execute("SELECT FROM outbox WHERE seq = 2 FOR UPDATE")
        settled = await relay.settle(relay.settlement(sent=rows))
    assert (settled.done, settled.locked) == ([rows[0], rows[2]], [rows[1]])
    assert (await relay.settle(relay.settlement(sent=settled.locked))).done == [rows[1]]


async def test_the_fence(database: asyncpg.Connection, started: Callable[..., Relay]) -> None:
    """S1: of a shard under another epoch, or of another owner, nothing is settled."""
    relay = await started().start()
    await insert(database, *"abcdefghijkl")
    rows = await relay.read()
    lost = {rows[0].shard, rows[1].shard}
    await database.execute("UPDATE outbox_shard SET epoch = epoch + 1 WHERE shard = $1", rows[0].shard)
    # A rewound database gives two instances the same epoch.
    await database.execute("UPDATE outbox_shard SET owner = 'other' WHERE shard = $1", rows[1].shard)
    settled = await relay.settle(
        relay.settlement(sent=rows[3:], setbacks=[deferred(rows[0])], followers=[rows[1]], tested=[rows[2]])
    )
    assert settled.lost == lost
    kept = [row for row in rows[2:] if row.shard not in lost]
    assert sorted(row.seq for row in [*settled.done, *settled.unblocked]) == [row.seq for row in kept]
    for state, row in zip(await states(database), rows, strict=True):
        assert state == ("pending" if row.shard in lost or row is rows[2] else "sent")


async def test_a_refused_settlement_changes_nothing_and_keeps_the_sessions(
    database: asyncpg.Connection, started: Callable[..., Relay]
) -> None:
    relay = await started().start()
    await insert(database, *"ab")
    rows = await relay.read()
    await database.execute(
        "CREATE FUNCTION no() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN RAISE EXCEPTION 'not this one' USING ERRCODE = '55P03'; END$$;"
        " CREATE TRIGGER no BEFORE UPDATE ON outbox FOR EACH ROW WHEN (old.seq = 2) EXECUTE FUNCTION no()"
    )
    with pytest.raises(DatabaseRefused, match=r"not this one \(55P03\)"):
        await relay.settle(relay.settlement(sent=rows))
    assert await states(database) == ["pending", "pending"]
    assert (await relay.settle(relay.settlement(sent=rows[:1]))).done == rows[:1]
    await database.execute(
        "DROP TRIGGER no ON outbox; CREATE CONSTRAINT TRIGGER no AFTER UPDATE ON outbox"
        " DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION no()"
    )
    with pytest.raises(DatabaseRefused, match="not this one"):  # at COMMIT
        await relay.settle(relay.settlement(sent=rows[1:]))
    assert await states(database) == ["sent", "pending"]
    assert relay.lost == []


async def test_an_operator_and_a_settlement_exclude_each_other(
    database: asyncpg.Connection, started: Callable[..., Relay]
) -> None:
    relay = await started(lease_s=1.0).start()
    await insert(database, "k")
    rows = await relay.read()
    async with database.transaction():
        await database.execute("SELECT FROM outbox_shard WHERE shard = $1 FOR UPDATE", rows[0].shard)
        with pytest.raises(DatabaseRefused, match="lock timeout"):
            await relay.settle(relay.settlement(sent=rows))
    assert (await relay.settle(relay.settlement(sent=rows))).done == rows


# ---------------------------------------------------------------- setting aside


async def test_a_setback_takes_its_followers_along(database: asyncpg.Connection, started: Callable[..., Relay]) -> None:
    """H1, and what is noted of a failure."""
    relay = await started().start()
    await insert(database, *"kkko")
    one, two, three, other = await relay.read()
    settled = await relay.settle(
        relay.settlement(
            setbacks=[deferred(one, attempts=3, error="bad\0 \udc80 bytes")], followers=[two, three], sent=[other]
        )
    )
    assert sorted(settled.done, key=lambda row: row.seq) == [one, two, three, other]
    assert (settled.promoted, settled.changed) == (set(), [])
    assert await states(database) == ["deferred+", "held+", "held+", "sent"]
    found = await database.fetchrow(
        "SELECT attempts, failure_class, failure_error, failure_exchange, failure_routing_key, failure_relay,"
        " failure_relay_version, first_failed_at = last_failed_at AS is_first, parked_at,"
        " date_part('epoch', due_at - now()) AS due FROM outbox WHERE seq = 1"
    )
    assert 50 < found["due"] <= 60
    assert tuple(found)[:-1] == (
        3, "unroutable", "bad\ufffd ? bytes", "events", "a.b", "a", "0.0", True, None,
    )  # fmt: skip
    assert await relay.read() == []


async def test_a_miss_when_setting_aside_is_a_change(
    database: asyncpg.Connection, started: Callable[..., Relay]
) -> None:
    """S2: by address only. A park committed, its answer lost, an operator discarded: not undone."""
    relay = await started().start()
    await insert(database, *"abcd")
    rows = await relay.read()
    await database.execute("UPDATE outbox SET event_type = 'changed'")
    settled = await relay.settle(
        relay.settlement(setbacks=[parked(rows[0])], followers=[rows[1]], tested=[rows[2]], scheduled=[rows[3]])
    )
    assert sorted(settled.changed, key=lambda row: row.seq) == rows
    assert await states(database) == ["pending"] * 4
    again = await relay.reload(rows)
    assert [row.event_type for row in again] == ["changed"] * 4
    for row in rows:
        row.ctid = None
    assert (await relay.settle(relay.settlement(setbacks=[deferred(rows[0])]))).changed == rows[:1]


async def test_a_key_is_never_held_by_nothing(database: asyncpg.Connection, started: Callable[..., Relay]) -> None:
    """H3, H4: of a key only the lowest goes, and each that is sent makes the next one due."""
    relay = await started().start()
    await insert(database, *"kkk")
    one, two, three = await relay.read()
    await relay.settle(relay.settlement(setbacks=[deferred(one, delay_s=0.0)], followers=[two, three]))
    cursors = {one.shard: 10}
    for left in (["deferred+", "held+"], ["deferred+"], []):
        due = await relay.due(cursors, 10)
        assert (len(due.released), due.blocked) == (1, [])
        (row,) = due.released
        assert row.aside is Aside.DEFERRED
        settled = await relay.settle(relay.settlement(sent=[row]))
        assert settled.done == [row]
        assert settled.promoted == ({row.shard} if left else set())
        assert await states(database) == ["sent"] * (3 - len(left)) + left
    assert (await relay.due(cursors, 10)).released == []


async def test_keys_are_compared_by_value(database: asyncpg.Connection, started: Callable[..., Relay]) -> None:
    relay = await started().start()
    for kind, key in (("a", "k"), (None, "k"), ("", "k"), ("b", "k")):
        await database.execute(
            "INSERT INTO outbox (aggregate_type, aggregate_id, event_type) VALUES ($1, $2, 'e')", kind, key
        )
    of_a, of_null, of_empty, of_b = await relay.read()
    assert of_null.key == of_empty.key
    settled = await relay.settle(
        relay.settlement(setbacks=[deferred(of_a), deferred(of_null)], tested=[of_empty, of_b])
    )
    assert settled.unblocked == [of_b]
    assert await states(database) == ["deferred+", "deferred+", "held+", "pending"]
    found = await relay.held_keys([of_a.shard, of_null.shard], None, 10)
    assert {held.key for held in found.keys} == {("a", "k"), ("", "k")}


async def test_a_tested_row_without_a_blocker_comes_back(
    database: asyncpg.Connection, started: Callable[..., Relay]
) -> None:
    """H2. Blockers are lower and hold; what is scheduled or parked under `continue` does not."""
    relay = await started().start()
    await insert(database, *"kkkkkk")
    rows = await relay.read()
    await relay.settle(
        relay.settlement(
            setbacks=[parked(rows[0], holds=False), deferred(rows[3])],
            scheduled=[rows[1]],
        )
    )
    settled = await relay.settle(relay.settlement(tested=[rows[2], rows[4], rows[5]]))
    assert settled.unblocked == [rows[2]]
    assert settled.done == [rows[4], rows[5]]
    assert await states(database) == ["parked", "scheduled", "pending", "deferred+", "held+", "held+"]


async def test_a_tested_row_is_freed_by_what_the_same_settlement_sends(
    database: asyncpg.Connection, started: Callable[..., Relay]
) -> None:
    relay = await started().start()
    await insert(database, *"kk")
    one, two = await relay.read()
    await relay.settle(relay.settlement(setbacks=[deferred(one, delay_s=0.0)]))
    (one,) = (await relay.due({one.shard: 9}, 9)).released
    settled = await relay.settle(relay.settlement(sent=[one], tested=[two]))
    assert (settled.done, settled.unblocked) == ([one], [two])


async def test_due_rows(database: asyncpg.Connection, started: Callable[..., Relay]) -> None:
    """H4, H6: at or below the cursor; a scheduled row with a holding row of its key below is blocked."""
    relay = await started().start()
    await insert(database, "k", "k", "s")
    one, two, free = await relay.read()
    await relay.settle(relay.settlement(scheduled=[two, free], setbacks=[deferred(one, delay_s=60.0)]))
    every = dict.fromkeys(relay.epochs, 10)
    due = await relay.due(every, 10)
    assert [row.seq for row in due.released] == [free.seq]
    assert [row.seq for row in due.blocked] == [two.seq]
    assert due.released[0].aside is Aside.SCHEDULED
    assert due.next_due_in_s is not None
    assert 50 < due.next_due_in_s <= 60
    renewal = await relay.renew(relay.held(), available=True)
    assert renewal.next_due_in_s is not None
    assert renewal.next_due_in_s <= 0
    settled = await relay.settle(relay.settlement(tested=due.blocked))
    assert settled.done == due.blocked
    assert await states(database) == ["deferred+", "held+", "scheduled"]
    # Not above the cursor, and no more than asked for.
    assert (await relay.due(dict.fromkeys(relay.epochs, free.seq - 1), 10)).released == []
    assert (await relay.due(every, 0)).released == []
    assert (await relay.settle(relay.settlement(sent=due.released))).done == due.released
    assert await states(database) == ["deferred+", "held+", "sent"]


async def test_a_scheduled_row_waits_for_its_time(database: asyncpg.Connection, started: Callable[..., Relay]) -> None:
    relay = await started().start()
    await database.execute(
        "INSERT INTO outbox (event_type, available_at) VALUES ('e', now() + interval '1 hour'), ('e', 'infinity')"
    )
    rows = await relay.read()
    assert (await relay.settle(relay.settlement(scheduled=rows))).done == rows
    due = await relay.due(dict.fromkeys(relay.epochs, 9), 9)
    assert (due.released, due.blocked) == ([], [])
    assert due.next_due_in_s is not None
    assert 3500 < due.next_due_in_s <= 3600
    await database.execute("DELETE FROM outbox WHERE seq = 1")
    assert (await relay.due(dict.fromkeys(relay.epochs, 9), 9)).next_due_in_s is None
    assert (await relay.renew(relay.held(), available=True)).next_due_in_s is None


async def test_redriven_and_discarded(database: asyncpg.Connection, started: Callable[..., Relay]) -> None:
    """O1 as an operator's transaction does it; the relay does the rest."""
    relay = await started().start()
    await insert(database, *"kkk")
    one, two, three = await relay.read()
    await relay.settle(relay.settlement(setbacks=[parked(one)], followers=[two, three]))
    assert await states(database) == ["parked+", "held+", "held+"]
    await database.execute("UPDATE outbox SET aside = 'deferred', due_at = now() WHERE aside = 'parked'")
    (again,) = (await relay.due({one.shard: 9}, 9)).released
    assert again.seq == one.seq
    await relay.settle(relay.settlement(setbacks=[parked(again, attempts=2)]))
    schema = await migrate.read_schema(database)
    async with database.transaction():
        await database.execute("DELETE FROM outbox WHERE aside = 'parked'")
        await database.execute(texts(schema, "")["promote"], ["order"], ["k"])
    assert await states(database) == ["deferred+", "held+"]
    (again,) = (await relay.due({one.shard: 9}, 9)).released
    assert again.seq == two.seq


async def test_without_order_nothing_is_blocked(database: asyncpg.Connection, started: Callable[..., Relay]) -> None:
    relay = await started(is_ordered=False).start()
    await insert(database, *"kk")
    rows = await relay.read()
    await relay.settle(relay.settlement(setbacks=[deferred(row, delay_s=0.0, holds=False) for row in rows]))
    due = await relay.due({rows[0].shard: 9}, 9)
    assert ([row.seq for row in due.released], due.blocked) == ([1, 2], [])


@pytest.mark.parametrize(("before", "after"), [(True, False), (False, True)])
async def test_a_new_owner_has_its_own_policy_of_parked_rows(
    database: asyncpg.Connection, started: Callable[..., Relay], before: bool, after: bool
) -> None:
    """Parked rows store whether they hold; who claims rewrites that, but for expired ones, then H3."""
    a = await started("a", holds_when_parked=before).start()
    await insert(database, "k", "k", "e", None)
    one, two, expired, keyless = await a.read()
    await a.settle(
        a.settlement(
            setbacks=[
                parked(one, holds=before),
                parked(expired, reason="expired", holds=False),
                parked(keyless, holds=False),
            ],
            followers=[two],
        )
    )
    await a.release(a.held())
    b = await started("b", holds_when_parked=after).start(0)
    claims = await b.claim(ALL)
    assert all(claim.has_other_policy for claim in claims)
    b.take(claims)
    assert await b.apply_policy(b.epochs, 1) is False, "there may be more"
    assert await b.apply_policy(b.epochs, 1) is True
    stuck = await b.stuck()
    assert stuck == ([(two.shard, two.key)] if before else [])
    settled = await b.settle(b.settlement(promotions=list(stuck)))
    assert settled.promoted == {shard for shard, _ in stuck}
    # Under `continue` the follower is first of its key; one that the newly holding row blocks stays what it is.
    assert await states(database) == (
        ["parked", "deferred+", "parked", "parked"] if before else ["parked+", "deferred+", "parked", "parked"]
    )
    await b.release(b.held())
    assert not any(claim.has_other_policy for claim in await started("c", holds_when_parked=after).claims())


async def test_a_policy_that_was_not_applied_to_the_end_is_begun_again(
    database: asyncpg.Connection, started: Callable[..., Relay]
) -> None:
    """Some rows are changed, then the owner dies: neither the old policy nor the new one is what the shard has."""
    a = await started("a", holds_when_parked=True).start()
    await insert(database, *"kkk")
    await a.settle(a.settlement(setbacks=[parked(row) for row in await a.read()]))
    await a.release(a.held())
    b = await started("b", holds_when_parked=False).start()
    assert await b.apply_policy(b.epochs, 2) is False
    await b.release(b.held())
    c = await started("c", holds_when_parked=True).start(0)
    claims = await c.claim(ALL)
    assert all(claim.has_other_policy for claim in claims)
    c.take(claims)
    assert await c.apply_policy(c.epochs, 10) is True
    assert await states(database) == ["parked+"] * 3


async def test_a_shard_that_was_lost_keeps_its_policy(
    database: asyncpg.Connection, started: Callable[..., Relay]
) -> None:
    a = await started("a", holds_when_parked=False).start()
    await insert(database, "k")
    await a.settle(a.settlement(setbacks=[parked(row, holds=False) for row in await a.read()]))
    await a.apply_policy(a.epochs, 10)
    await database.execute("UPDATE outbox_shard SET epoch = epoch + 1")
    b = await started("b", holds_when_parked=True).start(0)
    b.epochs = a.epochs
    assert await b.apply_policy(b.epochs, 10) is True
    assert await states(database) == ["parked"]
    assert await database.fetchval("SELECT count(*) FROM outbox_shard WHERE parked_hold") == 0


async def test_followers_come_without_a_gap(database: asyncpg.Connection, started: Callable[..., Relay]) -> None:
    """Up to the first holding row that is not held, or lies above the cursor; a row of the fault table is none."""
    relay = await started().start()
    await insert(database, *"kkkkkkk", *"jjj")
    rows = await relay.read()
    await relay.settle(
        relay.settlement(setbacks=[deferred(rows[0], delay_s=0.0), parked(rows[5]), deferred(rows[7], delay_s=0.0)])
    )
    held = [rows[n] for n in (1, 2, 3, 4, 6, 8, 9)]
    await relay.settle(relay.settlement(tested=await relay.reload(held)))
    assert await states(database) == ["deferred+", *["held+"] * 4, "parked+", "held+", "deferred+", "held+", "held+"]
    await database.execute("INSERT INTO outbox_fault (seq, id, failure_class) VALUES (3, $1, 'x')", rows[2].id)
    cursors = {rows[0].shard: 10, rows[7].shard: 10}
    heads = (await relay.due(cursors, 10)).released
    assert sorted(row.seq for row in heads) == [1, 8]
    found = await relay.followers(heads, cursors, 100)
    assert [(row.seq, row.aside, row.payload) for row in found] == [
        (seq, Aside.HELD, b"{}") for seq in (2, 4, 5, 9, 10)
    ]
    assert [row.seq for row in await relay.followers(heads, cursors, 1)] == [2, 9]
    low = cursors | {rows[0].shard: 4, rows[7].shard: 8}
    assert [row.seq for row in await relay.followers(heads, low, 100)] == [2, 4]


@pytest.mark.parametrize("marks_sent", [True, False])
async def test_a_sent_row_that_was_aside_frees_its_key_whatever_memory_says(
    database: asyncpg.Connection, started: Callable[..., Relay], marks_sent: bool
) -> None:
    """H3: it was read as an ordinary row, and deferred since by a COMMIT whose answer was lost; by address and by id."""
    relay = await started(marks_sent=marks_sent).start()
    await insert(database, *"aab")
    one, two, other = await relay.read()
    await relay.settle(relay.settlement(setbacks=[deferred(one)], followers=[two]))
    ctid = await database.fetchval("SELECT ctid FROM outbox WHERE seq = 1")
    assert one.aside is None
    one.ctid = ctid if marks_sent else None
    settled = await relay.settle(relay.settlement(sent=[one, other]))
    assert settled.promoted == {two.shard}
    assert settled.moved == {2: await database.fetchval("SELECT ctid FROM outbox WHERE seq = 2")}
    assert (await states(database))[-1 if not marks_sent else 1] == "deferred+"


@pytest.mark.parametrize("page_rows", [1, 7, 100, 1000])
async def test_a_walk_finds_every_held_key(
    database: asyncpg.Connection, started: Callable[..., Relay], page_rows: int
) -> None:
    """Whatever the size of its pages; a key that holds nothing, one of another shard and one without order are none."""
    relay = await started().start()
    await insert(database, *(f"k{number}" for number in range(40)))
    await insert(database, *(f"k{number}" for number in range(40)))
    await insert(database, *["hot"] * 12, "expired", None)
    rows = {row.seq: row for row in await relay.read()}
    setbacks = [deferred(rows[seq]) for seq in range(1, 41)]
    setbacks += [parked(rows[81]), parked(rows[93], holds=False), parked(rows[94], holds=False)]
    followers = [rows[seq] for seq in (*range(41, 81), *range(82, 93))]
    await relay.settle(relay.settlement(setbacks=setbacks, followers=followers))
    await database.execute("DELETE FROM outbox WHERE seq IN (5, 7)")
    mine = sorted({row.shard for row in rows.values() if row.shard != rows[2].shard})
    walk = Walk(mine, 0)
    stuck: list[tuple[int, Key]] = []
    pages = 0
    while not walk.is_over:
        stuck += walk.take(await relay.held_keys(mine, walk.after, page_rows))
        pages += 1
    assert pages >= 90 // page_rows
    wanted: dict[int, dict[Key, int]] = {shard: {} for shard in mine}
    for seq in (*range(41, 81), 92):
        row = rows[seq]
        if row.shard in wanted and row.key is not None:
            wanted[row.shard][row.key] = seq
    assert walk.found == wanted
    assert sorted(stuck) == sorted((rows[s].shard, rows[s].key) for s in (5, 7) if rows[s].shard in mine)


async def test_a_page_of_the_walk_costs_the_same_whatever_there_is_aside(
    database: asyncpg.Connection, started: Callable[..., Relay]
) -> None:
    """Taking up a shard scanned all rows aside: 0.4 to 0.7 s with 100,000 of them. By the rows that the plan visits."""
    relay = await started().start()
    await database.execute(
        "INSERT INTO outbox (aggregate_id, event_type, aside, holds, parked_at)"
        " SELECT 'k' || n % 700, 'e', CASE WHEN n <= 700 THEN 'parked' ELSE 'held' END, true, now()"
        " FROM generate_series(1, 6000) n"
    )
    session = relay._sessions.connection(Group.READER)
    statement = texts(await migrate.read_schema(database), "")["held_keys"]
    await session.execute(f"PREPARE explained AS {statement}")
    (record,) = await session.fetch(
        "EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON)"
        f" EXECUTE explained('{{{','.join(map(str, range(ALL)))}}}', {-(2**63)}, {-(2**63)}, 500)"
    )
    plan = json.loads(record[0])[0]["Plan"]
    visited = [
        node["Actual Rows"] * node["Actual Loops"]
        for node in _nodes(plan)
        if "outbox_aside_key" in str(node.get("Index Name"))
    ]
    assert visited == [500]
    assert plan["Shared Hit Blocks"] + plan["Shared Read Blocks"] < 1500


async def test_a_page_costs_the_same_whatever_there_is_aside(
    database: asyncpg.Connection, started: Callable[..., Relay]
) -> None:
    """I6: parked and held rows are in no index that a page reads. By the blocks that it touches."""
    relay = await started().start()
    session = relay._sessions.connection(Group.READER)
    statement = texts(await migrate.read_schema(database), "")["page"]
    await database.execute(
        "ALTER TABLE outbox SET (autovacuum_enabled = false);"
        "INSERT INTO outbox (aggregate_id, event_type) SELECT 'p' || n, 'e' FROM generate_series(1, 300) n"
    )
    await session.execute(f"PREPARE explained AS {statement}")
    shards = f"'{{{','.join(map(str, range(ALL)))}}}', '{{{','.join(['0'] * ALL)}}}'"
    arguments = f"'{{}}', '{{}}', '{{}}', '{{}}', '{{}}', {shards}, {2**40}, 4, false, 16384"

    async def blocks() -> int:
        (record,) = await session.fetch(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) EXECUTE explained({arguments})")
        plan = json.loads(record[0])[0]["Plan"]
        assert any(node.get("Index Name") == "outbox_read" for node in _nodes(plan))
        return int(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"])

    await blocks()  # the first one also reads the catalogs
    empty = await blocks()
    await database.execute(
        "INSERT INTO outbox (aggregate_id, event_type, aside, holds, parked_at)"
        " SELECT 'k' || n % 500, 'e', CASE WHEN n <= 500 THEN 'parked' ELSE 'held' END, true, now()"
        " FROM generate_series(1, 10000) n"
    )
    assert await blocks() <= empty * 1.1


def _nodes(plan: dict[str, Any]) -> Iterable[dict[str, Any]]:
    yield plan
    for child in plan.get("Plans", ()):
        yield from _nodes(child)


# ---------------------------------------------------------------- backlog and purge


async def test_the_backlog(database: asyncpg.Connection, started: Callable[..., Relay]) -> None:
    relay = await started().start()
    empty = await relay.backlog()
    assert (empty.backlog_rows, empty.oldest_pending_age_s, empty.newest_seq) == (0, None, 0)
    await database.execute(
        "INSERT INTO outbox (aggregate_id, event_type, created_at, available_at)"
        " SELECT 'k' || n, 'e', now() - n * interval '1 s', CASE WHEN n = 9 THEN now() + interval '1 h' END"
        " FROM generate_series(1, 10) n"
    )
    rows = await relay.read()
    found = await relay.backlog()
    assert (found.backlog_rows, found.is_estimated, found.newest_seq) == (9, False, 10)
    assert found.oldest_pending_age_s == pytest.approx(10, abs=2)
    await relay.settle(
        relay.settlement(
            sent=rows[:2],
            setbacks=[parked(rows[9]), deferred(rows[7])],
            followers=rows[4:6],
            scheduled=[rows[8]],
        )
    )
    await relay.renew(relay.held(floor=2), available=True)
    found = await relay.backlog()
    assert (found.backlog_rows, found.deferred_rows, found.parked_rows) == (6, 3, 1)  # two held became due
    assert (found.held_rows, found.held_keys, found.scheduled_rows) == (0, 0, 1)
    assert found.oldest_pending_age_s == pytest.approx(8, abs=2)


async def test_the_purge(database: asyncpg.Connection, started: Callable[..., Relay]) -> None:
    """Marked rows past their age, below the floors, oldest first; nothing else ever."""
    relay = await started().start()
    await insert(database, *(f"k{number}" for number in range(10)))
    rows = await relay.read()
    await relay.settle(relay.settlement(sent=rows[:7], setbacks=[parked(rows[7]), deferred(rows[8])]))
    await database.execute("UPDATE outbox SET sent_at = sent_at - interval '2 days' WHERE seq <= 5")
    assert await relay.purge(86400.0, 100) == 0  # no floor yet
    await relay.renew(relay.held(floor=9), available=True)
    async with database.transaction():
        await database.execute("SELECT FROM outbox WHERE seq = 1 FOR UPDATE")
        assert await relay.purge(86400.0, 2) == 1
    assert await relay.purge(86400.0, 2) == 2
    assert await relay.purge(86400.0, 100) == 2
    assert await relay.purge(86400.0, 100) == 0
    assert await states(database) == ["sent", "sent", "parked+", "deferred+", "pending"]
    assert relay.lost == []


@pytest.mark.parametrize("marks_sent", [True, False])
async def test_the_search_lowers_a_floor_that_hides_a_row(
    database: asyncpg.Connection, started: Callable[..., Relay], marks_sent: bool
) -> None:
    """R5 lowering: no fingerprint sees `setval`; the owner is unseated, or its renewal would undo it."""
    relay = await started(marks_sent=marks_sent).start()
    await insert(database, *["k"] * 9)
    rows = await relay.read()
    await relay.settle(relay.settlement(sent=rows))
    await relay.renew(relay.held(floor=9), available=True)
    await database.execute("DELETE FROM outbox; SELECT setval('outbox_seq_seq', 4)")
    await insert(database, *["k"] * 8)
    shard = rows[0].shard
    searched = await relay.search([(shard, 0), (shard, 7), ((shard + 1) % ALL, 0)], 3)
    assert searched == Searched([7, None, None], 5, {shard: 4})
    renewal = await relay.renew(relay.held(floor=12), available=True)
    assert shard not in renewal.mine
    assert len(renewal.mine) == ALL - 1
    (claim,) = await relay.claim(1)
    assert (claim.shard, claim.epoch, claim.floor) == (shard, 3, 4)


async def test_the_search_goes_round_below_the_floors(
    database: asyncpg.Connection, started: Callable[..., Relay]
) -> None:
    """Sent rows, those of the fault table and those of others' shards hide nothing; it goes on where it stopped."""
    relay = await started().start()
    await insert(database, *["k"] * 9)
    rows = await relay.read()
    shard = rows[0].shard
    await relay.settle(relay.settlement(sent=rows[:8]))
    await database.execute("INSERT INTO outbox_fault (seq, id, failure_class) VALUES (9, $1, 'unmarkable')", rows[8].id)
    await relay.renew(relay.held(floor=9), available=True)
    assert await relay.search([(shard, 0)], 5) == Searched([5], 5, {})
    assert await relay.search([(shard, 5)], 5) == Searched([None], 4, {})
    await database.execute("DELETE FROM outbox_fault; UPDATE outbox_shard SET owner = 'other'")
    assert await relay.search([(shard, 0)], 50) == Searched([None], 0, {})


# ---------------------------------------------------------------- the retention of parked rows


async def age(database: asyncpg.Connection, *seqs: int) -> None:
    """Parked two days ago."""
    await database.execute("UPDATE outbox SET parked_at = parked_at - interval '2 days' WHERE seq = ANY ($1)", seqs)
    await database.execute(
        "UPDATE outbox_fault SET failed_at = failed_at - interval '2 days' WHERE seq = ANY ($1)", seqs
    )


async def test_parked_rows_go_by_the_time_since_they_were_parked(
    database: asyncpg.Connection, started: Callable[..., Relay]
) -> None:
    """Neither by `created_at`, nor what is deferred, held or another relay's; and what they held is due (H3)."""
    relay = await started().start()
    await insert(database, "a", "a", "b", "c", "d", created_at=datetime.fromtimestamp(0, UTC))
    a, after_a, b, c, d = await relay.read()
    setbacks = [parked(a), parked(b), deferred(c), parked(d, holds=False, reason="expired")]
    await relay.settle(relay.settlement(setbacks=setbacks, followers=[after_a]))
    assert await relay.discard_parked(86400.0, 10, []) == Discarded(0, [], [], is_full=False)
    await age(database, 1, 4, 5)
    assert await relay.discard_parked(86400.0, 1, []) == Discarded(1, [], [], is_full=True)
    assert await relay.discard_parked(86400.0, 10, []) == Discarded(1, [], [], is_full=False)
    assert await states(database) == ["deferred+", "parked+", "deferred+"]
    await age(database, 3)
    await database.execute("UPDATE outbox_shard SET owner = 'other'")
    assert (await relay.discard_parked(86400.0, 10, [])).rows == 0
    assert relay.lost == []


async def test_a_parked_row_that_is_redriven_is_not_discarded(
    database: asyncpg.Connection, started: Callable[..., Relay]
) -> None:
    """It is looked for under the shard's lock: a redrive that comes first wins, and its time begins anew."""
    relay = await started().start()
    await insert(database, "a")
    (a,) = await relay.read()
    await relay.settle(relay.settlement(setbacks=[parked(a)]))
    await age(database, 1)
    async with database.transaction():
        await database.execute("SELECT FROM outbox_shard WHERE shard = $1 FOR UPDATE", a.shard)
        discarding = asyncio.create_task(relay.discard_parked(86400.0, 10, []))
        await eventually(lambda: _waits(database))
        await database.execute("UPDATE outbox SET aside = 'deferred', parked_at = NULL, due_at = now()")
    assert (await discarding).rows == 0
    assert await states(database) == ["deferred+"]


async def _waits(database: asyncpg.Connection) -> bool:
    return bool(
        await database.fetchval("SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND pid <> 0")
    )


async def test_a_row_that_may_not_be_deleted_stops_no_retention(
    database: asyncpg.Connection, started: Callable[..., Relay]
) -> None:
    """The oldest rows refuse: they are told once and left out, and what was parked after them goes."""
    relay = await started().start()
    await insert(database, *"abcdef")
    rows = await relay.read()
    await relay.settle(relay.settlement(setbacks=[parked(row) for row in rows]))
    await age(database, *range(1, 7))
    await database.execute(
        "CREATE FUNCTION kept() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        " IF OLD.aggregate_id IN ('a', 'd') THEN RAISE 'an auditor keeps this row'; END IF; RETURN OLD; END $$;"
        "CREATE TRIGGER kept BEFORE DELETE ON outbox FOR EACH ROW EXECUTE FUNCTION kept()"
    )
    discarded = await relay.discard_parked(86400.0, 4, [])
    assert (discarded.rows, discarded.is_full) == (2, True)
    assert {each.seq for each in discarded.refused} == {1, 4}
    assert all("an auditor keeps this row" in each.error for each in discarded.refused)
    assert await relay.discard_parked(86400.0, 4, [1, 4]) == Discarded(2, [], [], is_full=False)
    assert await states(database) == ["parked+", "parked+"]


async def test_unmarkable_rows_have_the_same_retention(
    database: asyncpg.Connection, started: Callable[..., Relay]
) -> None:
    """The row and its fault go together, or both stay: without the fault the row would be published again."""
    relay = await started().start()
    await insert(database, *"abc")
    rows = await relay.read()
    for row in rows:
        await database.execute(
            "INSERT INTO outbox_fault (seq, id, failure_class) VALUES ($1, $2, 'unmarkable')", row.seq, row.id
        )
    await database.execute("INSERT INTO outbox_fault (seq, id, failure_class) VALUES (99, 'gone', 'unmarkable')")
    await database.execute(
        "CREATE FUNCTION kept() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        " IF OLD.aggregate_id = 'b' THEN RAISE 'immutable'; END IF; RETURN OLD; END $$;"
        "CREATE TRIGGER kept BEFORE DELETE ON outbox FOR EACH ROW EXECUTE FUNCTION kept()"
    )
    assert await relay.discard_parked(86400.0, 10, []) == Discarded(0, [], [], is_full=False)
    await age(database, 1, 2, 99)
    discarded = await relay.discard_parked(86400.0, 10, [])
    assert (discarded.rows, [each.seq for each in discarded.refused]) == (2, [2])
    assert await database.fetch("SELECT seq FROM outbox_fault ORDER BY 1") == [(2,), (3,)]
    assert await database.fetch("SELECT seq FROM outbox ORDER BY 1") == [(2,), (3,)]


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
                    "SELECT EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND NOT granted)"
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
        count = "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'outbox-relay%'"
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
                await database.fetchval("SELECT EXISTS (SELECT FROM pg_stat_activity WHERE wait_event_type = 'Lock')")
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
        loop = asyncio.get_running_loop()
        before = loop.time()
        with pytest.raises(DatabaseLost, match="no answer in time"):
            await relay.check()
        assert loop.time() - before < 2.0
        assert len(relay.lost) == 1
        await relay.close()
    finally:
        postgres_server.thaw()


async def test_a_call_that_is_given_up_midway_loses_the_sessions(
    database: asyncpg.Connection, started: Callable[..., Relay]
) -> None:
    relay = await started().start()
    async with database.transaction():
        await database.execute("SELECT FROM outbox_shard FOR UPDATE")
        settling = asyncio.ensure_future(relay.settle(relay.settlement()))

        async def is_waiting() -> bool:
            return bool(
                await database.fetchval("SELECT EXISTS (SELECT FROM pg_stat_activity WHERE wait_event_type = 'Lock')")
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
