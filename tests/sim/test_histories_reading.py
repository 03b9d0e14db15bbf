"""The histories of reading and floors that break the design without its rules: one test for each row of the last table of docs/protocol.md.

Each test drives the real runner into that history, step by step, and lets the oracle judge: loss, order,
copies, attempts, floors. What a test asserts itself is what the oracle cannot know.
"""

from __future__ import annotations

import asyncio

from relay.core.ports.outbox import Check, Page, PageRequest

from .steps import (
    brings,
    in_flight,
    is_aside,
    is_sent,
    lists_writers,
    owns,
    passes,
    play,
    reads_beyond,
    sees_prepared,
    sees_writers,
    settings,
)
from .tables import DatabaseOptions
from .wire import Stop
from .world import World

# ---------------------------------------------------------------- reading


def test_r2_lows_of_the_ended() -> None:
    """w0 inserts a1, open; check; page; w0 commits; w1 inserts a2, commits: a page above the cursor has a2 alone."""

    async def script(world: World) -> None:
        w0 = world.begin()
        a1 = world.insert(w0, "a")
        world.start()
        await passes(world, "check", when=sees_writers)
        await passes(world, "page")
        world.commit(w0)
        (a2,) = world.add("a")
        await world.delivered(a1, a2)
        assert world.order("a") == [a1, a2]

    play(script)


def test_r2_own_snapshot() -> None:
    """w0 with a1 is visible, its lock not gone; w1 inserts a2, commits: a page that trusts a check of locks has a2."""

    async def script(world: World) -> None:
        world.database.options.lock_lag = (3.0, 3.0)
        w0 = world.begin()
        a1 = world.insert(w0, "a")
        world.start()
        await passes(world, "check", when=sees_writers)
        await passes(world, "page")
        world.commit(w0, release=False)
        await passes(world, "check", when=sees_writers)
        (a2,) = world.add("a")
        await world.delivered(a1, a2, timeout_s=2.0)
        assert world.order("a") == [a1, a2]
        # Struck once: the lock that still shows brings no page back to its low.
        late = await passes(world, "check", when=sees_writers)
        assert late.result is not None

    play(script)


def test_r1_a_lock_that_is_given_up_and_taken_again() -> None:
    """Memory is full: no pages. w0 inserts behind a savepoint; check; it rolls back to it, which gives up the table's lock;
    check; it inserts a1 in the same transaction; check. It counted as ended for ever: the floor passed a1 while it was open."""

    async def script(world: World) -> None:
        relay = world.start()
        await owns(world, relay)
        await world.delivered(*world.add("z"))
        world.rabbit.block(True)
        filler = [id_ for n in range(80) for id_ in world.add(f"b{n}")]
        await asyncio.sleep(2.0)
        w0 = world.begin()
        savepoint = world.database.savepoint(w0)
        world.insert(w0, "x")
        await passes(world, "check", when=sees_writers)
        world.database.roll_back_to(w0, savepoint)
        await passes(world, "check", when=lambda call: isinstance(call.result, Check) and not call.result.writers)
        a1 = world.insert(w0, "a")
        await passes(world, "check", when=sees_writers)
        world.rabbit.block(False)
        await world.delivered(*filler)
        await passes(world, "renew")
        await passes(world, "renew")
        world.commit(w0)
        (a2,) = world.add("a")
        await world.delivered(a1, a2)
        assert world.order("a") == [a1, a2]

    play(script, settings(read_ahead_max=64))


def test_r2_struck_at_arrival() -> None:
    """w0 a1; w1 b2; w0 a3; w1 commits; a page of one row: b2; w0 commits: a page that goes on from 2 has a3."""

    async def script(world: World) -> None:
        relay = world.start()
        await owns(world, relay, 63)
        w0, w1 = world.begin(), world.begin()
        a1 = world.insert(w0, "a")
        b2 = world.insert(w1, "b")
        a3 = world.insert(w0, "a")
        await passes(world, "check", when=lambda call: isinstance(call.result, Check) and len(call.result.writers) > 1)
        stop = world.stop_at("page", at="after", when=brings(b2))
        world.commit(w1)
        call = await stop.reached()
        assert isinstance(call.result, Page)
        assert [row.id for row in call.result.rows] == [b2]
        world.commit(w0)
        stop.resume()
        await world.delivered(a1, b2, a3)
        assert world.order("a") == [a1, a3]

    play(script, settings(read_ahead_max=64))


