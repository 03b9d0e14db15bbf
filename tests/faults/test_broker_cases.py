"""Cases from the field in which RabbitMQ, or the way to it, misbehaves; the numbers are those of docs/cases.md."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Final

import aio_pika
import pytest

from bench.procfs import run_time_s
from tests.e2e.conftest import LADDER, QUEUE, Daemon, Site
from tests.e2e.ledger import ledger
from tests.faults.stage import CALM, IN_FLIGHT, Stage
from tests.faults.test_broker import passed
from tests.proxy import Proxy

LONG: Final = pytest.mark.long


@pytest.mark.parametrize("seconds", [pytest.param(4.0, id="short"), pytest.param(180.0, id="as-written", marks=LONG)])
async def test_case_08_broker_frozen(stage: Stage, seconds: float) -> None:
    """Gauges climb, nothing is given up that the heartbeat does not give up, and the backlog drains in time."""
    posts = await stage.up(2, lease=CALM)
    stage.rabbit.freeze()
    try:
        for post in posts:
            await stage.until_metric(post, "relay_in_flight_messages", 1)
        backlog = posts[0].relay.metric("relay_backlog_rows")
        await stage.until_metric(posts[0], "relay_backlog_rows", backlog + 100)
        stage.load.pace(30)
        await passed(seconds)
        assert all(post.relay.get("/livez")[0] == 200 for post in posts)
    finally:
        stage.rabbit.thaw()
    await stage.back(within_s=30)
    copies_max = 0 if seconds < 10 else 2 * IN_FLIGHT
    await stage.verdict(
        f"broker frozen for {seconds:.0f} s (case 8)", copies_max=copies_max, within_s=30, outage_s=seconds
    )


@pytest.mark.long
async def test_case_08_only_its_acks_vanish(stage: Stage) -> None:
    """The broker lives and confirms nothing: stalled is said; ten times as long, and the links are built anew."""
    posts = await stage.up(2, confirm_timeout="1s")
    for post in posts:
        post.broker.swallows_acks = True
    for post in posts:
        await post.relay.not_ready("stalled")
    for post in posts:
        await stage.logged(post, "link_rebuilt")
        post.broker.heal()
    await stage.back(within_s=45)
    for post in posts:
        assert len([event for event in post.relay.events() if event["event"] == "confirms_stalled"]) <= 2
    await stage.verdict(
        "acks vanish, the connection lives (case 8)", copies_max=2 * 2 * IN_FLIGHT, within_s=45, faults=2, outage_s=12
    )


async def test_case_10_exchange_recreated_with_another_type_during_a_reconnect(site: Site) -> None:
    """While it is missing the configuration is at fault; once it is there with another type the rows have no route."""
    async with Proxy(site.amqp_url) as proxy:
        daemon = await site.start(amqp_url=proxy.url, retry_delays=LADDER).ready()
        proxy.refuses = True
        proxy.reset()
        await daemon.not_ready("broker")
        async with await aio_pika.connect(site.amqp_url) as connection:
            broker = await connection.channel()
            await broker.exchange_delete("events")
            proxy.heal()
            await daemon.not_ready("exchange")
            await site.insert_many(50, 5)
            assert any("RELAY_EXCHANGE" in str(event) for event in daemon.events()), "a hint what to do"
            exchange = await broker.declare_exchange("events", aio_pika.ExchangeType.DIRECT, durable=True)
            await site.until("(SELECT count(*) >= 5 FROM outbox WHERE failure_class = 'unroutable')", 30)
            assert daemon.metric("relay_published_total") < 100, "it spins"
            assert proxy.accepted < 20, "it spins"
            await (await broker.get_queue(QUEUE)).bind(exchange, "ok.x")
        await site.all_sent(60)
        found = await ledger(site.database, site.amqp_url)
        found.assert_complete()


@pytest.mark.parametrize("how", ["refuses", pytest.param("half-open", marks=LONG)])
async def test_case_11_the_first_of_two_urls_dies(site: Site, how: str) -> None:
    """The next attempt tries the second as soon as the first fails; without a word it takes the heartbeat to notice."""
    async with Proxy(site.amqp_url) as first, Proxy(site.amqp_url) as second:
        tail = "?heartbeat=2&timeout=2"
        daemon = await site.start(amqp_url=f"{first.url}{tail},{second.url}{tail}", max_in_flight="100").ready()
        await site.insert_many(100, 10, prefix="a")
        await site.all_sent()
        assert (first.accepted, second.accepted) == (1, 0)
        if how == "refuses":
            first.refuses = True
            first.reset()
        else:
            first.half_open()
        await site.insert_many(500, 10, prefix="b")
        await site.all_sent(60)
        assert first.accepted <= 2, "one more try there at the most"
        assert second.accepted >= 1
        await daemon.ready()
        (await ledger(site.database, site.amqp_url)).assert_complete(duplicates_max=100)


def _livez_s(daemon: Daemon) -> float:
    """Seconds of the relay's own CPU until it answered: what it does before it gets to a probe, on whatever machine."""
    began_s = run_time_s(daemon.process.pid)
    status, _ = daemon.get("/livez")
    assert status == 200
    return run_time_s(daemon.process.pid) - began_s


@pytest.mark.parametrize("rows", [pytest.param(12, id="short"), pytest.param(1000, id="as-written", marks=LONG)])
async def test_case_41_large_rows_on_a_fifth_of_a_cpu(site: Site, rows: int) -> None:
    """A heartbeat of 5 s, rows of 1 MiB with headers of 2,000 keys, and a relay that runs 20 ms of each 100 ms.

    A probe's patience is a second by default, in which such a relay runs for a fifth of one."""
    await site.database.execute(
        "INSERT INTO outbox (event_type, aggregate_id, payload, headers)"
        " SELECT 'ok.x', (n % 20)::text, json_build_object('d', repeat('x', 1024 * 1024)),"
        " (SELECT jsonb_object_agg('key' || k, k) FROM generate_series(1, 2000) k)"
        " FROM generate_series(1, $1::int) n",
        rows,
    )
    daemon = await site.start(amqp_url=f"{site.amqp_url}?heartbeat=5").ready()
    slowest_s = 0.0
    with _throttled(daemon):
        async with asyncio.timeout(120 + 3 * rows):
            while await site.unsent():
                slowest_s = max(slowest_s, await asyncio.to_thread(_livez_s, daemon))
                assert daemon.process.poll() is None
    assert slowest_s < 0.2, f"/livez took {slowest_s:.3f} s of CPU"
    assert daemon.metric("relay_reconnects_total") == 0, daemon.text()
    assert await site.database.fetchval("SELECT count(*) FROM outbox WHERE sent_at IS NOT NULL") == rows


@contextlib.contextmanager
def _throttled(daemon: Daemon) -> Iterator[None]:
    """A process stopped for 80 ms of each 100 ms, by signals; by a thread, which waits for nothing of the test's."""
    is_over = threading.Event()

    def throttle() -> None:
        while not is_over.is_set():
            daemon.signal(signal.SIGSTOP)
            is_over.wait(0.08)
            daemon.signal(signal.SIGCONT)
            is_over.wait(0.02)

    thread = threading.Thread(target=throttle)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
