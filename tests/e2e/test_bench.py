"""`relay bench` against real servers: it measures, and nothing of it is left, whatever ended it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import signal
from collections.abc import AsyncIterator, Mapping
from typing import Any
from urllib.parse import urlsplit

import aio_pika
import asyncpg
import pytest

from relay.benchmark import ground
from relay.benchmark.figures import Plan
from relay.benchmark.load import filled
from relay.cli import console
from relay.config import load, needed_by, used_by
from relay.errors import CheckFailed
from relay.servers import PostgresServer, RabbitServer
from tests.conftest import eventually
from tests.e2e.conftest import COMMAND, command, environment


async def tables(url: str) -> set[str]:
    """Whatever has the benchmark's name in this database: tables, functions."""
    connection = await asyncpg.connect(url)
    try:
        rows = await connection.fetch(
            "SELECT relname AS name FROM pg_class WHERE relname LIKE 'relay\\_bench%' AND relkind = 'r'"
            " UNION SELECT proname FROM pg_proc WHERE proname LIKE 'relay\\_bench%'"
        )
    finally:
        await connection.close(timeout=5)
    return {row["name"] for row in rows}


def broker_names(rabbit: RabbitServer) -> str:
    """Queues and exchanges of every vhost, as Erlang prints them."""
    every = "rabbit_amqqueue:list_names() ++ rabbit_exchange:list_names()"
    return rabbit.eval(f"[binary_to_list(N) || {{resource, _, _, N}} <- {every}]")


@pytest.fixture
def settings(database_url: str, amqp_url: str) -> Mapping[str, str]:
    return {"RELAY_DATABASE_URL": database_url, "RELAY_AMQP_URL": amqp_url}


async def test_it_measures_and_leaves_nothing(settings: Mapping[str, str], rabbit_server: RabbitServer) -> None:
    flags = ("--rows", "500", "--seconds", "1", "--rate", "100", "--queue", "classic", "--json")
    done = await asyncio.to_thread(lambda: command("bench", *flags, settings=settings))
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", "quiet in a pipe"
    result = json.loads(done.stdout)
    assert result["drain"]["rows"] == 500
    assert result["drain"]["messages_per_s"] > 0
    assert result["drain"]["cpu_us_per_message"] > 0
    assert result["trickle"]["rows"] == 100
    assert 0 <= result["trickle"]["commit_to_consumer"]["p50_ms"] <= result["trickle"]["commit_to_consumer"]["max_ms"]
    assert result["limit"]["by"] in ("broker", "database", "relay", "network")
    assert await tables(settings["RELAY_DATABASE_URL"]) == set()
    assert "relay_bench" not in broker_names(rabbit_server)


async def test_a_default_of_read_only_stops_no_benchmark(
    settings: Mapping[str, str], database_url: str, postgres_server: PostgresServer
) -> None:
    name = urlsplit(database_url).path[1:]
    postgres_server.sql(f'ALTER DATABASE "{name}" SET default_transaction_read_only = on')
    flags = ("--rows", "500", "--seconds", "1", "--rate", "100", "--queue", "classic", "--json")
    done = await asyncio.to_thread(lambda: command("bench", *flags, settings=settings))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["trickle"]["rows"] == 100


