"""The fakes by themselves: the loop, the outbox suite over the fake, the crash model, the broker."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from relay.core.ports import Closed, Held, Link, Outbox, Publication, Rejection, Returned, Settlement
from relay.errors import BrokerUnavailable, DatabaseLost
from relay.message import PayloadType, Row
from tests.broker import link_suite
from tests.broker.recorder import Recorder

from . import outbox_suite
from .broker import BrokerOptions, FakeBroker, FakeLink, Rabbit
from .database import Database, DatabaseOptions, Transaction
from .loop import Deadlock, Process, Runaway, VirtualLoop, run_virtual
from .oracle import Entry, History, Oracle
from .outbox import FakeOutbox
from .outbox_suite import Seen
from .wire import Network


class Bench:
    """One database and broker without a relay."""

    def __init__(self, options: DatabaseOptions | None = None, broker: BrokerOptions | None = None) -> None:
        import random

        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        self.loop = loop
        self.history = History(loop.time)
        self.oracle = Oracle(self.history)
        self.database = Database(loop, random.Random(1), self.oracle, self.history, options or DatabaseOptions())
        self.network = Network()
        self.rabbit = Rabbit(loop, random.Random(2), self.oracle, self.history, broker or BrokerOptions())


class FakeWriter:
    def __init__(self, database: Database) -> None:
        self.database = database
        self.transaction: Transaction = database.begin()

    async def insert(self, key: str | None, count: int = 1) -> list[str]:
        return [self.database.insert(self.transaction, key) for _ in range(count)]

    async def commit(self) -> None:
        self.database.end(self.transaction, commit=True)

    async def rollback(self) -> None:
        self.database.end(self.transaction, commit=False)


class FakeTable(Bench):
    """`outbox_suite.Table` over the fake."""

    async def begin(self) -> FakeWriter:
        return FakeWriter(self.database)

    async def insert(
        self, key: str | None, count: int = 1, *, available_in_s: float | None = None, size: int = 10
    ) -> list[str]:
        writer = self.database.begin()
        ids = [self.database.insert(writer, key, available_in_s=available_in_s, size=size) for _ in range(count)]
        self.database.end(writer, commit=True)
        # The suite settles without a broker: the oracle is told that all was delivered.
        for each in ids:
            entry = self.oracle.entries[each]
            entry.accepted, entry.failures = 1, 100
        return ids

    async def relay(self, name: str) -> Outbox:
        outbox = FakeOutbox(self.database, self.network, name, Process(name))
        await outbox.open(lambda: None, lambda why: None)
        return outbox

    async def drop(self, relay: Outbox) -> None:
        assert isinstance(relay, FakeOutbox)
        relay.vanish(0.0)

    async def row(self, id_: str) -> Seen | None:
        for row in self.database.rows.values():
            if row.id == id_:
                return Seen(row.seq, row.shard, row.aside, row.attempts, row.sent_at is not None)
        return None

    async def touch(self, id_: str) -> None:
        for row in list(self.database.rows.values()):
            if row.id == id_:
                self.database.updated(row)

    async def lock(self, id_: str) -> Callable[[], Awaitable[None]]:
        self.database.row_locks.add(id_)

        async def unlock() -> None:
            self.database.row_locks.discard(id_)

        return unlock

    async def steal(self, shard: int) -> None:
        self.database.put_shard(shard, replace(self.database.shards[shard], owner="somebody else"))


@pytest.mark.parametrize("case", outbox_suite.CASES, ids=lambda case: case.__name__)
def test_outbox_suite(case: outbox_suite.Case) -> None:
    async def main() -> None:
        await case(FakeTable())

    run_virtual(main)


# ---------------------------------------------------------------- the loop


def test_time_jumps_and_frozen_processes_wait() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        seen: list[float] = []
        process = Process("p")
        ended: list[str] = []

        async def tick() -> None:
            try:
                while True:
                    await asyncio.sleep(1)
                    seen.append(loop.time())
            finally:
                ended.append("cleanup")

        began = loop.time()
        loop.spawn(process, tick)
        await asyncio.sleep(2.5)
        loop.freeze(process)
        await asyncio.sleep(100)
        loop.thaw(process)
        await asyncio.sleep(0.25)
        loop.kill(process)
        await asyncio.sleep(100)
        assert [time - began for time in seen] == [1, 2, 102.5]
        assert not ended, "a killed process runs no cleanup"
        await loop.reap(process)
        assert ended

    run_virtual(main)


def test_a_deadlock_and_a_runaway_are_errors() -> None:
    async def wait_for_ever() -> None:
        await asyncio.get_running_loop().create_future()

    async def spin() -> None:
        while True:
            await asyncio.sleep(0)

    async def sleep_on() -> None:
        while True:
            await asyncio.sleep(60)

    with pytest.raises(Deadlock):
        run_virtual(wait_for_ever)
    with pytest.raises(Runaway):
        run_virtual(spin, steps_max=1000)
    with pytest.raises(Runaway):
        run_virtual(sleep_on, seconds_max=1000)


# ---------------------------------------------------------------- the database


def test_a_commit_is_visible_before_its_lock_goes() -> None:
    async def main() -> None:
        bench = FakeTable(DatabaseOptions(lock_lag=(0.05, 0.05)))
        outbox = await bench.relay("a")
        claims = await outbox_suite.claim_all(outbox)
        writer = bench.database.begin()
        bench.database.insert(writer)
        bench.database.end(writer, commit=True, release=False)
        check = await outbox.check()
        assert [each.vxid for each in check.writers] == [writer.vxid]
        page = await outbox_suite.read(outbox, claims, check=check)
        assert list(page.ended) == [0]
        assert len(page.rows) == 1
        await asyncio.sleep(0.1)
        assert list((await outbox.check()).writers) == []

    run_virtual(main)


def test_a_slow_trigger_has_a_seq_and_no_xid() -> None:
    async def main() -> None:
        bench = FakeTable()
        outbox = await bench.relay("a")
        writer = bench.database.begin()
        bench.database.lock_table(writer)
        seq = bench.database.next_seq(writer)
        check = await outbox.check()
        assert (check.last_seq, check.writers[0].xid) == (seq, None)
        bench.database.write(writer, seq)
        assert (await outbox.check()).writers[0].xid is not None

    run_virtual(main)


def test_preparing_changes_the_virtual_id_and_survives_a_crash() -> None:
    async def main() -> None:
        bench = FakeTable()
        writer, other = bench.database.begin(), bench.database.begin()
        bench.database.insert(writer)
        bench.database.insert(other)
        before = writer.vxid
        bench.database.prepare(writer)
        assert writer.vxid == f"-1/{writer.xid}" != before
        bench.database.crash(down_s=0.1, loses=True)
        await asyncio.sleep(0.2)
        assert list(bench.database.transactions.values()) == [writer]
        assert not other.is_open
        bench.database.end(writer, commit=True)
        assert len(bench.database.rows) == 1

    run_virtual(main)


def test_a_crash_under_asynchronous_commit_hands_out_seqs_again() -> None:
    async def main() -> None:
        bench = FakeTable(DatabaseOptions(others_synchronous=False))
        await bench.insert("k", 3)
        bench.database.commit(synchronous=True)
        (lost,) = await bench.insert("k")
        bench.database.rewind_to(bench.database.boundaries[0], bench.database.boundaries[1:])
        assert not bench.oracle.entries[lost].is_alive
        assert len(bench.database.rows) == 3
        bench.database.meta["last_value"] = 3
        (again,) = await bench.insert("k")
        assert bench.oracle.entries[again].seq == bench.oracle.entries[lost].seq

    run_virtual(main)


def test_an_outcome_can_be_unknown() -> None:
    """The settlement is committed, its answer is lost."""

    async def main() -> None:
        bench = FakeTable()
        outbox = await bench.relay("a")
        claims = await outbox_suite.claim_all(outbox)
        (id_,) = await bench.insert("k")
        bench.oracle.publications = {}
        rows = list((await outbox_suite.read(outbox, claims)).rows)
        stop = bench.network.stop("settle", at="after")
        settling = asyncio.ensure_future(outbox.settle(Settlement(fences=outbox_suite.fenced(claims, rows), sent=rows)))
        await stop.reached()
        assert isinstance(outbox, FakeOutbox)
        outbox.is_cut = True
        outbox.lose("connection reset")
        with pytest.raises(DatabaseLost):
            await settling
        seen = await bench.row(id_)
        assert seen is not None
        assert seen.is_sent

    run_virtual(main)


def test_a_settlement_in_progress_keeps_others_from_claiming() -> None:
    async def main() -> None:
        bench = FakeTable()
        first, second = await bench.relay("a"), await bench.relay("b")
        claims = await outbox_suite.claim_all(first)
        await bench.insert("k")
        rows = list((await outbox_suite.read(first, claims)).rows)
        shard = rows[0].shard
        stop = bench.network.stop("settle", at="between")
        settling = asyncio.ensure_future(first.settle(Settlement(fences=outbox_suite.fenced(claims, rows), sent=rows)))
        await stop.reached()
        held = {shard: Held(claims[shard].epoch, None)}
        assert (await first.renew(held, available=True)).renewed == {shard}
        await asyncio.sleep(6)
        assert shard not in [each.shard for each in await second.claim(64)]
        stop.resume()
        assert (await settling).done
        assert shard in [each.shard for each in await second.claim(64)]

    run_virtual(main)


# ---------------------------------------------------------------- the broker


class Ear:
    """A listener that writes down what it hears."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, list[str]]] = []

    def on_acked(self, rows: object) -> None:
        self._note("acked", rows)

    def on_nacked(self, rows: object) -> None:
        self._note("nacked", rows)

    def on_returned(self, returned: object) -> None:
        assert isinstance(returned, list)
        self.heard.append(("returned", [each.row.id for each in returned if isinstance(each, Returned)]))

    def on_blocked(self, reason: str) -> None:
        self.heard.append(("blocked", []))

    def on_unblocked(self) -> None:
        self.heard.append(("unblocked", []))

    def on_writable(self) -> None:
        self.heard.append(("writable", []))

    def on_suspected(self, rows: object, error: str, *, alone: bool) -> None:
        self._note("suspected", rows)

    def on_passed(self, row: object) -> None:
        self._note("passed", [row])

    def on_refused(self, refusal: Rejection, lost: object) -> None:
        self._note("refused", [refusal.row])

    def on_closed(self, lost: object, closed: Closed, error: str) -> None:
        self._note("closed", lost)

    def _note(self, what: str, rows: object) -> None:
        assert isinstance(rows, list)
        self.heard.append((what, [row.id for row in rows if isinstance(row, Row)]))

    def ids(self, what: str) -> list[str]:
        return [each for name, ids in self.heard if name == what for each in ids]


