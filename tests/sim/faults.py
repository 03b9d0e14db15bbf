"""What goes wrong during a history, and how it heals. Each kind of fault draws from a source of its own."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Collection

from relay.core.ports import Closed

from .loop import Life
from .weather import Climate, source
from .world import Relay, World

Fault = Callable[[random.Random], Awaitable[None]]


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
        chosen = [*sure, *rng.sample([name for name in self.names() if name not in sure], rng.randint(1, 6))]
        rate = rng.choice([0.3, 1.0, 3.0])
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
        if self._climate.is_set_back:
            self._world.set_back(rng.randint(1, 5))


def _span(rng: random.Random) -> float:
    return rng.choice([0.01, 0.2, 1.0, 3.0])
