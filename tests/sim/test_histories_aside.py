"""The histories of rows aside and their policy that break the design without its rules: one test for each row of the last table of docs/protocol.md.

Each test drives the real runner into that history, step by step, and lets the oracle judge: loss, order,
copies, attempts, floors. What a test asserts itself is what the oracle cannot know.
"""

from __future__ import annotations

import asyncio

from .steps import (
    aside,
    failing_head,
    first_aside,
    in_flight,
    is_aside,
    is_sent,
    parks_or_defers,
    play,
    settings,
)
from .tables import DatabaseOptions
from .world import World

# ---------------------------------------------------------------- aside


def test_h5_a_due_row_stays_aside_until_it_is_sent() -> None:
    """The head is deferred, the floor passes, it falls due and is in flight; crash."""

    async def script(world: World) -> None:
        relay = world.start()
        world.rabbit.route("nowhere", False)
        (a,) = world.add("a", event_type="nowhere")
        await is_aside(world, a, "deferred")
        await world.until(lambda: world.database.shards[0].floor >= 1, what="the floor passes")
        world.rabbit.route("nowhere", True)
        world.rabbit.mute(True)
        await in_flight(world, a, copies=2)
        assert aside(world, a) == "deferred"
        relay.kill()
        world.rabbit.mute(False)
        world.start()
        await is_sent(world, a)

    play(script, settings(retry_delays_s=(3.0,)))


def test_h1_followers_go_aside_with_their_head() -> None:
    """[1, 2] are read; 1 is deferred; the floor passes; crash."""

    async def script(world: World) -> None:
        relay = world.start()
        a1, a2 = failing_head(world)
        await is_aside(world, a1, "deferred")
        assert aside(world, a2) == "held"
        await world.until(lambda: world.database.shards[0].floor >= 2, what="the floor passes")
        relay.kill()
        world.rabbit.route("nowhere", True)
        world.start()
        await world.delivered(a1, a2)
        assert world.order("a") == [a1, a2]

    play(script, settings(retry_delays_s=(3.0,)))


def test_h2_a_row_read_later_is_moved_aside() -> None:
    """1 is deferred; 2 commits later and is read: it waits behind 1."""

    async def script(world: World) -> None:
        a1 = await first_aside(world, "deferred")
        (a2,) = world.add("a")
        await is_aside(world, a2, "held")
        world.rabbit.route("nowhere", True)
        await world.delivered(a1, a2)
        assert world.order("a") == [a1, a2]

    play(script, settings(retry_delays_s=(3.0,)))


def test_h2_a_late_low_row_does_not_free_its_key() -> None:
    """2 is parked; 1 of its key commits late, is tested and free; 3 still waits behind 2."""

    async def script(world: World) -> None:
        world.start()
        world.rabbit.route("nowhere", False)
        w0 = world.begin()
        a1 = world.insert(w0, "a")
        (a2,) = world.add("a", event_type="nowhere")
        await is_aside(world, a2, "parked")
        world.commit(w0)
        await is_sent(world, a1)
        (a3,) = world.add("a")
        await is_aside(world, a3, "held")
        world.rabbit.route("nowhere", True)
        await world.operate("redrive", [a2])
        await world.delivered(a3)
        assert world.order("a") == [a1, a2, a3]

    play(script, settings(parks=True))


def test_h3_a_key_is_never_held_by_nothing() -> None:
    """The head is parked, the follower held, the head discarded by the operator."""

    async def script(world: World) -> None:
        world.start()
        a1, a2 = failing_head(world)
        await is_aside(world, a1, "parked")
        assert aside(world, a2) == "held"
        await world.operate("discard", [a1])
        await world.delivered(a2, timeout_s=5.0)

    play(script, settings(parks=True))


def test_h4_a_scheduled_row_falls_due_behind_a_deferred_one() -> None:
    """1 deferred; scheduled 2 falls due first."""

    async def script(world: World) -> None:
        a1 = await first_aside(world, "deferred")
        (a2,) = world.add("a", available_in_s=1.0)
        await is_aside(world, a2, "scheduled")
        await asyncio.sleep(2.0)
        assert not world.oracle.entries[a2].copies
        world.rabbit.route("nowhere", True)
        await world.delivered(a1, a2)
        assert world.order("a") == [a1, a2]

    play(script, settings(retry_delays_s=(5.0,)))


