"""A quorum queue on three nodes loses its leader, then its majority."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from relay.servers import Epmd, PostgresServer, RabbitServer
from tests.conftest import eventually
from tests.e2e.conftest import QUEUE
from tests.faults.load import Load
from tests.faults.stage import IN_FLIGHT, Stage, site_at
from tests.faults.test_broker import OUTAGE_S, passed

pytestmark = pytest.mark.long
CONFIG = "cluster_partition_handling = ignore"


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[RabbitServer]]:
    """Three nodes, one cluster."""
    with contextlib.ExitStack() as stack:
        epmd = stack.enter_context(Epmd.start())
        members = [
            stack.enter_context(RabbitServer.start(plugins=(), extra_config=CONFIG, epmd=epmd)) for _ in range(3)
        ]
        for member in members[1:]:
            member.join(members[0])
        yield members


def leader(nodes: list[RabbitServer]) -> RabbitServer:
    """Of the queue, as a living node tells it."""
    teller = next(node for node in nodes if node.is_running)
    name = teller.ctl("list_queues", "name", "leader").split()[-1]
    return next(node for node in nodes if node.node == name)


@contextlib.asynccontextmanager
async def stage_on(
    nodes: list[RabbitServer],
    database_url: str,
    postgres: PostgresServer,
    directory: Path,
    record: Callable[[str, object], None],
) -> AsyncIterator[Stage]:
    settings = {"RELAY_DATABASE_URL": database_url}
    async with contextlib.AsyncExitStack() as stack:
        site = await stack.enter_async_context(
            site_at(database_url, nodes[0].amqp_url(), directory, settings, is_quorum=True)
        )
        load = await stack.enter_async_context(Load(database_url))
        yield Stage(site, load, nodes[0], postgres, record, stack)


@pytest.mark.parametrize("relays", [1, 2])
async def test_leader_then_majority_lost(
    nodes: list[RabbitServer],
    database_url: str,
    postgres_server: PostgresServer,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
    relays: int,
) -> None:
    """Nacked or left without an answer, rows wait without an attempt; the URLs are tried in turn."""
    async with stage_on(nodes, database_url, postgres_server, tmp_path, record_property) as stage:
        urls = ",".join(f"{node.amqp_url()}?heartbeat=4&timeout=4" for node in nodes)
        await stage.up(relays, amqp_url=urls)
        first = await asyncio.to_thread(leader, nodes)
        await asyncio.to_thread(first.kill)
        await stage.back(within_s=60)
        await asyncio.to_thread(first.restart)
        others = [node for node in nodes if node is not await asyncio.to_thread(leader, nodes)]
        for node in others:
            await asyncio.to_thread(node.kill)
        newest = await stage.site.database.fetchval("SELECT max(seq) FROM outbox")
        await passed(OUTAGE_S)
        assert await stage.site.unsent(), "confirmed without a majority"
        assert await stage.site.database.fetchval("SELECT max(seq) FROM outbox") > newest
        await asyncio.gather(*(asyncio.to_thread(node.restart) for node in others))
        await eventually(lambda: all(node.is_running for node in nodes), 30)
        await stage.back(within_s=60)
        await stage.verdict(
            f"3-node cluster, {QUEUE} a quorum queue: leader killed, then the majority",
            copies_max=3 * relays * IN_FLIGHT, within_s=60, faults=4, outage_s=60,
        )  # fmt: skip
        with contextlib.suppress(StopIteration):
            await asyncio.to_thread(next(node for node in nodes if node.is_running).ctl, "delete_queue", QUEUE)
