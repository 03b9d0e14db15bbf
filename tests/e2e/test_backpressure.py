"""Each reason of backpressure, provoked, and gone when its cause is; what RELAY_MAX_RATE lets through."""

from __future__ import annotations

import asyncio
import time

import pytest

from relay.servers import PostgresServer, RabbitServer, free_port
from tests.conftest import eventually
from tests.e2e.conftest import Daemon, Site
from tests.proxy import Proxy, Side

REASONS = ("in_flight", "bytes", "blocked", "rate", "broker_down", "database_down")


def active(relay: Daemon) -> set[str]:
    """The reasons that hold now."""
    numbers = relay.metrics()
    return {reason for reason in REASONS if numbers.get(f'relay_backpressure_active{{reason="{reason}"}}') == 1}


def seconds(relay: Daemon, reason: str) -> float:
    return relay.metrics()[f'relay_backpressure_seconds_total{{reason="{reason}"}}']


async def test_a_relay_with_nothing_to_do_waits_for_nothing(site: Site) -> None:
    relay = await site.start().ready()
    await site.insert("one")
    await site.all_sent()
    await eventually(lambda: active(relay) == set())


async def test_in_flight(site: Site) -> None:
    """The window is full and rows are ready; other keys', as one key never has two in flight."""
    await site.insert_many(300, 300)
    relay = await site.start(max_in_flight="2", max_read_ahead="100").ready()
    await site.all_sent()
    assert seconds(relay, "in_flight") > 0
    assert seconds(relay, "bytes") == 0
    await eventually(lambda: active(relay) == set())


@pytest.mark.parametrize("size", [3_000, 40_000])
async def test_bytes(site: Site, size: int) -> None:
    """Small bodies that come with their page, and large ones that are fetched apart: both have half of the memory."""
    await site.database.execute(
        "INSERT INTO outbox (event_type, aggregate_id, payload)"
        " SELECT 'ok.x', 'k' || n % 5, to_json((SELECT string_agg(md5(random()::text), '') FROM generate_series(1, $1::int / 32)"
        " WHERE n > 0)) FROM generate_series(1, 200) n", size,
    )  # fmt: skip
    relay = await site.start(max_bytes="64KiB").ready()
    await site.all_sent(40.0)
    assert seconds(relay, "bytes") > 0
    await eventually(lambda: active(relay) == set())


async def test_blocked(site: Site, rabbit_server: RabbitServer) -> None:
    relay = await site.start().ready()
    await asyncio.to_thread(rabbit_server.memory_alarm, True)
    try:
        await site.insert_many(50, 50)
        await eventually(lambda: active(relay) == {"blocked"}, 20.0)
        assert "blocked" in relay.reasons()
    finally:
        await asyncio.to_thread(rabbit_server.memory_alarm, False)
    await site.all_sent()
    await eventually(lambda: active(relay) == set())
    assert seconds(relay, "blocked") > 0
    assert relay.metrics()['relay_published_total{outcome="acked"}'] == 50


async def test_rate(site: Site) -> None:
    """Never above the rate and its burst; the reason holds while rows are ready, and not longer."""
    rate = 20.0
    relay = await site.start(max_rate=f"{rate:g}").ready()
    began = time.monotonic()
    await site.insert_many(60, 60)
    await eventually(lambda: active(relay) == {"rate"})
    async with asyncio.timeout(60):
        while (sent := int(relay.metric("relay_published_total"))) < 60:
            assert sent <= rate * (time.monotonic() - began) + 2
            await asyncio.sleep(0)
    assert seconds(relay, "rate") > 1.0
    await eventually(lambda: active(relay) == set())


async def test_a_rate_below_one_a_second(site: Site) -> None:
    relay = await site.start(max_rate="0.5").ready()
    began = time.monotonic()
    await site.insert_many(3, 3)
    await site.all_sent(30.0)
    assert time.monotonic() - began > 3.5
    assert relay.metric("relay_published_total") == 3


async def test_the_broker_goes_and_no_other_reason_stays(site: Site) -> None:
    """in_flight and rate are reasons of a relay that publishes: with its link gone they are none."""
    async with Proxy(site.amqp_url) as proxy:
        relay = await site.start(amqp_url=proxy.url, max_rate="20", max_in_flight="2").ready()
        await site.insert_many(200, 200)
        await eventually(lambda: "rate" in active(relay))
        proxy.deaf = {Side.SERVER}
        proxy.reset()
        await eventually(lambda: active(relay) == {"broker_down"}, 20.0)
        proxy.heal()
        proxy.reset()
        await eventually(lambda: "broker_down" not in active(relay), 30.0)
        assert seconds(relay, "broker_down") > 0


async def test_the_database_goes(site: Site, postgres_server: PostgresServer) -> None:
    relay = await site.start().ready()
    await site.database.close()
    await asyncio.to_thread(postgres_server.stop)
    try:
        await eventually(lambda: active(relay) == {"database_down"}, 20.0)
    finally:
        await asyncio.to_thread(postgres_server.restart)
    await eventually(lambda: active(relay) == set(), 30.0)
    assert seconds(relay, "database_down") > 0
    await site.reconnect()


async def test_a_relay_that_never_found_its_broker(site: Site) -> None:
    relay = site.start(amqp_url=f"amqp://guest:guest@127.0.0.1:{free_port()}/")
    await eventually(lambda: active(relay) == {"broker_down"}, 20.0)
