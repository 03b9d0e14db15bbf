"""The reader under sixteen writers that do what writers do: nothing committed is missed, nothing serialised overtaken.

A plain loop drives `core.reading.Reading` over `PostgresOutbox`: check, page, settle, floors, and a takeover midway.
The oracle knows each committed id, and for the keys whose writers were serialised the order of their commits (I1, I3,
R1-R5). `test-long` runs it for longer, with a transaction that stays open for 30 s.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import asyncpg
import pytest

from relay import migrate
from relay.core.ports.outbox import Held, Settlement
from relay.core.reading import Reading
from relay.message import Row
from relay.outbox import PostgresOutbox
from relay.servers import PostgresServer
from relay.sessions import Group
from relay.urls import DatabaseTarget
from relay.values import table_name

WRITERS = 16
KEYS = 24
LEASE_S = 5.0


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    """With prepared transactions, which the shared one does not have."""
    with PostgresServer.start(durable=False, options={"max_prepared_transactions": "20"}) as started:
        yield started


@pytest.fixture
async def url(server: PostgresServer) -> AsyncIterator[str]:
    url = await asyncio.to_thread(server.create_database, "stress")
    await migrate.run(url)
    connection = await asyncpg.connect(url)
    # A seq is drawn before this trigger sleeps, and there is no xid yet (R3).
    await connection.execute(
        "CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS $$"
        " BEGIN PERFORM pg_sleep((new.payload ->> 'sleep')::float8); RETURN new; END$$;"
        " CREATE TRIGGER slow BEFORE INSERT ON outbox FOR EACH ROW"
        " WHEN (new.payload ->> 'sleep' IS NOT NULL) EXECUTE FUNCTION slow()"
    )
    await connection.close()
    yield url
    await asyncio.to_thread(server.drop_database, "stress")


@dataclass
class Oracle:
    """What was committed: all ids, and per serialised key its ids in the order of their commits."""

    committed: set[str] = field(default_factory=set)
    in_order: dict[str, list[str]] = field(default_factory=dict)
    rolled_back: set[str] = field(default_factory=set)
    kinds: dict[str, int] = field(default_factory=dict)


class Writer:
    """One application's connection, writing until told to stop, each time in another way."""

    def __init__(self, number: int, url: str, oracle: Oracle, locks: list[asyncio.Lock], seed: int) -> None:
        self.number = number
        self.url = url
        self.oracle = oracle
        self.locks = locks
        self.random = random.Random(seed * 1000 + number)
        self.ids = 0
        self.connection: asyncpg.Connection = None

    async def run(self, is_over: Callable[[], bool]) -> None:
        self.connection = await asyncpg.connect(self.url)
        kinds: list[Callable[[str], Awaitable[list[str]]]] = [
            self.autocommit,
            self.batch,
            self.savepoints,
            self.copy,
            self.slow,
            self.late,
            self.serializable,
            self.prepared,
            self.rollback,
        ]
        try:
            while not is_over():
                kind = self.random.choice(kinds)
                self.oracle.kinds[kind.__name__] = self.oracle.kinds.get(kind.__name__, 0) + 1
                if self.random.random() < 0.6:
                    # A serialised writer: the one before has committed when this one draws its seq.
                    number = self.random.randrange(KEYS)
                    async with self.locks[number]:
                        ids = await kind(f"s{number}")
                        self.oracle.in_order.setdefault(f"s{number}", []).extend(ids)
                else:
                    ids = await kind(f"free{self.random.randrange(KEYS)}")
                self.oracle.committed.update(ids)
        finally:
            await self.connection.close()

    def _id(self) -> str:
        self.ids += 1
        return f"w{self.number}-{self.ids}"

    async def insert(self, key: str, *, sleep_s: float | None = None) -> str:
        id_ = self._id()
        payload = {} if sleep_s is None else {"sleep": sleep_s}
        await self.connection.execute(
            "INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload) VALUES ($1, 't', $2, 'e', $3)",
            id_,
            key,
            json.dumps(payload),
        )
        return id_

    async def pause(self) -> None:
        await self.connection.execute(f"SELECT pg_sleep({self.random.choice([0, 0, 0.001, 0.01, 0.05])})")

    async def autocommit(self, key: str) -> list[str]:
        return [await self.insert(key)]

    async def batch(self, key: str) -> list[str]:
        ids = [self._id() for _ in range(self.random.randrange(2, 30))]
        await self.connection.execute(
            "INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type) SELECT id, 't', $2, 'e'"
            " FROM unnest($1::text[]) WITH ORDINALITY u(id, n) ORDER BY n",
            ids,
            key,
        )
        return ids

    async def late(self, key: str) -> list[str]:
        async with self.connection.transaction():
            ids = [await self.insert(key)]
            await self.pause()
            ids.append(await self.insert(key))
            await self.pause()
        return ids

    async def savepoints(self, key: str) -> list[str]:
        ids = []
        async with self.connection.transaction():
            for _ in range(self.random.randrange(1, 5)):
                savepoint = self.connection.transaction()
                await savepoint.start()
                id_ = await self.insert(key)
                await self.pause()
                if self.random.random() < 0.5:
                    await savepoint.rollback()
                    self.oracle.rolled_back.add(id_)
                else:
                    await savepoint.commit()
                    ids.append(id_)
        return ids

    async def copy(self, key: str) -> list[str]:
        ids = [self._id() for _ in range(self.random.randrange(1, 60))]
        await self.connection.copy_records_to_table(
            "outbox",
            records=[(id_, "t", key, "e") for id_ in ids],
            columns=["id", "aggregate_type", "aggregate_id", "event_type"],
        )
        return ids

    async def slow(self, key: str) -> list[str]:
        async with self.connection.transaction():
            ids = [await self.insert(key, sleep_s=self.random.choice([0.005, 0.03, 0.1]))]
            await self.pause()
        return ids

    async def serializable(self, key: str) -> list[str]:
        async with self.connection.transaction(isolation="serializable"):
            await self.connection.fetchval("SELECT 1")
            await self.pause()
            return [await self.insert(key)]

    async def prepared(self, key: str) -> list[str]:
        name = f"p{self._id()}"
        await self.connection.execute("BEGIN")
        ids = [await self.insert(key)]
        await self.pause()
        ids.append(await self.insert(key))
        await self.connection.execute(f"PREPARE TRANSACTION '{name}'")
        await self.pause()
        if self.random.random() < 0.3:
            await self.connection.execute(f"ROLLBACK PREPARED '{name}'")
            self.oracle.rolled_back.update(ids)
            return []
        await self.connection.execute(f"COMMIT PREPARED '{name}'")
        return ids

    async def rollback(self, key: str) -> list[str]:
        transaction = self.connection.transaction()
        await transaction.start()
        id_ = await self.insert(key)
        await self.pause()
        await transaction.rollback()
        self.oracle.rolled_back.add(id_)
        return []


