"""The histories that break the design without its rules: one test for each row of the last table of docs/protocol.md.

Each test drives the real runner into that history, step by step, and lets the oracle judge: loss, order,
copies, attempts, floors. What a test asserts itself is what the oracle cannot know.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from relay.core.ports import Check, Page, PageRequest, Settlement
from relay.core.settings import EngineSettings, Ordering, Unroutable

from .broker import BrokerOptions
from .database import DatabaseOptions
from .loop import run_virtual
from .oracle import Outcome
from .wire import Call
from .world import Relay, World, WorldOptions

Script = Callable[[World], Awaitable[None]]


def settings(
    *,
    lease_s: float = 5.0,
    read_ahead_max: int = 1000,
    retry_delays_s: tuple[float, ...] = (0.2,),
    parks: bool = False,
    continues: bool = False,
    ordering: Ordering = Ordering.STRICT,
    marks_sent: bool = True,
) -> EngineSettings:
    return EngineSettings(
        ordering=ordering,
        on_unroutable=Unroutable.PARK if parks else Unroutable.RETRY,
        holds_when_parked=not continues,
        read_ahead_max=read_ahead_max,
        in_flight_max=100,
        lease_s=lease_s,
        retry_delays_s=retry_delays_s,
        marks_sent=marks_sent,
        poll_interval_s=0.1,
    )


def play(script: Script, engine: EngineSettings | None = None, database: DatabaseOptions | None = None) -> None:
    """Run a script in a fresh world of one shard; afterwards everything drains and the oracle judges."""

    async def main() -> None:
        options = WorldOptions(database or DatabaseOptions(shards_used=1), BrokerOptions(), engine or settings())
        world = World(script.__name__, options)
        await script(world)
        await world.drain()
        await world.finish()

    run_virtual(main)


# ---------------------------------------------------------------- steps


async def passes(
    world: World, name: str, relay: Relay | None = None, when: Callable[[Call], bool] | None = None
) -> Call:
    """Until such a call has acted; its answer goes its way."""
    stop = world.stop_at(name, at="after", relay=relay, when=when)
    call = await stop.reached()
    stop.resume()
    return call


def sees_writers(call: Call) -> bool:
    return isinstance(call.result, Check) and bool(call.result.writers)


def sees_prepared(call: Call) -> bool:
    return isinstance(call.result, Check) and any(each.vxid.startswith("-1/") for each in call.result.writers)


def lists_writers(call: Call) -> bool:
    return isinstance(call.argument, PageRequest) and bool(call.argument.numbers)


def reads_beyond(call: Call) -> bool:
    return isinstance(call.argument, PageRequest) and call.argument.beyond


def brings(*ids: str) -> Callable[[Call], bool]:
    def look(call: Call) -> bool:
        return isinstance(call.result, Page) and set(ids) <= {row.id for row in call.result.rows}

    return look


def parks_or_defers(call: Call) -> bool:
    return isinstance(call.argument, Settlement) and bool(call.argument.setbacks)


def aside(world: World, id_: str) -> str | None:
    for row in world.database.rows.values():
        if row.id == id_:
            return row.aside
    return None


async def is_aside(world: World, id_: str, what: str) -> None:
    await world.until(lambda: aside(world, id_) == what, what=f"{id_} {what}")


async def in_flight(world: World, id_: str, copies: int = 1) -> None:
    await world.until(lambda: len(world.oracle.publications.get(id_, ())) >= copies, what=f"{id_} published")


async def is_sent(world: World, id_: str) -> None:
    await world.until(lambda: world.oracle.entries[id_].is_sent, what=f"{id_} sent")


async def owns(world: World, relay: Relay, shard: int = 0) -> None:
    await world.until(lambda: world.database.shards[shard].owner == relay.name, what=f"{relay.name} owns {shard}")


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
        world.rabbit.mute(False)
        await is_sent(world, a)
        await asyncio.sleep(0.02)
        stop.resume()
        await asyncio.sleep(1.0)
        assert world.oracle.duplicates() == 0

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
        world.rabbit.mute(False)
        await is_sent(world, a)
        await asyncio.sleep(0.02)
        stop.resume()
        await asyncio.sleep(1.0)
        assert world.oracle.duplicates() == 0

    play(script)


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
        world.rabbit.route("nowhere", False)
        w = world.begin()
        a1, a2 = world.insert(w, "a", event_type="nowhere"), world.insert(w, "a")
        world.commit(w)
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
        world.start()
        world.rabbit.route("nowhere", False)
        (a1,) = world.add("a", event_type="nowhere")
        await is_aside(world, a1, "deferred")
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
        world.rabbit.route("nowhere", False)
        w = world.begin()
        a1, a2 = world.insert(w, "a", event_type="nowhere"), world.insert(w, "a")
        world.commit(w)
        await is_aside(world, a1, "parked")
        assert aside(world, a2) == "held"
        await world.operate("discard", [a1])
        await world.delivered(a2, timeout_s=5.0)

    play(script, settings(parks=True))


def test_h4_a_scheduled_row_falls_due_behind_a_deferred_one() -> None:
    """1 deferred; scheduled 2 falls due first."""

    async def script(world: World) -> None:
        world.start()
        world.rabbit.route("nowhere", False)
        (a1,) = world.add("a", event_type="nowhere")
        await is_aside(world, a1, "deferred")
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
        world.start()
        world.rabbit.route("nowhere", False)
        (a1,) = world.add("a", event_type="nowhere")
        await is_aside(world, a1, "deferred")
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
        world.rabbit.route("nowhere", False)
        w = world.begin()
        a1, a2 = world.insert(w, "a", event_type="nowhere"), world.insert(w, "a")
        world.commit(w)
        await is_sent(world, a2)
        assert aside(world, a1) == "parked"
        world.rabbit.route("nowhere", True)

    play(script, settings(parks=True, continues=True))


# ---------------------------------------------------------------- settling and publishing


def test_s2_a_discard_is_not_undone() -> None:
    """A park is committed, its answer lost; the operator discards; the relay settles what it remembers."""

    async def script(world: World) -> None:
        relay = world.start()
        world.rabbit.route("nowhere", False)
        stop = world.stop_at("settle", at="after", when=parks_or_defers)
        (a,) = world.add("a", event_type="nowhere")
        await stop.reached()
        assert aside(world, a) == "parked"
        relay.outbox.is_cut = True
        relay.outbox.lose("connection reset")
        assert await world.operate("discard", [a]) == [a]
        await passes(world, "renew")
        await asyncio.sleep(2.0)
        assert all(row.id != a for row in world.database.rows.values())
        world.rabbit.route("nowhere", True)

    play(script, settings(parks=True))


def test_s3_an_unknown_commit_is_settled_again() -> None:
    """`sent` is committed, its answer lost: settled again, nothing published again."""

    async def script(world: World) -> None:
        relay = world.start()
        stop = world.stop_at(
            "settle", at="after", when=lambda call: isinstance(call.argument, Settlement) and bool(call.argument.sent)
        )
        (a,) = world.add("a")
        await stop.reached()
        relay.outbox.is_cut = True
        relay.outbox.lose("connection reset")
        await passes(world, "renew")
        await asyncio.sleep(2.0)
        assert world.oracle.entries[a].copies == 1

    play(script)


def test_p3_an_orphan_is_not_its_rows_successor() -> None:
    """A has 1 in flight, loses the lease, gets it back and wants to publish 1 again: not while the first is
    unconfirmed on this channel, for a return carries an id and no tag."""

    async def script(world: World) -> None:
        relay = world.start()
        await owns(world, relay)
        world.rabbit.mute(True)
        world.rabbit.scripted.extend([Outcome.ACKED, Outcome.RETURNED])
        (a,) = world.add("a")
        await in_flight(world, a)
        epoch = world.database.shards[0].epoch
        world.unseat(0)
        await world.until(lambda: world.database.shards[0].epoch == epoch + 2, what="claimed again")
        await passes(world, "page", when=brings(a))
        await asyncio.sleep(2.0)
        assert len(world.oracle.publications[a]) == 1, "the orphan is still unconfirmed"
        world.rabbit.mute(False)
        await in_flight(world, a, copies=2)
        await is_aside(world, a, "deferred")

    play(script)


def test_p3_an_orphans_confirm_settles_nothing() -> None:
    """The orphan is returned; its row, read again, is then published and confirmed: sent by its own confirm."""

    async def script(world: World) -> None:
        relay = world.start()
        await owns(world, relay)
        world.rabbit.mute(True)
        world.rabbit.scripted.extend([Outcome.RETURNED, Outcome.ACKED])
        (a,) = world.add("a")
        await in_flight(world, a)
        world.unseat(0)
        await passes(world, "page", when=brings(a))
        world.rabbit.mute(False)
        await is_sent(world, a)
        assert world.oracle.entries[a].copies == 1

    play(script)


# ---------------------------------------------------------------- leases


def test_l3_who_loses_the_renewing_session_stops_writing() -> None:
    """The renewing session dies; until a renewal succeeds nothing more is written."""

    async def script(world: World) -> None:
        relay = world.start()
        await owns(world, relay)
        world.rabbit.mute(True)
        world.add(None, 300)
        await world.until(lambda: len(world.oracle.publications) >= 100, what="a full window")
        keeper = min((each for each in world.database.sessions), key=lambda each: each.pid)
        stop = world.stop_at("renew", relay=relay)
        world.database.terminate(keeper, "terminated")
        await asyncio.sleep(0.01)
        published = sum(len(each) for each in world.oracle.publications.values())
        # What was in flight is ready again, on a new link; the lease may be somebody else's by now.
        world.rabbit.links[0].cut()
        world.rabbit.mute(False)
        await stop.reached()
        await world.until(lambda: len(world.rabbit.links) == 1, what="a new link")
        await asyncio.sleep(1.0)
        assert sum(len(each) for each in world.oracle.publications.values()) == published
        stop.resume()

    play(script)


def test_l4_a_frozen_relay_writes_nothing_after_its_lease() -> None:
    """A freezes with rows ready (an alarm kept them), B takes over, A wakes: the oracle looks at every publish."""

    async def script(world: World) -> None:
        first = world.start()
        await owns(world, first)
        await world.until(lambda: bool(world.rabbit.links), what="a link")
        world.rabbit.block(True)
        await asyncio.sleep(0.01)
        rows = world.add(None, 50)
        await passes(world, "page", when=brings(rows[0]))
        await asyncio.sleep(0.2)
        first.freeze()
        second = world.start()
        await owns(world, second)
        world.rabbit.block(False)
        first.thaw()

    play(script, settings(lease_s=2.0))


def test_l5_no_release_with_rows_in_flight() -> None:
    """A hand-over takes longer than its bound (a mute broker): the shard is kept, nothing is copied."""

    async def script(world: World) -> None:
        first = world.start()
        await owns(world, first, 63)
        world.rabbit.mute(True)
        rows = [each for key in range(40) for each in world.add(f"k{key}")]
        await world.until(lambda: len(world.oracle.publications) == len(rows), what="all in flight")
        world.start()
        await asyncio.sleep(15.0)
        world.rabbit.mute(False)
        await world.delivered(*rows)
        await asyncio.sleep(5.0)
        assert world.oracle.duplicates() == 0

    play(script, settings(lease_s=2.0), DatabaseOptions(shards_used=64))


def test_l2_a_locked_shard_row_delays_no_other_lease() -> None:
    async def script(world: World) -> None:
        relay = world.start()
        await owns(world, relay, 3)
        world.database.exclusive.add(0)
        free = [key for key in "abcdefgh" if world.database.shard_of(("t", key), "") != 0]
        for _ in range(6):
            await asyncio.sleep(1.0)
            await world.delivered(*[each for key in free for each in world.add(key)], timeout_s=0.5)
        world.database.exclusive.discard(0)

    play(script, settings(lease_s=2.0), DatabaseOptions(shards_used=4))


def test_l6_without_a_broker_a_relay_gives_its_shards_away() -> None:
    """A has no broker for some leases' time, B has: B gets everything."""

    async def script(world: World) -> None:
        first = world.start()
        await owns(world, first, 63)
        second = world.start()
        await owns(world, second, 63)

        async def refuse() -> None:
            while True:
                for link in [each for each in world.rabbit.links if each.relay == first.name]:
                    link.cut()
                await asyncio.sleep(0.05)

        refusing = asyncio.ensure_future(refuse())
        first.broker.is_refused = True
        await world.until(
            lambda: all(each.owner == second.name for each in world.database.shards.values()),
            what="B owns everything",
        )
        refusing.cancel()
        first.broker.is_refused = False

    play(script, settings(lease_s=2.0))


