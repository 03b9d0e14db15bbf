"""Rows that cannot go keep nobody waiting who could (I5), with the default settings and many of them."""

from __future__ import annotations

import asyncio
import random

import pytest

from relay.core.settings import EngineSettings, Ordering, Unroutable

from .broker import BrokerOptions
from .steps import is_aside, play
from .tables import DatabaseOptions
from .world import World

MANY = 800
SPREAD = DatabaseOptions(shards_used=64)


def test_rows_that_fall_due_together_go_together() -> None:
    """Two hundred went at a time, and the next a second later."""

    async def script(world: World) -> None:
        world.start()
        ids = insert(world, MANY, available_in_s=3.0)
        await asyncio.sleep(3.0)
        await world.delivered(*ids, timeout_s=1.0)

    play(script, EngineSettings(), SPREAD)


def test_redriven_rows_go_together() -> None:
    async def script(world: World) -> None:
        world.start()
        ids = await parked(world)
        world.rabbit.route("nowhere", True)
        await world.operate("redrive", ids)
        await world.delivered(*ids, timeout_s=1.0)

    play(script, EngineSettings(on_unroutable=Unroutable.PARK), SPREAD)


def test_due_rows_of_held_keys_do_not_hide_the_others() -> None:
    """They are only tested, and become held."""

    async def script(world: World) -> None:
        world.start()
        ids = await parked(world)
        insert(world, MANY, available_in_s=3.0)
        (free,) = world.add("free", available_in_s=3.1)
        await asyncio.sleep(3.1)
        await world.delivered(free, timeout_s=0.5)
        world.rabbit.route("nowhere", True)
        await world.operate("redrive", ids)

    play(script, EngineSettings(on_unroutable=Unroutable.PARK), SPREAD)


def test_nacked_rows_that_are_due_do_not_hide_the_others() -> None:
    """Those of a full queue are due again and again; the oldest stayed in memory and were all that was seen."""

    async def script(world: World) -> None:
        world.rabbit.full.add("full")
        insert(world, MANY, event_type="full")
        world.start()
        await asyncio.sleep(40.0)
        for _ in range(2):
            (free,) = world.add("free", available_in_s=1.0)
            await asyncio.sleep(1.0)
            await world.delivered(free, timeout_s=0.5)
            await asyncio.sleep(3.0)
        world.rabbit.full.clear()

    play(script, EngineSettings(), SPREAD)


def test_a_wave_of_due_rows_leaves_room_for_ordinary_ones() -> None:
    """They were read as soon as anything left memory, and a page, which wants room for many, only when the last of them
    was through: a redrive, or a rung of the ladder, stopped the traffic of a slow relay for as long as it took."""

    async def script(world: World) -> None:
        ids = await parked(world)
        world.rabbit.route("nowhere", True)
        await world.operate("redrive", ids)
        began = world.loop.time()
        for n in range(8):
            await world.delivered(*world.add(f"free{n}"), timeout_s=4.0)
        assert world.loop.time() - began < MANY / 100

    async def begun(world: World) -> None:
        world.start()
        await script(world)

    play(begun, EngineSettings(on_unroutable=Unroutable.PARK, read_ahead_max=200, rate_max=100.0), SPREAD)


def test_rows_of_a_full_queue_that_are_due_without_an_end_stop_nobody() -> None:
    """More of them than the relay tries in the half minute that each is put off: some were always due, and filled memory for
    ever."""

    async def script(world: World) -> None:
        world.rabbit.full.add("full")
        insert(world, 2400, event_type="full")
        world.start()
        await asyncio.sleep(60.0)
        for n in range(5):
            await world.delivered(*world.add(f"free{n}"), timeout_s=10.0)
        world.rabbit.full.clear()

    slow = BrokerOptions(latency=(0.1, 0.1), confirm=(0.15, 0.15))
    play(script, EngineSettings(read_ahead_max=400, in_flight_max=40), SPREAD, slow)


@pytest.mark.parametrize(("keys", "rows_each"), [(300, 8), (20, 60)])
def test_a_full_queue_with_few_heads_and_many_behind_them(keys: int, rows_each: int) -> None:
    """P2: memory was full of what waited behind some hundred nacked rows, and nothing else was read meanwhile."""

    async def script(world: World) -> None:
        world.rabbit.full.add("full")
        for _ in range(rows_each):
            insert(world, keys, event_type="full")
        world.start()
        await asyncio.sleep(2.0)
        for _ in range(8):
            await world.delivered(*world.add("free"), timeout_s=3.0)
            await asyncio.sleep(0.5)
        world.rabbit.full.clear()

    play(script, EngineSettings(read_ahead_max=800), SPREAD)


