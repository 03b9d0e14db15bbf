"""What goes wrong during a history, and how it heals. Each kind of fault draws from a source of its own."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Collection

from relay.core.ports.broker import Closed
from relay.core.ports.outbox import Due, Page, Settlement
from relay.message import Row

from .climate import Climate, source
from .loop import Life
from .wire import Call
from .world import Relay, World

Fault = Callable[[random.Random], Awaitable[None]]

STEPS = (
    ("settle", "before"),
    ("settle", "between"),
    ("settle", "after"),
    ("settle", "after"),
    ("settle", "after"),
    ("settle", "after"),
    ("page", "after"),
    ("due", "after"),
    ("followers", "after"),
    ("claim", "after"),
    ("renew", "after"),
    ("release", "before"),
    ("discard_parked", "between"),
)
"""Statements of a relay, and when something happens to them: before they act, in the middle, or before their answer."""

SURE_ONLY = frozenset({"usurp"})
"""Kinds that happen only in the seasons that name them: the histories of all others are what they were without them."""

AMBUSH_S = 1.0
"""So long an ambush waits for its statement."""


class Faults:
    """`without`: kinds that are drawn and not done."""

    def __init__(self, world: World, climate: Climate, end: float, without: Collection[str] = ()) -> None:
        self._world = world
        self._climate = climate
        self._end = end
        self._without = without
        self._healing: list[Callable[[], None]] = []
        self._deprived: Relay | None = None

    @staticmethod
    def names() -> list[str]:
        return [name.removeprefix("_do_") for name in vars(Faults) if name.startswith("_do_")]

    async def blow(self) -> None:
        world = self._world
        rng = source(world.seed, "faults")
        sure = self._climate.sure_faults
        others = [name for name in self.names() if name not in sure and name not in SURE_ONLY]
        others_max = self._climate.other_faults_max
        chosen = [*sure, *rng.sample(others, rng.randint(0 if sure else 1, max(0 if sure else 1, others_max)))]
        rate = rng.choice(self._climate.fault_rates)
        sources = {name: source(world.seed, name) for name in chosen}
        while True:
            await asyncio.sleep(rng.expovariate(rate))
            if world.loop.time() >= self._end:
                return
            name = rng.choice(chosen)
            if name not in self._without:
                fault: Fault = getattr(self, f"_do_{name}")
                await fault(sources[name])

    def heal(self) -> None:
        """All of it; but a relay may stay without its broker while another one has one (L6)."""
        while self._healing:
            self._healing.pop()()
        others = [relay for relay in self._world.running if relay is not self._deprived]
        if self._deprived is not None and not others:
            self._deprived.broker.is_refused = False

    def _later(self, after_s: float, heal: Callable[[], None]) -> None:
        """Heal after a while, at the latest when the weather ends."""
        self._healing.append(heal)

        def once() -> None:
            if heal in self._healing:
                self._healing.remove(heal)
                heal()

        self._world.loop.call_later(after_s, once)

    def _some(self, rng: random.Random) -> Relay | None:
        return rng.choice(self._world.running) if self._world.running else None

    def _top_up(self) -> None:
        alive = [each for each in self._world.relays if not each.process.is_dead and not each.task.done()]
        if len(alive) < self._climate.relays:
            self._world.start()

    # -------------------------------------------------------- relays

    async def _do_start(self, rng: random.Random) -> None:
        if len(self._world.running) < 4:
            self._world.start()

    async def _do_stop(self, rng: random.Random) -> None:
        relay = self._some(rng)
        if relay is not None:
            await relay.stop()
            self._top_up()

    async def _do_kill(self, rng: random.Random) -> None:
        relay = self._some(rng)
        if relay is not None:
            self._world.kill_noticed = (0.0, rng.choice([0.0, 0.03, 10.0]))
            relay.kill()
            await asyncio.sleep(rng.choice([0.0, 0.1, 1.0]))
            self._top_up()

    async def _do_freeze(self, rng: random.Random) -> None:
        relay = self._some(rng)
        if relay is not None:
            relay.freeze()

            def thaw() -> None:
                if relay.process.life is Life.FROZEN:
                    relay.thaw()

            self._later(rng.choice([0.05, 1.0, 4.0, 9.0]), thaw)

    # -------------------------------------------------------- at a step of a statement

    async def _do_ambush(self, rng: random.Random) -> None:
        """Something happens just when a statement begins, is half done, or has acted and not been answered."""
        world = self._world
        relay = self._some(rng)
        if relay is None:
            return
        name, at = rng.choice(STEPS)
        stop = world.stop_at(name, at=at, relay=relay, when=_decides if rng.random() < 0.7 else None)
        try:
            call = await stop.reached(AMBUSH_S)
        except TimeoutError:
            world.network.stops.remove(stop)
            return
        world.history.note("world", "AMBUSHES", f"{name} of {relay.name}, {at} it acts")
        act: Callable[[random.Random, Relay, Call], Awaitable[None]] = rng.choice(
            [
                self._lose_answer,
                self._lose_answer,
                self._lose_answer,
                self._touch,
                self._touch,
                self._hold_up,
                self._kill,
                self._unseat_owner,
            ]
        )
        await act(rng, relay, call)
        stop.resume()
        self._top_up()

    async def _do_sever(self, rng: random.Random) -> None:
        """A relay does not hear that its decisions were written: they are, or are not, when it is back."""
        relay = self._some(rng)
        if relay is None:
            return
        stop = self._world.stop_at("settle", at=rng.choice(["between", "after", "after"]), relay=relay, when=_decides)
        try:
            call = await stop.reached(AMBUSH_S)
        except TimeoutError:
            self._world.network.stops.remove(stop)
            return
        await self._lose_answer(rng, relay, call)
        stop.resume()

    async def _kill(self, rng: random.Random, relay: Relay, call: Call) -> None:
        self._world.kill_noticed = (0.0, rng.choice([0.0, 0.03]))
        relay.kill()

    async def _lose_answer(self, rng: random.Random, relay: Relay, call: Call) -> None:
        """The relay is cut off just now; an operator may act before it is back."""
        relay.outbox.cut(rng.choice([0.0, 0.1, 1.0]))
        if self._climate.has_operator and call.is_applied and rng.random() < 0.5:
            await self._world.operate("redrive", [row.id for row in self._world.parked()])

    async def _hold_up(self, rng: random.Random, relay: Relay, call: Call) -> None:
        """The statement takes long."""
        span_s = rng.choice([0.01, 0.2, 1.0])
        self._world.oracle.ails_for(relay.name, self._world.loop.time() + span_s)
        await asyncio.sleep(span_s)

    async def _unseat_owner(self, rng: random.Random, relay: Relay, call: Call) -> None:
        database = self._world.database
        owned = [number for number, shard in database.shards.items() if shard.owner == relay.name]
        used = [number for number in owned if number < database.options.shards_used and database.is_shard_free(number)]
        if used and database.is_up:
            self._world.unseat(rng.choice(used))

    async def _touch(self, rng: random.Random, relay: Relay, call: Call) -> None:
        """An application changes one of the statement's rows, or locks it for a while."""
        database = self._world.database
        stored = [database.rows.get((row.seq, row.id)) for row in _rows_of(call)]
        unsent = [row for row in stored if row is not None and row.sent_at is None and row.id not in database.row_locks]
        if not unsent or not database.is_up:
            return
        row = rng.choice(unsent)
        if rng.random() < 0.5:
            database.updated(row)
            database.commit(synchronous=database.options.others_synchronous)
        else:
            database.row_locks.add(row.id)
            self._later(_span(rng), lambda: database.row_locks.discard(row.id))

    # -------------------------------------------------------- the broker

    async def _do_cut_link(self, rng: random.Random) -> None:
        if self._world.rabbit.links:
            closed = rng.choice([Closed.CONNECTION, Closed.CONNECTION, Closed.REFUSED])
            rng.choice(self._world.rabbit.links).cut(closed=closed)

    async def _do_broker_down(self, rng: random.Random) -> None:
        if self._world.rabbit.is_up:
            self._world.rabbit.go_down(_span(rng))

    async def _do_block(self, rng: random.Random) -> None:
        rabbit = self._world.rabbit
        if not rabbit.is_blocked:
            rabbit.block(True)
            self._later(_span(rng), lambda: rabbit.block(False))

    async def _do_mute(self, rng: random.Random) -> None:
        rabbit = self._world.rabbit
        if not rabbit.is_mute:
            rabbit.mute(True)
            self._later(rng.choice([0.01, 0.2, 1.0, 7.0]), lambda: rabbit.mute(False))

    async def _do_hush(self, rng: random.Random) -> None:
        rabbit = self._world.rabbit
        if not rabbit.is_hushed:
            rabbit.hush(True)
            self._later(rng.choice([0.01, 0.2, 1.0, 7.0]), lambda: rabbit.hush(False))

    async def _do_no_exchange(self, rng: random.Random) -> None:
        rabbit = self._world.rabbit
        if rabbit.has_exchange:
            rabbit.has_exchange = False
            self._later(_span(rng), lambda: setattr(rabbit, "has_exchange", True))

    async def _do_unbind(self, rng: random.Random) -> None:
        self._world.rabbit.route("flaky", False)
        self._later(_span(rng), lambda: self._world.rabbit.route("flaky", True))

    async def _do_deprive(self, rng: random.Random) -> None:
        """One relay's way to the broker is gone, for good if another one has one (L6)."""
        relay = self._some(rng)
        if relay is None or self._deprived is not None:
            return
        self._deprived = relay
        relay.broker.is_refused = True
        self._world.history.note(relay.name, "DEPRIVED", "of its broker")
        if relay.broker.link is not None:
            relay.broker.link.cut()

    # -------------------------------------------------------- the database

    async def _do_crash(self, rng: random.Random) -> None:
        database = self._world.database
        if database.is_up:
            database.crash(down_s=rng.choice([0.01, 0.5, 3.0]), loses=rng.random() < 0.7)

    async def _do_terminate(self, rng: random.Random) -> None:
        sessions = sorted(self._world.database.sessions, key=lambda each: each.pid)
        if sessions:
            self._world.database.terminate(rng.choice(sessions), "terminated by an administrator")

    async def _do_usurp(self, rng: random.Random) -> None:
        """The database's clock is set forward by more than a lease while a page and a renewal are on their way, slowly: another
        relay takes over meanwhile (L8)."""
        world, relay = self._world, self._some(rng)
        if relay is None:
            return
        renewal, page = (world.stop_at(name, relay=relay) for name in ("renew", "page"))
        after_s = rng.choice([0.5, 1.0, 2.0])
        world.oracle.ails_for(relay.name, world.loop.time() + 2 * AMBUSH_S + after_s + 1.0)
        try:
            async with asyncio.timeout(2 * AMBUSH_S):
                await renewal.reached()
                await page.reached()
        except TimeoutError:
            for stop in (renewal, page):
                if stop.call is None:
                    world.network.stops.remove(stop)
                else:
                    stop.resume()
            return
        world.jump(8.0)
        self._later(after_s, page.resume)
        self._later(after_s + 0.2, renewal.resume)

    async def _do_cut_database(self, rng: random.Random) -> None:
        relay = self._some(rng)
        if relay is not None:
            relay.outbox.cut(rng.choice([0.0, 0.1, 2.0]))

    async def _do_stall(self, rng: random.Random) -> None:
        self._world.stall(_span(rng))

    async def _do_unseat(self, rng: random.Random) -> None:
        database = self._world.database
        shard = rng.randrange(database.options.shards_used)
        if database.is_up and database.is_shard_free(shard):
            self._world.unseat(shard)

    async def _do_lock_shard(self, rng: random.Random) -> None:
        """Somebody keeps a shard's row locked (L2)."""
        database = self._world.database
        shard = rng.randrange(database.options.shards_used)
        if database.is_up and database.is_shard_free(shard):
            self._later(rng.choice([0.05, 0.5, 3.0, 6.0]), database.lock_shards({shard}))

    async def _do_jump(self, rng: random.Random) -> None:
        """The database's clock is set (I7)."""
        self._world.jump(rng.choice([-3.0, -0.5, 0.5, 3.0, 8.0]))

    async def _do_pause(self, rng: random.Random) -> None:
        self._world.pause(True)
        self._later(_span(rng), lambda: self._world.pause(False))

    async def _do_set_back(self, rng: random.Random) -> None:
        """The sequence goes back, and rows come at once, before anybody sees it there, or later."""
        by = rng.randint(1, 5)
        if self._climate.is_set_back and self._world.set_back(by) and rng.random() < 0.7:
            self._world.add(f"k{rng.randrange(self._climate.keys)}", rng.randint(1, by))


def _span(rng: random.Random) -> float:
    return rng.choice([0.01, 0.2, 1.0, 3.0])


def _decides(call: Call) -> bool:
    """A settlement that does more than mark what was sent; or any other statement."""
    settlement = call.argument
    return not isinstance(settlement, Settlement) or len(settlement) > len(settlement.sent)


def _rows_of(call: Call) -> list[Row]:
    if isinstance(call.argument, Settlement):
        settlement = call.argument
        failed = [setback.row for setback in settlement.setbacks]
        return [*failed, *settlement.followers, *settlement.tested, *settlement.sent]
    if isinstance(call.result, Due):
        return [*call.result.released, *call.result.blocked]
    return list(call.result.rows) if isinstance(call.result, Page) else []
