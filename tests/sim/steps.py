"""What histories are told with: a world of one shard, and the moments that they wait for."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from relay.core.ports.outbox import Check, Page, PageRequest, Settlement
from relay.core.settings import EngineSettings, Ordering, Unroutable

from .broker import BrokerOptions
from .loop import run_virtual
from .tables import DatabaseOptions
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


def play(
    script: Script,
    engine: EngineSettings | None = None,
    database: DatabaseOptions | None = None,
    broker: BrokerOptions | None = None,
) -> None:
    """Run a script in a fresh world of one shard; afterwards everything drains and the oracle judges."""

    async def main() -> None:
        options = WorldOptions(
            database or DatabaseOptions(shards_used=1), broker or BrokerOptions(), engine or settings()
        )
        world = World(script.__name__, options)
        await script(world)
        await world.drain()
        await world.finish()

    run_virtual(main)


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


async def first_aside(world: World, state: str) -> str:
    """A relay, and the row of key a that reaches no queue, once it is aside so."""
    world.start()
    world.rabbit.route("nowhere", False)
    (row,) = world.add("a", event_type="nowhere")
    await is_aside(world, row, state)
    return row


def failing_head(world: World) -> tuple[str, str]:
    """One key's two rows in one commit, of which the first reaches no queue."""
    world.rabbit.route("nowhere", False)
    w = world.begin()
    head, follower = world.insert(w, "a", event_type="nowhere"), world.insert(w, "a")
    world.commit(w)
    return head, follower
