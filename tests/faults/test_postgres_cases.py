"""Cases from the field in which PostgreSQL, its age or its size is the matter; the numbers are those of docs/cases.md."""

from __future__ import annotations

import asyncio
import os
import resource
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import pytest

from relay.servers import PostgresServer, find_postgres
from tests.conftest import eventually
from tests.e2e.bystanders import channel_of
from tests.e2e.conftest import QUEUE, Site
from tests.e2e.ledger import drain, ledger
from tests.faults.stage import CALM, IN_FLIGHT, Stage, said_again, site_at
from tests.faults.test_broker import passed

LONG: Final = pytest.mark.long
CASE_18_ROWS_S: Final = 500
CASE_18_P95_MS: Final = 200
"""The least that counts as a baseline: less is chance on a machine that does other things."""


# ---------------------------------------------------------------- old transactions, sockets, proxies


@pytest.mark.parametrize("seconds", [pytest.param(3.0, id="short"), pytest.param(600.0, id="as-written", marks=LONG)])
async def test_case_18_an_old_reader_stops_nobody(stage: Stage, seconds: float) -> None:
    """A REPEATABLE READ transaction stays open; what is committed meanwhile, 500 rows a second, arrives meanwhile. (How fast:
    `bench`; here the rate and the 95th percentiles of INSERT to mark, before and meanwhile, are recorded, and compared over
    the ten minutes only: of a few seconds one hiccup of the machine is the 95th percentile.)"""
    await stage.up(2, lease=CALM)
    stage.load.pace(CASE_18_ROWS_S)
    before_ms, _ = await _latency_ms(stage, seconds / 10)
    reader = await asyncpg.connect(stage.site.database_url)
    try:
        async with reader.transaction(isolation="repeatable_read"):
            seen = await reader.fetchval("SELECT count(*) FROM outbox")
            while_open_ms, rows_s = await _latency_ms(stage, seconds)
            assert await reader.fetchval("SELECT count(*) FROM outbox") == seen
    finally:
        await reader.close()
    found = f"p95 before {before_ms:.0f} ms, while it was open {while_open_ms:.0f} ms at {rows_s:.0f} rows/s"
    stage.record("case_18", found)
    if seconds > 60:
        assert rows_s >= 0.9 * CASE_18_ROWS_S, found
        assert while_open_ms < 3 * max(before_ms, CASE_18_P95_MS), found
    await stage.verdict(
        f"a reading transaction open for {seconds:.0f} s at {rows_s:.0f} rows/s (case 18)", copies_max=0
    )


async def _latency_ms(stage: Stage, seconds: float) -> tuple[float, float]:
    """The 95th percentile of the rows of so many seconds, in which all that is committed arrives; and how many a second that
    were."""
    newest = await stage.site.database.fetchval("SELECT max(seq) FROM outbox")
    began, answered = time.monotonic(), len(stage.load.answered)
    while time.monotonic() < began + seconds:
        await passed(min(20.0, seconds / 3))
        await stage.back()
        await stage.take_off()
    rows_s = (len(stage.load.answered) - answered) / (time.monotonic() - began)
    p95_ms = float(
        await stage.site.database.fetchval(
            "SELECT 1000 * percentile_cont(0.95) WITHIN GROUP (ORDER BY date_part('epoch', sent_at - created_at))"
            " FROM outbox WHERE seq > $1",
            newest,
        )
    )
    return p95_ms, rows_s


@pytest.mark.parametrize("seconds", [pytest.param(2.0, id="short"), pytest.param(120.0, id="as-written", marks=LONG)])
async def test_case_22_half_open_socket(stage: Stage, seconds: float) -> None:
    """PostgreSQL's answers end without a word: noticed within the calls' deadlines, and all is well afterwards."""
    if seconds < 10:
        # Or an attempt that began in the void waits its ten seconds after all is well.
        stage.change_database_url = lambda url: f"{url}?connect_timeout=2"
    posts = await stage.up(2)
    for post in posts:
        post.database.half_open()
    for post in posts:
        await post.relay.not_ready("database", 30)
    stage.load.pace(30)
    await passed(seconds)
    for post in posts:
        post.database.heal()
    await stage.back(within_s=30)
    await stage.verdict(
        f"PostgreSQL's sockets half-open for {seconds:.0f} s (case 22)",
        copies_max=2 * IN_FLIGHT, within_s=30, outage_s=seconds + 15,
    )  # fmt: skip


