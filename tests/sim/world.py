"""The world of one history: a database, a broker, relays that live and die, an operator.

Tests script it step by step; `seeds.py` drives it with actors. Everything runs in one virtual-time loop.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from relay.core.settings import EngineSettings
from relay.message import Aside, Key

from .broker import BrokerOptions, Rabbit
from .database import Database
from .harness import Program
from .link import FakeBroker
from .loop import Life, Process, VirtualLoop
from .oracle import History, Oracle, Rules
from .outbox import FakeOutbox
from .tables import DatabaseOptions, DbRow, Transaction, TransactionGone
from .wire import Call, Network, Stop

T = TypeVar("T")

HOPELESS = ("invalid", "too_large", "expired", "unknown", "refused", "refused_all")
"""Event types that can never be delivered."""


@dataclass(slots=True)
class WorldOptions:
    database: DatabaseOptions = field(default_factory=DatabaseOptions)
    broker: BrokerOptions = field(default_factory=BrokerOptions)
    settings: EngineSettings = field(default_factory=EngineSettings)
    has_doorbell: bool = True
    stop_grace_s: float = 8.0


class Relay:
    """One process of the relay. A restart is another `Relay`."""

    def __init__(self, world: World, name: str, settings: EngineSettings) -> None:
        self.world = world
        self.name = name
        self.settings = settings
        self.process = Process(name)
        self.outbox = FakeOutbox(
            world.database,
            world.network,
            name,
            self.process,
            parked_holds=settings.holds_when_parked,
            has_doorbell=world.options.has_doorbell,
        )
        self.broker = FakeBroker(
            world.rabbit,
            name,
            self.process,
            mandatory=settings.on_unroutable != "drop",
            in_flight_max=settings.in_flight_max,
        )
        self.program = Program(name, self.outbox, self.broker, settings, world.rng(f"relay {name}"), world.history)
        self.task = world.loop.spawn(self.process, self.program.run)
        world.history.note(name, "starts")

    @property
    def is_running(self) -> bool:
        return self.process.life is Life.RUNNING and not self.task.done()

    def kill(self) -> None:
        """SIGKILL: its sessions end when the server notices; its socket's content may still arrive."""
        if self.process.is_dead:
            return
        world = self.world
        world.history.note(self.name, "KILLED")
        world.loop.kill(self.process)
        world.oracle.relay_ended(self.name)
        self.outbox.vanish(world.database.draw(world.kill_noticed))
        self.broker.vanish()

    def freeze(self) -> None:
        """SIGSTOP, or a machine that sleeps."""
        self.world.history.note(self.name, "FROZEN")
        self.world.oracle.freezes(self.name, self.world.loop.time(), on=True)
        self.world.loop.freeze(self.process)

    def thaw(self) -> None:
        self.world.history.note(self.name, "THAWS")
        self.world.oracle.freezes(self.name, self.world.loop.time(), on=False)
        self.world.loop.thaw(self.process)

    async def stop(self) -> bool:
        """SIGTERM; waits for the end, at most for the grace, then SIGKILL. True: it ended clean."""
        world = self.world
        world.history.note(self.name, "STOPS")
        world.oracle.ails(self.name)
        world.loop.call_soon(self.program.stop, context=self.process.context)
        await asyncio.wait([self.task], timeout=world.options.stop_grace_s)
        if not self.task.done():
            self.kill()
            return False
        world.history.note(self.name, "ENDED")
        if not self.process.is_dead:
            world.loop.kill(self.process)
            self.outbox.vanish(0.0)
            self.broker.vanish()
        return True


