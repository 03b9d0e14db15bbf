"""The loop and the fake database by themselves: the outbox suite over it, the crash model. The broker: `test_fake_broker`."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from relay.core.ports.outbox import Held, Outbox, OutboxInfo, Settlement
from relay.errors import DatabaseLost

from . import chores_suite, outbox_suite
from .bench import Bench
from .database import Database
from .loop import Deadlock, Process, Runaway, VirtualLoop, run_virtual
from .outbox import FakeOutbox
from .outbox_suite import Seen
from .tables import DatabaseOptions, Transaction


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

    def __init__(self, options: DatabaseOptions | None = None) -> None:
        super().__init__(options)
        self.rings: Counter[str] = Counter()
        self.losses: list[tuple[str, str]] = []

    async def begin(self) -> FakeWriter:
        return FakeWriter(self.database)

    async def insert(
        self,
        key: str | None,
        count: int = 1,
        *,
        available_in_s: float | None = None,
        size: int = 10,
        headers_size: int = 0,
    ) -> list[str]:
        writer = self.database.begin()
        columns = {"available_in_s": available_in_s, "size": size, "headers_size": headers_size}
        ids = [self.database.insert(writer, key, **columns) for _ in range(count)]
        self.database.end(writer, commit=True)
        # The suite settles without a broker: the oracle is told that all was delivered.
        for each in ids:
            entry = self.oracle.entries[each]
            entry.accepted, entry.failures = 1, 100
        return ids

    async def relay(self, name: str, *, holds_when_parked: bool = True) -> Outbox:
        outbox = FakeOutbox(self.database, self.network, name, Process(name), parked_holds=holds_when_parked)
        await self.open(outbox, name)
        return outbox

    async def open(self, relay: Outbox, name: str) -> OutboxInfo:
        return await relay.open(lambda: self.rings.update([name]), lambda why: self.losses.append((name, why)))

    async def sever(self, name: str) -> None:
        session = next(each for each in self.database.sessions if each.instance == name)
        self.database.terminate(session, "terminated by an administrator")

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

    async def lock_shard(self, shard: int) -> Callable[[], Awaitable[None]]:
        release = self.database.lock_shards({shard})

        async def unlock() -> None:
            release()

        return unlock

    async def delete(self, id_: str) -> None:
        for row in [each for each in self.database.rows.values() if each.id == id_]:
            self.database.delete_row(row)

    async def refuse(self, id_: str) -> None:
        self.database.unmarkable.add(id_)

    async def run_out(self, shard: int) -> None:
        self.database.put_shard(shard, replace(self.database.shards[shard], leased_until=0.0))

    async def set_back(self, last_seq: int) -> None:
        self.database.setval(last_seq)

    async def pause(self, on: bool) -> None:
        self.database.put_meta("paused", int(on))

    async def steal(self, shard: int) -> None:
        self.database.put_shard(shard, replace(self.database.shards[shard], owner="somebody else"))


@pytest.mark.parametrize("case", [*outbox_suite.CASES, *chores_suite.CASES], ids=lambda case: case.__name__)
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
