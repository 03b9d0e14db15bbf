"""The private servers do what `relay demo`, the fault tests and the benchmark lean on."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import aio_pika
import asyncpg
import pytest

from relay.servers import LOOPBACK, PostgresServer, RabbitServer, ServerFailed, ServersUnavailable, free_port, programs
from relay.servers.ports import PORTS
from relay.servers.process import child_environment
from tests.conftest import eventually, is_alive


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    with PostgresServer.start(durable=False, options={"max_prepared_transactions": "3"}) as server:
        yield server


def test_a_statement_may_take_as_long_as_its_caller_says(postgres: PostgresServer) -> None:
    """Ten million rows take longer to fill in than a server to start, which was the bound of both."""
    with pytest.raises(ServerFailed, match=r"psql gave no answer in 0\.2 s"):
        postgres.sql("select pg_sleep(2)", timeout_s=0.2)
    assert postgres.sql("select 1", timeout_s=30.0) == "1\n"


def test_ports_are_in_the_projects_range_and_never_handed_out_twice() -> None:
    ports = [free_port() for _ in range(50)]
    assert len(set(ports)) == 50
    assert all(port in PORTS for port in ports)


def test_two_processes_are_never_given_one_port() -> None:
    """Between the look and the start of a server another worker's server took the port."""
    script = "from relay.servers import free_port; print(*[free_port() for _ in range(400)], flush=True); input()"
    given: list[str] = []
    children = [
        subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    try:
        for child in children:
            assert child.stdout is not None
            given += child.stdout.readline().split()
    finally:
        for child in children:
            child.communicate("\n", timeout=30)
    assert len(set(given)) == len(given) == 800


async def test_a_fresh_database_and_a_fresh_vhost_are_given_to_a_test(database_url: str, amqp_url: str) -> None:
    connection = await asyncpg.connect(database_url)
    try:
        assert await connection.fetchval("select count(*) from pg_tables where schemaname = 'public'") == 0
    finally:
        await connection.close()
    async with await aio_pika.connect(amqp_url) as broker:
        channel = await broker.channel()
        await channel.declare_queue("work")


def test_options_reach_postgres(postgres: PostgresServer) -> None:
    assert postgres.sql("show max_prepared_transactions").strip() == "3"


def test_a_database_is_copied_from_a_template(postgres: PostgresServer) -> None:
    postgres.create_database('the "first"')
    postgres.sql("create table kept (i int)", 'the "first"')
    postgres.create_database("the second", template='the "first"')
    assert postgres.sql("select count(*) from kept", "the second").strip() == "0"
    postgres.drop_database("the second")
    postgres.drop_database('the "first"')


def test_commits_survive_a_crash(postgres: PostgresServer) -> None:
    postgres.create_database("crashed")
    postgres.sql("create table kept as select 42 as answer", "crashed")
    port = postgres.port
    postgres.crash()
    assert not postgres.is_running
    postgres.restart()
    assert postgres.port == port
    assert postgres.sql("select answer from kept", "crashed").strip() == "42"


async def test_a_frozen_postgres_keeps_its_connections_and_answers_after_the_thaw(
    postgres: PostgresServer,
) -> None:
    connection = await asyncpg.connect(postgres.url())
    try:
        postgres.freeze()
        with pytest.raises(TimeoutError):
            await connection.fetchval("select 1", timeout=0.2)
        postgres.thaw()
    finally:
        connection.terminate()
    assert postgres.sql("select 1").strip() == "1"


def test_a_frozen_postgres_can_be_stopped(postgres: PostgresServer) -> None:
    postgres.freeze()
    postgres.restart()
    assert postgres.sql("select 1").strip() == "1"


async def test_a_killed_rabbit_comes_back_on_its_port_with_its_durable_messages() -> None:
    with RabbitServer.start(plugins=()) as rabbit:
        url = rabbit.add_vhost("vh ü/%")
        async with await aio_pika.connect(url) as broker:
            channel = await broker.channel()
            await channel.declare_queue("work", durable=True)
            message = aio_pika.Message(b"kept", delivery_mode=aio_pika.DeliveryMode.PERSISTENT)
            await channel.default_exchange.publish(message, "work")
            rabbit.write_down()
            rabbit.kill()
        assert not rabbit.is_running
        rabbit.restart()
        async with await aio_pika.connect(url) as broker:
            queue = await (await broker.channel()).get_queue("work")
            kept = await queue.get()
            assert kept.body == b"kept"
        rabbit.stop()
        assert not rabbit.is_running
        with pytest.raises(OSError, match="refused"):
            socket.create_connection((LOOPBACK, rabbit.port), timeout=5)
        directory = rabbit.directory
    assert not directory.exists()


def test_a_private_rabbit_reads_no_configuration_of_the_machine(rabbit_server: RabbitServer) -> None:
    """What stands in /etc/rabbitmq/conf.d or its advanced.config is for another broker."""
    for name, file in (("additional_config_files", "conf.d"), ("advanced_config_file", "advanced.config")):
        found = rabbit_server.eval(f"maps:get({name}, rabbit_prelaunch:get_context())")
        assert found.startswith(f'"{rabbit_server.directory}/{file}'), found


async def test_a_memory_alarm_is_raised_and_cleared(rabbit_server: RabbitServer) -> None:
    rabbit_server.memory_alarm(True)
    try:
        await eventually(lambda: "memory" in rabbit_server.eval("rabbit_alarm:get_alarms()"))
    finally:
        rabbit_server.memory_alarm(False)
    await eventually(lambda: rabbit_server.eval("rabbit_alarm:get_alarms()") == "[]")


def test_a_frozen_rabbit_is_silent_until_thawed(rabbit_server: RabbitServer) -> None:
    rabbit_server.freeze()
    with socket.create_connection((LOOPBACK, rabbit_server.port), timeout=0.3) as probe:
        probe.sendall(b"AMQP\x00\x00\x09\x01")
        with pytest.raises(TimeoutError):
            probe.recv(1)
        rabbit_server.thaw()
        probe.settimeout(10)
        assert probe.recv(1) == b"\x01"


@pytest.mark.usefixtures("server_programs")
async def test_servers_do_not_outlive_a_process_that_was_killed() -> None:
    """Guards against a fault: a test run that was killed with SIGKILL left its servers running for ever."""
    script = (
        "import sys; from relay.servers import PostgresServer, RabbitServer\n"
        "pg = PostgresServer.start(durable=False)\n"
        "rabbit = RabbitServer.start(plugins=())\n"
        "print(pg.pid, rabbit.broker_pid, rabbit.pid, pg.directory, rabbit.directory, flush=True)\n"
        "sys.stdin.read()\n"
    )
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    *pids, postgres_directory, rabbit_directory = (await child.stdout.readline()).decode().split()
    try:
        child.kill()
        await child.wait()
        await eventually(lambda: not any(is_alive(int(pid)) for pid in pids))
    finally:
        for directory in (postgres_directory, rabbit_directory):
            shutil.rmtree(directory, ignore_errors=True)


def test_missing_programs_are_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "POSTGRES_HOME", Path("/nonexistent"))
    monkeypatch.setattr(programs, "RABBITMQ_HOME", Path("/nonexistent"))
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(ServersUnavailable, match="PostgreSQL") as postgres:
        PostgresServer.start()
    assert "apt-get install postgresql" in str(postgres.value.hint)
    with pytest.raises(ServersUnavailable, match="RabbitMQ") as rabbit:
        RabbitServer.start()
    assert "apt-get install rabbitmq-server" in str(rabbit.value.hint)


def test_programs_are_found_without_an_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """`env -i relay demo` was a KeyError."""
    monkeypatch.delenv("PATH")
    assert "/bin" in child_environment()["PATH"]


def test_a_server_that_cannot_start_says_why_and_leaves_nothing() -> None:
    directory = Path("/tmp") / f"relay-broken-{os.getpid()}"  # pytest's own folders are closed to the user postgres
    directory.mkdir()
    try:
        with pytest.raises(ServerFailed, match="unrecognized configuration parameter"):
            PostgresServer.start(directory, options={"no_such_setting": "1"})
    finally:
        shutil.rmtree(directory)
