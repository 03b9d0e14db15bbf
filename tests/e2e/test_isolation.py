"""Rows that cannot go, among rows that can, end to end: one bad row costs nobody else anything."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from datetime import timedelta
from typing import Any
from urllib.parse import unquote, urlsplit

import aio_pika
import asyncpg
import pytest

from relay.servers import RabbitServer
from tests.e2e.bystanders import ONE_OR_TWO, arrived, channel_of, insert_among, start
from tests.e2e.conftest import LADDER, Site
from tests.e2e.ledger import drain


async def row(site: Site, id: str) -> asyncpg.Record:
    found = await site.database.fetchrow("SELECT * FROM outbox WHERE id = $1", id)
    assert found is not None
    return found


async def parked(site: Site, id: str, failure: str) -> asyncpg.Record:
    await site.until(f"(SELECT aside = 'parked' FROM outbox WHERE id = '{id}')")
    found = await row(site, id)
    assert (found["failure_class"], found["sent_at"]) == (failure, None)
    return found


# ---------------------------------------------------------------- no route


@ONE_OR_TWO
async def test_case_01_an_unroutable_row_goes_when_its_route_comes(site: Site, relays: int) -> None:
    await start(site, relays, retry_delays=LADDER)
    poison: list[dict[str, Any]] = [
        {"id": "nowhere", "event_type": "nope.x", "key": "n"},
        {"id": "empty", "event_type": "nope.x", "key": "e", "payload": None},
    ]
    good = await insert_among(site, poison)
    assert await arrived(site, good) == {}
    for each in ("nowhere", "empty"):
        await site.until(f"(SELECT attempts > 0 FROM outbox WHERE id = '{each}')")
        found = await row(site, each)
        assert (found["sent_at"], found["failure_class"]) == (None, "unroutable")
        assert "NO_ROUTE" in found["failure_error"]
        assert (found["failure_exchange"], found["failure_routing_key"]) == ("events", "nope.x")
    async with channel_of(site) as channel:
        await (await channel.get_queue("q")).bind("events", "nope.#")
    await site.all_sent()
    assert Counter(message.message_id for message in await drain(site.amqp_url, 2)) == {"nowhere": 1, "empty": 1}


# ---------------------------------------------------------------- too large


async def test_headers_of_megabytes_are_parked_with_their_size(site: Site) -> None:
    """They are not read; whoever looks at the row learns what is wrong with it."""
    await start(site, 1)
    headers = json.dumps({"h": "x" * (5 * 1024 * 1024)})
    good = await insert_among(site, [{"id": "huge", "key": "h", "headers": headers, "routing_key": "ok.mine"}])
    found = await parked(site, "huge", "invalid")
    assert found["failure_error"].startswith("properties and headers have 52429")
    assert "one frame could not hold them" in found["failure_error"]
    assert found["failure_routing_key"] == "ok.mine"
    assert await arrived(site, good) == {}


# ---------------------------------------------------------------- refused


@ONE_OR_TWO
async def test_case_02_an_internal_exchange(site: Site, relays: int) -> None:
    async with channel_of(site) as channel:
        await channel.declare_exchange("inner", aio_pika.ExchangeType.TOPIC, durable=True, internal=True)
    daemons = await start(site, relays)
    good = await insert_among(site, [{"id": f"bad{n}", "key": f"b{n}", "exchange": "inner"} for n in range(5)])
    for n in range(5):
        found = await parked(site, f"bad{n}", "refused")
        assert "cannot publish to internal exchange 'inner'" in found["failure_error"]
        assert found["failure_error"].startswith("403 ACCESS_REFUSED")
        assert (found["failure_exchange"], found["failure_routing_key"], found["attempts"]) == ("inner", "ok.x", 1)
    assert await arrived(site, good, copies_max=2) == {}
    for daemon in daemons:
        await daemon.ready()
        assert daemon.metrics().get('relay_reconnects_total{peer="broker"}', 0.0) <= 3, "no storm"


@ONE_OR_TWO
async def test_case_02_several_internal_exchanges_at_once(site: Site, relays: int) -> None:
    """Each closed everybody's channel once more, and bystanders were repeated each time."""
    async with channel_of(site) as channel:
        for n in range(4):
            await channel.declare_exchange(f"inner{n}", aio_pika.ExchangeType.TOPIC, durable=True, internal=True)
    daemons = await start(site, relays)
    poison: list[dict[str, Any]] = []
    for n in range(4):
        poison += [{"id": f"bad{n}", "key": f"b{n}", "exchange": f"inner{n}"}]
        poison += [{"id": f"among{n}-{each}", "key": f"a{n}{each}"} for each in range(50)]
    good = await insert_among(site, poison)
    for n in range(4):
        assert "cannot publish to internal exchange" in (await parked(site, f"bad{n}", "refused"))["failure_error"]
    good += [row["id"] for row in poison if "exchange" not in row]
    assert await arrived(site, good, copies_max=2) == {}
    assert sum(daemon.metric("relay_reconnects_total") for daemon in daemons) <= relays


