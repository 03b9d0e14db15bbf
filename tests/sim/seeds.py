"""Random histories: writers, an operator and faults, all drawn from one seed.

A seed draws its own weather: how many relays, which settings, how slow everything is and which faults
happen. After the last fault everything heals; then every committed row must be done in bounded time.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from relay.core.ports import Closed
from relay.core.settings import EngineSettings, Ordering, Unroutable
from relay.message import Aside

from .broker import BrokerOptions
from .database import DatabaseOptions, Transaction, TransactionGone
from .loop import Life, run_virtual
from .world import Relay, World, WorldOptions

KEYS = 8


@dataclass(frozen=True, slots=True)
class Result:
    """What a history came to."""

    seed: int
    committed: int
    delivered: int
    duplicates: int
    steps: int
    virtual_s: float
    log: tuple[tuple[str, float], ...]
    """What the queue got, and when."""


def weather(rng: random.Random) -> WorldOptions:
    """Settings, latencies and shares of chance for one history."""
    ordering = rng.choices([Ordering.STRICT, Ordering.PIPELINED, Ordering.NONE], [8, 1, 1])[0]
    settings = EngineSettings(
        ordering=ordering,
        on_unroutable=rng.choices(list(Unroutable), [8, 1, 1])[0],
        holds_when_parked=rng.random() < 0.6,
        read_ahead_max=rng.choice([10, 40, 1000]),
        in_flight_max=rng.choice([1, 4, 20, 500]),
        bytes_max=rng.choice([10_000, 1_000_000]),
        lease_s=rng.choice([2.0, 5.0]),
        rate_max=rng.choice([None, None, None, 200.0]),
        retry_delays_s=rng.choice([(0.1, 0.3), (0.5,), (0.2, 0.5, 1.0)]),
        age_max_s=rng.choice([None, None, 1.0]),
        marks_sent=rng.random() < 0.5,
        retention_s=rng.choice([1.0, 604_800.0]),
        parked_retention_s=rng.choice([None, None, 2.0]),
        confirm_timeout_s=rng.choice([0.5, 30.0]),
        poll_interval_s=rng.choice([0.1, 0.5]),
    )
    fast = rng.choice([0.0002, 0.001, 0.004])
    database = DatabaseOptions(
        latency=(fast / 4, fast),
        slow_share=rng.choice([0.0, 0.01, 0.05]),
        slow=(0.01, rng.choice([0.05, 0.5])),
        check_gap=(0.0, rng.choice([0.0, 0.002, 0.02])),
        lock_lag=(0.0, rng.choice([0.0, 0.002, 0.05])),
        xid_goes_first=rng.choice([0.0, 0.5]),
        session_linger=(0.0, rng.choice([0.0, 0.02, 0.5])),
        settle_synchronous=rng.random() < 0.8,
        others_synchronous=rng.random() < 0.5,
        shards_used=rng.choice([1, 4, 16]),
        due_inline_bytes=rng.choice([100, 16_384]),
        page_refusals=rng.choice([0.0, 0.0, 0.03]),
        settle_refusals=rng.choice([0.0, 0.0, 0.05]),
    )
    fast = rng.choice([0.0002, 0.001, 0.01])
    broker = BrokerOptions(
        latency=(fast / 4, fast),
        confirm=(fast / 2, rng.choice([fast, 0.05])),
        nacks=rng.choice([0.0, 0.0, 0.0, 0.05, 0.7]),
        multiple=rng.choice([0.0, 0.5, 1.0]),
        pipe_rows=rng.choice([2, 20, 100_000]),
        cut_noticed=(0.0, rng.choice([0.0, 0.5])),
    )
    return WorldOptions(database, broker, settings, has_doorbell=rng.random() < 0.7)


class Weather:
    """The actors of one history."""

    def __init__(self, world: World, rng: random.Random, *, seconds: float, faults: bool) -> None:
        self.world = world
        self.rng = rng
        self.end = world.loop.time() + seconds
        self.guards = [asyncio.Lock() for _ in range(KEYS // 2)]
        self.has_faults = faults
        self.healing: list[Callable[[], None]] = []
        self.relays_wanted = rng.choice([1, 2, 2, 3])
        self.has_poison = rng.random() < 0.4
        self.is_gusty = rng.random() < 0.25
        if self.is_gusty:
            # Many short transactions at once: what begins and ends between two checks.
            self.end = world.loop.time() + 1.5

    @property
    def is_over(self) -> bool:
        return self.world.loop.time() >= self.end

    # -------------------------------------------------------- writers

    async def writer(self, rate: float) -> None:
        while not self.is_over:
            await asyncio.sleep(self.rng.expovariate(rate))
            transaction = None
            try:
                transaction = self.world.begin()
                await self._transaction(transaction)
            except TransactionGone:
                await asyncio.sleep(0.05)

    async def _transaction(self, transaction: Transaction) -> None:
        rng = self.rng
        key = rng.randrange(KEYS)
        if key < len(self.guards):
            # The usual business case: writers of a key are serialised by a row that they lock.
            async with self.guards[key]:
                await self._write(transaction, [f"k{key}"])
        else:
            await self._write(transaction, [f"k{key}", f"k{rng.randrange(len(self.guards), KEYS)}", None])

    async def _write(self, transaction: Transaction, keys: list[str | None]) -> None:
        rng, world, database = self.rng, self.world, self.world.database
        count = rng.choice([1, 1, 1, 2, 5])
        for _ in range(count):
            key = rng.choice(keys)
            columns = self._columns()
            kind = rng.random()
            if kind < 0.15:
                # A slow trigger: a seq and no xid yet.
                database.lock_table(transaction)
                seq = database.next_seq(transaction)
                await asyncio.sleep(rng.choice([0.001, 0.03, 0.3]))
                database.write(transaction, seq, key=key, **columns)  # type: ignore[arg-type]
            elif kind < 0.25:
                # A savepoint that is rolled back, after a row of its own.
                kept = len(transaction.rows)
                world.insert(transaction, key, **columns)
                del transaction.rows[kept:]
            else:
                world.insert(transaction, key, **columns)
            if rng.random() < 0.4:
                await asyncio.sleep(rng.choice([0.0, 0.002, 0.02]))
        if rng.random() < 0.05:
            await asyncio.sleep(rng.uniform(0.5, 3.0))
        if rng.random() < 0.1 and transaction.xid is not None and not transaction.rings:
            database.prepare(transaction)
            await asyncio.sleep(rng.choice([0.001, 0.1, 1.0]))
            while not database.is_up:
                await asyncio.sleep(0.1)
        database.end(transaction, commit=rng.random() < 0.85, release=False)

    def _columns(self) -> dict[str, object]:
        rng = self.rng
        columns: dict[str, object] = {"size": rng.choice([10, 10, 10, 1500])}
        roll = rng.random()
        if roll < 0.1:
            columns["event_type"] = "flaky"
        elif roll < 0.13 and self.has_poison:
            columns["event_type"] = "invalid"
        elif roll < 0.15 and self.has_poison:
            columns["event_type"] = rng.choice(["refused", "refused", "refused_all"])
        if rng.random() < 0.05:
            columns["available_in_s"] = rng.choice([-1.0, 0.01, 0.5, 2.0])
        return columns

    # -------------------------------------------------------- applications and the operator

    async def application(self) -> None:
        """Locks and changes rows that are none of its business (S2); has triggers that refuse some rows' marks."""
        rng, database = self.rng, self.world.database
        while not self.is_over:
            await asyncio.sleep(rng.expovariate(2.0))
            pending = [row for row in database.rows.values() if row.sent_at is None]
            if not pending or not database.is_up:
                continue
            row = rng.choice(pending)
            if row.id in database.row_locks or row.id in database.unmarkable:
                continue
            roll = rng.random()
            if roll < 0.4:
                database.updated(row)
                database.commit(synchronous=database.options.others_synchronous)
            elif roll < 0.85 or row.aside is Aside.PARKED:
                database.row_locks.add(row.id)
                await asyncio.sleep(rng.choice([0.01, 0.2, 3.0]))
                database.row_locks.discard(row.id)
            else:
                database.unmarkable.add(row.id)

    async def operator(self) -> None:
        rng, world = self.rng, self.world
        while not self.is_over:
            await asyncio.sleep(rng.expovariate(0.7))
            parked = world.parked()
            if parked and world.database.is_up:
                some = rng.sample(parked, rng.randint(1, min(3, len(parked))))
                act = "redrive" if rng.random() < 0.75 else "discard"
                hold_s = rng.choice([0.0, 0.0, 0.01, 0.5])
                await world.operate(act, [row.id for row in some], hold_lock_s=hold_s)

    # -------------------------------------------------------- faults

    async def faults(self) -> None:
        rng = self.rng
        kinds: list[Callable[[], Awaitable[None]]] = [
            self._kill,
            self._freeze,
            self._stop,
            self._cut_link,
            self._broker_down,
            self._block,
            self._mute,
            self._crash,
            self._terminate,
            self._cut_database,
            self._stall,
            self._unbind,
            self._pause,
            self._start,
            self._no_exchange,
            self._unseat,
        ]
        chosen = rng.sample(kinds, rng.randint(1, 5))
        rate = rng.choice([0.3, 1.0, 3.0])
        while not self.is_over:
            await asyncio.sleep(rng.expovariate(rate))
            await rng.choice(chosen)()

    def _some(self) -> Relay | None:
        return self.rng.choice(self.world.running) if self.world.running else None

    def _span(self) -> float:
        return self.rng.choice([0.01, 0.2, 1.0, 3.0])

    def _later(self, after_s: float, heal: Callable[[], None]) -> None:
        """Heal after a while, at the latest when the weather ends."""
        self.healing.append(heal)

        def once() -> None:
            if heal in self.healing:
                self.healing.remove(heal)
                heal()

        self.world.loop.call_later(after_s, once)

    async def _kill(self) -> None:
        relay = self._some()
        if relay is not None:
            self.world.kill_noticed = (0.0, self.rng.choice([0.0, 0.03, 10.0]))
            relay.kill()
            await asyncio.sleep(self.rng.choice([0.0, 0.1, 1.0]))
            self._top_up()

    def _top_up(self) -> None:
        alive = [each for each in self.world.relays if not each.process.is_dead and not each.task.done()]
        if len(alive) < self.relays_wanted:
            self.world.start()

    async def _start(self) -> None:
        if len(self.world.running) < 4:
            self.world.start()

    async def _stop(self) -> None:
        relay = self._some()
        if relay is not None:
            await relay.stop()
            self._top_up()

    async def _freeze(self) -> None:
        relay = self._some()
        if relay is not None:
            relay.freeze()

            def thaw() -> None:
                if relay.process.life is Life.FROZEN:
                    relay.thaw()

            self._later(self.rng.choice([0.05, 1.0, 4.0, 9.0]), thaw)

    async def _cut_link(self) -> None:
        if self.world.rabbit.links:
            closed = self.rng.choice([Closed.CONNECTION, Closed.CONNECTION, Closed.REFUSED])
            self.rng.choice(self.world.rabbit.links).cut(closed=closed)

    async def _broker_down(self) -> None:
        if self.world.rabbit.is_up:
            self.world.rabbit.go_down(self._span())

    async def _block(self) -> None:
        rabbit = self.world.rabbit
        if not rabbit.is_blocked:
            rabbit.block(True)
            self._later(self._span(), lambda: rabbit.block(False))

    async def _mute(self) -> None:
        rabbit = self.world.rabbit
        if not rabbit.is_mute:
            rabbit.mute(True)
            self._later(self._span(), lambda: rabbit.mute(False))

    async def _no_exchange(self) -> None:
        rabbit = self.world.rabbit
        if rabbit.has_exchange:
            rabbit.has_exchange = False
            self._later(self._span(), lambda: setattr(rabbit, "has_exchange", True))

    async def _crash(self) -> None:
        database = self.world.database
        if database.is_up:
            database.crash(down_s=self.rng.choice([0.01, 0.5, 3.0]), loses=self.rng.random() < 0.7)

    async def _terminate(self) -> None:
        sessions = sorted(self.world.database.sessions, key=lambda each: each.pid)
        if sessions:
            self.world.database.terminate(self.rng.choice(sessions), "terminated by an administrator")

    async def _cut_database(self) -> None:
        relay = self._some()
        if relay is not None:
            relay.outbox.cut(self.rng.choice([0.0, 0.1, 2.0]))

    async def _stall(self) -> None:
        self.world.network.stalled_until = self.world.loop.time() + self._span()

    async def _unbind(self) -> None:
        self.world.rabbit.route("flaky", False)
        self._later(self._span(), lambda: self.world.rabbit.route("flaky", True))

    async def _unseat(self) -> None:
        database = self.world.database
        if database.is_up:
            shard = self.rng.randrange(database.options.shards_used)
            if not database.key_share[shard] and shard not in database.exclusive:
                self.world.unseat(shard)

    async def _pause(self) -> None:
        self.world.pause(True)
        self._later(self._span(), self._resume)

    def _resume(self) -> None:
        if self.world.database.is_up:
            self.world.pause(False)

    # -------------------------------------------------------- all of it

    async def blow(self) -> None:
        rng = self.rng
        for _ in range(self.relays_wanted):
            self.world.start()
        if self.is_gusty:
            actors = [self.writer(40.0) for _ in range(rng.randint(3, 6))]
        else:
            actors = [self.writer(rng.choice([1.0, 4.0, 10.0])) for _ in range(rng.randint(1, 5))]
        if rng.random() < 0.5:
            actors.append(self.application())
        if rng.random() < 0.7:
            actors.append(self.operator())
        if self.has_faults:
            actors.append(self.faults())
        await asyncio.gather(*actors)
        await self._heal()

    async def _heal(self) -> None:
        world = self.world
        world.history.note("world", "HEALS")
        while not world.database.is_up or not world.rabbit.is_up:
            await asyncio.sleep(0.05)
        while self.healing:
            self.healing.pop()()
        world.pause(False)
        world.rabbit.route("flaky", True)
        world.rabbit.options.nacks = 0.0
        options = world.database.options
        options.page_refusals = options.settle_refusals = options.slow_share = 0.0
        world.network.stalled_until = 0.0
        if not world.running:
            world.start()


