"""Who writes, locks and operates during a history; each actor draws from a source of its own."""

from __future__ import annotations

import asyncio
import random

from relay.message import Aside

from .climate import Climate, source
from .tables import DbRow, Transaction, TransactionGone
from .world import World

UNENCODABLE = ("invalid", "too_large", "unknown")
"""Event types over which a row fails before anything is sent; they are named after its failure class."""

PATIENCE_S = 5.0
"""In a history in which nothing fails, and rows are rare, each is delivered so soon."""

PATIENCE_OF_NARROW_S = 20.0
"""The same for a relay that may have hardly anything in memory or in flight: rows queue before it."""


class Actors:
    """`end`: virtual time at which they stop."""

    def __init__(self, world: World, climate: Climate, end: float) -> None:
        self._world = world
        self._climate = climate
        self._end = end
        self._kinds = source(world.seed, "what cannot be encoded")
        self._guards = [asyncio.Lock() for _ in range(climate.keys // 2)]

    @property
    def _is_over(self) -> bool:
        return self._world.loop.time() >= self._end

    # -------------------------------------------------------- writers

    async def write(self, number: int, rate: float) -> None:
        """Transactions of one writer: so many a second."""
        rng = source(self._world.seed, f"writer {number}")
        while not self._is_over:
            await asyncio.sleep(_lull(rng) if self._climate.has_lulls else rng.expovariate(rate))
            try:
                await self._transaction(rng, self._world.begin())
            except TransactionGone:
                await asyncio.sleep(0.05)

    async def _transaction(self, rng: random.Random, transaction: Transaction) -> None:
        climate = self._climate
        key = rng.randrange(climate.keys)
        if climate.is_hot and rng.random() < 0.7:
            key = 0
        if key < len(self._guards) and climate.is_guarded:
            # The usual business case: writers of a key are serialised by a row that they lock.
            async with self._guards[key]:
                await self._insert_some(rng, transaction, [self._name(key)])
        else:
            other = rng.randrange(len(self._guards), climate.keys)
            await self._insert_some(rng, transaction, [self._name(key), self._name(other), None])

    def _name(self, key: int) -> str:
        life_s = self._climate.key_life_s
        return f"k{key}" if life_s is None else f"k{key}.{int(self._world.loop.time() / life_s)}"

    async def _insert_some(self, rng: random.Random, transaction: Transaction, keys: list[str | None]) -> None:
        database = self._world.database
        for _ in range(rng.choice([1, 1, 1, 2, 5])):
            await self._insert(rng, transaction, rng.choice(keys))
            if rng.random() < 0.4:
                await asyncio.sleep(rng.choice([0.0, 0.002, 0.02]))
        if rng.random() < self._climate.open_share:
            await asyncio.sleep(rng.choice([0.1, 0.5, 1.0, 3.0]) * rng.random())
        if rng.random() < 0.1 and transaction.xid is not None and not transaction.rings:
            database.prepare(transaction)
            await asyncio.sleep(rng.choice([0.001, 0.1, 1.0]))
            while not database.is_up:
                await asyncio.sleep(0.1)
        does_commit = rng.random() < 0.85
        database.end(transaction, commit=does_commit, release=False)
        if does_commit and transaction.rows and rng.random() < self._climate.grip_share:
            self._lock(rng, rng.choice(transaction.rows).id)

    async def _insert(self, rng: random.Random, transaction: Transaction, key: str | None) -> None:
        world, database = self._world, self._world.database
        columns = self._columns(rng)
        kind = rng.random()
        if kind < self._climate.trigger_share:
            # A slow trigger: a seq and no xid yet.
            database.lock_table(transaction)
            seq = database.next_seq(transaction)
            await asyncio.sleep(rng.choice([0.001, 0.03, 0.3]))
            database.write(transaction, seq, key=key, **columns)  # type: ignore[arg-type]
        elif kind > 0.9:
            # A savepoint that is rolled back, after a row of its own; it may be a while before the transaction goes on.
            savepoint = database.savepoint(transaction)
            world.insert(transaction, key, **columns)
            await asyncio.sleep(rng.choice([0.0, 0.0, 0.1]))
            database.roll_back_to(transaction, savepoint)
            await asyncio.sleep(rng.choice([0.0, 0.0, 0.1]))
        else:
            world.insert(transaction, key, **columns)

    def _columns(self, rng: random.Random) -> dict[str, object]:
        columns: dict[str, object] = {"size": rng.choice([10, 10, 10, 1500])}
        roll = rng.random()
        poison = rng.choice(["invalid", "invalid", "expired", "refused", "refused", "refused_all"])
        if roll < self._climate.flaky_share:
            columns["event_type"] = "flaky"
        elif roll > 0.95 and self._climate.has_poison:
            columns["event_type"] = self._kinds.choice(UNENCODABLE) if poison == "invalid" else poison
        if rng.random() < 0.05:
            columns["available_in_s"] = rng.choice([-1.0, 0.01, 0.5, 2.0])
        return columns

    async def expect(self) -> None:
        """Where nothing fails every row arrives soon, whatever comes after it: a ring that was lost shows."""
        world = self._world
        waiting: dict[str, float] = {}
        settings = world.options.settings
        is_narrow = settings.in_flight_max < 4 or settings.read_ahead_max < 40
        patience_s = PATIENCE_OF_NARROW_S if is_narrow else PATIENCE_S
        while not self._is_over:
            await asyncio.sleep(0.5)
            now = world.loop.time()
            entries = world.oracle.entries
            due = [id_ for id_, entry in entries.items() if not entry.copies and not entry.is_scheduled]
            waiting = {id_: waiting.get(id_, now) for id_ in due}
            for id_, since in waiting.items():
                if now - since > patience_s:
                    world.oracle.blame(f"liveness: nothing failed, and {id_} waits for {now - since:.1f} s")
            world.oracle.check(world.seed)

    # -------------------------------------------------------- applications and the operator

    async def apply(self) -> None:
        """Locks and changes rows that are none of its business (S2); has triggers that refuse some rows' marks."""
        database = self._world.database
        rng = source(self._world.seed, "application")
        while not self._is_over:
            await asyncio.sleep(rng.expovariate(self._climate.application_rate))
            row = self._some_row(rng) if database.is_up else None
            if row is None or row.id in database.row_locks or row.id in database.unmarkable:
                continue
            roll = rng.random()
            balks_from = 1.0 - self._climate.balking
            if roll < min(0.4, balks_from):
                database.updated(row)
                database.commit(synchronous=database.options.others_synchronous)
            elif roll < balks_from or row.aside is Aside.PARKED:
                self._lock(rng, row.id)
            else:
                database.unmarkable.add(row.id)

    def _lock(self, rng: random.Random, id_: str) -> None:
        locks = self._world.database.row_locks
        locks.add(id_)
        self._world.loop.call_later(rng.choice([0.01, 0.2, 3.0]), locks.discard, id_)

    def _some_row(self, rng: random.Random) -> DbRow | None:
        unsent = self._world.database.unsent()
        if rng.random() < self._climate.meddling:
            troubled = {row.key for row in unsent if row.aside is not None and row.key is not None}
            unsent = [row for row in unsent if row.key in troubled]
        return rng.choice(unsent) if unsent else None

    async def operate(self) -> None:
        """Redrives and discards what is parked; ends faults once their trigger is mended, or before."""
        world = self._world
        rng = source(world.seed, "operator")
        while not self._is_over:
            await asyncio.sleep(rng.expovariate(self._climate.operator_rate))
            if not world.database.is_up:
                continue
            if world.database.faults and rng.random() < 0.5:
                seq, id_ = rng.choice(sorted(world.database.faults))
                if rng.random() < 0.7:
                    world.database.unmarkable.discard(id_)
                await world.end_fault(seq, id_)
                continue
            parked = world.parked()
            if parked:
                some = rng.sample(parked, rng.randint(1, min(3, len(parked))))
                act = "redrive" if rng.random() < 1.0 - self._climate.discard_share else "discard"
                hold_s = rng.choice(self._climate.ponders_s)
                await world.operate(act, [row.id for row in some], hold_lock_s=hold_s)


def _lull(rng: random.Random) -> float:
    """Until the next row: at once, about when the relay arms the doorbell (a tenth of a second of silence), or long."""
    return rng.choice([rng.uniform(0.0, 0.01), rng.uniform(0.09, 0.2), rng.uniform(0.09, 0.2), rng.uniform(1.0, 4.0)])
