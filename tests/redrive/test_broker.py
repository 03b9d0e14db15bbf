"""`relay redrive` against RabbitMQ: what is sent arrives once confirmed, what is not sent stays in its place."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import aio_pika
import pytest
from aio_pika.abc import AbstractChannel

from relay.topology import names
from tests import foreign
from tests.conftest import eventually
from tests.e2e.conftest import COMMAND, environment
from tests.foreign import HEADERS, MESSAGE_ID, MICROSECONDS, TIMESTAMP, entry, long, short, stamp
from tests.vhost import Vhost, count, message_of, send

PARKING = "inv.parking"


@pytest.fixture
async def channel(broker: Vhost) -> AsyncIterator[AbstractChannel]:
    """A parking queue, and an exchange `orders` with a work queue `inv` bound to `order.#`."""
    policy = {"pattern": f"^{PARKING}$", "apply-to": "queues", "definition": {"delivery-limit": 1_000_000}}
    broker.api.put("policies", broker.vhost, "parking", document=policy)
    async with await aio_pika.connect(broker.url) as connection:
        channel = await connection.channel()
        quorum: dict[str, Any] = {"x-queue-type": "quorum"}
        orders = await channel.declare_exchange("orders", aio_pika.ExchangeType.TOPIC, durable=True)
        work = await channel.declare_queue("inv", durable=True, arguments=quorum)
        await work.bind(orders, "order.#")
        await channel.declare_queue(PARKING, durable=True, arguments=quorum)
        yield channel


def diagnosis(key: str = "order.paid", **headers: Any) -> dict[str, Any]:
    route = {names.ORIGINAL_EXCHANGE: "orders", names.ORIGINAL_ROUTING_KEY: key}
    return {**route, names.RETRY_ATTEMPT: 3, names.ERROR_CLASS: "transient", **headers}


async def park(channel: AbstractChannel, *ids: str, key: str = "order.paid", **headers: Any) -> None:
    for id in ids:
        await send(channel, "", PARKING, id, headers=diagnosis(key, **headers), type="order.paid")


async def ids(channel: AbstractChannel, queue: str) -> list[str]:
    """The ids in a queue, in their order; it is empty afterwards."""
    source = await channel.get_queue(queue, ensure=False)
    found = []
    while (message := await source.get(no_ack=True, fail=False)) is not None:
        found.append(message.message_id or "")
    return found


def start(broker: Vhost, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COMMAND, "redrive", *arguments],
        env=environment(broker.settings),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


# ---------------------------------------------------------------- what arrives


async def test_messages_go_back_to_where_they_came_from(broker: Vhost, channel: AbstractChannel) -> None:
    sent = aio_pika.Message(
        b'{"n":1}',
        message_id="m0",
        type="order.paid",
        content_type="application/json",
        correlation_id="c",
        app_id="shop",
        priority=3,
        delivery_mode=2,
        headers=diagnosis(share=0.5, big=2**40, flag=True),
    )
    await channel.default_exchange.publish(sent, PARKING)
    await park(channel, *(f"m{n}" for n in range(1, 6)))
    done = await broker.relay("redrive", PARKING)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "6 looked at, 6 matched, 6 redriven" in done.stdout
    message = await message_of(channel, "inv")
    await message.ack()
    assert (message.message_id, message.body, message.exchange, message.routing_key) == (
        "m0",
        sent.body,
        "orders",
        "order.paid",
    )
    for name in ("type", "content_type", "correlation_id", "app_id", "priority", "delivery_mode"):
        assert getattr(message, name) == getattr(sent, name)
    run = message.headers[names.REDRIVE_RUN]
    own = {names.RETRY_ATTEMPT: 0, names.REDRIVE_COUNT: 1, names.REDRIVE_RUN: run}
    kept = {name: value for name, value in message.headers.items() if not names.is_brokers_own(name)}
    assert kept == {**sent.headers, **own}
    assert await ids(channel, "inv") == ["m1", "m2", "m3", "m4", "m5"]
    assert await count(channel, PARKING) == 0
    assert json.loads(done.stderr.splitlines()[-1])["event"] == "queue_redriven"


async def test_another_route_can_be_said(broker: Vhost, channel: AbstractChannel) -> None:
    await send(channel, "", PARKING, "without a diagnosis")
    refused = await broker.relay("redrive", PARKING, "--json")
    assert refused.returncode == 1
    assert json.loads(refused.stdout)["failed"] == {"no_route": 1}
    done = await broker.relay("redrive", PARKING, "--to-exchange", "", "--routing-key", "inv")
    assert done.returncode == 0, done.stdout
    assert await ids(channel, "inv") == ["without a diagnosis"]


async def test_what_cannot_be_decoded_is_left_and_told(broker: Vhost, channel: AbstractChannel) -> None:
    """One such message ended every run with "the connection was lost": nothing behind it could be redriven."""
    await park(channel, "m1")
    table = long(
        entry(names.ORIGINAL_EXCHANGE.encode(), b"S", long(b"orders"))
        + entry(names.ORIGINAL_ROUTING_KEY.encode(), b"S", long(b"order.paid"))
    )
    properties = table + short(b"m2") + stamp(MICROSECONDS)
    await foreign.publish(broker.url, b"", PARKING.encode(), HEADERS | MESSAGE_ID | TIMESTAMP, properties)
    await park(channel, "m3")
    for options, redriven, failed in (
        (("--dry-run",), 0, {"undecodable": 1}),
        (("--where", "message_id=m1"), 1, {}),
        ((), 1, {"undecodable": 1}),
    ):
        done = await broker.relay("redrive", PARKING, "--json", *options)
        document = json.loads(done.stdout)
        assert (document["redriven"], document["failed"]) == (redriven, failed), done.stderr
        assert done.returncode == (1 if failed else 0)
    told = {one["id"]: (one["reason"], one["text"]) for one in document["messages"]}
    assert told["m2"] == ("undecodable", "cannot be decoded: timestamp 1764439200000000: year 57882 is out of range")
    assert await ids(channel, "inv") == ["m1", "m3"]
    assert await count(channel, PARKING) == 1


async def test_messages_with_one_id_or_none_are_kept_apart(broker: Vhost, channel: AbstractChannel) -> None:
    """A return names a message by its id: the unroutable copy must not be taken for the one that arrived."""
    await park(channel, "same", key="order.1")
    await park(channel, "same", key="nowhere")
    await park(channel, "same", key="order.2")
    for key in ("order.3", "nowhere", "order.4"):
        message = aio_pika.Message(b"", delivery_mode=2, headers=diagnosis(key), type="anonymous")
        # Its id would be made up by the library that publishes it.
        raw = await channel.get_underlay_channel()
        properties = message.properties
        properties.message_id = None
        await raw.basic_publish(b"", exchange="", routing_key=PARKING, properties=properties)
    done = await broker.relay("redrive", PARKING, "--json")
    assert done.returncode == 1
    document = json.loads(done.stdout)
    assert (document["redriven"], document["failed"]) == (4, {"returned": 2})
    assert await count(channel, "inv") == 4
    assert await count(channel, PARKING) == 2


async def test_bodies_of_any_size(broker: Vhost, channel: AbstractChannel) -> None:
    """Above the negotiated frame size a body goes in several frames; an empty one in none."""
    bodies = [b"", b"x" * 131_064, b"y" * 131_065, bytes(range(256)) * 4096]
    for number, body in enumerate(bodies):
        message = aio_pika.Message(body, message_id=f"m{number}", headers=diagnosis(), delivery_mode=2)
        await channel.default_exchange.publish(message, PARKING)
    done = await broker.relay("redrive", PARKING)
    assert done.returncode == 0, done.stdout + done.stderr
    for body in bodies:
        arrived = await message_of(channel, "inv")
        await arrived.ack()
        assert arrived.body == body


# ---------------------------------------------------------------- what stays


async def test_without_a_binding_everything_stays(broker: Vhost, channel: AbstractChannel) -> None:
    await park(channel, "m1", "m2", key="gone.x")
    await park(channel, "m3")
    done = await broker.relay("redrive", PARKING)
    assert done.returncode == 1
    assert "1 redriven; not sent, still there: 2 returned" in done.stdout
    assert "312 NO_ROUTE" in done.stdout
    assert await ids(channel, "inv") == ["m3"]
    work = await channel.get_queue("inv")
    await work.bind("orders", "gone.#")
    assert (await broker.relay("redrive", PARKING)).returncode == 0
    assert await ids(channel, "inv") == ["m1", "m2"]
    assert await count(channel, PARKING) == 0


async def test_an_exchange_that_is_missing_or_internal_costs_the_others_nothing(
    broker: Vhost, channel: AbstractChannel
) -> None:
    """The broker closes the channel over such a publish, and with it what else is in flight."""
    await channel.declare_exchange("inside", internal=True, durable=True)
    for n in range(4):
        for exchange in ("orders", "missing", "inside"):
            await park(channel, f"{exchange}{n}", **{names.ORIGINAL_EXCHANGE: exchange})
    done = await broker.relay("redrive", PARKING, "--json")
    assert done.returncode == 1
    document = json.loads(done.stdout)
    assert (document["redriven"], document["failed"]) == (4, {"refused": 8})
    assert {text.partition(" ")[0] for text in (one["text"] for one in document["messages"])} == {"403", "404"}
    assert await ids(channel, "inv") == [f"orders{n}" for n in range(4)]
    assert await ids(channel, PARKING) == [f"{exchange}{n}" for n in range(4) for exchange in ("missing", "inside")]


async def test_a_message_over_which_the_channel_closes_is_found_among_many(
    broker: Vhost, channel: AbstractChannel
) -> None:
    """All that were in flight are in doubt: each is tried again, alone, and one of them stays."""
    broker.api.put("users", "picky", document={"password": "picky", "tags": ""})
    try:
        rights = {"configure": "^$", "write": ".*", "read": ".*"}
        broker.api.put("permissions", broker.vhost, "picky", document=rights)
        topic = {"exchange": "orders", "write": "^order[.](?!secret)", "read": ".*"}
        broker.api.put("topic-permissions", broker.vhost, "picky", document=topic)
        await park(channel, *(f"a{n}" for n in range(20)))
        await park(channel, "secret", key="order.secret")
        await park(channel, *(f"b{n}" for n in range(20)))
        url = broker.url.replace("guest:guest", "picky:picky")
        done = await broker.relay("redrive", PARKING, "--json", settings={"RELAY_AMQP_URL": url})
        assert done.returncode == 1
        document = json.loads(done.stdout)
        assert (document["redriven"], document["failed"]) == (40, {"refused": 1})
        arrived = Counter(await ids(channel, "inv"))
        assert arrived.keys() == {f"{half}{n}" for half in "ab" for n in range(20)}
        assert await ids(channel, PARKING) == ["secret"]
    finally:
        broker.server.ctl("delete_user", "picky")


async def test_a_full_queue_stops_the_run(broker: Vhost, channel: AbstractChannel) -> None:
    policy = {"pattern": "^inv$", "apply-to": "queues", "definition": {"max-length": 2, "overflow": "reject-publish"}}
    broker.api.put("policies", broker.vhost, "small", document=policy)
    await park(channel, *(f"m{n}" for n in range(40)))
    done = await broker.relay("redrive", PARKING, "--json", "--rate", "200/s")
    assert done.returncode == 1
    document = json.loads(done.stdout)
    assert "takes no more" in document["stopped"]
    assert document["failed"].keys() == {"nacked"}
    assert await count(channel, "inv") + await count(channel, PARKING) == 40
    assert await count(channel, PARKING) > 0


async def test_what_does_not_match_stays_in_order(broker: Vhost, channel: AbstractChannel) -> None:
    for n in range(12):
        await park(channel, f"m{n}", **{names.ERROR_CLASS: "transient" if n % 3 else "permanent"})
    done = await broker.relay("redrive", PARKING, "--where", "x-error-class=permanent", "--where", "type=order.paid")
    assert done.returncode == 0
    assert await ids(channel, "inv") == ["m0", "m3", "m6", "m9"]
    assert await ids(channel, PARKING) == ["m1", "m2", "m4", "m5", "m7", "m8", "m10", "m11"]


async def test_many_that_do_not_match_stay_in_order(broker: Vhost, channel: AbstractChannel) -> None:
    """More than one consumer's prefetch, and than 32 of anything: where RabbitMQ itself keeps no order."""
    every = [f"m{n}" for n in range(400)]
    await asyncio.gather(*(park(channel, id) for id in every))
    done = await broker.relay("redrive", PARKING, "--where", "message_id=m399")
    assert done.returncode == 0, done.stdout + done.stderr
    assert await ids(channel, "inv") == ["m399"]
    assert await ids(channel, PARKING) == every[:399]


