"""The adapter on a real RabbitMQ: what arrives is what was written, and what the broker really says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any
from urllib.parse import unquote, urlsplit

import aiormq
import pytest
from aiormq.abc import AbstractChannel, DeliveredMessage

from relay.broker.link import AmqpLink
from relay.core.ports.broker import Closed
from relay.errors import BrokerRefused
from relay.message import PayloadType
from relay.servers import RabbitServer
from tests.conftest import eventually

from .recorder import Recorder, make_broker, make_row, make_rows


class Vhost:
    """The test's vhost with `ev` (topic) bound to `q` with `ok.#`, and a channel to look with."""

    def __init__(self, url: str, channel: AbstractChannel) -> None:
        self.url = url
        self.channel = channel

    async def link(self, recorder: Recorder, exchange: str = "ev", **options: Any) -> AmqpLink:
        return await make_broker(self.url, exchange=exchange, **options).connect(recorder, PayloadType.JSON)

    async def queue(self, name: str, exchange: str, routing_key: str, **arguments: Any) -> None:
        await self.channel.queue_declare(name, durable=True, arguments=arguments)
        await self.channel.queue_bind(name, exchange, routing_key)

    async def get(self, queue: str = "q") -> DeliveredMessage:
        """The queue's next message; it must be there."""
        message = await self.channel.basic_get(queue, no_ack=True)
        assert message.header.body_size is not None
        assert message.header.properties.message_id is not None, "the queue is empty"
        return message

    async def size(self, queue: str = "q") -> int:
        answer = await self.channel.queue_declare(queue, passive=True)
        assert answer.message_count is not None
        return answer.message_count


@pytest.fixture
async def vhost(amqp_url: str) -> AsyncIterator[Vhost]:
    connection = await aiormq.connect(amqp_url)
    channel = await connection.channel()
    await channel.exchange_declare("ev", exchange_type="topic", durable=True)
    vhost = Vhost(amqp_url, channel)
    await vhost.queue("q", "ev", "ok.#")
    yield vhost
    await connection.close()


async def test_every_property_arrives(vhost: Vhost) -> None:
    recorder = Recorder()
    link = await vhost.link(recorder)
    headers = {
        "null": None,
        "nested": {"list": [1, "é", {"deep": True}]},
        "bool": False,
        "big": 2**53 + 1,
        "small": 200,
        "minus": -1,
        "fraction": 1.1,
        "huge": 1e300,
        "n" * 255: "a name of 255 bytes",
    }
    row = make_row(
        1,
        id="01K0ORDERCREATED",
        aggregate_type="order",
        aggregate_id="42",
        occurred_at=1_764_439_200.123456,
        payload=b'{"b":1, "a":1.10}',
        headers=json.dumps(headers),
        rare={
            "aggregate_version": 2**40,
            "schema_version": 3,
            "correlation_id": "é" * 127,
            "causation_id": "cause",
            "producer": "orders",
            "traceparent": "00-aa-bb-01",
            "priority": 255,
            "expires_at": 1_764_440_060.0,
            "content_encoding": "identity",
        },
    )
    assert link.publish([row]).taken == 1
    assert (await recorder.outcomes_of(1))["acked"] == [1]
    message = await vhost.get()
    assert message.body == b'{"b":1, "a":1.10}'
    properties = message.header.properties
    assert properties.message_id == "01K0ORDERCREATED"
    assert properties.message_type == "ok.created"
    assert properties.timestamp == datetime(2025, 11, 29, 18, 0, tzinfo=UTC)
    assert properties.content_type == "application/json"
    assert properties.content_encoding == "identity"
    assert properties.delivery_mode == 2
    assert properties.app_id == "orders"
    assert properties.correlation_id == "é" * 127
    assert properties.priority == 255
    assert properties.expiration == "60000"
    assert properties.headers == headers | {
        "aggregate_type": "order",
        "aggregate_id": "42",
        "aggregate_version": 2**40,
        "schema_version": 3,
        "causation_id": "cause",
        "traceparent": "00-aa-bb-01",
        "occurred_at": "2025-11-29T18:00:00.123456Z",
    }
    for name, value in headers.items():
        assert type(properties.headers[name]) is type(value)
    await link.close()


