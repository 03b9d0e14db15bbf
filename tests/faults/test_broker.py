"""RabbitMQ fails in every way that a server can, with two relays under load."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Final
from urllib.parse import quote

import aio_pika
import pytest

from relay.servers import RabbitServer
from tests.e2e.conftest import LADDER, QUEUE
from tests.e2e.ledger import drain
from tests.faults.stage import CALM, IN_FLIGHT, Stage

RELAYS: Final = pytest.mark.parametrize("relays", [pytest.param(1, marks=pytest.mark.long), 2])
LONG_RELAYS: Final = pytest.mark.parametrize("relays", [1, 2])
OUTAGE_S: Final = 6.0
"""Long enough for the backoff to climb to its end."""


async def passed(seconds: float) -> None:
    """An outage's length: the fault itself, not a wait for something."""
    await asyncio.sleep(seconds)


@RELAYS
async def test_broker_killed(stage: Stage, relays: int) -> None:
    await stage.up(relays)
    await asyncio.to_thread(stage.rabbit.write_down)
    await asyncio.to_thread(stage.rabbit.kill)
    for post in stage.posts:
        await post.relay.not_ready("broker")
    await asyncio.to_thread(stage.rabbit.restart)
    await stage.back()
    await stage.verdict("broker killed (SIGKILL) and started again", copies_max=relays * IN_FLIGHT, outage_s=15)


@pytest.mark.long
@LONG_RELAYS
async def test_broker_restarted(stage: Stage, relays: int) -> None:
    await stage.up(relays)
    await asyncio.to_thread(stage.rabbit.restart)
    await stage.back()
    await stage.verdict("broker stopped in good order and started", copies_max=relays * IN_FLIGHT, outage_s=20)


@pytest.mark.long
@LONG_RELAYS
async def test_broker_frozen_for_a_while(stage: Stage, relays: int) -> None:
    """Shorter than what the heartbeat allows: nothing is given up, nothing is repeated."""
    await stage.up(relays, lease=CALM)
    stage.rabbit.freeze()
    try:
        await stage.until_metric(stage.posts[0], "relay_in_flight_messages", 1)
        await passed(OUTAGE_S)
    finally:
        stage.rabbit.thaw()
    await stage.back()
    await stage.verdict("broker frozen for 6 s", copies_max=0)


@pytest.mark.long
@LONG_RELAYS
async def test_broker_frozen_until_given_up(stage: Stage, relays: int) -> None:
    """With a heartbeat of 2 s the relays drop the connection, and try in vain until it thaws."""
    stage.change_url = lambda url: f"{url}?heartbeat=2&timeout=3"
    await stage.up(relays, confirm_timeout="3s")
    stage.rabbit.freeze()
    try:
        for post in stage.posts:
            await post.relay.not_ready("broker", 40)
        await passed(OUTAGE_S)
    finally:
        stage.rabbit.thaw()
    await stage.back()
    await stage.verdict("broker frozen until the heartbeat gave it up", copies_max=relays * IN_FLIGHT, outage_s=40)


@RELAYS
async def test_memory_alarm(stage: Stage, relays: int) -> None:
    await stage.up(relays, lease=CALM)
    await asyncio.to_thread(stage.rabbit.memory_alarm, True)
    try:
        for post in stage.posts:
            await post.relay.not_ready("blocked")
        await passed(2.0)
    finally:
        await asyncio.to_thread(stage.rabbit.memory_alarm, False)
    await stage.back()
    await stage.verdict("memory alarm", copies_max=0)


@pytest.mark.long
@LONG_RELAYS
async def test_disk_alarm(stage: Stage, relays: int) -> None:
    await stage.up(relays, lease=CALM)
    await asyncio.to_thread(stage.rabbit.disk_alarm, True)
    try:
        for post in stage.posts:
            await post.relay.not_ready("blocked")
        await passed(OUTAGE_S)
    finally:
        await asyncio.to_thread(stage.rabbit.disk_alarm, False)
    await stage.back()
    await stage.verdict("disk alarm", copies_max=0)


@contextlib.asynccontextmanager
async def channel(stage: Stage) -> AsyncIterator[aio_pika.abc.AbstractChannel]:
    async with await aio_pika.connect(stage.site.amqp_url) as connection:
        yield await connection.channel()