class World:
    """`seed` feeds every part's own randomness. Use inside a running `VirtualLoop`."""

    def __init__(self, seed: object = 0, options: WorldOptions | None = None) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop), "the simulation runs in virtual time"
        self.seed = seed
        self.loop = loop
        self.options = options or WorldOptions()
        settings = self.options.settings
        self.history = History(loop.time)
        self.oracle = Oracle(
            self.history,
            Rules(
                is_ordered=settings.ordering != "none",
                is_strict=settings.ordering == "strict",
                parked_holds=settings.holds_when_parked,
            ),
        )
        self.options.database.delete_sent = not settings.marks_sent
        self.options.database.lease_s = settings.lease_s
        self.database = Database(loop, self.rng("database"), self.oracle, self.history, self.options.database)
        self.oracle.table = self.database
        self.network = Network()
        self.rabbit = Rabbit(loop, self.rng("broker"), self.oracle, self.history, self.options.broker)
        self.relays: list[Relay] = []
        self.kill_noticed = (0.0, 0.0)
        self._operator = self.rng("operator")

    def rng(self, name: str) -> random.Random:
        return random.Random(f"{self.seed}/{name}")

    # -------------------------------------------------------- relays

    def start(self, name: str = "", settings: EngineSettings | None = None) -> Relay:
        relay = Relay(self, name or f"R{len(self.relays) + 1}", settings or self.options.settings)
        self.relays.append(relay)
        return relay

    @property
    def running(self) -> list[Relay]:
        return [relay for relay in self.relays if relay.is_running]

    def stop_at(
        self,
        name: str,
        *,
        at: str = "before",
        relay: Relay | None = None,
        when: Callable[[Call], bool] | None = None,
    ) -> Stop:
        """See `Network.stop`."""
        return self.network.stop(name, at=at, relay=relay.name if relay else None, when=when)

    # -------------------------------------------------------- writers, in one go

    def begin(self) -> Transaction:
        return self.database.begin()

    def insert(self, transaction: Transaction, key: str | None = "k", **columns: object) -> str:
        return self.database.insert(transaction, key, **columns)

    def commit(self, transaction: Transaction, *, release: bool = True) -> None:
        self.database.end(transaction, commit=True, release=release)

    def add(self, key: str | None = "k", count: int = 1, **columns: object) -> list[str]:
        """A transaction that inserts `count` rows of a key and commits, at one instant."""
        transaction = self.begin()
        ids = [self.insert(transaction, key, **columns) for _ in range(count)]
        self.commit(transaction)
        return ids

    # -------------------------------------------------------- the operator (O1)

    async def operate(self, act: str, ids: Iterable[str], *, hold_lock_s: float = 0.0) -> list[str]:
        """`redrive` or `discard` those of the rows that are parked now; returns which. Under the shard
        locks, ends with H3, rings. Gives up (returns nothing) when the database goes away."""
        assert act in ("redrive", "discard"), act
        database = self.database
        wanted = set(ids)
        crashes = database.crashes
        shards = {row.shard for row in database.rows.values() if row.id in wanted}
        while not all(database.is_shard_free(shard) for shard in shards):
            await asyncio.sleep(0.001)
        if not database.is_up:
            return []
        unlock = database.lock_shards(shards)
        # What it sees now, it acts on at its commit.
        chosen = [row for row in database.unsent() if row.id in wanted and row.aside is Aside.PARKED]
        promotions = self._promotions({(row.shard, row.key) for row in chosen}, wanted if act == "discard" else set())
        await asyncio.sleep(hold_lock_s)
        if database.crashes != crashes:
            return []
        unlock()
        for row in sorted(chosen, key=lambda each: each.seq):
            stored = database.rows.get(row.identity)
            if stored is None or stored.aside is not Aside.PARKED:
                continue
            if act == "discard":
                database.delete_row(stored)
                self.oracle.discarded(row.id)
            else:
                database.updated(stored, aside=Aside.DEFERRED, holds=row.key is not None, due_at=database.now())
                self.oracle.was_redriven(row.id, held=stored.holds)
        self._promote(promotions)
        database.commit(synchronous=True)
        self.history.note("operator", act, [row.id for row in chosen])
        database.ring()
        return [row.id for row in chosen]

    async def end_fault(self, seq: int, id_: str) -> None:
        """`redrive` of an unmarkable row: the fault goes, and a row that no relay would read again is read (R5)."""
        database = self.database
        stored = database.rows.get((seq, id_))
        shard = self.oracle.entries[id_].shard
        while not database.is_shard_free(shard):
            await asyncio.sleep(0.001)
        if not database.is_up or (seq, id_) not in database.faults:
            return
        database.end_fault((seq, id_))
        if stored is not None and stored.sent_at is None:
            self.oracle.was_released(id_)
            if stored.aside is None:
                database.unseat(shard, seq - 1)
            self._promote(self._promotions({(shard, stored.key)}, set()))
        database.commit(synchronous=True)
        self.history.note("operator", "ends the fault of", id_)
        database.ring()

    def _promotions(self, touched: set[tuple[int, Key | None]], gone: set[str]) -> list[DbRow]:
        """H3: the held rows that the operator has to promote, as far as it can see."""
        database = self.database
        lowest = []
        for shard, key in touched:
            holding = [row for row in database.holding_rows(key, shard) if row.id not in gone]
            if holding and holding[0].aside is Aside.HELD:
                lowest.append(holding[0])
        return sorted(lowest, key=lambda row: row.seq)

    def _promote(self, rows: list[DbRow]) -> None:
        """What an operator cannot promote, for it is locked or refuses it, is the shard's next owner's."""
        database = self.database
        for row in rows:
            if row.id in database.row_locks or row.id in database.unmarkable:
                database.unseat(row.shard)
            elif database.is_stuck(row.shard, row.key):
                database.promote([(row.shard, row.key)])

    def parked(self) -> list[DbRow]:
        """Those that an operator can change."""
        database = self.database
        return [
            row for row in database.rows.values() if row.aside is Aside.PARKED and row.id not in database.unmarkable
        ]

    def unseat(self, shard: int) -> None:
        """Raise the epoch and clear the owner, as lowering a floor does (R5)."""
        self.history.note("operator", "unseats", f"{self.database.owner_of(shard)} of shard {shard}")
        self.database.unseat(shard)
        self.database.commit(synchronous=True)

    def stall(self, span_s: float) -> None:
        """No statement gets an answer for so long."""
        self.network.stalled_until = self.loop.time() + span_s
        self.oracle.all_ail_until(self.network.stalled_until)

    def jump(self, by_s: float) -> None:
        """The database's clock is set."""
        self.history.note("database", "clock jumps", f"{by_s:+.1f} s")
        self.database.clock_error_s += by_s
        self.oracle.has_clock_jumped = True
        self.oracle.all_ail_until(self.loop.time())

    def set_back(self, by: int) -> bool:
        """The sequence hands out again what rows had that are sent. Their order is then nobody's promise. False: it
        would meet rows that are not sent."""
        database = self.database
        last_seq = max(0, database.last_seq() - by)
        drawn = [seq for each in database.transactions.values() if each.is_open for seq in each.seqs]
        if not database.is_up or max([row.seq for row in database.unsent()] + drawn, default=0) > last_seq:
            return False
        self.oracle.rules.is_ordered = False
        database.setval(last_seq)
        return True

    def pause(self, on: bool) -> None:
        if self.database.is_up:
            self.history.note("operator", "pause" if on else "resume")
            self.database.put_meta("paused", int(on))
            self.database.commit(synchronous=True)

    # -------------------------------------------------------- waiting

    async def until(self, holds: Callable[[], bool], timeout_s: float = 120.0, what: str = "") -> None:
        """Until the predicate holds, looked at every millisecond of virtual time (then every ten)."""
        deadline = self.loop.time() + timeout_s
        pause_s = 0.001
        while not holds():
            self.oracle.check(self.seed)
            if self.loop.time() > deadline:
                self.oracle.blame(f"liveness: not reached within {timeout_s:.0f} s: {what or 'a condition'}")
                self.oracle.check(self.seed)
            await asyncio.sleep(pause_s)
            pause_s = min(0.01, pause_s * 1.1)

    async def delivered(self, *ids: str, timeout_s: float = 120.0) -> None:
        """Until a copy of each of these reached the queue."""
        entries = self.oracle.entries
        await self.until(
            lambda: all(each in entries and entries[each].copies for each in ids),
            timeout_s,
            f"{ids} delivered",
        )

    def order(self, key: str = "k") -> list[str]:
        """The first copies of a key as they arrived."""
        seen = dict.fromkeys(each.id for each in self.oracle.log if each.key is not None and each.key[1] == key)
        return list(seen)

    # -------------------------------------------------------- the end

    def unfinished(self) -> list[DbRow]:
        database = self.database
        return sorted(filter(database.is_sound, database.unsent()), key=lambda each: each.seq)

    async def drain(self, timeout_s: float = 120.0) -> None:
        """No more faults: every committed row becomes sent, or is parked and discarded by the operator.

        Parked rows that have a route by now are redriven, those that can never go are discarded. Then each
        committed row must be gone or sent: nothing is lost (I1).
        """
        await self.until_settled(timeout_s)
        for entry in self.oracle.entries.values():
            stored = self.database.rows.get((entry.seq, entry.id))
            if not entry.is_alive or entry.is_discarded:
                continue
            if stored is None and not entry.is_sent:
                self.oracle.blame(f"I1: {entry.id} (seq {entry.seq}) is gone from the table")
            elif stored is not None and stored.sent_at is None and self.database.is_sound(stored):
                self.oracle.blame(f"I1: {entry.id} (seq {entry.seq}) is still {stored.aside or 'pending'}")
            elif entry.copies == 0:
                self.oracle.blame(f"I1: {entry.id} (seq {entry.seq}) was never delivered")
        self.oracle.check(self.seed)

    async def until_settled(self, timeout_s: float) -> None:
        deadline = self.loop.time() + timeout_s
        while True:
            self.oracle.check(self.seed)
            left = self.unfinished()
            if not left and not any(each.is_open for each in self.database.transactions.values()):
                return
            if self.loop.time() > deadline:
                rows = [
                    f"{row.id} seq {row.seq} shard {row.shard} {row.aside or 'pending'} due "
                    f"{None if row.due_at is None else round(row.due_at - self.database.now(), 3)}"
                    for row in left[:12]
                ]
                ends = [f"{relay.name}: {relay.program.state()}" for relay in self.relays if relay.is_running]
                self.oracle.blame(
                    f"liveness: {len(left)} rows not done {timeout_s:.0f} s after the last fault: {rows}; {ends}"
                )
                continue
            parked = self.parked()
            hopeless = [row.id for row in parked if row.event_type in HOPELESS]
            others = [row.id for row in parked if row.event_type not in HOPELESS]
            if hopeless:
                await self.operate("discard", hopeless, hold_lock_s=self._operator.choice([0.0, 0.02]))
            if others:
                await self.operate("redrive", others, hold_lock_s=self._operator.choice([0.0, 0.02]))
            await asyncio.sleep(0.05)

    async def finish(self) -> None:
        """Stop all relays, close what is left of the dead; then the oracle's word."""
        for relay in self.relays:
            if relay.process.life is Life.FROZEN:
                relay.thaw()
        for relay in self.running:
            assert await relay.stop(), f"{relay.name} did not stop clean\n{self.history.text()}"
        for relay in self.relays:
            if relay.task.done() and not relay.task.cancelled() and relay.task.exception() is not None:
                self.oracle.blame(f"{relay.name} ended with {relay.task.exception()!r}")
            if relay.process.is_dead:
                await self.loop.reap(relay.process)
        for error_text in self.loop.errors:
            self.oracle.blame(error_text)
        self.loop.errors.clear()
        self.oracle.check(self.seed)


__all__ = ["Relay", "TransactionGone", "World", "WorldOptions"]