@ONE_OR_TWO
@pytest.mark.parametrize("name", ["inner-" + "x" * 240, "inner-" + "é" * 120])
async def test_case_02_a_refusal_that_names_nobody(
    site: Site, rabbit_server: RabbitServer, relays: int, name: str
) -> None:
    """A name so long that the broker's text is cut off before it says anything: all in flight are suspects. Where it is
    not of ASCII characters, RabbitMQ 4.3 closes the connection and says nothing but INTERNAL_ERROR."""
    vhost = unquote(urlsplit(site.amqp_url).path[1:])
    # The client library knows no names of this length.
    binary = f"<<{','.join(map(str, name.encode()))}>>"
    declare = f'rabbit_exchange:declare({{resource, <<"{vhost}">>, exchange, {binary}}}, topic, true, false, true, [],'
    await asyncio.to_thread(rabbit_server.eval, f'{declare} <<"test">>)')
    daemons = await start(site, relays)
    poison: list[dict[str, Any]] = [{"id": "bad", "key": "b", "exchange": name}, {"id": "behind", "key": "b"}]
    good = await insert_among(site, poison)
    found = await parked(site, "bad", "refused")
    assert (found["failure_exchange"], found["attempts"]) == (name, 1)
    assert await arrived(site, good, copies_max=2) == {}
    await site.until("(SELECT aside = 'held' FROM outbox WHERE id = 'behind')")
    for daemon in daemons:
        await daemon.ready()


@ONE_OR_TWO
async def test_case_02_a_header_that_adds_routes(site: Site, relays: int) -> None:
    await start(site, relays)
    poison = [
        {"id": "cc", "key": "c", "headers": '{"CC": ["ok.y"]}'},
        {"id": "bcc", "key": "d", "headers": '{"BCC": ["ok.y"]}'},
    ]
    good = await insert_among(site, poison)
    assert await arrived(site, good) == {}
    for each in ("cc", "bcc"):
        assert (await parked(site, each, "invalid"))["attempts"] == 1


@ONE_OR_TWO
@pytest.mark.parametrize("on_parked", ["hold", "continue"])
async def test_case_03_a_body_above_the_brokers_limit(
    site: Site, rabbit_server: RabbitServer, relays: int, on_parked: str
) -> None:
    with rabbit_server.limited_message_size(1 << 20):
        await start(site, relays, on_parked=on_parked)
        large = json.dumps("x" * (2 << 20))
        poison = [{"id": "large", "key": "l", "payload": large}, {"id": "behind", "key": "l"}]
        good = await insert_among(site, poison)
        found = await parked(site, "large", "too_large")
        assert "1048576" in found["failure_error"]
        if on_parked == "continue":
            await site.until("(SELECT sent_at IS NOT NULL FROM outbox WHERE id = 'behind')")
            assert (await arrived(site, good, others=1, copies_max=2)).keys() == {"behind"}
        else:
            assert await arrived(site, good, copies_max=2) == {}
            await site.until("(SELECT aside = 'held' FROM outbox WHERE id = 'behind')")


