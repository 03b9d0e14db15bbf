"""Held rows that are loaded behind a due one of their key, in the runner's histories (H4)."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from relay.core.ports.outbox import Due, PageRequest, Settlement
from relay.message import Aside

from .steps import aside, failing_head, in_flight, is_aside, play, settings
from .wire import Call
from .world import Relay, World


async def held_behind(world: World, count: int) -> list[str]:
    """A deferred row and `count` held ones of its key."""
    world.rabbit.route("nowhere", False)
    w = world.begin()
    ids = [world.insert(w, "a", event_type="nowhere"), *(world.insert(w, "a") for _ in range(count))]
    world.commit(w)
    await is_aside(world, ids[-1], "held")
    return ids


def parks(call: Call) -> bool:
    assert isinstance(call.argument, Settlement)
    return any(setback.aside is Aside.PARKED for setback in call.argument.setbacks)


def counted(relay: Relay) -> list[int]:
    """Its questions for due rows: how many rows each brought."""
    calls: list[int] = []
    due = relay.outbox.due

    async def counting(cursors: Mapping[int, int], limit: int, here: Sequence[int] = ()) -> Due:
        found = await due(cursors, limit, here)
        calls.append(len(found.released))
        return found

    relay.outbox.due = counting  # type: ignore[method-assign]
    return calls


@pytest.mark.parametrize("marks_sent", [True, False])
def test_h4_a_key_with_many_held_rows_drains_at_the_confirms_pace(marks_sent: bool) -> None:
    """A question for due rows, a settlement and a promotion a row took 10,000 held rows many minutes."""

    async def script(world: World) -> None:
        relay = world.start()
        ids = await held_behind(world, 400)
        calls = counted(relay)
        world.rabbit.route("nowhere", True)
        began = world.loop.time()
        await world.delivered(*ids, timeout_s=10.0)
        assert world.order("a") == ids
        assert len(calls) < 30, "not one a row"
        assert world.loop.time() - began < 4.0
        assert all(world.oracle.entries[id_].copies == 1 for id_ in ids)

    play(script, settings(marks_sent=marks_sent))


def test_h4_followers_above_the_cursor_wait_for_it() -> None:
    """An application keeps 2 locked when 3 becomes held behind 1; the relay dies; the next one releases 1 before it has
    read 2, which is neither aside nor in memory, for its pages span few seqs and there are many below 2."""

    async def script(world: World) -> None:
        first = world.start()
        a1, b = await held_behind(world, 1)
        (z,) = world.add("z")
        world.database.row_locks.add(z)
        w = world.begin()
        for _ in range(6):
            world.insert(w, "z")
        world.database.end(w, commit=False)
        (a2,) = world.add("a")
        world.database.row_locks.add(a2)
        (a3,) = world.add("a")
        await is_aside(world, a3, "held")
        assert aside(world, a2) is None
        await world.until(lambda: world.database.shards[0].floor == 2, what="the floor has passed what is aside")
        first.kill()
        world.database.row_locks.clear()
        world.rabbit.route("nowhere", True)
        await asyncio.sleep(8.0)  # 1 is due, the lease has run out
        page = world.stop_at("page", relay=world.start(), when=lambda call: _cursor(call) > 2)
        await page.reached()
        await world.delivered(a1, b)
        await asyncio.sleep(0.2)
        page.resume()
        await world.delivered(a2, a3)
        assert world.order("a") == [a1, b, a2, a3]

    play(script, replace(settings(retry_delays_s=(3.0,)), page_span=2))


def _cursor(call: Call) -> int:
    assert isinstance(call.argument, PageRequest)
    return call.argument.cursors[call.argument.shards.index(0)]


def test_h4_a_follower_that_fails_stops_those_behind_it() -> None:
    """It is deferred as any row; those behind it are held again, and nobody is repeated."""

    async def script(world: World) -> None:
        world.start()
        world.rabbit.route("nowhere", False)
        world.rabbit.route("neither", False)
        w = world.begin()
        a1 = world.insert(w, "a", event_type="nowhere")
        a2, a3 = world.insert(w, "a"), world.insert(w, "a", event_type="neither")
        a4, a5 = world.insert(w, "a"), world.insert(w, "a")
        world.commit(w)
        await is_aside(world, a5, "held")
        world.rabbit.route("nowhere", True)
        await world.delivered(a1, a2)
        await world.until(lambda: len(world.oracle.publications.get(a3, ())) >= 1, 5.0)
        await is_aside(world, a3, "deferred")
        assert (aside(world, a4), aside(world, a5)) == ("held", "held")
        world.rabbit.route("neither", True)
        await world.delivered(a3, a4, a5)
        assert world.order("a") == [a1, a2, a3, a4, a5]

    play(script, settings(retry_delays_s=(1.0,)))


def test_h4_a_void_decision_drops_what_was_loaded_behind_it() -> None:
    """1, deferred, is to be parked under `continue`; an application changes it meanwhile: it is deferred still and due, and
    2, loaded behind it and waiting for the park's commit, must not go first."""

    async def script(world: World) -> None:
        relay = world.start()
        a1, a2 = await held_behind(world, 1)
        settle = world.stop_at("settle", relay=relay, when=parks)
        await settle.reached()
        (stored,) = (row for row in world.database.rows.values() if row.id == a1)
        world.database.updated(stored)
        world.database.commit(synchronous=True)
        world.rabbit.route("nowhere", True)
        settle.resume()
        await world.delivered(a1, a2)
        assert world.order("a") == [a1, a2]

    play(script, settings(continues=True))