def test_a_full_queue_with_one_key_and_many_behind_it() -> None:
    """A key's rows may fill a quarter of memory, and with it their shard."""

    async def script(world: World) -> None:
        world.rabbit.full.add("full")
        for _ in range(400):
            insert(world, 1, event_type="full")
        world.start()
        await asyncio.sleep(2.0)
        await world.delivered(*world.add("free"), timeout_s=2.0)
        world.rabbit.full.clear()

    play(script, EngineSettings(read_ahead_max=800))


def insert(world: World, keys: int, *, event_type: str = "ok", available_in_s: float | None = None) -> list[str]:
    """A row of each key, in one transaction."""
    transaction = world.begin()
    ids = [
        world.insert(transaction, f"k{number}", event_type=event_type, available_in_s=available_in_s)
        for number in range(keys)
    ]
    world.commit(transaction)
    return ids


async def parked(world: World) -> list[str]:
    """A parked row of each key."""
    world.rabbit.route("nowhere", False)
    ids = insert(world, MANY, event_type="nowhere")
    for id_ in ids:
        await is_aside(world, id_, "parked")
    return ids


# ---------------------------------------------------------------- a mute queue


@pytest.mark.parametrize("ordering", list(Ordering))
def test_a_mute_queue_stops_nobody_for_long(ordering: Ordering) -> None:
    """P2: its rows filled the window, and the window of each link that was built anew for the silence."""

    async def script(world: World) -> None:
        world.rabbit.silence("mute", True)
        insert(world, MANY, event_type="mute")
        world.start()
        await asyncio.sleep(5.0)
        (first,) = world.add("free")
        await world.delivered(first, timeout_s=20.0)
        for n in range(20):
            await world.delivered(*world.add(f"free{n}", 10), timeout_s=3.0)
            await asyncio.sleep(3.0)
        world.rabbit.silence("mute", False)

    quick = EngineSettings(ordering=ordering, confirm_timeout_s=1.0, in_flight_max=100)
    play(script, quick, SPREAD)


def test_more_rows_of_a_mute_queue_than_memory_holds_stop_nobody() -> None:
    """Nobody else's are read before some of them have made room: slowly, for it may be the whole broker that is silent."""

    async def script(world: World) -> None:
        world.rabbit.silence("mute", True)
        for _ in range(5):
            insert(world, MANY, event_type="mute")
        (free,) = world.add("free")
        world.start()
        await world.delivered(free, timeout_s=200.0)
        world.rabbit.silence("mute", False)

    play(script, EngineSettings(confirm_timeout_s=1.0, in_flight_max=100, read_ahead_max=400), SPREAD)


@pytest.mark.parametrize("ordering", [Ordering.STRICT, Ordering.NONE])
@pytest.mark.parametrize("seed", range(4))
def test_queues_that_fall_silent_and_speak_lose_and_reorder_nothing(ordering: Ordering, seed: int) -> None:
    """Two relays, keys whose rows go to several queues, links that break in between; the oracle judges. (`pipelined` promises no order where
    links break.)"""

    async def script(world: World) -> None:
        chance = random.Random(seed)
        kinds = ("mute", "dumb", "loud")
        for name in ("R1", "R2"):
            world.start(name)
        for _ in range(60):
            match chance.randrange(6):
                case 0:
                    world.rabbit.silence(chance.choice(kinds[:2]), chance.random() < 0.6)
                case 1 if world.rabbit.links:
                    chance.choice(world.rabbit.links).cut()
                case _:
                    for _ in range(chance.randint(1, 20)):
                        world.add(f"k{chance.randrange(8)}", chance.randint(1, 3), event_type=chance.choice(kinds))
            await asyncio.sleep(chance.uniform(0.1, 4.0))
        for kind in kinds:
            world.rabbit.silence(kind, False)

    quick = EngineSettings(ordering=ordering, confirm_timeout_s=0.5, in_flight_max=30, read_ahead_max=200)
    play(script, quick, DatabaseOptions(shards_used=4))
