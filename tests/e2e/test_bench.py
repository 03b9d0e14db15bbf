"""`relay bench` against real servers: it measures, and nothing of it is left, whatever ended it."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Mapping

import asyncpg
import pytest

from relay.servers import RabbitServer
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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_interrupted_it_leaves_nothing(
    settings: Mapping[str, str], rabbit_server: RabbitServer, number: signal.Signals
) -> None:
    process = await asyncio.create_subprocess_exec(
        *COMMAND,
        *("bench", "--rows", "1000", "--seconds", "600"),
        env=environment(settings),
        stdin=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        await eventually(lambda: tables(settings["RELAY_DATABASE_URL"]), 30.0)
        await eventually(lambda: "relay_bench" in broker_names(rabbit_server), 30.0)
        process.send_signal(number)
        async with asyncio.timeout(60.0):
            _, complaint = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 1
    assert complaint == b"relay: interrupted\n"
    assert await tables(settings["RELAY_DATABASE_URL"]) == set()
    assert "relay_bench" not in broker_names(rabbit_server)


async def test_a_wrong_flag_and_a_missing_setting_are_usage(settings: Mapping[str, str]) -> None:
    wrong = command("bench", "--rows", "5", settings=settings)
    assert wrong.returncode == 2
    assert "allowed: a whole number from 100 to" in wrong.stderr
    missing = command("bench", settings={"RELAY_DATABASE_URL": settings["RELAY_DATABASE_URL"]})
    assert missing.returncode == 2
    assert "RELAY_AMQP_URL: not set" in missing.stderr
