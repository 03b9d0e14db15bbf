"""Rows that cannot go keep nobody waiting who could (I5), with the default settings and many of them."""

from __future__ import annotations

import asyncio

import pytest

from relay.core.settings import EngineSettings, Unroutable

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