async def linked(bench: Bench, ear: Ear) -> FakeLink:
    return await FakeBroker(bench.rabbit, "a", Process("a")).connect(ear, PayloadType.JSON)


def rows_of(bench: Bench, count: int, event_type: str = "ok") -> list[Row]:
    rows = []
    for _ in range(count):
        seq = len(bench.oracle.entries) + 1
        row = Row(1, seq, f"m{seq}", event_type, aggregate_type="t", aggregate_id=f"k{seq}", payload=b"x")
        bench.oracle.committed(Entry(row.id, seq, row.key, 1, event_type, 0, 0, False))
        bench.oracle.granted["a", 1] = 1e18
        rows.append(row)
    return rows


class RegisteringLink:
    """A fake's link that tells the oracle of rows which nobody inserted."""

    def __init__(self, bench: Bench, link: FakeLink) -> None:
        self._bench = bench
        self._link = link

    @property
    def in_flight(self) -> int:
        return self._link.in_flight

    def is_in_flight(self, message_id: str) -> bool:
        return self._link.is_in_flight(message_id)

    def publish(self, rows: Sequence[Row]) -> Publication:
        for row in rows:
            if row.id not in self._bench.oracle.entries:
                self._bench.oracle.committed(Entry(row.id, row.seq, row.key, row.shard, row.event_type, 0, 0, False))
        self._bench.oracle.granted["a", 0] = 1e18
        return self._link.publish(rows)

    def probe(self, row: Row) -> Publication:
        return self._link.probe(row)

    async def close(self) -> None:
        await self._link.close()