class Reader:
    """The relay, reduced to reading: rows go from pages to a log, and are settled one page later."""

    def __init__(self, url: str, instance: str, log: list[Row], *, check_gap_s: float) -> None:
        self.url = url
        self.check_gap_s = check_gap_s
        self.log = log
        self.outbox = PostgresOutbox(
            lambda: DatabaseTarget(url, "test"),
            table_name("outbox"),
            instance=instance,
            name=instance,
            version="0",
            lease_s=LEASE_S,
            marks_sent=True,
            holds_when_parked=True,
            is_ordered=True,
            settle_commit=True,
            poll_interval_s=0.5,
        )
        self.reading = Reading()
        self.epochs: dict[int, int] = {}
        self.memory: dict[int, Row] = {}
        self.pages = 0
        self.beyond = 0
        self.lost: list[str] = []

    async def start(self) -> None:
        await self.outbox.open(lambda: None, self.lost.append)
        if self.check_gap_s:
            statements = self.outbox._sessions._sessions[Group.KEEPER]._texts
            check = statements["check"]
            assert check.rstrip().endswith("FROM s")
            # Between the two halves: S is read, then nothing happens for a while, then the locks are read.
            check = check.rstrip() + f" CROSS JOIN LATERAL (SELECT pg_sleep({self.check_gap_s} + 0 * s.seq)) gap"
            self.outbox._sessions.know(dict(statements) | {"check": check})
        deadline = time.monotonic() + 20.0
        while len(self.epochs) < 64:
            assert time.monotonic() < deadline, "the shards of a relay that is gone were not to be had"
            for claim in await self.outbox.claim(64):
                assert not claim.floor_was_void
                self.epochs[claim.shard] = claim.epoch
                self.reading.add_shard(claim.shard, claim.floor)

    def has_read_both_kinds(self) -> bool:
        """Pages that stopped at the last known seq, and pages that went beyond."""
        return 0 < self.beyond < self.pages

    async def run(self, is_over: Callable[[], bool]) -> None:
        """Until `is_over` and nothing is left that a check knows of."""
        renewed_at = 0.0
        settling: asyncio.Task[None] | None = None
        quiet = 0
        while quiet < 3:
            self.reading.on_check(await self.outbox.check())
            if time.monotonic() - renewed_at > 0.2:
                renewed_at = time.monotonic()
                await self._renew()
            for _ in range(3):
                rows = await self._page()
                if settling is not None:
                    await settling
                settling = asyncio.create_task(self._settle(rows)) if rows else None
            if settling is not None:
                quiet = 0
            elif is_over() and not self.reading.behind(self.reading.cursors) and self.reading.open_writers == 0:
                quiet += 1
        await self._renew()

    async def _page(self) -> list[Row]:
        request = self.reading.request(sorted(self.epochs), 40, 16384)
        self.beyond += request.beyond
        self.pages += 1
        rows = self.reading.on_page(request, await self.outbox.page(request))
        news = []
        for row in rows:
            known = self.memory.get(row.seq)
            if known is not None:
                assert known.id == row.id
                continue
            self.memory[row.seq] = row
            news.append(row)
        self.log.extend(news)
        return news

    async def _settle(self, rows: list[Row]) -> None:
        settled = await self.outbox.settle(Settlement(fences=dict(self.epochs), sent=rows))
        assert len(settled.done) == len(rows), settled
        self.reading.note_settled(rows)
        for row in rows:
            del self.memory[row.seq]

    async def _renew(self) -> None:
        lowest: dict[int, int] = {}
        for seq, row in self.memory.items():
            lowest[row.shard] = min(seq, lowest.get(row.shard, seq))
        held = {
            shard: Held(epoch, self.reading.floor(shard, lowest.get(shard))) for shard, epoch in self.epochs.items()
        }
        renewal = await self.outbox.renew(held, available=True)
        assert len(renewal.renewed) == 64