async def test_case_22_sigterm_while_half_open(stage: Stage) -> None:
    (post,) = await stage.up(1)
    post.database.half_open()
    # Its grace is 8 s; a socket that is waited for lasts minutes.
    assert await post.relay.stop(60) in (0, 4), post.relay.text()
    assert "Traceback" not in post.relay.text()
    post.database.heal()
    stage.start(post)
    await stage.back()
    await stage.verdict("SIGTERM while PostgreSQL's socket is half-open (case 22)", copies_max=IN_FLIGHT)


async def test_case_35_gauges_of_a_database_that_is_gone(stage: Stage) -> None:
    (post,) = await stage.up(1)
    await stage.until_metric(post, "relay_backlog_observed_timestamp_seconds", 1)
    await asyncio.to_thread(stage.postgres.stop, "immediate")
    try:
        await post.relay.not_ready("database")
        metrics = post.relay.metrics()
        assert not {"relay_backlog_rows", "relay_oldest_pending_age_seconds", "relay_parked_rows"} & metrics.keys()
        assert metrics['relay_connected{peer="database"}'] == 0
        tries = post.database.accepted
        await eventually(lambda: post.database.accepted >= tries + 4, 30)
    finally:
        await asyncio.to_thread(stage.postgres.restart)
    await stage.back()
    await eventually(lambda: "relay_backlog_rows" in post.relay.metrics(), 20, interval_s=0.1)
    assert said_again(post.relay) == [], "one line a change, not a try"


# ---------------------------------------------------------------- writers


async def test_case_24_fifty_writers_of_large_rows(site: Site) -> None:
    """Payloads of 20 KB, keys of 9 KB, the doorbell armed between them: every insert commits, every row arrives."""
    await site.start().ready()

    async def write(writer: int) -> None:
        connection = await asyncpg.connect(site.database_url)
        for number in range(4):
            await connection.execute(
                "INSERT INTO outbox (id, event_type, aggregate_type, aggregate_id, payload)"
                " VALUES ($1, 'ok.x', 'big', repeat($2, 4500), json_build_object('d', repeat('y', 20000)))",
                f"{writer}-{number}", f"{writer:02}",
            )  # fmt: skip
        await connection.close()

    await asyncio.gather(*(write(writer) for writer in range(50)))
    await site.all_sent(60)
    (await ledger(site.database, site.amqp_url)).assert_complete()


# ---------------------------------------------------------------- size and age

DEADLOCKS: Final = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"


@pytest.mark.parametrize("sent", [pytest.param(5_000, id="short"), pytest.param(1_000_000, id="long", marks=LONG)])
async def test_case_26_retention_purges_only_what_is_sent(site: Site, sent: int) -> None:
    """Old sent rows go in batches while two relays work; pending and parked ones stay until they are sent or judged."""
    await site.database.execute(
        "INSERT INTO outbox (event_type, aggregate_id, payload, created_at, sent_at)"
        " SELECT 'ok.old', (n % 500)::text, '{}', now() - interval '9 d', now() - interval '8 d'"
        " FROM generate_series(1, $1::int) n",
        sent,
    )
    for number in range(100):
        await site.insert(f"parked{number}", key=f"p{number}", priority=300)
    daemons = [await site.start(name=name, retention="1d").ready(60) for name in ("one", "two")]
    await site.insert_many(1000, 50)
    await site.until("(SELECT count(*) = 1000 FROM outbox WHERE sent_at > now() - interval '1 d')", 60)
    await site.until("NOT EXISTS (SELECT FROM outbox WHERE event_type = 'ok.old')", 60 + sent / 1000)
    assert await site.database.fetchval("SELECT count(*) FROM outbox WHERE aside = 'parked'") == 100
    assert await site.database.fetchval("SELECT count(*) FROM outbox") == 1100
    assert await site.database.fetchval(DEADLOCKS) == 0
    assert len(await drain(site.amqp_url, 1000)) == 1000
    for daemon in daemons:
        assert await daemon.stop() == 0
        assert "refused" not in daemon.text()