def test_h2_what_stands_behind_a_row_that_becomes_held_is_tested_too() -> None:
    """`continue`: 2 is to be parked, an application changes it, and the operator redrives 1 beneath it: 2 is loaded anew and
    held behind 1. 3, read when the key was free, went before it."""

    async def script(world: World) -> None:
        relay = world.start()
        world.rabbit.route("nowhere", False)
        world.rabbit.route("neither", False)
        w = world.begin()
        a1, a2 = world.insert(w, "a", event_type="nowhere"), world.insert(w, "a", event_type="neither")
        a3 = world.insert(w, "a")
        world.commit(w)
        await is_aside(world, a1, "parked")
        settle = world.stop_at("settle", relay=relay, when=parks)
        await settle.reached()
        (stored,) = (row for row in world.database.rows.values() if row.id == a2)
        world.database.updated(stored)
        world.rabbit.route("nowhere", True)
        world.rabbit.mute(True)
        await world.operate("redrive", [a1])
        await in_flight(world, a1, copies=2)
        # What is held is not known completely: each row is tested.
        relay.program.runner.engine.chains.holding.take_up(0)
        settle.resume()
        await is_aside(world, a2, "held")
        world.rabbit.route("neither", True)
        world.rabbit.mute(False)
        await world.delivered(a1, a2, a3)
        assert world.order("a") == [a1, a2, a3]

    play(script, settings(parks=True, continues=True))


def test_h4_a_newcomer_between_followers() -> None:
    """1 is in flight, 2 and 4 loaded behind it; 3 commits late and is moved aside: 4 goes after it."""

    async def script(world: World) -> None:
        world.start()
        a1, a2 = failing_head(world)
        w0 = world.begin()
        a3 = world.insert(w0, "a")
        (a4,) = world.add("a")
        await is_aside(world, a4, "held")
        world.rabbit.route("nowhere", True)
        world.rabbit.mute(True)
        await in_flight(world, a1, copies=2)
        world.commit(w0)
        await is_aside(world, a3, "held")
        world.rabbit.mute(False)
        await world.delivered(a1, a2, a3, a4)
        assert world.order("a") == [a1, a2, a3, a4]

    play(script, settings(retry_delays_s=(1.0,)))


def test_s2_a_promoted_row_in_memory_has_its_new_address() -> None:
    """2 was loaded behind 1 and promoted when 1 was sent; then it is returned: its deferral must find it."""

    async def script(world: World) -> None:
        world.start()
        world.rabbit.route("neither", False)
        world.rabbit.route("nowhere", False)
        w = world.begin()
        a1, a2 = world.insert(w, "a", event_type="nowhere"), world.insert(w, "a", event_type="neither")
        world.commit(w)
        await is_aside(world, a2, "held")
        world.rabbit.route("nowhere", True)
        world.rabbit.mute(True)
        await in_flight(world, a1, copies=2)
        world.rabbit.mute(False)
        await is_aside(world, a2, "deferred")
        await world.until(lambda: bool(world.oracle.entries[a2].failures), 5.0)
        await world.until(lambda: any(row.id == a2 and row.attempts == 1 for row in world.database.rows.values()), 1.0)
        assert len(world.oracle.publications[a2]) == 1, "published again, for its deferral had missed"
        world.rabbit.route("neither", True)

    play(script, settings(retry_delays_s=(1.0,)))