async def hold_open(url: str, oracle: Oracle, seconds: float) -> None:
    """One transaction that inserts, stays open for long, inserts again and commits."""
    connection = await asyncpg.connect(url)
    insert = "INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type) VALUES ($1, 't', 'long', 'e')"
    try:
        async with connection.transaction():
            await connection.execute(insert, "long-1")
            await connection.execute(f"SELECT pg_sleep({seconds})")
            await connection.execute(insert, "long-2")
        oracle.committed.update(["long-1", "long-2"])
        oracle.in_order["long"] = ["long-1", "long-2"]
    finally:
        await connection.close()


async def stress(url: str, *, seconds: float, long_s: float, check_gap_s: float, seed: int) -> dict[str, Any]:
    oracle = Oracle()
    locks = [asyncio.Lock() for _ in range(KEYS)]
    log: list[Row] = []
    first = Reader(url, "first", log, check_gap_s=check_gap_s)
    await first.start()
    end = time.monotonic() + seconds

    def is_late() -> bool:
        return time.monotonic() >= end

    writers = [asyncio.create_task(Writer(number, url, oracle, locks, seed).run(is_late)) for number in range(WRITERS)]
    writers.append(asyncio.create_task(hold_open(url, oracle, long_s)))

    def is_written() -> bool:
        return all(task.done() for task in writers)

    try:
        async with asyncio.timeout(seconds + long_s + 60.0):
            halfway = asyncio.create_task(first.run(lambda: False))
            # At least until it has read pages of both kinds, which on a busy machine takes longer.
            while not halfway.done() and not (time.monotonic() > end - seconds / 2 and first.has_read_both_kinds()):
                await asyncio.wait([halfway], timeout=0.05)
            # Killed at any point; what it had read and not settled is read again by the next owner.
            halfway.cancel()
            (ended,) = await asyncio.gather(halfway, return_exceptions=True)
            assert isinstance(ended, asyncio.CancelledError), ended
            await first.outbox.close()
            second = Reader(url, "second", log, check_gap_s=check_gap_s)
            await second.start()
            await second.run(is_written)
            await asyncio.gather(*writers)
            await second.outbox.close()
    finally:
        for task in writers:
            task.cancel()
        await asyncio.gather(*writers, return_exceptions=True)
    judge(oracle, log, second)
    return {
        "committed": len(oracle.committed),
        "read": len(log),
        "has_read_both_kinds": first.has_read_both_kinds(),
        "kinds": oracle.kinds,
    }


def judge(oracle: Oracle, log: list[Row], last: Reader) -> None:
    read: dict[str, int] = {}
    for position, row in enumerate(log):
        read.setdefault(row.id, position)
    missed = oracle.committed - read.keys()
    assert not missed, f"{len(missed)} of {len(oracle.committed)} committed rows were never read: {sorted(missed)[:5]}"
    invented = read.keys() & oracle.rolled_back
    assert not invented, f"read, but rolled back: {sorted(invented)[:5]}"
    for key, ids in oracle.in_order.items():
        positions = [read[id_] for id_ in ids]
        wrong = [id_ for id_, before, after in zip(ids, positions, positions[1:], strict=False) if before > after]
        assert not wrong, f"{key}: {wrong[:5]} were read after what was written after them"
    assert last.lost == []
    assert not last.memory


@pytest.mark.parametrize("check_gap_s", [0.0, 0.02], ids=["", "gap"])
async def test_every_committed_row_is_read_in_order(url: str, check_gap_s: float) -> None:
    found = await stress(url, seconds=5.0, long_s=3.0, check_gap_s=check_gap_s, seed=1)
    assert found["committed"] > 100
    assert len(found["kinds"]) == 9
    assert found["has_read_both_kinds"]


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_for_longer(url: str, seed: int) -> None:
    await stress(url, seconds=40.0, long_s=30.0, check_gap_s=0.02 if seed == 2 else 0.0, seed=seed)
