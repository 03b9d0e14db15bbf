"""A relay killed at each step of a row's way, and a relay that stood still past its fence."""

from __future__ import annotations

import asyncio
import signal
from typing import Final

import pytest

from tests.faults.stage import IN_FLIGHT, Post, Stage
from tests.proxy import ACK, COMMIT, PUBLISH, Side, Trap

SETTLER: Final = b"outbox-relay settler"
READER: Final = b"outbox-relay reader"
KEEPER: Final = b"outbox-relay keeper"

# Each step: which of the relay's two proxies sees it, and what passes there at that moment.
STEPS: Final = {
    "claiming, not committed": ("database", Side.CLIENT, COMMIT, 2, False, KEEPER),
    "claimed, answer lost": ("database", Side.CLIENT, COMMIT, 2, True, KEEPER),
    "half a page read": ("database", Side.SERVER, b"ok.x", 60, False, READER),
    "half a publish written": ("broker", Side.CLIENT, PUBLISH, 200, False, b""),
    "published, not confirmed": ("broker", Side.CLIENT, PUBLISH, 200, True, b""),
    "confirmed, not heard": ("broker", Side.SERVER, ACK, 20, False, b""),
    "confirmed, not settled": ("database", Side.CLIENT, b"BEGIN ISO", 10, False, SETTLER),
    "marked, not committed": ("database", Side.CLIENT, COMMIT, 10, False, SETTLER),
    "marks committed, answer lost": ("database", Side.CLIENT, COMMIT, 10, True, SETTLER),
    "marks committed and answered": ("database", Side.SERVER, COMMIT, 10, True, SETTLER),
}
SHORT: Final = {"half a publish written", "marks committed, answer lost"}


def steps() -> list[object]:
    return [
        pytest.param(step, relays, marks=() if step in SHORT and relays == 2 else pytest.mark.long)
        for step in STEPS
        for relays in (1, 2)
    ]


def trap(victim: Post, step: str) -> asyncio.Event:
    """SIGKILL for the relay when this step's bytes pass."""
    where, side, needle, nth, is_passed, session = STEPS[step]
    proxy = victim.broker if where == "broker" else victim.database
    return proxy.trap(
        Trap(side, needle, lambda: victim.relay.signal(signal.SIGKILL), nth=nth, is_passed=is_passed, session=session)
    )


@pytest.mark.parametrize(("step", "relays"), steps())
async def test_relay_killed(stage: Stage, step: str, relays: int) -> None:
    """The victim starts into the load and dies at its step; the other takes over, or its own next life does."""
    if relays == 2:
        await stage.up(1)
    victim = await stage.post("victim")
    sprung = trap(victim, step)
    stage.start(victim)
    await asyncio.wait_for(sprung.wait(), 40)
    assert await victim.relay.exit() == -signal.SIGKILL
    if relays == 1:
        stage.start(victim)
    await stage.back()
    if relays == 2:
        stage.start(victim)
    await stage.works(victim, shards=64 // relays)
    await stage.verdict(f"relay killed: {step}", copies_max=IN_FLIGHT)