class FakePlace(Bench):
    """`link_suite.Place` over the fake, whose pipe takes twenty rows."""

    def __init__(self) -> None:
        super().__init__(broker=BrokerOptions(pipe_rows=20))

    async def connect(self, recorder: Recorder, *, routing_key: str = "{event_type}") -> Link:
        link = await FakeBroker(self.rabbit, "a", Process("a")).connect(recorder, PayloadType.JSON)
        return RegisteringLink(self, link)

    async def arrived(self, count: int) -> Sequence[tuple[str, bytes, dict[str, Any]]]:
        assert len(self.oracle.log) == count
        return [(each.id, b"", {}) for each in self.oracle.log]


@pytest.mark.parametrize("case", link_suite.LIVES, ids=lambda case: case.__name__)
def test_link_suite(case: link_suite.Case) -> None:
    async def main() -> None:
        await case(FakePlace())

    run_virtual(main)


def test_every_row_gets_exactly_one_outcome() -> None:
    async def main() -> None:
        bench = Bench(broker=BrokerOptions(nacks=0.2, confirm=(0.001, 0.01), latency=(0.0, 0.01)))
        ear = Ear()
        link = await linked(bench, ear)
        rows = rows_of(bench, 300)
        for start in range(0, 300, 10):
            assert link.publish(rows[start : start + 10]).taken == 10
            await asyncio.sleep(0.001)
        assert not ear.heard or link.in_flight < 300
        await asyncio.sleep(5)
        outcomes = ear.ids("acked") + ear.ids("nacked")
        assert sorted(outcomes) == sorted(row.id for row in rows)
        assert ear.ids("nacked")
        assert outcomes != [row.id for row in rows], "confirms come in any order"
        assert link.in_flight == 0

    run_virtual(main)