async def two_parked(world: World) -> tuple[str, str]:
    """1 and 2 of a key, both parked under `hold`: 1 committed after 2 was parked."""
    world.rabbit.route("nowhere", False)
    w0 = world.begin()
    a1 = world.insert(w0, "a", event_type="nowhere")
    (a2,) = world.add("a", event_type="nowhere")
    await is_aside(world, a2, "parked")
    world.commit(w0)
    await is_aside(world, a1, "parked")
    return a1, a2


def test_h4_two_parked_rows_redriven_out_of_order() -> None:
    async def script(world: World) -> None:
        world.start()
        a1, a2 = await two_parked(world)
        world.rabbit.route("nowhere", True)
        await world.operate("redrive", [a2])
        await asyncio.sleep(1.0)
        assert not world.oracle.entries[a2].copies
        await world.operate("redrive", [a1])
        await world.delivered(a1, a2)
        assert world.order("a") == [a1, a2]

    play(script, settings(parks=True))


def test_h4_no_due_row_above_the_cursor() -> None:
    """After a takeover a row is due while a lower one is unread."""

    async def script(world: World) -> None:
        relay = world.start()
        world.rabbit.route("nowhere", False)
        w0 = world.begin()
        a1 = world.insert(w0, "a")
        (a2,) = world.add("a", event_type="nowhere")
        await is_aside(world, a2, "deferred")
        relay.kill()
        world.commit(w0)
        world.rabbit.route("nowhere", True)
        await asyncio.sleep(1.0)
        second = world.start()
        stop = world.stop_at("page", relay=second)
        await stop.reached()
        await asyncio.sleep(1.0)
        assert not world.oracle.entries[a2].copies
        stop.resume()
        await world.delivered(a1, a2)
        assert world.order("a") == [a1, a2]

    play(script)


def test_h4_a_newcomer_below_a_held_row() -> None:
    """The head 1 is due and in flight, 3 held behind it; 2 is read late and moved aside: it goes before 3."""

    async def script(world: World) -> None:
        a1 = await first_aside(world, "deferred")
        w0 = world.begin()
        a2 = world.insert(w0, "a")
        (a3,) = world.add("a")
        await is_aside(world, a3, "held")
        world.rabbit.route("nowhere", True)
        world.rabbit.mute(True)
        await in_flight(world, a1, copies=2)
        world.commit(w0)
        await is_aside(world, a2, "held")
        world.rabbit.mute(False)
        await world.delivered(a1, a2, a3)
        assert world.order("a") == [a1, a2, a3]

    play(script, settings(retry_delays_s=(1.0,)))


def test_h6_a_scheduled_row_holds_nobody() -> None:
    """A row is read before its time: the floor passes it, its key goes on; crash; it goes when due."""

    async def script(world: World) -> None:
        relay = world.start()
        (a1,) = world.add("a", available_in_s=3.0)
        await is_aside(world, a1, "scheduled")
        (a2,) = world.add("a")
        await is_sent(world, a2)
        await world.until(lambda: world.database.shards[0].floor >= 2, what="the floor passes")
        relay.kill()
        world.start()
        await world.delivered(a1, timeout_s=5.0)
        assert world.order("a") == [a2, a1]

    play(script)


def test_h6_a_scheduled_row_whose_key_is_held_when_its_shard_is_taken_up() -> None:
    """1 is deferred; the next owner, which does not know yet what is held, reads 2 in a page that asks. As `held` it would
    go with 1's confirm, before its time."""

    async def script(world: World) -> None:
        relay = world.start()
        world.rabbit.route("nowhere", False)
        for key in "bcd":
            world.add(key, event_type="nowhere")
        (a1,) = world.add("a", event_type="nowhere")
        await is_aside(world, a1, "deferred")
        relay.kill()
        (a2,) = world.add("a", available_in_s=3.0)
        world.start()
        await is_aside(world, a2, "scheduled")
        world.rabbit.route("nowhere", True)
        await is_sent(world, a1)
        await world.delivered(a2, timeout_s=5.0)

    play(script, database=DatabaseOptions(shards_used=1, held_page_rows=1))