async def test_every_second_one_of_many(broker: Vhost, channel: AbstractChannel) -> None:
    """What is sent makes room for more in a prefetch that what stays fills up."""
    every = [f"m{n}" for n in range(400)]
    await asyncio.gather(*(park(channel, id, half=number % 2) for number, id in enumerate(every)))
    done = await broker.relay("redrive", PARKING, "--where", "half=1", "--json")
    assert (done.returncode, json.loads(done.stdout)["redriven"]) == (0, 200), done.stderr
    assert await ids(channel, "inv") == every[1::2]
    assert await ids(channel, PARKING) == every[::2]


async def test_a_dry_run_changes_nothing(broker: Vhost, channel: AbstractChannel) -> None:
    await park(channel, "m1", "m2", "m3")
    done = await broker.relay("redrive", PARKING, "--dry-run", "--limit", "2", "--json")
    assert done.returncode == 0
    document = json.loads(done.stdout)
    assert (document["dry_run"], document["matched"], document["redriven"]) == (True, 2, 0)
    assert [(one["id"], one["exchange"], one["routing_key"]) for one in document["messages"]] == [
        ("m1", "orders", "order.paid"),
        ("m2", "orders", "order.paid"),
    ]
    assert "would be redriven; nothing was changed" in (await broker.relay("redrive", PARKING, "--dry-run")).stdout
    assert await count(channel, "inv") == 0
    assert await ids(channel, PARKING) == ["m1", "m2", "m3"]


