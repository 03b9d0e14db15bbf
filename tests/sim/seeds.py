"""Random histories: writers, an operator and faults, all drawn from one seed.

After the last fault everything heals; then every committed row must be done in bounded time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass, replace

from relay.core.settings import Ordering

from .actors import Actors
from .climate import Climate
from .faults import Faults
from .loop import run_virtual
from .weather import CALMS, climate
from .world import World


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


def _prepare(seed: int, without: Collection[str], seconds: float | None) -> Climate:
    drawn = climate(seed)
    for name in without:
        if name in CALMS:
            CALMS[name](drawn)
    if seconds is not None:
        drawn.seconds = min(seconds, drawn.seconds)
    if drawn.options.settings.ordering is Ordering.PIPELINED and not drawn.has_faults:
        # What it promises, it promises while nothing fails: nacks, returns and suspects are failures.
        drawn.options.broker.nacks = 0.0
        drawn.options.database.others_synchronous = True
        drawn.has_poison = False
    return drawn


def _relax(world: World, drawn: Climate) -> None:
    """What this history does not promise."""
    settings = world.options.settings
    is_pipelined = settings.ordering is Ordering.PIPELINED
    # A park whose commit is lost with the database has let its key go on (RELAY_SETTLE_COMMIT=off).
    may_lose_parks = not world.options.database.settle_synchronous and not settings.holds_when_parked
    if (is_pipelined and drawn.has_faults) or may_lose_parks:
        world.oracle.rules = replace(world.oracle.rules, is_ordered=False)


async def _history(seed: int, without: Collection[str], seconds: float | None) -> Result:
    drawn = _prepare(seed, without, seconds)
    world = World(seed, drawn.options)
    _relax(world, drawn)
    end = world.loop.time() + drawn.seconds
    faults = Faults(world, drawn, end, without)
    # A message over which the broker closes a link repeats what was on it; so does an operator who ends a fault.
    may_repeat = drawn.has_faults or drawn.options.broker.nacks > 0 or drawn.has_poison or drawn.has_application
    await _blow(world, drawn, faults, end)
    await _heal(world, faults)
    await world.drain(timeout_s=90.0)
    await world.finish()
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


async def _blow(world: World, drawn: Climate, faults: Faults, end: float) -> None:
    for _ in range(drawn.relays):
        world.start()
    actors = Actors(world, drawn, end)
    acts = [actors.write(number, rate) for number, rate in enumerate(drawn.writers)]
    if drawn.has_application:
        acts.append(actors.apply())
    if drawn.has_operator:
        acts.append(actors.operate())
    if drawn.has_lulls:
        acts.append(actors.expect())
    if drawn.has_faults:
        acts.append(faults.blow())
    await asyncio.gather(*acts)


async def _heal(world: World, faults: Faults) -> None:
    world.history.note("world", "HEALS")
    while not world.database.is_up or not world.rabbit.is_up:
        await asyncio.sleep(0.05)
    faults.heal()
    world.pause(False)
    world.rabbit.route("flaky", True)
    world.rabbit.options.nacks = world.rabbit.options.returns = 0.0
    options = world.database.options
    options.page_refusals = options.settle_refusals = options.other_refusals = options.slow_share = 0.0
    world.network.stalled_until = 0.0
    if not world.running:
        world.start()


def play(seed: int, *, without: Collection[str] = (), seconds: float | None = None) -> Result:
    """One history; raises Violation (or what broke) with its end. `without`: parts left out (`weather.CALMS`, kinds of
    faults); `seconds`: it ends sooner."""
    return run_virtual(lambda: _history(seed, without, seconds), steps_max=3_000_000, seconds_max=3_000.0)
