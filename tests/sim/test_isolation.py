"""Poison: the broker closes the link over a message and does not say which.

Bystander rule: the culprit parks, alone; all others arrive, charged nothing, repeated at most once a culprit that was
met on the main link.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from relay.core.settings import EngineSettings, Ordering
from relay.message import Aside

from .broker import BrokerOptions
from .loop import run_virtual
from .world import World, WorldOptions


def play(
    main: Callable[[World], Awaitable[None]],
    *,
    seed: int = 0,
    confirm_s: float = 0.001,
    unverified: float = 0.0,
    **settings: object,
) -> None:
    async def whole() -> None:
        options = WorldOptions(
            broker=BrokerOptions(confirm=(confirm_s, confirm_s), unverified=unverified),
            settings=replace(EngineSettings(), **settings),  # type: ignore[arg-type]
        )
        world = World(seed, options)
        await main(world)
        await world.finish()

    run_virtual(whole, steps_max=3_000_000, seconds_max=600.0)


def poison(world: World, good: int, bad: int, kind: str) -> tuple[list[str], list[str]]:
    """One transaction: good rows of as many keys, with bad ones of their own keys evenly between them."""
    transaction = world.begin()
    goods: list[str] = []
    bads: list[str] = []
    for number in range(good):
        goods.append(world.insert(transaction, f"g{number}"))
        if (number + 1) % (good // (bad + 1)) == 0 and len(bads) < bad:
            bads.append(world.insert(transaction, f"b{number}", event_type=kind))
    world.commit(transaction)
    return goods, bads


def parked(world: World) -> set[str]:
    return {row.id for row in world.parked()}


@pytest.mark.parametrize("relays", [1, 2])
@pytest.mark.parametrize("kind", ["refused", "refused_all"])
@pytest.mark.parametrize("bad", [1, 3])
@pytest.mark.parametrize(("seed", "unverified"), [(0, 0.0), (1, 0.0), (2, 0.5)])
def test_bystanders_of_a_refused_row(relays: int, kind: str, bad: int, seed: int, unverified: float) -> None:
    async def main(world: World) -> None:
        for _ in range(relays):
            world.start()
        goods, bads = poison(world, 200, bad, kind)
        began = world.loop.time()
        await world.delivered(*goods, timeout_s=10.0)
        await world.until(lambda: parked(world) == set(bads), 10.0, "the culprits park")
        # A whole second of it is a relay's start.
        assert world.loop.time() - began < 6.0
        for row in world.parked():
            assert (row.attempts, row.aside) == (1, Aside.PARKED)
        meetings = min(bad, relays) if kind == "refused" else bad
        for each in goods:
            assert world.oracle.entries[each].copies <= 1 + meetings, each

    # Where confirms are slow, what had passed on the channel that is closed goes again.
    play(main, seed=seed, unverified=unverified, confirm_s=0.05 if unverified else 0.001)


def test_a_closed_connection_stops_everybody_for_round_trips_not_for_confirms() -> None:
    """Each probe waited for the confirm of the one before: with a slow disk a window of suspects stopped all for a minute."""

    async def main(world: World) -> None:
        world.start()
        goods, _ = poison(world, 300, 1, "refused_all")
        await world.until(lambda: " refuses " in world.history.text(100_000), 5.0, "the connection is closed")
        (late,) = world.add("late")
        await world.delivered(late, timeout_s=3.0)
        await world.delivered(*goods, timeout_s=10.0)
        for each in goods:
            assert world.oracle.entries[each].copies <= 2, each

    play(main, confirm_s=0.1)


@pytest.mark.parametrize("ordering", list(Ordering))
def test_a_suspects_key_waits_and_others_flow(ordering: Ordering) -> None:
    async def main(world: World) -> None:
        transaction = world.begin()
        first = [world.insert(transaction, f"k{number % 5}") for number in range(50)]
        world.insert(transaction, "bad", event_type="refused")
        behind = world.insert(transaction, "bad")
        world.insert(transaction, None, event_type="refused")
        last = [world.insert(transaction, f"k{number % 5}") for number in range(50)]
        world.commit(transaction)
        world.start()
        await world.delivered(*first, *last, timeout_s=20.0)
        await world.until(lambda: len(world.parked()) >= 2, 20.0, "two are parked")
        held = [row for row in world.database.rows.values() if row.id == behind]
        if ordering is Ordering.NONE:
            await world.delivered(behind)
        elif ordering is Ordering.STRICT:
            assert held[0].aside is Aside.HELD
            assert world.oracle.entries[behind].copies == 0

    play(main, ordering=ordering)


def test_a_parked_culprit_lets_its_key_go_on_under_continue() -> None:
    async def main(world: World) -> None:
        world.start()
        world.add("k", event_type="refused")
        (after,) = world.add("k")
        await world.delivered(after)
        assert len(world.parked()) == 1

    play(main, holds_when_parked=False)


def test_poison_in_every_batch_is_no_reconnect_storm() -> None:
    async def main(world: World) -> None:
        world.start()
        goods, bads = poison(world, 600, 40, "refused")
        await world.delivered(*goods, timeout_s=60.0)
        await world.until(lambda: parked(world) == set(bads), 60.0, "the culprits park")
        connects = [text for text in world.history.text(100_000).splitlines() if " connects " in text]
        assert len(connects) <= len(bads), "at most one close a culprit"

    play(main, read_ahead_max=100, in_flight_max=50)