# ---------------------------------------------------------------- crashes of the database


def asynchronous(**others: object) -> DatabaseOptions:
    """Nothing is flushed but by hand, and the sequence falls back to what was."""
    return DatabaseOptions(
        shards_used=1,
        others_synchronous=False,
        settle_synchronous=False,
        sequence_ahead_max=0,
        **others,  # type: ignore[arg-type]
    )


def test_identity_seqs_are_handed_out_again() -> None:
    """40 rows are read, then lost in a crash; five new ones reuse their seqs below the cursor."""

    async def script(world: World) -> None:
        relay = world.start()
        await owns(world, relay)
        world.database.commit(synchronous=True)
        world.rabbit.mute(True)
        lost = world.add("a", 40)
        await in_flight(world, lost[0])
        await passes(world, "check")
        world.database.crash(down_s=0.0, loses=True, keeps=0)
        await asyncio.sleep(0.001)
        new = world.add("a", 5)
        assert {world.oracle.entries[each].seq for each in new} < {world.oracle.entries[each].seq for each in lost}
        world.rabbit.mute(False)
        await world.delivered(*new)
        await is_sent(world, new[4])
        assert not [each for each in lost[1:] if each in world.oracle.publications], "gone from the table"

    play(script, database=asynchronous())


def test_r5_an_old_acknowledgement_is_void() -> None:
    """A settlement is under way; the database crashes and loses it; its acknowledgement is taken all the same."""

    async def script(world: World) -> None:
        relay = world.start()
        await owns(world, relay)
        (a,) = world.add("a")
        stop = world.stop_at("settle", at="after")
        world.database.commit(synchronous=True)
        await stop.reached()
        world.database.crash(down_s=0.0, loses=True, keeps=0)
        assert not world.oracle.entries[a].is_sent
        await is_sent(world, a)

    play(script, database=asynchronous(late_answers=1.0))