def _memory_peak(pid: int) -> int:
    """VmHWM in bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmHWM")


@pytest.mark.parametrize("rows", [pytest.param(40, id="short"), pytest.param(500, id="as-written", marks=LONG)])
async def test_case_33_large_rows_in_little_memory(site: Site, rows: int) -> None:
    """Rows of 5 MiB, more of them than the memory has: the peak is RELAY_MAX_BYTES and a constant. (As written: about 102 MB, at
    two rows a second of a machine on which thirty processes wanted two cores.)"""
    max_bytes = 32 * 1024 * 1024
    await site.database.execute(
        "INSERT INTO outbox (event_type, aggregate_id, payload)"
        " SELECT 'ok.x', n::text, json_build_object('d', repeat('x', 5 * 1024 * 1024))"
        " FROM generate_series(1, $1::int) n",
        rows,
    )
    daemon = await site.start(max_bytes=str(max_bytes)).ready()
    resource.prlimit(daemon.process.pid, resource.RLIMIT_DATA, (512 * 1024**2, 512 * 1024**2))
    # PostgreSQL unpacks each of them twice, which takes a second of a machine that is busy with other things.
    await site.all_sent(60 + 2 * rows)
    peak = _memory_peak(daemon.process.pid)
    # Python and its libraries, the body in the driver's hands, the socket's buffer.
    assert peak < max_bytes + 120 * 1024 * 1024, f"{peak / 1024 / 1024:.0f} MiB"
    assert await daemon.stop() == 0


async def test_case_33_large_headers_in_little_memory(site: Site) -> None:
    """Headers of 100 KB, which a frame holds, counted for nothing: these rows took twice the memory that they may."""
    max_bytes = 16 * 1024 * 1024
    await site.database.execute(
        "INSERT INTO outbox (event_type, aggregate_id, payload, headers)"
        " SELECT 'ok.x', n::text, '{}', jsonb_build_object('h', repeat('x', 100000)) FROM generate_series(1, 1500) n"
    )
    async with channel_of(site) as channel:
        # Whoever publishes is meant, and not RabbitMQ's memory.
        await channel.queue_delete(QUEUE)
        queue = await channel.declare_queue(QUEUE, arguments={"x-max-length": 10})
        await queue.bind("events", "ok.#")
    daemon = await site.start(max_bytes=str(max_bytes)).ready()
    await site.all_sent(60)
    peak = _memory_peak(daemon.process.pid)
    assert peak < max_bytes + 120 * 1024 * 1024, f"{peak / 1024 / 1024:.0f} MiB"
    assert await daemon.stop() == 0


# ---------------------------------------------------------------- another server


async def test_case_27_dump_and_restore_into_a_fresh_cluster(site: Site, tmp_path: Path) -> None:
    """Transaction numbers begin anew there: floors count for nothing, what was sent stays sent, the rest is delivered."""
    await site.insert_many(100, 10, prefix="sent")
    daemon = await site.start().ready()
    await site.all_sent()
    assert await daemon.stop() == 0
    await site.insert_many(100, 10, prefix="pending")
    dump = tmp_path / "dump.sql"
    programs = find_postgres()
    with await asyncio.to_thread(lambda: PostgresServer.start(durable=False)) as fresh:
        url = fresh.create_database("restored")
        for program in ([str(programs / "pg_dump"), "-f", str(dump), site.database_url],
                        [str(programs / "psql"), "-q", "-v", "ON_ERROR_STOP=1", "-f", str(dump), "-d", url]):  # fmt: skip
            done = await asyncio.to_thread(
                lambda program=program: subprocess.run(  # type: ignore[misc]
                    program, capture_output=True, text=True, check=False, timeout=60, env={"PATH": os.environ["PATH"]}
                )
            )
            assert done.returncode == 0, done.stderr
        restored = await asyncpg.connect(url)
        daemon = await site.start(database_url=url).ready()
        for number in range(10):
            await restored.execute(
                "INSERT INTO outbox (id, event_type, aggregate_id, payload) VALUES ($1, 'ok.x', 'new', '{}')",
                f"new{number}",
            )

        async def all_sent() -> bool:
            return not await restored.fetchval("SELECT EXISTS (SELECT FROM outbox WHERE sent_at IS NULL)")

        await eventually(all_sent, 30)
        assert await daemon.stop() == 0
        (await ledger(restored, site.amqp_url)).assert_complete()
        assert await restored.fetchval("SELECT count(*) FROM outbox") == 210
        await restored.close()


async def test_case_28_asynchronous_settlements_and_a_crash(stage: Stage) -> None:
    """What the database settled last, it may have forgotten: it comes again, and no more than that."""
    posts = await stage.up(1, settle_commit="off")
    await asyncio.to_thread(stage.postgres.crash)
    await posts[0].relay.not_ready("database")
    await asyncio.to_thread(stage.postgres.restart)
    await stage.back()
    # The WAL writer is at most three times its delay of 200 ms behind, at some 200 rows a second.
    await stage.verdict(
        "asynchronous settlements, PostgreSQL killed (case 28)", copies_max=IN_FLIGHT + 400, outage_s=10
    )


@pytest.mark.long
async def test_case_28_a_standby_is_promoted(amqp_url: str, tmp_path: Path) -> None:
    """The URL names both; the standby is waited with until it takes writes. What was settled there is not repeated."""
    with await asyncio.to_thread(PostgresServer.start) as primary:
        url = primary.create_database("shop")
        with await asyncio.to_thread(PostgresServer.standby, primary) as standby:
            both = f"postgresql://postgres@127.0.0.1:{primary.port},127.0.0.1:{standby.port}/shop"
            settings = {"RELAY_DATABASE_URL": both, "RELAY_AMQP_URL": amqp_url}
            async with site_at(url, amqp_url, tmp_path, settings) as site:
                await _fail_over(site, primary, standby)


async def _fail_over(site: Site, primary: PostgresServer, standby: PostgresServer) -> None:
    daemon = await site.start(max_in_flight="100").ready()
    await site.insert_many(500, 20, prefix="a")
    await site.all_sent()
    await site.insert_many(500, 20, prefix="b")
    newest = await site.database.fetchval("SELECT pg_current_wal_lsn()::text")

    async def has_replayed() -> bool:
        behind = await asyncio.to_thread(standby.sql, f"SELECT pg_last_wal_replay_lsn() >= '{newest}'::pg_lsn")
        return behind.strip() == "t"

    await eventually(has_replayed, 30, interval_s=0.1)
    await asyncio.to_thread(primary.crash)
    await daemon.not_ready("database")
    await asyncio.to_thread(standby.promote)
    parts = urlsplit(site.database_url)
    site.database_url = urlunsplit(parts._replace(netloc=f"postgres@127.0.0.1:{standby.port}"))
    await site.reconnect()
    await site.insert_many(500, 20, prefix="c")
    await site.all_sent(60)
    # Settlements that the standby had not got when the primary died are made again; those of `a` it had.
    found = await ledger(site.database, site.amqp_url)
    found.assert_complete(duplicates_max=500 + 100)
    again = [id_ for id_, copies in Counter(found.arrivals).items() if copies > 1]
    assert not [id_ for id_ in again if id_.startswith("a")]
    assert await daemon.stop() == 0
