"""Rows that cannot go keep nobody waiting who could (I5), with the default settings and many of them."""

from __future__ import annotations

import asyncio

import pytest

from relay.core.settings import EngineSettings, Unroutable

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