async def test_limit_takes_the_oldest(broker: Vhost, channel: AbstractChannel) -> None:
    await park(channel, "m1", "m2", "m3")
    assert (await broker.relay("redrive", PARKING, "--limit", "2", "--yes")).returncode == 0
    assert await ids(channel, "inv") == ["m1", "m2"]
    assert await ids(channel, PARKING) == ["m3"]


async def test_nothing_there_and_no_such_queue(broker: Vhost, channel: AbstractChannel) -> None:
    assert (await broker.relay("redrive", PARKING)).returncode == 4
    await park(channel, "m1")
    assert (await broker.relay("redrive", PARKING, "--where", "type=other")).returncode == 4
    missing = await broker.relay("redrive", "no.such.queue")
    assert missing.returncode == 1
    assert "the queue 'no.such.queue' cannot be used: 404 NOT_FOUND" in missing.stderr
    assert "rabbitmqctl list_queues" in missing.stderr
    assert (await broker.relay("redrive", PARKING, "--rate", "fast")).returncode == 2


# ---------------------------------------------------------------- how a run ends


async def test_what_comes_back_at_once_is_not_sent_again(broker: Vhost, channel: AbstractChannel) -> None:
    """A queue whose messages come back would otherwise be redriven for ever."""
    await park(channel, "m1", "m2", "m3")
    to_itself = ("--to-exchange", "", "--routing-key", PARKING)
    for number in (1, 2):
        done = await broker.relay("redrive", PARKING, *to_itself, "--json")
        assert (done.returncode, json.loads(done.stdout)["redriven"]) == (0, 3)
        message = await message_of(channel, PARKING)
        assert message.headers[names.REDRIVE_COUNT] == number
        await message.nack(requeue=True)

        async def are_all_back() -> bool:
            return await count(channel, PARKING) == 3

        await eventually(are_all_back)