def test_r2_cursor_never_past_s() -> None:
    """A writer begins and ends between two checks while a page reads beyond S: its row is read all the same."""

    async def script(world: World) -> None:
        world.start()
        await world.delivered(*world.add("z"))
        stop = world.stop_at("page", when=reads_beyond)
        await stop.reached()
        w1 = world.begin()
        a1 = world.insert(w1, "a")
        (b2,) = world.add("b")
        after = world.stop_at("page", at="after", when=brings(b2))
        stop.resume()
        await after.reached()
        world.commit(w1)
        after.resume()
        await world.delivered(a1, b2, timeout_s=2.0)

    play(script)


def test_r3_a_slow_trigger() -> None:
    """w0 has drawn 1, a trigger sleeps, no xid; check; page; w0 commits; w1 a2: a page beyond S has a2."""

    async def script(world: World) -> None:
        world.start()
        await world.delivered(*world.add("z"))
        w0 = world.begin()
        world.database.lock_table(w0)
        seq = world.database.next_seq(w0)
        await passes(world, "check", when=sees_writers)
        await passes(world, "page", when=lists_writers)
        stop = world.stop_at("page")
        world.add("z")
        await stop.reached()
        a1 = world.database.write(w0, seq, key="a")
        world.commit(w0)
        (a2,) = world.add("a")
        stop.resume()
        await world.delivered(a1, a2)
        assert world.order("a") == [a1, a2]

    play(script)


def test_r3_an_xid_that_is_gone_before_its_lock() -> None:
    """w0 has drawn 1, no xid; check; page; w0 commits, its xid's lock goes first; w1 a2; check: w0 still shows."""

    async def script(world: World) -> None:
        world.database.options.lock_lag = (3.0, 3.0)
        world.database.options.xid_goes_first = 1.0
        world.start()
        await world.delivered(*world.add("z"))
        w0 = world.begin()
        world.database.lock_table(w0)
        seq = world.database.next_seq(w0)
        await passes(world, "check", when=sees_writers)
        await passes(world, "page", when=lists_writers)
        stop = world.stop_at("check")
        await stop.reached()
        a1 = world.database.write(w0, seq, key="a")
        world.commit(w0, release=False)
        (a2,) = world.add("a")
        stop.resume()
        await world.delivered(a1, a2, timeout_s=2.0)
        assert world.order("a") == [a1, a2]

    play(script)


def test_r1_a_gap_between_s_and_the_writers() -> None:
    """Writers begin, insert and end between the check's two halves: none of their rows is lost."""

    async def script(world: World) -> None:
        world.start()
        await world.delivered(*world.add("z"))
        for _ in range(3):
            stop = world.stop_at("check", at="between")
            await stop.reached()
            w0 = world.begin()
            a = world.insert(w0, "a")
            (b,) = world.add("b")
            stop.resume()
            await world.delivered(b)
            await passes(world, "page")
            world.commit(w0)
            (c,) = world.add("a")
            await world.delivered(a, c, timeout_s=2.0)

    play(script, database=DatabaseOptions(shards_used=1, check_gap=(0.02, 0.02)))


def test_r1_is_called() -> None:
    """The first row ever: last_value is 1 before anything was called."""

    async def script(world: World) -> None:
        world.start()
        await passes(world, "check", when=lambda call: isinstance(call.result, Check) and call.result.last_seq == 0)
        await passes(world, "renew")
        await passes(world, "renew")
        await world.delivered(*world.add("a"), timeout_s=2.0)

    play(script)


def test_r1_prepared() -> None:
    """The check sees w; PREPARE changes its id; the next check takes it for a new writer; COMMIT PREPARED."""

    async def script(world: World) -> None:
        world.start()
        w = world.begin()
        a1 = world.insert(w, "a")
        await world.delivered(*world.add("b", 3))
        await passes(world, "check", when=sees_writers)
        world.database.prepare(w)
        await passes(world, "check", when=sees_prepared)
        await world.delivered(*world.add("b", 3))
        await passes(world, "renew")
        world.commit(w)
        await world.delivered(a1, timeout_s=2.0)

    play(script)