def test_r5_a_page_from_before_a_crash_is_void() -> None:
    """A page sent before a crash arrives after it; the floor is not written from its S."""

    async def script(world: World) -> None:
        relay = world.start()
        await owns(world, relay)
        await world.delivered(*world.add("z"))
        await is_sent(world, "m1")
        world.database.commit(synchronous=True)
        stop = world.stop_at(
            "page", at="after", when=lambda call: isinstance(call.argument, PageRequest) and call.argument.last_seq >= 6
        )
        world.add("a", 5)
        await stop.reached()
        world.database.crash(down_s=0.0, loses=True, keeps=0)
        await passes(world, "renew")
        new = world.add("a", 5)
        await passes(world, "renew")
        relay.kill()
        world.start()
        await world.delivered(*new)

    play(script, database=asynchronous(late_answers=1.0))


def test_r5_begin_at_the_floor_as_stored() -> None:
    """A crash loses a settlement and the floor that followed it: the relay reads from the floor that is left."""

    async def script(world: World) -> None:
        relay = world.start()
        await owns(world, relay)
        world.database.commit(synchronous=True)
        ids = world.add("a", 3)
        world.database.commit(synchronous=True)
        await is_sent(world, ids[2])
        await world.until(lambda: world.database.shards[0].floor >= 3, what="the floor passes")
        await passes(world, "renew")
        world.database.crash(down_s=0.0, loses=True, keeps=0)
        assert world.database.shards[0].floor == 0
        await is_sent(world, ids[0])
        await is_sent(world, ids[2])

    play(script, database=asynchronous())


