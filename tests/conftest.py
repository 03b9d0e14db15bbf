"""Fixtures for tests on real servers: one PostgreSQL and one RabbitMQ a session, a database and a vhost a test.

`RELAY_TEST_DATABASE_URL` and `RELAY_TEST_AMQP_URL` name existing servers to use instead; then tests that
restart, freeze or crash a server are skipped, and so are those that start further ones where their programs are missing.
The one vhost is lent to one test at a time, over all workers, and emptied before and after (`tests/existing.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator
from pathlib import Path
from typing import Any, TypeVar, overload
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import hypothesis
import pytest

from relay.build import BUILD
from relay.servers import PostgresServer, RabbitServer, ServersUnavailable, find_postgres, find_rabbitmq
from tests import existing

T = TypeVar("T")

# How long an example takes is the machine's affair: no example fails by its time, nor by how long it took to make.
hypothesis.settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any machine")

# A shell without job control starts what it sends to the background deaf to SIGINT, and nohup what it starts deaf to SIGHUP;
# and so would be every command that a test starts from there and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

MEMORY = Path("/dev/shm")
MEMORY_FREE_MIN = 6 << 30
"""For three workers; each server has some 100 MB there, and up to 1 GB of WAL."""

_numbers = itertools.count(1)


def examples(count: int) -> int:
    """Of a random test: fewer for the compiled build, for the sources have had all of them."""
    return count // 5 if BUILD == "compiled" else count


LONGEST = (
    "e2e/test_compiled.py",
    "sim/test_seeds.py",
    "e2e/test_parked.py",
    "e2e/test_cases.py",
    "faults/test_postgres_cases.py",
    "e2e/test_demo.py",
    "e2e/test_run.py",
    "e2e/test_ladder.py",
    "e2e/test_parked_commands.py",
    "bench/test_runs.py",
)
"""A minute or so each, all of it in one worker (`make test`): begun last, they would keep one busy and the others idle."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {Path(__file__).parent / name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path, len(LONGEST)))


Step = Callable[[], Generator[None, object, object]]


def _skipping_without_programs() -> Generator[None, object, object]:
    try:
        return (yield)
    except ServersUnavailable as missing:
        if {"RELAY_TEST_DATABASE_URL", "RELAY_TEST_AMQP_URL"} & os.environ.keys():
            pytest.skip(f"needs a server of its own: {missing}")
        raise


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Generator[None, object, object]:
    return (yield from _skipping_without_programs())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, object, object]:
    return (yield from _skipping_without_programs())


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """A test that failed while a server was down or frozen fails alone: before anything is torn down, it is there again."""
    for name in ("postgres_server", "rabbit_server"):
        server = getattr(item, "funcargs", {}).get(name)
        if server is not None:
            server.thaw()
            if not server.is_running:
                server.restart()


@overload
async def eventually(predicate: Callable[[], Awaitable[T]], timeout: float = ..., *, interval_s: float = ...) -> T: ...
@overload
async def eventually(predicate: Callable[[], T], timeout: float = ..., *, interval_s: float = ...) -> T: ...
async def eventually(predicate: Callable[[], Any], timeout: float = 30.0, *, interval_s: float = 0.01) -> Any:
    """Ask until the answer is true, and return it; AssertionError after `timeout` seconds of false ones.

    For what nothing announces (a row, a metric, a file); where there is an event, wait for the event.
    """
    deadline = time.monotonic() + timeout
    while True:
        answer = predicate()
        value = await answer if isinstance(answer, Awaitable) else answer
        if value:
            return value
        assert time.monotonic() < deadline, f"not within {timeout} s: {predicate}, last answer {value!r}"
        await asyncio.sleep(interval_s)


@pytest.fixture
def server_programs() -> None:
    """For a test whose own processes start servers. Raises ServersUnavailable."""
    find_postgres()
    find_rabbitmq()


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """The session's PostgreSQL, without fsync. A test that stops or crashes it restarts it."""
    if "RELAY_TEST_DATABASE_URL" in os.environ:
        pytest.skip("needs a private PostgreSQL; RELAY_TEST_DATABASE_URL names an existing one")
    with _memory() as directory, PostgresServer.start(directory, durable=False) as server:
        yield server


@contextlib.contextmanager
def _memory() -> Iterator[Path | None]:
    """A directory in memory where that has room: a database's three hundred files take 40 ms there, and on some disks 300. None:
    it has not."""
    try:
        free = shutil.disk_usage(MEMORY).free
    except OSError:
        free = 0
    if free < MEMORY_FREE_MIN:
        yield None
        return
    with tempfile.TemporaryDirectory(dir=MEMORY, prefix="relay-test-", ignore_cleanup_errors=True) as directory:
        yield Path(directory)


@pytest.fixture(scope="session")
def rabbit_server() -> Iterator[RabbitServer]:
    """The session's RabbitMQ node. A test that stops or kills it restarts it."""
    if "RELAY_TEST_AMQP_URL" in os.environ:
        pytest.skip("needs a private RabbitMQ; RELAY_TEST_AMQP_URL names an existing one")
    with RabbitServer.start() as server:
        yield server


@pytest.fixture
async def database_url(request: pytest.FixtureRequest) -> AsyncIterator[str]:
    """An empty database of the test's own."""
    name = f"relay_test_{os.getpid()}_{next(_numbers)}"
    server_url = os.environ.get("RELAY_TEST_DATABASE_URL") or request.getfixturevalue("postgres_server").url()
    await _execute(server_url, f'create database "{name}"')
    yield urlunsplit(urlsplit(server_url)._replace(path=f"/{name}"))
    await _execute(server_url, f'drop database if exists "{name}" with (force)')


@pytest.fixture
async def amqp_url(request: pytest.FixtureRequest) -> AsyncIterator[str]:
    """A vhost of the test's own; its name needs percent-encoding, as users' names do."""
    if url := os.environ.get("RELAY_TEST_AMQP_URL"):
        async with existing.lent(url):
            yield url
        return
    is_private = "rabbit_server" in request.fixturenames
    server: RabbitServer = request.getfixturevalue("rabbit_server")
    vhost = f"test/{os.getpid()} {next(_numbers)}"
    yield server.add_vhost(vhost)
    left = set() if is_private else existing.left_in(server, vhost) - {*existing.NAMES}
    server.delete_vhost(vhost)
    assert not left, f"name them in tests/existing.py, or where a vhost is shared the next test finds them: {left}"


def has_ipv6() -> bool:
    """Whether this machine has the loopback address ::1."""
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


def is_alive(pid: int) -> bool:
    """A zombie has ended, whoever should have reaped it: a container's first process may reap nobody."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def _execute(url: str, statement: str) -> None:
    connection = await asyncpg.connect(url)
    try:
        await connection.execute(statement)
    finally:
        await connection.close()
