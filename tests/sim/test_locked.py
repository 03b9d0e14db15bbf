"""Rows that nobody can change for a while, or ever, in the runner's histories (S2, S4, H3)."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import pairwise

import pytest

from .steps import aside, failing_head, is_aside, passes, play, settings
from .world import World


@pytest.mark.parametrize("marks_sent", [True, False])
def test_s4_an_unmarkable_row_is_published_once(marks_sent: bool) -> None:
    """Its mark is refused; its key goes on; neither this relay nor the next one publishes it again."""

    async def script(world: World) -> None:
        first = world.start()
        a1, a2 = world.add("a", 2)
        world.database.unmarkable.add(a1)
        (b,) = world.add("b")
        await world.delivered(a1, a2, b)
        await world.until(lambda: bool(world.database.faults), 5.0)
        first.kill()
        world.start()
        (a3,) = world.add("a")
        await world.delivered(a3)
        assert world.order("a") == [a1, a2, a3]
        assert world.oracle.entries[a1].copies == 1

    play(script, settings(marks_sent=marks_sent))


def test_s4_a_deferral_that_is_refused_holds_nobody() -> None:
    async def script(world: World) -> None:
        world.start()
        world.rabbit.route("nowhere", False)
        w = world.begin()
        a1, a2 = world.insert(w, "a", event_type="nowhere"), world.insert(w, "a")
        world.database.unmarkable.add(a1)
        world.commit(w)
        await world.delivered(a2, timeout_s=5.0)
        assert [id_ for _, id_ in world.database.faults] == [a1]
        assert not world.oracle.entries[a1].copies

    play(script)


def test_s4_a_refused_promotion_passes_the_row() -> None:
    """The head is sent; its follower refuses to become due: it is recorded, the one behind it goes."""

    async def script(world: World) -> None:
        world.start()
        world.rabbit.route("nowhere", False)
        w = world.begin()
        a1, a2, a3 = world.insert(w, "a", event_type="nowhere"), world.insert(w, "a"), world.insert(w, "a")
        world.commit(w)
        await is_aside(world, a1, "deferred")
        assert aside(world, a2) == "held"
        world.database.unmarkable.add(a2)
        world.rabbit.route("nowhere", True)
        await world.delivered(a1, a3, timeout_s=10.0)
        await world.until(lambda: [id_ for _, id_ in world.database.faults] == [a2], 5.0)

    play(script)


@pytest.mark.parametrize("is_killed", [False, True])
def test_h3_an_owed_promotion_is_made_up_for(is_killed: bool) -> None:
    """An application keeps the held follower locked when its head is sent; the relay may end meanwhile."""

    async def script(world: World) -> None:
        relay = world.start()
        a1, a2 = failing_head(world)
        await is_aside(world, a2, "held")
        world.database.row_locks.add(a2)
        world.rabbit.route("nowhere", True)
        await world.until(lambda: world.oracle.entries[a1].is_sent, 5.0)
        # Nobody else waits for that.
        await world.delivered(*world.add("b", 2), timeout_s=1.0)
        if is_killed:
            relay.kill()
            world.database.row_locks.discard(a2)
            world.start()
        else:
            await asyncio.sleep(3.0)
            assert aside(world, a2) == "held"
            world.database.row_locks.discard(a2)
        await world.delivered(a2, timeout_s=5.0)

    play(script)


def test_s2_a_failed_row_that_is_locked_waits_alone() -> None:
    """It cannot be deferred: it keeps its place before its key's later rows, and uses up no attempt meanwhile."""

    async def script(world: World) -> None:
        world.start()
        world.rabbit.route("nowhere", False)
        w = world.begin()
        a1, a2 = world.insert(w, "a", event_type="nowhere"), world.insert(w, "a")
        world.database.row_locks.add(a1)
        world.commit(w)
        for _ in range(40):
            await world.delivered(*world.add("b", 2), timeout_s=1.0)
            await asyncio.sleep(0.5)
        assert aside(world, a1) is None
        assert not world.oracle.entries[a2].copies
        # Not a hot loop: twice as long each time, from half a second on.
        times = [each.time for each in world.oracle.publications[a1]]
        assert len(times) in (5, 6)
        assert all(later - earlier > 0.5 * 2**n for n, (earlier, later) in enumerate(pairwise(times)))
        (relay,) = world.relays
        assert relay.program.metrics.rows_deferred["locked"] in (len(times) - 1, len(times))
        world.database.row_locks.discard(a1)
        await is_aside(world, a1, "deferred")
        world.rabbit.route("nowhere", True)
        await world.delivered(a1, a2)
        assert world.order("a") == [a1, a2]

    play(script)


def test_s2_a_locked_row_whose_shard_is_lost_takes_up_no_window() -> None:
    """It was counted as unsettled when its shard went; with a window of one nothing was published any more."""

    async def script(world: World) -> None:
        relay = world.start()
        (a,) = world.add("a")
        world.database.row_locks.add(a)
        await passes(world, "settle")
        world.unseat(0)
        # Before the locked row is tried again: a renewal tells of the loss.
        relay.program.runner.engine.to_renew.set()
        await passes(world, "claim")
        world.database.row_locks.discard(a)
        await world.delivered(*world.add("b"), timeout_s=5.0)

    play(script, replace(settings(), in_flight_max=1))