@pytest.mark.long
@LONG_RELAYS
async def test_queue_deleted(stage: Stage, relays: int) -> None:
    """Nobody is subscribed for a while: rows climb the ladder, as the documentation says, and keep their order."""
    await stage.up(relays, retry_delays=LADDER, lease=CALM)
    await stage.load.pause()
    await stage.site.all_sent()
    stage.earlier += [message.message_id or "" for message in await drain(stage.site.amqp_url, 1)]
    async with channel(stage) as broker:
        await broker.queue_delete(QUEUE)
    stage.load.resume()
    await stage.site.until("(SELECT count(*) > 20 FROM outbox WHERE aside = 'deferred')")
    async with channel(stage) as broker:
        queue = await broker.declare_queue(QUEUE, durable=True)
        await queue.bind("events", "ok.#")
    await stage.back()
    await stage.verdict("queue deleted, declared again after some seconds", copies_max=0, attempts_max=10)


@pytest.mark.long
@LONG_RELAYS
async def test_exchange_deleted(stage: Stage, relays: int) -> None:
    """The configuration's fault: no row pays. Between declaration and binding there is no route, which is a row's."""
    await stage.up(relays, retry_delays=LADDER)
    async with channel(stage) as broker:
        await broker.exchange_delete("events")
    for post in stage.posts:
        await post.relay.not_ready("exchange")
    await passed(OUTAGE_S)
    assert await stage.site.database.fetchval("SELECT max(attempts) FROM outbox") == 0
    async with channel(stage) as broker:
        exchange = await broker.declare_exchange("events", aio_pika.ExchangeType.TOPIC, durable=True)
        await (await broker.get_queue(QUEUE)).bind(exchange, "ok.#")
    await stage.back()
    await stage.verdict(
        "exchange deleted, declared again after 6 s",
        copies_max=relays * IN_FLIGHT, attempts_max=1, faults=2, outage_s=OUTAGE_S + 5,
    )  # fmt: skip


@pytest.fixture
def user(stage: Stage, rabbit_server: RabbitServer) -> str:
    """A user of the test's own, who may do anything; the relays of the stage log in as it."""
    name = stage.vhost
    rabbit_server.add_user(name, "before")
    rabbit_server.permit(name, stage.vhost)
    return name


def logged_in(stage: Stage, user: str, password: str) -> Callable[[str], str]:
    """A URL with these credentials instead."""
    return lambda url: url.replace("guest:guest@", f"{quote(user, safe='')}:{password}@")


@pytest.mark.long
@LONG_RELAYS
async def test_permissions_withdrawn(stage: Stage, relays: int, user: str) -> None:
    """RabbitMQ remembers a channel's permissions: they go with the connection, which is cut."""
    stage.change_url = logged_in(stage, user, "before")
    await stage.up(relays)
    await asyncio.to_thread(stage.rabbit.permit, user, stage.vhost, write="^$")
    for post in stage.posts:
        post.broker.reset()
    for post in stage.posts:
        await stage.logged(post, "broker_lost")
    await passed(OUTAGE_S)
    for post in stage.posts:
        assert "exchange" in post.relay.reasons()
        lost = [event for event in post.relay.events() if event["event"] == "broker_lost"]
        assert len(lost) <= 2, "one for the cut, one for the refusal"
    await asyncio.to_thread(stage.rabbit.permit, user, stage.vhost)
    await stage.back()
    await stage.verdict(
        "permission to write withdrawn, given again after 6 s",
        copies_max=relays * IN_FLIGHT, outage_s=OUTAGE_S + 10,
    )  # fmt: skip


@pytest.mark.long
@LONG_RELAYS
async def test_password_changed(stage: Stage, relays: int, user: str) -> None:
    """The relays' secret is wrong for a while; nobody restarts them."""
    stage.change_url = logged_in(stage, user, "before")
    await stage.up(relays)
    await asyncio.to_thread(stage.rabbit.change_password, user, "after")
    for post in stage.posts:
        post.broker.reset()
        await post.relay.not_ready("broker")
    await passed(OUTAGE_S)
    assert all("refused the login" in post.relay.text() for post in stage.posts)
    await asyncio.to_thread(stage.rabbit.change_password, user, "before")
    await stage.back()
    await stage.verdict(
        "password changed, changed back after 6 s", copies_max=relays * IN_FLIGHT, outage_s=OUTAGE_S + 10
    )
