"""The doorbell with a poll interval of an hour: whoever sleeps is rung (nothing depends on it but latency)."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from relay.core.ports.outbox import Armed
from relay.reader import LISTEN_S

from .steps import passes, play, settings
from .tables import DatabaseOptions
from .world import World

PATIENT = replace(settings(), poll_interval_s=3600.0)


def bell_owner(world: World) -> str:
    assert world.database.bell_owner is not None, "nobody rings"
    return world.database.bell_owner.instance


def test_a_writer_that_did_not_ring_is_waited_for() -> None:
    """It was open when the lock was asked for; nothing rang for what came after, for as long as the poll interval."""

    async def script(world: World) -> None:
        world.start()
        await passes(world, "page")
        w = world.begin()
        a = world.insert(w, "a")
        await passes(world, "arm", when=lambda call: call.result is Armed.TIMED_OUT)
        world.commit(w)
        await world.delivered(a, *world.add("b"), timeout_s=2.0)
        await passes(world, "arm", when=lambda call: call.result is Armed.GRANTED)
        await asyncio.sleep(60.0)
        await world.delivered(*world.add("b"), timeout_s=0.5)

    play(script, PATIENT)


@pytest.mark.parametrize("is_killed", [True, False])
def test_whoever_had_the_doorbell_leaves(is_killed: bool) -> None:
    """The others counted on inserts that ring: their next look was their next poll, with each rolling deploy."""

    async def script(world: World) -> None:
        relays = [world.start(), world.start()]
        await asyncio.sleep(30.0)
        owner = bell_owner(world)
        (holder,) = (relay for relay in relays if relay.name == owner)
        if is_killed:
            holder.kill()
        else:
            await holder.stop()
        await asyncio.sleep(20.0)
        await world.delivered(*world.add("b"), timeout_s=0.5)

    play(script, PATIENT, DatabaseOptions(shards_used=64))


@pytest.mark.parametrize("read_ahead_max", [1, 8])
def test_room_that_comes_while_the_reader_looks_elsewhere_is_seen(read_ahead_max: int) -> None:
    """It found memory full, made a check, and slept for the poll interval: what had left memory during the check woke nobody."""

    async def script(world: World) -> None:
        world.start()
        await world.delivered(*world.add("z"))
        await asyncio.sleep(5.0)
        transaction = world.begin()
        ids = [world.insert(transaction, f"k{n % 50}") for n in range(200)]
        world.commit(transaction)
        await world.delivered(*ids, timeout_s=60.0)

    narrow = replace(PATIENT, read_ahead_max=read_ahead_max, in_flight_max=read_ahead_max)
    play(script, narrow, DatabaseOptions(shards_used=8, latency=(0.0005, 0.002), check_gap=(0.03, 0.08)))


def test_a_doorbell_that_nobody_has_any_more_is_missed() -> None:
    """The session of a host that vanished ends long after its shards were taken over."""

    async def script(world: World) -> None:
        world.start()
        world.start()
        await asyncio.sleep(30.0)
        before = bell_owner(world)
        world.database.bell_owner = None
        await asyncio.sleep(LISTEN_S + 1.0)
        assert bell_owner(world) != before

    play(script, PATIENT, DatabaseOptions(shards_used=64))


def test_a_refused_query_for_due_rows_is_asked_again_soon() -> None:
    async def script(world: World) -> None:
        world.start()
        world.rabbit.route("nowhere", False)
        (a,) = world.add("a", event_type="nowhere")
        stop = world.stop_at("due")
        call = await stop.reached()
        world.rabbit.route("nowhere", True)
        world.database.options.other_refusals = 1.0
        stop.resume()
        await world.until(call.future.done, what="refused")
        world.database.options.other_refusals = 0.0
        await world.delivered(a, timeout_s=5.0)

    play(script, PATIENT)


@pytest.mark.parametrize("opens_after_s", [0.0, 10.0])
def test_a_sleeping_relays_gauges_do_not_grow_old(opens_after_s: float) -> None:
    """With each poll only: for an hour they told of the time before it. A writer that is open when the relay goes to sleep
    keeps it from that, one that opens later does not wake it."""

    async def script(world: World) -> None:
        relay = world.start()
        metrics = relay.program.metrics
        world.rabbit.route("nowhere", False)
        world.add("b", event_type="nowhere")
        await world.delivered(*world.add("a"))
        await asyncio.sleep(opens_after_s)
        w = world.begin()
        world.insert(w, "c")
        await asyncio.sleep(60.0)
        seen_at = metrics.backlog_observed_timestamp_seconds
        assert seen_at is not None and world.database.now() - seen_at < 11.0
        assert metrics.parked_rows == 1
        assert metrics.late_commit_writers == 1
        assert metrics.oldest_writer_age_seconds is not None and metrics.oldest_writer_age_seconds > 40.0
        world.rabbit.route("nowhere", True)
        world.commit(w)

    play(script, PATIENT)