@ONE_OR_TWO
async def test_an_exchange_of_a_rows_own_that_is_missing_may_come_yet(site: Site, relays: int) -> None:
    """That is the row's fault: the ladder, with the broker's words; asked for first, so nobody's channel closes."""
    daemons = await start(site, relays, retry_delays=LADDER)
    good = await insert_among(site, [{"id": "early", "key": "e", "exchange": "later"}, {"id": "behind", "key": "e"}])
    assert await arrived(site, good) == {}
    await site.until("(SELECT aside = 'deferred' FROM outbox WHERE id = 'early')")
    found = await row(site, "early")
    assert (found["failure_class"], found["failure_exchange"]) == ("refused", "later")
    assert found["failure_error"].startswith("404 NOT_FOUND - no exchange 'later'")
    async with channel_of(site) as channel:
        exchange = await channel.declare_exchange("later", aio_pika.ExchangeType.TOPIC, durable=True)
        await (await channel.get_queue("q")).bind(exchange, "ok.#")
    await site.all_sent(30)
    assert [message.message_id for message in await drain(site.amqp_url, 2)] == ["early", "behind"]
    assert [daemon.metric("relay_reconnects_total") for daemon in daemons] == [0] * relays


@ONE_OR_TWO
async def test_a_template_over_a_null_column_is_invalid(site: Site, relays: int) -> None:
    """Never the default exchange, which would deliver to a queue that bears the routing key's name."""
    await start(site, relays, exchange="{aggregate_type}")
    good = await insert_among(site, [{"id": "nobody", "key": "n", "routing_key": "q"}], aggregate_type="events")
    found = await parked(site, "nobody", "invalid")
    assert "aggregate_type" in found["failure_error"]
    assert await arrived(site, good) == {}


async def test_the_configured_exchange_refuses(site: Site, rabbit_server: RabbitServer) -> None:
    """That is the configuration's fault: not ready, no attempts, and it goes on when it is mended."""
    async with channel_of(site) as channel:
        await channel.exchange_delete("events")
        await channel.declare_exchange("events", aio_pika.ExchangeType.TOPIC, durable=True, internal=True)
    daemon = site.start()
    await site.insert("m", key="k")
    await daemon.not_ready("exchange")
    assert (await row(site, "m"))["attempts"] == 0
    async with channel_of(site) as channel:
        await channel.exchange_delete("events")
        exchange = await channel.declare_exchange("events", aio_pika.ExchangeType.TOPIC, durable=True)
        await (await channel.get_queue("q")).bind(exchange, "ok.#")
    await site.all_sent(30)
    await daemon.ready()
    assert (await row(site, "m"))["attempts"] == 0


# ---------------------------------------------------------------- nacked


@ONE_OR_TWO
async def test_case_04_a_full_queue(site: Site, relays: int) -> None:
    async with channel_of(site) as channel:
        arguments: dict[str, Any] = {"x-max-length": 1, "x-overflow": "reject-publish"}
        queue = await channel.declare_queue("full", durable=True, arguments=arguments)
        await queue.bind("events", "full.#")
        await start(site, relays)
        poison = [{"id": f"f{n}", "event_type": "full.x", "key": "f"} for n in range(1, 6)]
        good = await insert_among(site, poison)
        assert await arrived(site, good) == {}
        order: list[str] = []
        while len(order) < 5:
            await site.until(
                f"(SELECT count(*) = {len(order) + 1} FROM outbox WHERE id LIKE 'f_' AND sent_at IS NOT NULL)"
            )
            message = await queue.get(timeout=5)
            assert message is not None
            await message.ack()
            order.append(message.message_id or "")
        assert order == ["f1", "f2", "f3", "f4", "f5"]
        assert await site.database.fetchval("SELECT sum(attempts) FROM outbox") == 0


# ---------------------------------------------------------------- encoding


