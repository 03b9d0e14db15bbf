"""Parked rows whose time is over, in the runner's histories (O2), and rows that a floor has passed (R5)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from relay.core.ports.outbox import Searched
from relay.errors import DatabaseRefused
from relay.housekeeping import SEARCH_INTERVAL_S, SEARCH_SHARDS_MAX

from .outbox import FakeOutbox
from .steps import aside, is_aside, owns, play, settings
from .tables import DatabaseOptions
from .wire import Call
from .world import World

RETENTION_S = 30.0
BRIEF = replace(settings(parks=True), parked_retention_s=RETENTION_S)


async def parked_with_follower(world: World) -> tuple[str, str]:
    world.rabbit.route("nowhere", False)
    w = world.begin()
    a1, a2 = world.insert(w, "a", event_type="nowhere"), world.insert(w, "a")
    world.commit(w)
    await is_aside(world, a1, "parked")
    return a1, a2


@pytest.mark.parametrize("relays", [1, 2])
def test_o2_a_parked_row_goes_after_its_retention(relays: int) -> None:
    """Not before; what it held goes then, and one relay's retention does not touch another's shard."""

    async def script(world: World) -> None:
        for _ in range(relays):
            world.start()
        a1, a2 = await parked_with_follower(world)
        await asyncio.sleep(RETENTION_S - 1.0)
        assert (aside(world, a1), aside(world, a2)) == ("parked", "held")
        await world.delivered(a2, timeout_s=15.0)
        assert aside(world, a1) is None
        assert world.oracle.entries[a1].is_discarded
        assert sum(relay.program.metrics.rows_discarded for relay in world.relays) == 1

    play(script, BRIEF)


def test_o2_a_redrive_begins_the_time_anew() -> None:
    async def script(world: World) -> None:
        world.start()
        a1, _ = await parked_with_follower(world)
        await asyncio.sleep(RETENTION_S - 5.0)
        await world.operate("redrive", [a1])
        await asyncio.sleep(RETENTION_S - 5.0)
        assert aside(world, a1) == "parked"
        world.rabbit.route("nowhere", True)

    play(script, BRIEF)


def test_o2_excludes_settlements() -> None:
    """A follower is being tested behind the parked row when that goes: it must not be held by nothing."""

    async def script(world: World) -> None:
        relay = world.start()
        a1, a2 = await parked_with_follower(world)
        await asyncio.sleep(RETENTION_S - 1.0)
        between = world.stop_at("settle", at="between", relay=relay)
        (a3,) = world.add("a")
        await between.reached()
        await asyncio.sleep(1.0)
        discarding = world.stop_at("discard_parked", relay=relay)
        await discarding.reached()
        discarding.resume()
        await asyncio.sleep(0.5)
        assert aside(world, a1) == "parked", "the settlement has the shard"
        between.resume()
        await world.delivered(a2, a3, timeout_s=15.0)
        assert world.order("a") == [a2, a3]

    play(script, BRIEF)


def test_o2_a_row_that_may_not_be_deleted_is_left_out() -> None:
    async def script(world: World) -> None:
        world.start()
        a1, a2 = await parked_with_follower(world)
        world.database.unmarkable.add(a1)
        (b1,) = world.add("b", event_type="nowhere")
        await world.until(lambda: world.oracle.entries[b1].is_discarded, 60.0)
        assert (aside(world, a1), aside(world, a2)) == ("parked", "held")
        world.database.unmarkable.discard(a1)
        world.rabbit.route("nowhere", True)

    play(script, BRIEF)


@pytest.mark.parametrize("marks_sent", [True, False])
def test_r5_lowering_in_both_modes(marks_sent: bool) -> None:
    """Under `delete` nothing was ever purged, and nobody looked below the floors."""

    async def script(world: World) -> None:
        relay = world.start()
        await owns(world, relay)
        await world.delivered(*world.add("z", 200))
        await world.until(lambda: world.database.shards[0].floor >= 200, what="the floor passes")
        world.database.setval(150)
        await world.delivered(*world.add("a"), timeout_s=90.0)

    play(script, settings(marks_sent=marks_sent))


def test_r5_a_search_is_a_few_shards_at_a_time() -> None:
    """Each row that was deleted since the last search costs a visit, while nothing is read: with all shards in one statement a
    quarter of a second under load, which is all that it is given."""

    async def script(world: World) -> None:
        relay = world.start()
        await owns(world, relay)
        searches: list[set[int]] = []

        def seen(call: Call) -> bool:
            assert isinstance(call.argument, list)
            searches.append({shard for shard, _ in call.argument})
            return False

        world.stop_at("search", when=seen)
        await asyncio.sleep(SEARCH_INTERVAL_S + 1.0)
        assert max(map(len, searches)) <= SEARCH_SHARDS_MAX
        assert set().union(*searches) == set(world.database.shards), "each has its turn"

    play(script, settings(), DatabaseOptions(shards_used=64))


def test_r5_a_refused_search_is_of_fewer_shards_the_next_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """And of others: those that cannot be searched in time keep nobody from it."""
    searches: list[list[int]] = []
    search = FakeOutbox._search

    def refused_once(outbox: FakeOutbox, positions: Sequence[tuple[int, int]], limit: int) -> Searched:
        searches.append(sorted({shard for shard, _ in positions}))
        if len(searches) == 1:
            raise DatabaseRefused("canceling statement due to statement timeout")
        return search(outbox, positions, limit)

    monkeypatch.setattr(FakeOutbox, "_search", refused_once)

    async def script(world: World) -> None:
        world.start()
        await world.until(lambda: len(searches) > 2, 60.0)
        assert searches[:3] == [list(range(8)), list(range(8, 12)), list(range(12, 20))]

    play(script, settings(), DatabaseOptions(shards_used=64))