def test_returns_rejections_and_a_full_pipe() -> None:
    async def main() -> None:
        bench = Bench(broker=BrokerOptions(pipe_rows=4))
        ear = Ear()
        link = await linked(bench, ear)
        bench.rabbit.route("nowhere", False)
        bad, lost, good = rows_of(bench, 1, "invalid"), rows_of(bench, 2, "nowhere"), rows_of(bench, 5)
        publication = link.publish(bad + lost + good)
        assert publication.taken == 5
        assert [each.row for each in publication.rejected] == bad
        await asyncio.sleep(1)
        assert ear.ids("returned") == [row.id for row in lost]
        assert ("writable", []) in ear.heard
        assert [each.id for each in bench.oracle.log] == [row.id for row in good[:2]]

    run_virtual(main)


def test_a_cut_delivers_a_prefix_without_confirms() -> None:
    async def main() -> None:
        prefixes: set[int] = set()
        for _ in range(20):
            bench = Bench()
            bench.rabbit.random.seed(len(prefixes) * 7 + _)
            ear = Ear()
            link = await linked(bench, ear)
            rows = rows_of(bench, 5)
            link.publish(rows)
            link.cut()
            await asyncio.sleep(1)
            assert ear.heard[-1] == ("closed", [row.id for row in rows])
            delivered = [each.id for each in bench.oracle.log]
            assert delivered == [row.id for row in rows[: len(delivered)]]
            prefixes.add(len(delivered))
        assert len(prefixes) > 2

    run_virtual(main)


def test_alarms_stop_the_link_and_silence_does_not() -> None:
    async def main() -> None:
        bench = Bench()
        ear = Ear()
        link = await linked(bench, ear)
        rows = rows_of(bench, 6)
        bench.rabbit.block(True)
        assert link.publish(rows[:2]).taken == 2
        await asyncio.sleep(1)
        assert ear.heard == [("blocked", [])]
        assert link.publish(rows[2:]).taken == 0
        bench.rabbit.block(False)
        await asyncio.sleep(1)
        assert ear.ids("acked") == [row.id for row in rows[:2]]
        bench.rabbit.mute(True)
        assert link.publish(rows[2:]).taken == 4
        await asyncio.sleep(100)
        assert link.in_flight == 4
        bench.rabbit.mute(False)
        await asyncio.sleep(1)
        assert link.in_flight == 0
        bench.rabbit.go_down(1.0)
        with pytest.raises(BrokerUnavailable):
            await linked(bench, ear)

    run_virtual(main)