@ONE_OR_TWO
async def test_case_12_short_strings_at_the_limit(site: Site, relays: int) -> None:
    await start(site, relays)
    fits, long = "é" * 127, "é" * 128
    async with channel_of(site) as channel:
        await (await channel.get_queue("q")).bind("events", fits)
    poison = [
        {"id": long, "key": "1"},
        {"id": "key", "key": "2", "routing_key": long},
        {"id": "type", "event_type": long, "key": "3"},
        {"id": "correlation", "key": "4", "correlation_id": long},
        {"id": fits, "event_type": fits, "key": "5", "routing_key": fits, "correlation_id": fits},
    ]
    good = await insert_among(site, poison)
    await site.until(f"(SELECT sent_at IS NOT NULL FROM outbox WHERE id = '{fits}')")
    for each in (long, "key", "type", "correlation"):
        await parked(site, each, "invalid")
    messages = await arrived(site, good, others=1)
    assert messages.keys() == {fits}
    exact = messages[fits]
    assert (exact.routing_key, exact.type, exact.correlation_id) == (fits, fits, fits)
    assert len((exact.type or "").encode()) == 254


@ONE_OR_TWO
async def test_case_13_headers_that_arrive_and_those_that_park(site: Site, relays: int) -> None:
    daemons = await start(site, relays)
    carried = {
        "nothing": None,
        "deep": {"a": [1, 2.5, None, {"b": True}]},
        "yes": True,
        "big": 2**53 + 1,
        "two hundred": 200,
        "minus": -1,
        "tenth": 0.1,
    }
    poison: list[dict[str, Any]] = [
        {"id": "carried", "key": "1", "headers": json.dumps(carried)},
        {"id": "int64", "key": "2", "headers": '{"n": 9223372036854775808}'},
        # jsonb keeps it as an integer of 301 digits, which is no 64-bit integer and not exactly a double.
        {"id": "1e300", "key": "6", "headers": '{"n": 1e300}'},
        {"id": "x" * 300, "key": "3"},
        {"id": "p300", "key": "4", "priority": 300},
        {"id": "p-1", "key": "5", "priority": -1},
    ]
    good = await insert_among(site, poison)
    await site.until("(SELECT sent_at IS NOT NULL FROM outbox WHERE id = 'carried')")
    for each in ("int64", "1e300", "x" * 300, "p300", "p-1"):
        await parked(site, each, "invalid")
    messages = await arrived(site, good, others=1)
    assert messages.keys() == {"carried"}
    headers = messages["carried"].headers
    for name, value in carried.items():
        assert headers[name] == value
        assert type(headers[name]) is type(value)
    for daemon in daemons:
        assert daemon.process.poll() is None
        await daemon.ready()


@ONE_OR_TWO
async def test_headers_larger_than_a_frame(site: Site, relays: int) -> None:
    """AMQP has one frame for them; RabbitMQ would close the connection (501)."""
    daemons = await start(site, relays)
    good = await insert_among(site, [{"id": "wide", "key": "w", "headers": json.dumps({"x": "x" * 200_000})}])
    found = await parked(site, "wide", "invalid")
    assert "one frame holds 131064" in found["failure_error"]
    assert await arrived(site, good) == {}
    assert [daemon.metric("relay_reconnects_total") for daemon in daemons] == [0] * relays


@ONE_OR_TWO
async def test_case_14_deadlines(site: Site, relays: int) -> None:
    await start(site, relays)
    now = await site.database.fetchval("SELECT clock_timestamp()")
    poison: list[dict[str, Any]] = [
        {"id": "minute", "key": "1", "expires_at": now + timedelta(seconds=60)},
        {"id": "past", "key": "2", "expires_at": now},
        {"id": "behind", "key": "2"},
    ]
    good = await insert_among(site, poison)
    found = await parked(site, "past", "expired")
    assert not found["holds"], "an expired row holds nobody"
    await site.until("(SELECT count(*) = 2 FROM outbox WHERE id IN ('minute', 'behind') AND sent_at IS NOT NULL)")
    messages = await arrived(site, good, others=2)
    assert messages.keys() == {"minute", "behind"}
    left = messages["minute"].expiration
    assert left is not None
    assert isinstance(left, int | float)
    assert 50 < left <= 60
