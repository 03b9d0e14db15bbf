"""The histories of settling, publishing, leases and crashes that break the design without its rules: one test for each row of the last table of docs/protocol.md.

Each test drives the real runner into that history, step by step, and lets the oracle judge: loss, order,
copies, attempts, floors. What a test asserts itself is what the oracle cannot know.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from relay.core.ports.outbox import PageRequest, Settlement

from .oracle import Outcome
from .steps import (
    aside,
    brings,
    in_flight,
    is_aside,
    is_sent,
    owns,
    parks_or_defers,
    passes,
    play,
    settings,
)
from .tables import DatabaseOptions
from .world import World

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


def taken_over_unawares(world: World, owner: str) -> Callable[[], None]:
    """The server ends the renewing session, and no word of it arrives until what is returned is called."""
    return world.database.terminate_unheard(owner)


def clock_set_forward(world: World, owner: str) -> Callable[[], None]:
    """All leases run out at once, by the database's clock alone; the next renewal tells."""
    world.jump(8.0)
    return lambda: None


@pytest.mark.parametrize("befalls", [taken_over_unawares, clock_set_forward])
def test_l8_a_former_owner_that_does_not_know_yet(befalls: Callable[[World, str], Callable[[], None]]) -> None:
    """B claims while A's own deadline has not come; B defers 1; A would read 2, alone, and publish it."""

    async def script(world: World) -> None:
        a = world.start()
        await owns(world, a)
        b = world.start()
        await asyncio.sleep(3.0)
        if world.database.shards[0].owner == b.name:
            a, b = b, a
        world.rabbit.route("nowhere", False)
        renewal = world.stop_at("renew", relay=a)
        await renewal.reached()
        page = world.stop_at("page", relay=a)
        world.add("x")
        await page.reached()
        tell = befalls(world, a.name)
        (one,) = world.add("a", event_type="nowhere")
        await owns(world, b)
        await is_aside(world, one, "deferred")
        (two,) = world.add("a")
        answered = world.stop_at("page", at="after", relay=a)
        page.resume()
        await answered.reached()
        answered.resume()
        await asyncio.sleep(0.1)  # virtual
        tell()
        renewal.resume()
        world.rabbit.route("nowhere", True)
        await world.delivered(one, two)
        assert world.order("a") == [one, two]

    play(script, settings(retry_delays_s=(0.2,) * 20))


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


def test_r5_who_was_unseated_gives_the_shard_back_soon_whatever_the_lease() -> None:
    """Nobody else can claim it before."""

    async def script(world: World) -> None:
        world.start()
        (a,) = world.add("a")
        await is_sent(world, a)
        world.unseat(0)
        (b,) = world.add("b")
        await world.until(lambda: world.oracle.entries[b].is_sent, 2.0, "settled under the next epoch")

    play(script, settings(lease_s=60.0))


def test_l4_a_frozen_relay_writes_nothing_after_its_lease() -> None:
    """A freezes with rows ready (an alarm kept them), B takes over, A wakes: the oracle looks at every publish."""

    async def script(world: World) -> None:
        first = world.start()
        await owns(world, first)
        await world.until(lambda: bool(world.rabbit.links), what="a link")
        world.rabbit.block(True)
        # By which it hears of the alarm.
        world.add(None)
        await asyncio.sleep(0.2)
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


def test_l2_a_shard_whose_row_is_locked_is_given_away_later() -> None:
    """A second relay comes while an operator keeps the row of one shard locked that the first has to give: a release that
    waited for it let the leases of all run out. Seed 808922."""

    async def script(world: World) -> None:
        first = world.start()
        await owns(world, first, 63)
        unlock = world.database.lock_shards({63})
        second = world.start()
        for _ in range(60):
            await asyncio.sleep(0.1)
            live = [each for each in world.database.shards.values() if each.leased_until > world.database.now()]
            assert len(live) >= 63
        await owns(world, second, 62)
        unlock()
        await owns(world, second, 63)

    play(script, settings(lease_s=2.0))


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
