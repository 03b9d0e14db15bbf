"""Cases from the field, end to end: the numbers are those of the project's list of cases."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import tempfile
from collections.abc import AsyncIterator
from datetime import timedelta
from urllib.parse import quote

import aio_pika
import asyncpg
import pytest

from relay.servers import PostgresServer, RabbitServer
from tests.conftest import eventually, has_ipv6
from tests.e2e.conftest import Daemon, Site, command
from tests.e2e.credentials import role, user
from tests.e2e.ledger import Ledger, committed, drain, ledger

ARMED = (
    "EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND mode = 'ExclusiveLock' AND granted"
    " AND database = (SELECT oid FROM pg_database WHERE datname = current_database()))"
)


# ---------------------------------------------------------------- start and outages


async def test_case_09_start_while_the_broker_is_off(site: Site, rabbit_server: RabbitServer) -> None:
    await site.insert_many(50, 5)
    await asyncio.to_thread(rabbit_server.stop)
    try:
        daemon = site.start()
        await daemon.not_ready("broker")
    finally:
        await asyncio.to_thread(rabbit_server.restart)
    await site.insert("one more", key="1")
    await site.all_sent(30)
    await daemon.ready()
    assert daemon.process.poll() is None
    (await ledger(site.database, site.amqp_url)).assert_complete()


async def test_case_09_stop_midway(site: Site, rabbit_server: RabbitServer) -> None:
    daemon = await site.start(max_rate="200").ready()
    await site.insert_many(300, 5)
    await eventually(lambda: daemon.metric("relay_rows_sent_total") > 50)
    await asyncio.to_thread(rabbit_server.stop)
    await daemon.not_ready("broker")
    await site.insert("one more", key="1")
    await asyncio.to_thread(rabbit_server.restart)
    await site.all_sent(30)
    (await ledger(site.database, site.amqp_url)).assert_complete(duplicates_max=300)


@pytest.mark.parametrize("group", ["keeper", "reader", "settler"])
async def test_case_23_a_session_is_terminated_and_the_doorbell_still_wakes(site: Site, group: str) -> None:
    daemon = await site.start(poll_interval="1h").ready()
    await site.until(ARMED)
    killed = await site.database.fetchval(
        "SELECT count(*) FILTER (WHERE pg_terminate_backend(pid)) FROM pg_stat_activity"
        " WHERE datname = current_database() AND application_name LIKE $1",
        f"outbox-relay {group}%",
    )
    assert killed == 1
    await eventually(lambda: daemon.metric("relay_reconnects_total") >= 1)
    await site.until(ARMED)
    await site.insert("woken")
    await site.all_sent(10)


# ---------------------------------------------------------------- kills and stops


async def test_case_30_killed_ten_times(site: Site) -> None:
    """With a lease of a minute the test ends in time only if each kill frees the claims at once. Each life has rows of its own
    beside what was left: however slowly a life is ended, the next one finds work."""
    rows, kills, in_flight = 100, 10, 20
    for number in range(kills):
        await site.insert_many(rows, 50, prefix=f"life{number}-")
        daemon = await site.start(
            name=f"pod-{number}", lease="60s", max_in_flight=str(in_flight), max_rate="100"
        ).ready()
        await _published(daemon, rows // 2)
        await daemon.kill()
    await site.start(name="last", lease="60s").ready()
    await site.all_sent(30)
    found = await ledger(site.database, site.amqp_url)
    found.assert_complete(duplicates_max=kills * in_flight)


async def _published(daemon: Daemon, count: int) -> None:
    await eventually(lambda: daemon.metric("relay_published_total") >= count, 30)


async def test_case_31_sigterm_mid_batch(site: Site) -> None:
    await site.insert_many(3000, 100)
    first = await site.start(max_rate="300", shutdown_grace="1h").ready()
    await eventually(lambda: first.metric("relay_published_total") > 100)
    assert await first.stop() == 0
    delivered = [message.message_id or "" for message in await drain(site.amqp_url, 1)]
    marked = await site.database.fetchval("SELECT count(*) FROM outbox WHERE sent_at IS NOT NULL")
    assert 0 < marked < 3000, "not in the middle"
    assert len(delivered) == marked, "confirmed and not marked, or the other way round"
    assert "Traceback" not in first.text()
    await site.start().ready()
    await site.all_sent()
    (await ledger(site.database, site.amqp_url, earlier=delivered)).assert_complete()


async def test_case_31_sigterm_with_the_broker_stopped(site: Site, rabbit_server: RabbitServer) -> None:
    daemon = await site.start(shutdown_grace="1h").ready()
    await asyncio.to_thread(rabbit_server.stop)
    try:
        await site.insert_many(100, 10)
        await daemon.not_ready("broker")
        assert await daemon.stop() == 0
    finally:
        await asyncio.to_thread(rabbit_server.restart)
    await site.start().ready()
    await site.all_sent()
    (await ledger(site.database, site.amqp_url)).assert_complete()


async def test_case_31_second_signal_ends_at_once(site: Site, rabbit_server: RabbitServer) -> None:
    daemon = await site.start(shutdown_grace="1h").ready()
    rabbit_server.freeze()
    try:
        await site.insert_many(100, 100)
        await eventually(lambda: daemon.metric("relay_in_flight_messages") > 0)
        daemon.signal(signal.SIGTERM)
        await eventually(lambda: '"stopping"' in daemon.text())
        daemon.signal(signal.SIGTERM)
        assert await daemon.exit() == 4
    finally:
        rabbit_server.thaw()
    assert "Traceback" not in daemon.text()
    await site.start().ready()
    await site.all_sent(30)
    (await ledger(site.database, site.amqp_url)).assert_complete(duplicates_max=100)


async def test_case_31_the_grace_runs_out(site: Site, rabbit_server: RabbitServer) -> None:
    daemon = await site.start(shutdown_grace="1s").ready()
    rabbit_server.freeze()
    try:
        await site.insert_many(100, 100)
        await eventually(lambda: daemon.metric("relay_in_flight_messages") > 0)
        # Nothing else ends it: the broker is frozen.
        assert await daemon.stop() == 4
    finally:
        rabbit_server.thaw()
    assert "unsettled" in daemon.text()
    assert '"grace_s":1.0' in daemon.text()
    assert daemon.events()[-1]["event"] == "exited"
    assert daemon.events()[-1]["exit_code"] == 4
    assert "Traceback" not in daemon.text()


@pytest.mark.parametrize("seconds", [3.0, pytest.param(31.0, marks=pytest.mark.long)])
async def test_case_31_old_and_new_overlap(site: Site, seconds: float) -> None:
    """A rolling deployment under load: both work for a while, the old one stops; no loss, no copy, no reordering."""
    old = await site.start(name="old", lease="5s").ready()
    async with _writing(site.database_url):
        await eventually(lambda: old.metric("relay_rows_sent_total") > 0, 30)
        new = await site.start(name="new", lease="5s").ready()
        await eventually(lambda: new.metric("relay_shards_owned") == 32 and old.metric("relay_shards_owned") == 32, 30)
        await eventually(lambda: new.metric("relay_rows_sent_total") > 0, 30)
        await site.until(f"EXISTS (SELECT FROM outbox WHERE created_at < now() - interval '{seconds} s')", 60)
        assert await old.stop() == 0
        await eventually(lambda: new.metric("relay_shards_owned") == 64, 30)
    await site.all_sent(60)
    (await ledger(site.database, site.amqp_url)).assert_complete()
    assert await new.stop() == 0


@contextlib.asynccontextmanager
async def _writing(url: str) -> AsyncIterator[None]:
    """Small transactions over fifty keys, one after the other, for as long as the block lasts."""
    is_over = asyncio.Event()

    async def write() -> None:
        connection = await asyncpg.connect(url)
        number = 0
        while not is_over.is_set():
            number += 1
            await connection.execute(
                "INSERT INTO outbox (id, event_type, aggregate_id, payload) VALUES ($1, 'ok.x', $2, '{}')",
                f"w{number}", str(number % 50),
            )  # fmt: skip
        await connection.close()

    async with asyncio.TaskGroup() as group:
        group.create_task(write())
        try:
            yield
        finally:
            is_over.set()


# ---------------------------------------------------------------- clocks


@pytest.mark.parametrize("skew_s", [-3600, 3600])
async def test_case_32_due_times_follow_the_server(site: Site, skew_s: int) -> None:
    """The relay in one time zone with its clock an hour off, the server in another: what is due, what expires, what is tried again."""
    name = await site.database.fetchval("SELECT quote_ident(current_database())")
    await site.database.execute(f"ALTER DATABASE {name} SET timezone = 'Asia/Kolkata'")
    prelude = (
        "import os, time; os.environ['TZ'] = 'America/St_Johns'; time.tzset()\n"
        f"real = time.time; time.time = lambda: real() + {skew_s}"
    )
    due = await site.database.fetchval("SELECT now() + interval '2 seconds'")
    await site.insert("scheduled", available_at=due)
    await site.insert("plain")
    await site.insert("expiring", expires_at=due + timedelta(minutes=10))
    await site.insert("late", event_type="nowhere.x")
    daemon = await site.start(prelude=prelude, retry_delays="20s", max_age="30m").ready()
    await site.until("(SELECT count(*) = 3 FROM outbox WHERE sent_at IS NOT NULL)")
    failed = "SELECT date_part('epoch', due_at - last_failed_at) FROM outbox WHERE aside = 'deferred' AND id = 'late'"
    assert 15 < await site.database.fetchval(failed) < 25, "neither tried again at once nor in an hour, nor too old"
    sent = await site.database.fetchval("SELECT sent_at FROM outbox WHERE id = 'scheduled'")
    assert due <= sent < due + timedelta(minutes=20), "not by a clock that is an hour off"
    metrics = daemon.metrics()
    assert metrics["relay_delivery_seconds_count"] == 3
    assert 0 <= metrics["relay_delivery_seconds_sum"] < 3 * 1200
    assert metrics.get("relay_oldest_pending_age_seconds", 0.0) >= 0
    messages = {message.message_id: message for message in await drain(site.amqp_url, 3)}
    left = messages["expiring"].expiration
    assert isinstance(left, int | float) and 300 < left <= 602
    occurred = await site.database.fetchval("SELECT occurred_at FROM outbox WHERE id = 'plain'")
    assert messages["plain"].timestamp is not None
    assert abs((messages["plain"].timestamp - occurred).total_seconds()) < 1


# ---------------------------------------------------------------- probes and metrics


async def test_case_34_postgres_frozen(site: Site, postgres_server: PostgresServer) -> None:
    daemon = await site.start(lease="1s").ready()
    postgres_server.freeze()
    try:
        await eventually(lambda: daemon.get("/readyz")[0] == 503, 30)
        assert daemon.get("/livez")[0] == 200
    finally:
        postgres_server.thaw()
    await daemon.ready(30)


async def test_case_34_broker_frozen(site: Site, rabbit_server: RabbitServer) -> None:
    daemon = await site.start(confirm_timeout="1s").ready()
    rabbit_server.freeze()
    try:
        await site.insert("stuck")
        await eventually(lambda: daemon.get("/readyz")[0] == 503, 30)
        assert daemon.get("/livez")[0] == 200
    finally:
        rabbit_server.thaw()
    await site.all_sent(40)
    await daemon.ready(40)


async def test_case_34_wedged_event_loop_fails_livez_and_ends_when_it_is_told_to(site: Site) -> None:
    """The signal was the loop's to hear: SIGTERM did nothing until the container runtime's SIGKILL."""
    prelude = "import signal, time; signal.signal(signal.SIGUSR1, lambda *_: time.sleep(60))"
    daemon = await site.start(prelude=prelude, shutdown_grace="500ms").ready()
    assert daemon.get("/livez")[0] == 200
    daemon.signal(signal.SIGUSR1)
    await eventually(lambda: daemon.get("/livez")[0] == 503, 15)
    daemon.signal(signal.SIGTERM)
    assert await daemon.exit() == 4
    assert "the grace ran out, and something still hung" in daemon.text()


async def test_case_36_series_do_not_grow_with_keys(site: Site) -> None:
    daemon = await site.start().ready()
    await site.insert("first", key="k")
    await site.all_sent()
    await eventually(lambda: "relay_backlog_rows" in daemon.metrics())
    before = daemon.metrics().keys()
    await site.database.execute(
        "INSERT INTO outbox (event_type, aggregate_id, payload)"
        " SELECT 'ok.' || n, n, '{}' FROM generate_series(1, 10000) n"
    )
    await site.all_sent(60)
    assert daemon.metrics().keys() == before
    assert daemon.metric("relay_rows_sent_total") == 10_001


async def test_case_37_port_taken(site: Site) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        daemon = site.start(listen=f"127.0.0.1:{port}")
        assert await daemon.exit() == 2
    assert f"127.0.0.1:{port}" in daemon.text()
    assert "Traceback" not in daemon.text()
    assert len(daemon.events()) <= 2


# ---------------------------------------------------------------- URLs and the environment

PASSWORD = "p@ss/w#rd:%2F +x"


@pytest.mark.parametrize("vhost", ["/", "a/b", "vh ü"])
async def test_case_38_passwords_and_vhosts(
    site: Site, postgres_server: PostgresServer, rabbit_server: RabbitServer, vhost: str
) -> None:
    name = "relay ü"
    if vhost != "/":
        rabbit_server.add_vhost(vhost)
    everything = {"configure": ".*", "write": ".*", "read": ".*"}
    try:
        async with role(site.database, postgres_server, name, PASSWORD, attributes="SUPERUSER") as at_database:
            with user(rabbit_server, vhost, name, PASSWORD, **everything) as at_broker:
                async with await aio_pika.connect(rabbit_server.amqp_url(vhost)) as connection:
                    channel = await connection.channel()
                    exchange = await channel.declare_exchange("events", aio_pika.ExchangeType.TOPIC, durable=True)
                    queue = await channel.declare_queue("q", durable=True)
                    await queue.bind(exchange, "ok.#")
                addresses = {"database_url": at_database.url, "amqp_url": at_broker.url}
                daemon = await site.start(**addresses, log_level="debug").ready()
                await site.insert("m")
                await site.all_sent()
                assert await daemon.stop() == 0
                for form in (PASSWORD, quote(PASSWORD, safe=""), quote(PASSWORD)):
                    assert form not in daemon.text()
    finally:
        if vhost != "/":
            rabbit_server.delete_vhost(vhost)


async def test_case_38_unix_socket_several_hosts_and_ipv6(site: Site) -> None:
    # Not `tmp_path`: a socket's path has 107 bytes, and the server's user has to reach it.
    directory = tempfile.mkdtemp(prefix="relay-sockets-")
    os.chmod(directory, 0o777)
    is_ipv6_here = has_ipv6()
    options = {
        "unix_socket_directories": directory,
        "listen_addresses": "127.0.0.1,::1" if is_ipv6_here else "127.0.0.1",
    }
    server = await asyncio.to_thread(lambda: PostgresServer.start(durable=False, options=options))
    try:
        urls = {
            "socket": f"postgresql://postgres@/postgres?host={quote(directory, safe='')}&port={server.port}",
            "hosts": f"postgresql://postgres@127.0.0.1:1,127.0.0.1:{server.port}/postgres",
        }
        if is_ipv6_here:
            urls["ipv6"] = f"postgresql://postgres@[::1]:{server.port}/postgres"
        connection = await asyncpg.connect(server.url())
        for kind, url in urls.items():
            table = f"outbox_{kind}"
            settings = {**site.settings, "RELAY_DATABASE_URL": url, "RELAY_TABLE": table}
            done = await asyncio.to_thread(command, "migrate", settings=settings)
            assert done.returncode == 0, (kind, done.stderr)
            daemon = await site.start(database_url=url, table=table).ready()
            await connection.execute(f"INSERT INTO {table} (id, event_type, payload) VALUES ('{kind}', 'ok.x', '1')")
            (message,) = await drain(site.amqp_url, 1)
            assert message.message_id == kind
            assert await daemon.stop() == 0
        await connection.close()
    finally:
        server.close()
        shutil.rmtree(directory)


async def test_case_39_kubernetes_service_variables_are_ignored(site: Site) -> None:
    daemon = await site.start(port="tcp://10.0.0.1:9000", service_host="10.0.0.1").ready()
    await site.insert("m")
    await site.all_sent()
    assert await daemon.stop() == 0
    assert "10.0.0.1" not in daemon.text()
    assert not [event for event in daemon.events() if event["level"] != "info"]


# ---------------------------------------------------------------- the oracle itself


def test_the_ledger_notices() -> None:
    """An oracle that cannot fail proves nothing."""
    keys: dict[str, tuple[str, str] | None] = {"a1": ("", "a"), "a2": ("", "a"), "x": None}
    assert Ledger(keys, ["a1", "a2"]).lost == {"x"}
    assert Ledger(keys, ["a1", "a2", "x", "y"]).invented == {"y"}
    assert Ledger(keys, ["x", "a2", "a1"]).overtaken() == [("a2", "a1")]
    assert Ledger(keys, ["a1", "a2", "a1", "x"]).duplicates == 1
    assert Ledger(keys, ["a1", "a2", "a1", "x"]).overtaken() == []


async def test_the_ledger_reads_in_the_order_of_seq(site: Site) -> None:
    ids = await site.insert_many(20, 3)
    assert list(await committed(site.database)) == ids