async def test_case_12_short_strings_of_254_bytes_arrive_exactly(vhost: Vhost) -> None:
    recorder = Recorder()
    link = await vhost.link(recorder)
    text = "é" * 127
    await vhost.queue("short", "ev", text)
    row = make_row(1, id=text, event_type=text, rare={"correlation_id": text})
    long = make_row(2, id="é" * 128)
    publication = link.publish([make_row(3), row, long, make_row(4)])
    assert [(each.row.seq, each.reason) for each in publication.rejected] == [(2, "invalid")]
    assert sorted((await recorder.outcomes_of(3))["acked"]) == [1, 3, 4]
    properties = (await vhost.get("short")).header.properties
    assert properties.message_id == properties.message_type == properties.correlation_id == text
    await link.close()


async def test_case_01_an_unroutable_row_among_bystanders(vhost: Vhost) -> None:
    """Also with an empty body; once the route is there, it is delivered."""
    recorder = Recorder()
    link = await vhost.link(recorder)
    lost = [make_row(10, event_type="nope.x"), make_row(11, event_type="nope.y", payload=None)]
    rows = make_rows(3)
    assert link.publish([rows[0], lost[0], rows[1], lost[1], rows[2]]).taken == 5
    outcomes = await recorder.outcomes_of(5)
    assert (outcomes["acked"], outcomes["returned"]) == ([1, 2, 3], [10, 11])
    assert [(each.error, each.routing_key) for each in recorder.returned] == [
        ("312 NO_ROUTE", "nope.x"),
        ("312 NO_ROUTE", "nope.y"),
    ]
    await vhost.channel.queue_bind("q", "ev", "nope.#")
    link.publish(lost)
    await recorder.until(lambda: recorder.count() == 7)
    assert outcomes["acked"] == [1, 2, 3, 10, 11]
    await link.close()


async def test_without_mandatory_no_route_is_fine(vhost: Vhost) -> None:
    recorder = Recorder()
    link = await vhost.link(recorder, is_mandatory=False)
    link.publish(
        [
            make_row(1, event_type="nope.x"),
            make_row(2, event_type="nope.x", rare={"mandatory": True}),
            make_row(3, event_type="nope.x", rare={"mandatory": False}),
        ]
    )
    outcomes = await recorder.outcomes_of(3)
    assert (outcomes["acked"], outcomes["returned"]) == ([1, 3], [2])
    await link.close()


@pytest.mark.parametrize("queue_type", ["classic", "quorum"])
async def test_five_thousand_messages_arrive_once_in_order(vhost: Vhost, queue_type: str) -> None:
    await vhost.queue("many", "ev", "many.#", **{"x-queue-type": queue_type})
    recorder = Recorder()
    link = await vhost.link(recorder)
    rows = make_rows(5000, event_type="many.created", payload=b'{"x":"' + b"y" * 240 + b'"}')
    assert await recorder.publish_all(link, rows) == []
    outcomes = await recorder.outcomes_of(5000, timeout=30)
    assert sorted(outcomes["acked"]) == list(range(1, 5001))
    assert await vhost.size("many") == 5000
    received: list[str | None] = []
    arrived = asyncio.Event()

    async def consume(message: DeliveredMessage) -> None:
        received.append(message.header.properties.message_id)
        if len(received) == 5000:
            arrived.set()

    await vhost.channel.basic_consume("many", consume, no_ack=True)
    async with asyncio.timeout(30):
        await arrived.wait()
    assert received == [row.id for row in rows]
    await link.close()


@pytest.mark.parametrize("size", [131_063, 131_064, 131_065, 300_000])
async def test_bodies_around_the_frame_size(vhost: Vhost, size: int) -> None:
    recorder = Recorder()
    link = await vhost.link(recorder)
    body = bytes(n % 251 for n in range(size))
    link.publish([make_row(1, payload=body)])
    assert (await recorder.outcomes_of(1))["acked"] == [1]
    assert (await vhost.get()).body == body
    await link.close()


async def test_headers_fill_one_frame_and_no_more(vhost: Vhost) -> None:
    """The largest header that is let through is one that RabbitMQ takes; the next byte is refused here."""
    recorder = Recorder()
    link = await vhost.link(recorder)
    room = 131_064
    while True:  # down from too large to the first that fits
        row = make_row(1, headers=json.dumps({"h": "x" * room}))
        if not link.publish([row]).rejected:
            break
        room -= 1
        assert room > 130_000, "refused whatever their size"
    assert (await recorder.outcomes_of(1))["acked"] == [1]
    message = await vhost.get()
    assert message.header.properties.headers is not None
    assert message.header.properties.headers["h"] == "x" * room
    await link.close()