async def test_killed_midway_nothing_is_lost(broker: Vhost, channel: AbstractChannel) -> None:
    """Taken messages go back, confirmed ones are there: at most two windows are there twice."""
    every = [f"m{n}" for n in range(300)]
    await park(channel, *every)
    process = start(broker, PARKING, "--rate", "400/s")
    try:
        await eventually(lambda: count(channel, "inv"), 20)
    finally:
        process.kill()
        process.communicate()

    async def is_back() -> bool:
        return await count(channel, PARKING) + await count(channel, "inv") >= 300

    await eventually(is_back)
    left, arrived = await ids(channel, PARKING), await ids(channel, "inv")
    assert set(left) | set(arrived) == set(every)
    assert len(set(left) & set(arrived)) <= 200
    assert left == sorted(left, key=every.index)


async def test_interrupted_it_stops_in_good_order(broker: Vhost, channel: AbstractChannel) -> None:
    every = [f"m{n}" for n in range(30)]
    await park(channel, *every)
    process = start(broker, PARKING, "--rate", "5/s", "--json")
    try:
        await eventually(lambda: count(channel, "inv"), 20)
        process.send_signal(signal.SIGTERM)
        output, _ = await asyncio.to_thread(process.communicate, None, 20)
    finally:
        process.kill()
    document = json.loads(output)
    assert (process.returncode, document["stopped"]) == (1, "interrupted")
    arrived = await ids(channel, "inv")
    assert arrived == every[: document["redriven"]]
    assert await ids(channel, PARKING) == every[document["redriven"] :]


