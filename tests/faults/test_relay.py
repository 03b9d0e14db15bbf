"""A relay killed at each step of a row's way, one that stood still past its fence, and bad lines to both servers."""

from __future__ import annotations

import asyncio
import functools
import signal
from typing import Final

import aio_pika
import pytest

from tests.conftest import eventually
from tests.e2e.conftest import LADDER, QUEUE
from tests.faults.stage import IN_FLIGHT, LEASE_S, Post, Stage
from tests.faults.test_broker import passed
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
    "renewing, not committed": ("database", Side.CLIENT, COMMIT, 6, False, KEEPER),
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


@pytest.mark.long
@pytest.mark.parametrize("relays", [1, 2])
@pytest.mark.parametrize("step", ["deferral not committed", "deferral committed, answer lost"])
async def test_relay_killed_while_setting_aside(stage: Stage, step: str, relays: int) -> None:
    """A row without a route and its followers are being set aside; they keep their order, and nobody else pays."""
    await stage.up(relays, retry_delays=LADDER)
    victims = list(stage.posts)

    def await_commit(victim: Post) -> None:
        for each in victims:
            each.database.disarm()  # or the one that takes over dies as well
        kill = functools.partial(victim.relay.signal, signal.SIGKILL)
        is_passed = step.endswith("lost")
        victim.database.trap(Trap(Side.CLIENT, COMMIT, kill, is_passed=is_passed, session=SETTLER))

    for victim in victims:
        then = functools.partial(await_commit, victim)
        victim.database.trap(Trap(Side.CLIENT, b"set_back", then, is_passed=True, session=SETTLER))
    async with stage.site.database.transaction():
        await stage.site.insert("nowhere", "nope.x", key="k")
        for number in range(5):
            await stage.site.insert(f"behind{number}", key="k")
    await eventually(lambda: any(victim.relay.process.poll() is not None for victim in victims), 30)
    (dead,) = [victim for victim in victims if victim.relay.process.poll() is not None]
    stage.start(dead)
    await stage.works(dead, shards=64 // relays)
    async with await aio_pika.connect(stage.site.amqp_url) as connection:
        await (await (await connection.channel()).get_queue(QUEUE)).bind("events", "nope.#")
    await stage.back(within_s=30)
    await stage.verdict(f"relay killed: {step}", copies_max=IN_FLIGHT, within_s=30, attempts_max=10)


@pytest.mark.long
async def test_relay_killed_while_handing_over(stage: Stage) -> None:
    """A second relay comes; the first dies when it gives shards away."""
    (victim,) = await stage.up(1)
    sprung = victim.database.trap(
        Trap(Side.CLIENT, b"release", lambda: victim.relay.signal(signal.SIGKILL), session=KEEPER, is_passed=True)
    )
    other = await stage.post("other")
    stage.start(other)
    await asyncio.wait_for(sprung.wait(), 40)
    await victim.relay.exit()
    await stage.back()
    stage.start(victim)
    await stage.works(victim, shards=32)
    await stage.verdict("relay killed: handing shards over", copies_max=IN_FLIGHT)


@pytest.mark.long
@pytest.mark.parametrize("relays", [1, 2])
async def test_relay_killed_while_draining(stage: Stage, relays: int) -> None:
    """SIGTERM under load, and the container runtime's patience ends during the last settlement."""
    victim = (await stage.up(relays))[0]
    # Or all might be settled already.
    victim.broker.freeze()
    await stage.until_metric(victim, "relay_in_flight_messages", 1)
    victim.relay.signal(signal.SIGTERM)
    await stage.logged(victim, "draining")
    sprung = victim.database.trap(
        Trap(Side.CLIENT, COMMIT, lambda: victim.relay.signal(signal.SIGKILL), session=SETTLER)
    )
    victim.broker.thaw()
    await asyncio.wait_for(sprung.wait(), 20)
    await victim.relay.exit()
    stage.start(victim)
    await stage.back()
    await stage.works(victim, shards=64 // relays)
    await stage.verdict("relay killed: draining after SIGTERM", copies_max=IN_FLIGHT)


@pytest.mark.parametrize("relays", [pytest.param(1, marks=pytest.mark.long), 2])
async def test_relay_frozen_past_its_fence(stage: Stage, relays: int) -> None:
    """SIGSTOP with messages in flight and others behind them, longer than a lease: the other takes over. The sleeper wakes to
    confirms that let the others go, and is fenced off: it writes none of them before a renewal was answered (L4)."""
    victim = (await stage.up(relays))[0]
    victim.broker.freeze()
    read = victim.relay.metric("relay_rows_read_total")
    await stage.until_metric(victim, "relay_rows_read_total", read + 100)
    # Not amid a call, whose deadline would end its sessions first thing (L3).
    await stage.load.pause()
    victim.relay.signal(signal.SIGSTOP)
    stage.load.resume()
    victim.broker.thaw()
    await passed(2.5 * LEASE_S)
    if relays == 2:
        await stage.works(stage.posts[1], shards=64)
    first = _first_word(victim)
    victim.relay.signal(signal.SIGCONT)
    assert await asyncio.wait_for(first, 20) == "a renewal was answered"
    victim.database.heal()
    await stage.back()
    await stage.works(victim, shards=64 // relays)
    await stage.verdict("relay frozen (SIGSTOP) past its lease, and woken", copies_max=IN_FLIGHT)


def _first_word(victim: Post) -> asyncio.Future[str]:
    """What comes first: a publish, or the answer to a call of the session that renews, which takes its time."""
    first = asyncio.get_running_loop().create_future()

    def note(what: str) -> None:
        if not first.done():
            first.set_result(what)

    victim.database.delay_s = 0.1
    for proxy, side, needle, session, what in (
        (victim.broker, Side.CLIENT, PUBLISH, b"", "a row was published"),
        (victim.database, Side.SERVER, b"SELECT 1\x00", KEEPER, "a renewal was answered"),
    ):
        proxy.trap(Trap(side, needle, functools.partial(note, what), session=session, is_passed=True))
    return first


LINES: Final = {
    "50 ms of delay each way": {"delay_s": 0.05},
    "40 kB/s": {"bytes_s": 40_000.0},
}


@pytest.mark.long
@pytest.mark.parametrize("relays", [1, 2])
@pytest.mark.parametrize("line", LINES)
async def test_bad_lines(stage: Stage, line: str, relays: int) -> None:
    """Slow, to both servers at once: nothing is repeated, the backlog drains when the line is well again."""
    await stage.up(relays)
    for post in stage.posts:
        for proxy in (post.broker, post.database):
            for name, value in LINES[line].items():
                setattr(proxy, name, value)
    for post in stage.posts:
        await stage.sends(post)
    await passed(4.0)
    for post in stage.posts:
        post.broker.heal()
        post.database.heal()
    await stage.back()
    # A lease that is renewed too late may change hands.
    await stage.verdict(f"lines to both servers: {line}", copies_max=relays * IN_FLIGHT, faults=2)


@pytest.mark.long
@pytest.mark.parametrize("relays", [1, 2])
async def test_stalled_lines(stage: Stage, relays: int) -> None:
    """Nothing is read for three seconds, longer than a lease, and nothing is lost of it."""
    await stage.up(relays)
    for post in stage.posts:
        post.broker.freeze()
        post.database.freeze()
    await passed(1.5 * LEASE_S)
    for post in stage.posts:
        post.broker.thaw()
        post.database.thaw()
    await stage.back()
    await stage.verdict("lines to both servers stalled, longer than the lease", copies_max=relays * IN_FLIGHT, faults=2)


@pytest.mark.long
@pytest.mark.parametrize("relays", [1, 2])
@pytest.mark.parametrize("side", list(Side))
async def test_one_direction_vanishes(stage: Stage, side: Side, relays: int) -> None:
    """What the relay says, or what the servers say, is lost without a word, until both links are given up."""
    stage.change_url = lambda url: f"{url}?heartbeat=2&timeout=2"
    stage.change_database_url = lambda url: f"{url}?connect_timeout=2"
    await stage.up(relays)
    for post in stage.posts:
        post.broker.deaf = post.database.deaf = {side}
    for post in stage.posts:
        await stage.logged(post, "broker_lost", 60)
        await stage.logged(post, "database_unavailable", 60)
    for post in stage.posts:
        post.broker.heal()
        post.database.heal()
    await stage.back()
    await stage.verdict(f"what the {side} says vanishes", copies_max=relays * IN_FLIGHT, faults=2, outage_s=30)


@pytest.mark.long
@pytest.mark.parametrize("relays", [1, 2])
@pytest.mark.parametrize("how", ["cut", "reset"])
async def test_connections_end(stage: Stage, how: str, relays: int) -> None:
    """By FIN or by RST, to both servers at once, three times under load: as a firewall or a restarted proxy ends them."""
    await stage.up(relays)
    for _ in range(3):
        for post in stage.posts:
            await stage.sends(post)
        for post in stage.posts:
            for proxy in (post.broker, post.database):
                getattr(proxy, how)()
    await stage.back()
    await stage.verdict(f"connections to both servers {how}, three times", copies_max=3 * relays * IN_FLIGHT, faults=3)