@contextlib.asynccontextmanager
async def trickling(settings: Mapping[str, str]) -> AsyncIterator[asyncio.subprocess.Process]:
    """A benchmark that takes ten minutes unless it is ended."""
    process = await asyncio.create_subprocess_exec(
        *COMMAND,
        *("bench", "--rows", "1000", "--seconds", "600"),
        env=environment(settings),
        stdin=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_interrupted_it_leaves_nothing(
    settings: Mapping[str, str], rabbit_server: RabbitServer, number: signal.Signals
) -> None:
    async with trickling(settings) as process:
        await eventually(lambda: tables(settings["RELAY_DATABASE_URL"]), 30.0)
        await eventually(lambda: "relay_bench" in broker_names(rabbit_server), 30.0)
        process.send_signal(number)
        async with asyncio.timeout(60.0):
            _, complaint = await process.communicate()
    assert process.returncode == 1
    assert complaint == b"relay: interrupted\n"
    assert await tables(settings["RELAY_DATABASE_URL"]) == set()
    assert "relay_bench" not in broker_names(rabbit_server)


def test_what_nohup_lets_go_on_goes_on() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert signal.SIGHUP not in console._heeded()
    finally:
        signal.signal(signal.SIGHUP, before)
    assert signal.SIGHUP in console._heeded()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_interrupted_once_more_it_says_what_is_left(
    settings: Mapping[str, str], rabbit_server: RabbitServer, number: signal.Signals
) -> None:
    """A second signal cancelled the clean-up without a word."""
    database = await asyncpg.connect(settings["RELAY_DATABASE_URL"])

    async def waits_for_the_lock() -> bool:
        return bool(await database.fetchval("SELECT count(*) FROM pg_locks WHERE NOT granted"))

    async with trickling(settings) as process:
        await eventually(lambda: "relay_bench" in broker_names(rabbit_server), 30.0)
        (name,) = [
            each for each in await tables(settings["RELAY_DATABASE_URL"]) if len(each) == len("relay_bench_") + 12
        ]
        async with database.transaction():
            await database.execute(f"LOCK TABLE {name} IN ACCESS SHARE MODE")
            process.send_signal(number)
            await eventually(waits_for_the_lock, 30.0)
            process.send_signal(number)
            async with asyncio.timeout(60.0):
                _, complaint = await process.communicate()
    assert process.returncode == 4
    said, hint = complaint.decode().splitlines()
    assert said == f"relay: the benchmark may have left behind the table {name} (interrupted)"
    assert "relay_bench" not in broker_names(rabbit_server)
    await database.execute(hint.partition("the table: ")[2].partition(" The broker")[0])
    assert await tables(settings["RELAY_DATABASE_URL"]) == set()
    await database.close(timeout=5)


@pytest.mark.parametrize("kind", ["classic", "quorum"])
async def test_the_queue_stays_while_it_is_filled_and_drained(
    kind: str, settings: Mapping[str, str], rabbit_server: RabbitServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backlog of more than an hour lost its queue and its exchange midway: to publish is no use of a queue."""
    expires_ms = 6_000
    monkeypatch.setattr(ground, "QUEUE_EXPIRES_MS", expires_ms)
    config, _ = load(settings, needs=needed_by("bench"), uses=used_by("bench"))
    async with await aio_pika.connect(settings["RELAY_AMQP_URL"]) as broker:
        channel = await broker.channel()
        async with ground.prepared(config, kind) as made, made.kept():
            arguments: dict[str, Any] = {"x-queue-type": kind, "x-expires": expires_ms}
            await channel.declare_queue("used_by_nobody", durable=True, arguments=arguments)

            async def names() -> str:
                return await asyncio.to_thread(broker_names, rabbit_server)

            async def has_expired() -> bool:
                return "used_by_nobody" not in await names()

            await eventually(has_expired, 60.0, interval_s=0.5)
            assert made.queue in await names()


async def test_the_backlog_has_the_keys_that_were_asked_for(settings: Mapping[str, str]) -> None:
    """Each statement hashed the numbers from 1 on: 20,000 rows had the keys of the first 5,000. Cut short, nothing of it stays."""
    config, _ = load(settings, needs=needed_by("bench"), uses=used_by("bench"))
    async with ground.prepared(config, "classic") as made:
        counting = f"SELECT count(DISTINCT aggregate_id) FROM {made.table.quoted}"
        with contextlib.suppress(CheckFailed):
            async with filled(made, Plan(rows=12_000, keys=5_000, payload_bytes=10)):
                assert await made.database.fetchval(counting) > 4_400
                raise CheckFailed("cut short")
        assert await made.database.fetchval(counting) == 0


async def test_a_wrong_flag_and_a_missing_setting_are_usage(settings: Mapping[str, str]) -> None:
    wrong = command("bench", "--rows", "5", settings=settings)
    assert wrong.returncode == 2
    assert "allowed: a whole number from 100 to" in wrong.stderr
    missing = command("bench", settings={"RELAY_DATABASE_URL": settings["RELAY_DATABASE_URL"]})
    assert missing.returncode == 2
    assert "RELAY_AMQP_URL: not set" in missing.stderr


@pytest.mark.parametrize("taken", ["table", "exchange", "queue"])
async def test_what_it_did_not_make_it_does_not_touch(
    taken: str, settings: Mapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its names are drawn at random; were one taken nevertheless, that thing stays as it is, and nothing else stays."""
    monkeypatch.setattr(secrets, "token_hex", lambda _=None: "taken")
    name = "relay_bench_taken"
    database = await asyncpg.connect(settings["RELAY_DATABASE_URL"])
    async with await aio_pika.connect(settings["RELAY_AMQP_URL"]) as broker:
        channel = await broker.channel()
        match taken:
            case "table":
                await database.execute(f"CREATE TABLE {name} AS SELECT 1 AS mine")
            case "exchange":
                await channel.declare_exchange(name)
            case _:
                await channel.default_exchange.publish(
                    aio_pika.Message(b"mine"), (await channel.declare_queue(name)).name
                )
        config, _ = load(settings, needs=needed_by("bench"), uses=used_by("bench"))
        with pytest.raises(CheckFailed, match="exists already: nothing is touched"):
            async with ground.prepared(config, "classic"):
                pytest.fail("it went on")
        found = await tables(settings["RELAY_DATABASE_URL"])
        if taken == "table":
            assert found == {name}
            assert await database.fetchval(f"SELECT mine FROM {name}") == 1
        else:
            assert found == set()
        if taken == "exchange":
            await channel.get_exchange(name, ensure=True)
        if taken == "queue":
            message = await (await channel.get_queue(name)).get(no_ack=True)
            assert message is not None
            assert message.body == b"mine"
    await database.close(timeout=5)