def test_h7_the_next_row_waits_for_the_parks_commit() -> None:
    """`continue`: 1 is decided parked, crash before the park's commit: 2 has not gone before."""

    async def script(world: World) -> None:
        relay = world.start()
        world.rabbit.route("nowhere", False)
        stop = world.stop_at("settle", when=parks_or_defers)
        w = world.begin()
        a1, a2 = world.insert(w, "a", event_type="nowhere"), world.insert(w, "a")
        world.commit(w)
        await stop.reached()
        await asyncio.sleep(1.0)
        assert a2 not in world.oracle.publications
        relay.kill()
        world.rabbit.route("nowhere", True)
        world.start()
        await world.delivered(a1, a2)
        assert world.order("a") == [a1, a2]

    play(script, settings(parks=True, continues=True))


def test_h7_under_continue_the_key_goes_on() -> None:
    async def script(world: World) -> None:
        world.start()
        a1, a2 = failing_head(world)
        await is_sent(world, a2)
        assert aside(world, a1) == "parked"
        world.rabbit.route("nowhere", True)

    play(script, settings(parks=True, continues=True))


# ---------------------------------------------------------------- the operator


def test_o1_excludes_settlements() -> None:
    """1 is parked, an operator sees nothing held behind it; 2 is tested before the operator has discarded 1."""

    async def script(world: World) -> None:
        a1 = await first_aside(world, "parked")
        discarding = asyncio.create_task(world.operate("discard", [a1], hold_lock_s=0.5))
        await asyncio.sleep(0.1)
        (a2,) = world.add("a")
        assert await discarding == [a1]
        await world.delivered(a2, timeout_s=5.0)

    play(script, settings(parks=True))


# ---------------------------------------------------------------- the parked row's policy


def test_a_parked_row_keeps_its_policy() -> None:
    """0 and 1 are parked under `hold`, 2 held; a command configured `continue` discards 0: 2 waits for 1."""

    async def script(world: World) -> None:
        world.start()
        a1, a2 = await two_parked(world)
        (a3,) = world.add("a")
        await is_aside(world, a3, "held")
        await world.operate("discard", [a1])
        await asyncio.sleep(1.0)
        assert aside(world, a3) == "held"
        world.rabbit.route("nowhere", True)
        await world.operate("redrive", [a2])
        await world.delivered(a2, a3)
        assert world.order("a") == [a2, a3]

    play(script, settings(parks=True))


def test_an_owner_of_another_policy_rewrites_it() -> None:
    """1 is parked under `hold`, 2 held; a relay with `continue` takes over: 2 goes on."""

    async def script(world: World) -> None:
        relay = world.start()
        a1, a2 = failing_head(world)
        await is_aside(world, a1, "parked")
        relay.kill()
        world.oracle.rules.parked_holds = False
        world.start(settings=settings(parks=True, continues=True))
        await world.delivered(a2)
        world.rabbit.route("nowhere", True)

    play(script, settings(parks=True))


def test_an_owner_of_another_policy_rewrites_it_in_its_next_life_too() -> None:
    """1 is parked under `hold`, 2 held; a relay with `continue` takes over, loses its sessions before it has rewritten 1, and
    finds its leases as they were: else 2 waits until the shard changes hands."""

    async def script(world: World) -> None:
        relay = world.start()
        a1, a2 = failing_head(world)
        await is_aside(world, a1, "parked")
        relay.kill()
        world.oracle.rules.parked_holds = False
        second = world.start(settings=settings(parks=True, continues=True))
        stop = world.stop_at("apply_policy", relay=second)
        call = await stop.reached()
        world.database.terminate(call.session, "terminated by an administrator")
        stop.resume()
        await world.delivered(a2, timeout_s=10.0)
        assert world.database.shards[0].epoch == 2
        world.rabbit.route("nowhere", True)

    play(script, settings(parks=True))