async def test_a_lost_connection_ends_the_run_and_loses_nothing(broker: Vhost, channel: AbstractChannel) -> None:
    every = [f"m{n}" for n in range(30)]
    await park(channel, *every)
    process = start(broker, PARKING, "--rate", "5/s")
    try:
        await eventually(lambda: count(channel, "inv"), 20)
        names_ = 'lists:keyfind(<<"connection_name">>, 1, proplists:get_value(client_properties, I, []))'
        broker.server.eval(
            '[rabbit_networking:close_connection(proplists:get_value(pid, I), "bye") || '
            "I <- rabbit_networking:connection_info_all([pid, client_properties]), "
            f'{names_} =:= {{<<"connection_name">>, longstr, <<"outbox-relay redrive">>}}]'
        )
        _, said = await asyncio.to_thread(process.communicate, None, 20)
    finally:
        process.kill()
    assert process.returncode == 1
    assert "Traceback" not in said
    assert "the broker closed the connection: 320" in said
    arrived, left = await ids(channel, "inv"), await ids(channel, PARKING)
    assert set(arrived) | set(left) == set(every)


async def test_an_alarm_is_waited_for(broker: Vhost, channel: AbstractChannel) -> None:
    await park(channel, "m1", "m2", "m3")
    broker.server.memory_alarm(True)
    try:
        process = start(broker, PARKING)
        states = "[S || [{state, S}] <- rabbit_networking:connection_info_all([state])]"
        await eventually(lambda: "blocked" in broker.server.eval(states), 20, interval_s=0.1)
        assert process.poll() is None
    finally:
        broker.server.memory_alarm(False)
    output, said = await asyncio.to_thread(process.communicate, None, 30)
    assert process.returncode == 0, output + said
    assert await ids(channel, "inv") == ["m1", "m2", "m3"]


async def test_a_queue_that_is_deleted_midway_ends_the_run(broker: Vhost, channel: AbstractChannel) -> None:
    """More than one prefetch: what was taken is sent, the rest is gone with its queue."""
    await asyncio.gather(*(park(channel, f"m{n}") for n in range(80)))
    process = start(broker, PARKING, "--rate", "20/s")
    try:
        await eventually(lambda: count(channel, "inv"), 20)
        await channel.queue_delete(PARKING)
        output, said = await asyncio.to_thread(process.communicate, None, 40)
    finally:
        process.kill()
    assert process.returncode == 1, output + said
    assert "404 NOT_FOUND" in said
    assert "Traceback" not in said and "unhandled" not in said


async def test_a_rate_is_kept(broker: Vhost, channel: AbstractChannel) -> None:
    await park(channel, *(f"m{n}" for n in range(10)))
    loop = asyncio.get_running_loop()
    began = loop.time()
    assert (await broker.relay("redrive", PARKING, "--rate", "10/s")).returncode == 0
    assert loop.time() - began >= 0.9


# ---------------------------------------------------------------- with a topology


async def test_from_the_delivery_limit_to_parking_and_back_and_retried_again(broker: Vhost) -> None:
    """RabbitMQ 3.10 drops a message with an old `x-death` of its work queue when it expires in a retry queue."""
    await broker.apply(
        '[[exchange]]\nname = "orders"\n[[queue]]\nname = "inv"\nretry = ["200ms"]\ndelivery_limit = 1\n'
        'bind = [{ exchange = "orders", key = "order.*" }]\n'
    )
    async with await aio_pika.connect(broker.url) as connection:
        channel = await connection.channel()
        await send(channel, "orders", "order.paid", "poison", type="order.paid")
        for _ in range(2):
            await (await message_of(channel, "inv")).reject(requeue=True)
        await (await message_of(channel, PARKING)).nack(requeue=True)
        done = await broker.relay("redrive", PARKING, "--where", "x-first-death-reason=delivery_limit")
        assert done.returncode == 0, done.stdout + done.stderr
        message = await message_of(channel, "inv")
        assert (message.message_id, message.exchange, message.routing_key) == ("poison", "orders", "order.paid")
        assert "x-death" not in message.headers
        retried = aio_pika.Message(b"", message_id="poison", headers=dict(message.headers), delivery_mode=2)
        await channel.default_exchange.publish(retried, "inv.retry.200ms", mandatory=True)
        await message.ack()
        assert (await message_of(channel, "inv")).message_id == "poison"