def test_r5_owner_in_the_fence() -> None:
    """A rewound database gives two instances the same epoch."""

    async def script(world: World) -> None:
        first = world.start()
        await owns(world, first)
        epoch = world.database.shards[0].epoch
        world.rabbit.mute(True)
        ids = world.add("a", 3)
        await in_flight(world, ids[0])
        first.freeze()
        world.database.crash(down_s=0.0, loses=True, keeps=0)
        await asyncio.sleep(0.001)
        ids = world.add("a", 3)
        second = world.start()
        await owns(world, second)
        assert world.database.shards[0].epoch == epoch
        world.rabbit.mute(False)
        await world.delivered(*ids)
        first.thaw()
        await asyncio.sleep(3.0)
        later = world.add("a", 20)
        await world.delivered(*later)
        assert all(world.oracle.entries[each].copies == 1 for each in later)

    play(script, database=asynchronous())


def test_r5_lowering() -> None:
    """A setval hands out seqs below the floor; the purge lowers the floor; the owner's renewal must not undo it."""

    async def script(world: World) -> None:
        relay = world.start()
        await owns(world, relay)
        await world.delivered(*world.add("z", 5))
        await world.until(lambda: world.database.shards[0].floor >= 5, what="the floor passes")
        world.database.setval(2)
        await world.delivered(*world.add("a"), timeout_s=60.0)

    play(script)


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
        world.rabbit.route("nowhere", False)
        w = world.begin()
        a1, a2 = world.insert(w, "a", event_type="nowhere"), world.insert(w, "a")
        world.commit(w)
        await is_aside(world, a1, "parked")
        relay.kill()
        world.oracle.rules.parked_holds = False
        world.start(settings=settings(parks=True, continues=True))
        await world.delivered(a2)
        world.rabbit.route("nowhere", True)

    play(script, settings(parks=True))
