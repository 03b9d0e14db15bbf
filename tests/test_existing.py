"""What makes tests green on servers that exist: their one vhost is lent, and a server that cannot be started skips."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator

import aiormq
import pytest

from relay.servers import RabbitServer, ServersUnavailable
from tests import conftest, existing


@pytest.fixture
def vhost(rabbit_server: RabbitServer) -> Iterator[str]:
    """One that no fixture has lent already."""
    yield "shared"
    rabbit_server.delete_vhost("shared")


async def leave(url: str) -> None:
    """What a test leaves that ends without a word: a queue with a message, and its binding."""
    async with await aiormq.connect(url) as connection:
        channel = await connection.channel()
        await channel.exchange_declare("events", exchange_type="topic", durable=True)
        await channel.queue_declare("q", durable=True)
        await channel.queue_bind("q", "events", "nope.#")
        await channel.basic_publish(b"{}", exchange="events", routing_key="nope.x")


async def test_a_lent_vhost_is_empty_before_and_after(rabbit_server: RabbitServer, vhost: str) -> None:
    """A binding of one test routed what the next one expected to be returned, and its message was counted there."""
    url = rabbit_server.add_vhost(vhost)
    await leave(url)
    assert existing.left_in(rabbit_server, vhost) == {"events", "q"}
    async with existing.lent(url):
        assert existing.left_in(rabbit_server, vhost) == set()
        await leave(url)
    assert existing.left_in(rabbit_server, vhost) == set()


async def test_a_lent_vhost_is_nobody_elses(rabbit_server: RabbitServer, vhost: str) -> None:
    """Three workers of one run worked on it at once."""
    url = rabbit_server.add_vhost(vhost)
    async with existing.lent(url):
        with existing.lock_of(url).open() as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with existing.lock_of(url).open() as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.parametrize("step", [conftest.pytest_runtest_setup, conftest.pytest_runtest_call])
@pytest.mark.parametrize("variable", ["RELAY_TEST_DATABASE_URL", "RELAY_TEST_AMQP_URL", None])
def test_where_servers_are_named_missing_programs_skip(
    step: conftest.Step, variable: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tests that start further servers failed where only the named ones are to be had. Without names they still fail."""
    for name in ("RELAY_TEST_DATABASE_URL", "RELAY_TEST_AMQP_URL"):
        monkeypatch.delenv(name, raising=False)
    if variable:
        monkeypatch.setenv(variable, "somewhere")
    running = step()
    next(running)
    expected = pytest.skip.Exception if variable else ServersUnavailable
    with pytest.raises(expected, match="initdb is not installed"):
        running.throw(ServersUnavailable("initdb is not installed"))