async def _history(seed: int) -> Result:
    rng = random.Random(f"weather {seed}")
    options = weather(rng)
    has_faults = rng.random() < 0.85
    is_pipelined = options.settings.ordering is Ordering.PIPELINED
    if is_pipelined and not has_faults:
        # What it promises, it promises while nothing fails: nacks and returns are failures.
        options.broker.nacks = 0.0
        options.database.others_synchronous = True
    may_repeat = has_faults or options.broker.nacks > 0
    world = World(seed, options)
    if is_pipelined and has_faults:
        world.oracle.rules = replace(world.oracle.rules, is_ordered=False)
    if not options.database.settle_synchronous and not options.settings.holds_when_parked:
        # A park whose commit is lost with the database has let its key go on (RELAY_SETTLE_COMMIT=off).
        world.oracle.rules = replace(world.oracle.rules, is_ordered=False)
    actors = Weather(world, rng, seconds=rng.choice([2.0, 5.0, 10.0]), faults=has_faults)
    if is_pipelined and not has_faults:
        actors.has_poison = False
    await actors.blow()
    await world.drain(timeout_s=90.0)
    await world.finish()
    # A message over which the broker closes a link repeats what was on it.
    may_repeat = may_repeat or actors.has_poison
    duplicates = world.oracle.duplicates()
    if duplicates and not may_repeat:
        world.oracle.blame(f"I4: {duplicates} duplicates and nothing failed")
        world.oracle.check(seed)
    return Result(
        seed,
        len(world.oracle.entries),
        len(world.oracle.log),
        duplicates,
        world.loop.steps,
        world.loop.time(),
        tuple((each.id, each.time) for each in world.oracle.log),
    )


def play(seed: int) -> Result:
    """One history; raises Violation (or what broke) with its end."""
    return run_virtual(lambda: _history(seed), steps_max=3_000_000, seconds_max=3_000.0)