@pytest.mark.parametrize("name", ["gone", "fort élégant", "x" * 200, "é" * 127])
async def test_a_rows_own_exchange_is_missing(vhost: Vhost, name: str) -> None:
    """Whatever its name: one that cannot be asked for would keep everything behind it for ever."""
    recorder = Recorder()
    link = await vhost.link(recorder)
    rows = [make_row(1), make_row(2, rare={"exchange": name}), make_row(3)]
    (rejection,) = await recorder.publish_all(link, rows)
    assert (rejection.row.seq, rejection.reason) == (2, "refused")
    # RabbitMQ 4.3 has no words for a long name of other than ASCII characters.
    assert rejection.error.startswith((f"404 NOT_FOUND - no exchange '{name[:100]}", "541 INTERNAL_ERROR"))
    assert recorder.closed is None
    assert not rejection.is_final, "it may be declared yet"
    assert (await recorder.outcomes_of(2))["acked"] == [1, 3]
    await link.close()


async def test_case_02_an_internal_exchange_refuses(vhost: Vhost) -> None:
    await vhost.channel.exchange_declare("inner", exchange_type="topic", durable=True, internal=True)
    recorder = Recorder()
    link = await vhost.link(recorder)
    await recorder.publish_all(link, [make_row(1), make_row(2, rare={"exchange": "inner"}), make_row(3)])
    outcomes = await recorder.outcomes_of(3)
    # The text names the exchange, and one row only goes there.
    assert outcomes["refused"] == [2]
    assert sorted(outcomes["lost"] + outcomes["acked"]) == [1, 3]
    (refusal,) = recorder.refusals
    assert (refusal.reason, refusal.exchange, refusal.routing_key) == ("refused", "inner", "ok.created")
    assert refusal.is_final
    assert recorder.closed is not None
    assert recorder.closed[0] is Closed.REFUSED
    assert "cannot publish to internal exchange 'inner'" in recorder.closed[1]
    assert refusal.error == recorder.closed[1]
    await link.close()


async def test_case_03_a_body_above_the_brokers_limit(vhost: Vhost, rabbit_server: RabbitServer) -> None:
    """The first one costs a channel; then its size is known, and its bystanders go on."""
    with rabbit_server.limited_message_size(1 << 20):
        broker = make_broker(vhost.url)
        recorder = Recorder()
        link = await broker.connect(recorder, PayloadType.JSON)
        large = make_row(1, payload=b"x" * (2 << 20))
        await recorder.publish_all(link, [large])
        assert (await recorder.outcomes_of(1))["lost"] == [1]
        assert recorder.closed is not None
        assert recorder.closed[0] is Closed.REFUSED
        assert recorder.closed[1].startswith("406 PRECONDITION_FAILED - message size")
        await link.close()
        recorder = Recorder()
        link = await broker.connect(recorder, PayloadType.JSON)
        (rejection,) = await recorder.publish_all(link, [make_row(2), large, make_row(3)])
        assert (rejection.row.seq, rejection.reason) == (1, "too_large")
        assert (await recorder.outcomes_of(2))["acked"] == [2, 3]
        await link.close()


async def test_case_04_a_full_queue_nacks(vhost: Vhost) -> None:
    await vhost.queue("full", "ev", "full.#", **{"x-max-length": 1, "x-overflow": "reject-publish"})
    recorder = Recorder()
    link = await vhost.link(recorder)
    link.publish([make_row(1, event_type="full.x"), make_row(2), make_row(3, event_type="full.x")])
    outcomes = await recorder.outcomes_of(3)
    assert sorted(outcomes["acked"]) == [1, 2]
    assert outcomes["nacked"] == [3]
    await vhost.get("full")
    link.publish([make_row(3, event_type="full.x")])
    await recorder.until(lambda: 3 in recorder.outcomes["acked"])
    await link.close()


async def test_the_connection_is_killed(vhost: Vhost, rabbit_server: RabbitServer) -> None:
    """Under load: each row is confirmed or lost, and what was confirmed is in the queue."""
    recorder = Recorder()
    link = await vhost.link(recorder)
    rows = make_rows(20_000)
    publishing = asyncio.ensure_future(recorder.publish_all(link, rows))
    await recorder.until(lambda: len(recorder.outcomes["acked"]) > 1000)
    kill = '[rabbit_networking:close_connection(P, "enough") || P <- rabbit_networking:connections()]'
    await asyncio.to_thread(rabbit_server.eval, kill)
    await recorder.until(lambda: recorder.closed is not None)
    publishing.cancel()
    assert recorder.closed == (
        Closed.CONNECTION,
        "320 CONNECTION_FORCED - enough",
    )
    outcomes = recorder.outcomes
    seqs = outcomes["acked"] + outcomes["lost"]
    assert len(seqs) == len(set(seqs))
    assert link.in_flight == 0
    await link.close()
    await vhost.channel.connection.close()
    looking = await aiormq.connect(vhost.url)
    channel = await looking.channel()
    answer = await channel.queue_declare("q", passive=True)
    assert answer.message_count is not None
    assert answer.message_count >= len(outcomes["acked"])
    await looking.close()


