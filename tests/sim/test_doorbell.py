"""The doorbell with a poll interval of an hour: whoever sleeps is rung (nothing depends on it but latency)."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from relay.core.ports import Armed

from .steps import passes, play, settings
from .world import World

PATIENT = replace(settings(), poll_interval_s=3600.0)


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