def test_r1_prepared_before_a_takeover() -> None:
    """The first check of a new owner finds a prepared transaction: its low is the claimed floor."""

    async def script(world: World) -> None:
        relay = world.start()
        w = world.begin()
        a1 = world.insert(w, "a")
        await world.delivered(*world.add("b", 3))
        world.database.prepare(w)
        await passes(world, "renew")
        await passes(world, "renew")
        relay.kill()
        world.start()
        await world.delivered(*world.add("b", 3))
        await passes(world, "renew")
        world.commit(w)
        await world.delivered(a1, timeout_s=2.0)

    play(script)


async def is_sent_before(world: World, id_: str, stop: Stop) -> None:
    """The row in flight is confirmed, settled, forgotten; then the stopped result arrives, and nothing comes of it."""
    world.rabbit.mute(False)
    await is_sent(world, id_)
    await asyncio.sleep(0.02)
    stop.resume()
    await asyncio.sleep(1.0)
    assert world.oracle.duplicates() == 0


def test_r4_a_result_that_comes_late() -> None:
    """A read is sent; its row is confirmed, settled, forgotten; the result arrives."""

    async def script(world: World) -> None:
        world.start()
        await world.delivered(*world.add("z"))
        world.rabbit.mute(True)
        first = world.stop_at("page", when=reads_beyond)
        await first.reached()
        (a,) = world.add("a")
        stop = world.stop_at("page", at="after", when=brings(a))
        first.resume()
        await stop.reached()
        stop.resume()
        await in_flight(world, a)
        stop = world.stop_at("page", at="after", when=brings(a))
        await stop.reached()
        await is_sent_before(world, a, stop)

    play(script)


def test_r4_due_rows_that_come_late() -> None:
    """The same for rows that fall due: the row was settled while the query for due ones was on its way."""

    async def script(world: World) -> None:
        world.start()
        world.rabbit.route("nowhere", False)
        (a,) = world.add("a", event_type="nowhere")
        await is_aside(world, a, "deferred")
        world.rabbit.route("nowhere", True)
        world.rabbit.mute(True)
        await in_flight(world, a, copies=2)
        stop = world.stop_at("due", at="after")
        await stop.reached(timeout_s=30.0)
        await is_sent_before(world, a, stop)

    play(script)


def test_r3_rows_behind_a_full_page_are_reached_while_a_writer_has_no_xid() -> None:
    """A DELETE that finds nothing for long, a database 40 ms away, rows that come all the time, and some that cannot go: each
    check sent the pages back to those, and nothing else of their shard was read."""

    async def script(world: World) -> None:
        await owns(world, world.start())
        deletes = world.begin()
        world.database.lock_table(deletes)
        world.rabbit.full.add("full")
        w = world.begin()
        world.insert(w, "hot", event_type="full")
        for _ in range(40):
            world.insert(w, "hot")
        world.commit(w)
        cold = []
        for number in range(100):
            cold += world.add(f"cold {number}")
            await asyncio.sleep(0.02)
        # The last second's may be on their way.
        assert all(world.oracle.entries[id_].copies for id_ in cold[:50])
        world.rabbit.full.clear()
        world.database.end(deletes, commit=False)

    play(script, database=DatabaseOptions(shards_used=1, latency=(0.02, 0.02)))


# ---------------------------------------------------------------- floors


def test_r5_a_floor_over_an_unread_row() -> None:
    """w commits row 1; check; a renewal writes floor 1; crash, nobody had read it."""

    async def script(world: World) -> None:
        relay = world.start()
        await owns(world, relay)
        stop = world.stop_at(
            "page", when=lambda call: isinstance(call.argument, PageRequest) and call.argument.last_seq >= 1
        )
        (a,) = world.add("a")
        await stop.reached()
        await passes(world, "renew")
        await passes(world, "renew")
        relay.kill()
        world.start()
        await world.delivered(a)

    play(script)