async def test_case_38_credentials_and_vhosts_of_all_kinds(rabbit_server: RabbitServer) -> None:
    name, password = "ü ser", "p@ss/w#rd:%2F +x"
    binary = "<<{}>>".format
    user = binary(",".join(str(byte) for byte in name.encode()))
    secret = binary(",".join(str(byte) for byte in password.encode()))
    await asyncio.to_thread(rabbit_server.eval, f'rabbit_auth_backend_internal:add_user({user}, {secret}, <<"test">>)')
    for vhost in ("/", "a/b", "vh ü"):
        if vhost != "/":
            await asyncio.to_thread(rabbit_server.add_vhost, vhost)
        path = binary(",".join(str(byte) for byte in vhost.encode()))
        await asyncio.to_thread(
            rabbit_server.eval,
            f'rabbit_auth_backend_internal:set_permissions({user}, {path}, <<".*">>, <<".*">>, <<".*">>, {user})',
        )
        broker = make_broker(rabbit_server.amqp_url(vhost, name, password), exchange="amq.topic")
        link = await broker.connect(Recorder(), PayloadType.JSON)
        await link.close()
    broker = make_broker(rabbit_server.amqp_url("/", name, "wrong"), exchange="amq.topic")
    with pytest.raises(BrokerRefused, match="refused the login") as caught:
        await broker.connect(Recorder(), PayloadType.JSON)
    assert "wrong" not in str(caught.value)
    broker = make_broker(rabbit_server.amqp_url("none such"), exchange="amq.topic")
    with pytest.raises(BrokerRefused, match="vhost none such not found"):
        await broker.connect(Recorder(), PayloadType.JSON)


async def test_a_users_limit_of_channels_is_no_rows_fault(vhost: Vhost, rabbit_server: RabbitServer) -> None:
    """RabbitMQ closes the connection over a channel too many, and says 530."""
    await asyncio.to_thread(rabbit_server.add_user, "limited", "secret")
    name = unquote(urlsplit(vhost.url).path[1:])
    names = ", ".join(f'<<"{text}">>' for text in ("limited", name, ".*", ".*", ".*", "test"))
    await asyncio.to_thread(rabbit_server.eval, f"rabbit_auth_backend_internal:set_permissions({names})")
    recorder = Recorder()
    broker = make_broker(rabbit_server.amqp_url(name, "limited", "secret"))
    link = await broker.connect(recorder, PayloadType.JSON)
    limits = '<<"limited">>, #{<<"max-channels">> => 1}, <<"test">>'
    await asyncio.to_thread(rabbit_server.eval, f"rabbit_auth_backend_internal:set_user_limits({limits})")
    link.publish([make_row(1)])
    assert link.probe(make_row(2)).taken == 0
    await recorder.until(lambda: recorder.closed)
    assert recorder.closed is not None
    assert recorder.closed[0] is Closed.CONNECTION
    assert recorder.closed[1].startswith("530 NOT_ALLOWED - number of channels")
    assert recorder.outcomes["acked"] + recorder.outcomes["lost"] == [1]
    assert set(recorder.outcomes) == {"acked", "nacked", "returned", "lost"}


async def test_case_40_urls_are_read_anew_for_each_connect(vhost: Vhost) -> None:
    urls = [vhost.url.replace("guest:guest", "guest:old")]
    broker = make_broker()
    broker._urls = lambda: urls
    with pytest.raises(BrokerRefused):
        await broker.connect(Recorder(), PayloadType.JSON)
    urls[0] = vhost.url
    await (await broker.connect(Recorder(), PayloadType.JSON)).close()


async def test_the_connection_has_its_name(vhost: Vhost, rabbit_server: RabbitServer) -> None:
    link = await vhost.link(Recorder(), connection_name="outbox-relay shop")
    # Erlang shows a binary's bytes.
    name = ",".join(map(str, b"outbox-relay shop"))
    await eventually(lambda: name in rabbit_server.eval("rabbit_networking:connection_info_all([client_properties])"))
    await link.close()
