"""The consumer on real servers: outcomes, copies and their headers, order policies, stop and reconnect."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aio_pika
import asyncpg
import pytest
from aiormq import spec

from relay.errors import ConfigError, DrainIncomplete
from relay.inbox import (
    AsyncpgLedger,
    ConsumerSettings,
    ErrorClass,
    Message,
    Order,
    Permanent,
    RetryPolicy,
    Transient,
    migrate,
)
from relay.inbox.message import read
from relay.inbox.outcome import Outcome
from relay.servers import RabbitServer
from relay.topology import names
from tests.authority import Authority
from tests.conftest import eventually
from tests.inbox.site import LADDER, QUEUE, Site, apply
from tests.tls_proxy import TlsProxy


async def test_a_message_takes_effect_once_and_its_copy_never_reaches_the_handler(inbox: Site) -> None:
    seen: list[Message] = []

    async def handle(message: Message, connection: asyncpg.Connection) -> None:
        seen.append(message)
        await apply(message, connection)

    await inbox.declare()
    consumer = await inbox.start(inbox.consumer(handle))
    headers = {
        "schema_version": 1,
        "aggregate_type": "order",
        "aggregate_id": "42",
        "aggregate_version": 7,
        "causation_id": "cmd-1",
        "occurred_at": "2026-11-29T18:00:00.123456Z",
    }
    for _ in range(2):
        await inbox.publish("m1", headers=headers, correlation_id="checkout-9", app_id="shop")
    await eventually(lambda: consumer.metrics.messages[Outcome.DUPLICATE] == 1)
    assert await inbox.effects() == {"m1": 1}
    (message,) = seen
    assert (message.id, message.type, message.attempt, message.exchange) == ("m1", "order.created", 0, "events")
    assert (message.aggregate_type, message.aggregate_id, message.aggregate_version) == ("order", "42", 7)
    assert (message.correlation_id, message.causation_id, message.producer) == ("checkout-9", "cmd-1", "shop")
    assert message.occurred_at == datetime(2026, 11, 29, 18, 0, 0, 123456, UTC)
    assert await inbox.ready() == 0 and consumer.metrics.unacked_messages == 0


async def test_a_transient_failure_comes_back_with_the_same_id_one_attempt_up(inbox: Site) -> None:
    seen: list[Message] = []

    async def handle(message: Message, connection: asyncpg.Connection) -> None:
        seen.append(message)
        await apply(message, connection)
        if message.attempt < 2:
            raise Transient("the warehouse does not answer")

    await inbox.declare()
    await inbox.start(inbox.consumer(handle))
    headers = {"schema_version": 1, "price": 0.1, "tags": ["a", 1], "n" * 200: 2**40, "CC": ["order.other"]}
    await inbox.publish("m1", headers=headers, expiration=60, priority=3, correlation_id="c", reply_to="r")
    await inbox.effects_are({"m1": 1})
    assert [message.attempt for message in seen] == [0, 1, 2]
    last = seen[-1]
    assert {message.id for message in seen} == {"m1"}
    assert (last.exchange, last.routing_key) == ("events", "order.created")
    assert last.headers[names.LAST_ERROR] == "the warehouse does not answer"
    assert last.headers[names.ERROR_CLASS] == "transient"
    # Kept by value, though the driver would write 32 bits and cut the name.
    assert (last.headers["price"], last.headers["tags"], last.headers["n" * 200]) == (0.1, ["a", 1], 2**40)
    assert last.headers["x-original-cc"] == ["order.other"] and "CC" not in last.headers
    first, properties = seen[0].properties, last.properties
    assert properties.expiration is None and first.expiration is not None
    for name in ("priority", "correlation_id", "reply_to", "message_type", "delivery_mode", "message_id"):
        assert getattr(properties, name) == getattr(first, name), name


async def test_a_permanent_failure_is_parked_with_its_diagnosis(inbox: Site) -> None:
    async def handle(message: Message, connection: asyncpg.Connection) -> None:
        await apply(message, connection)
        raise Permanent("no such product")

    await inbox.declare()
    consumer = await inbox.start(inbox.consumer(handle))
    await inbox.publish("m1", correlation_id="c")
    parked = await inbox.parked()
    assert (parked.message_id, parked.body, parked.correlation_id) == ("m1", b'{"v":1}', "c")
    headers: dict[str, Any] = dict(parked.headers)
    assert datetime.fromisoformat(headers.pop(names.FIRST_FAILURE)) <= datetime.now(UTC)
    assert headers == {
        "schema_version": 1,
        names.RETRY_ATTEMPT: 0,
        names.LAST_ERROR: "no such product",
        names.ERROR_CLASS: "permanent",
        names.ORIGINAL_EXCHANGE: "events",
        names.ORIGINAL_ROUTING_KEY: "order.created",
        names.CONSUMER: "inventory",
        names.CONSUMER_VERSION: "1.2.3",
    }
    assert await inbox.effects() == {}
    assert await inbox.database.fetchval("SELECT count(*) FROM processed_messages") == 0
    await eventually(lambda: consumer.metrics.messages[Outcome.PARKED] == 1)


async def test_an_unknown_failure_is_bounded(inbox: Site) -> None:
    attempts: list[int] = []

    async def handle(message: Message, connection: asyncpg.Connection) -> None:
        attempts.append(message.attempt)
        raise RuntimeError("what is this?")

    await inbox.declare()
    await inbox.start(inbox.consumer(handle, retry=RetryPolicy(LADDER, unknown_retries_max=1, jitter=0.0)))
    await inbox.publish("m1")
    parked = await inbox.parked()
    assert attempts == [0, 1]
    assert parked.headers[names.ERROR_CLASS] == "unknown"
    assert parked.headers[names.LAST_ERROR] == "after 2 attempts: RuntimeError: what is this?"


async def test_what_an_exception_quotes_of_the_payload_costs_no_copy(inbox: Site) -> None:
    """JSON can name half of a surrogate pair, and UTF-8 has no bytes for it."""

    async def handle(message: Message, connection: asyncpg.Connection) -> None:
        raise ValueError(f"unknown sku {json.loads(message.body)['sku']}")

    await inbox.declare((0.05,))
    consumer = await inbox.start(inbox.consumer(handle, retry=RetryPolicy((0.05,), jitter=0.0)))
    await inbox.publish("m1", b'{"sku":"\\ud800"}')
    parked = await inbox.parked()
    assert parked.headers[names.LAST_ERROR] == "after 2 attempts: ValueError: unknown sku \\ud800"
    await eventually(lambda: consumer.metrics.messages[Outcome.PARKED] == 1)
    assert consumer.metrics.messages[Outcome.RETRIED] == 1 and consumer.metrics.messages[Outcome.REJECTED] == 0


async def test_a_message_of_which_there_can_be_no_copy_goes_by_the_queues_own_policy(inbox: Site) -> None:
    """Its headers fill a frame, a copy's would not fit: sent, they would cost everybody the connection."""

    async def handle(message: Message, connection: asyncpg.Connection) -> None:
        raise Permanent("no such product")

    parking = names.parking_queue(QUEUE)
    await inbox.declare(arguments={"x-dead-letter-exchange": "", "x-dead-letter-routing-key": parking})
    consumer = await inbox.start(inbox.consumer(handle))
    await inbox.publish("m1", headers={"schema_version": 1, "long": "x" * 130_900})
    parked = await inbox.parked()
    assert parked.message_id == "m1" and names.LAST_ERROR not in parked.headers
    assert consumer.metrics.messages[Outcome.REJECTED] == 1
    assert consumer.metrics.reconnects == 0


async def test_a_swallowed_database_error_is_no_success(inbox: Site) -> None:
    """COMMIT of a failed transaction succeeds and says ROLLBACK; taking it for success loses the effect."""

    async def handle(message: Message, connection: asyncpg.Connection) -> None:
        await apply(message, connection)
        try:
            await connection.execute("INSERT INTO nowhere VALUES (1)")
        except asyncpg.UndefinedTableError:
            return

    await inbox.declare()
    await inbox.start(inbox.consumer(handle, retry=RetryPolicy((0.05,), unknown_retries_max=0)))
    await inbox.publish("m1")
    parked = await inbox.parked()
    assert "went on after an error" in str(parked.headers[names.LAST_ERROR])


async def test_a_savepoint_of_the_handlers_own_may_fail(inbox: Site) -> None:
    async def handle(message: Message, connection: asyncpg.Connection) -> None:
        await apply(message, connection)
        try:
            async with connection.transaction():
                await connection.execute("INSERT INTO nowhere VALUES (1)")
        except asyncpg.UndefinedTableError:
            pass

    await inbox.declare()
    await inbox.start(inbox.consumer(handle))
    await inbox.publish("m1")
    await inbox.effects_are({"m1": 1})


@pytest.mark.parametrize(
    ("statement", "error_class", "is_retried"),
    [
        ("INSERT INTO processed_messages VALUES (NULL, 'x')", "constraint", False),
        ("SELECT 1/0", "constraint", False),
        ("DO $$ BEGIN RAISE EXCEPTION 'x' USING ERRCODE = '40P01'; END $$", "database", True),
        ("DO $$ BEGIN RAISE EXCEPTION 'x' USING ERRCODE = '40001'; END $$", "database", True),
        ("SELECT pg_terminate_backend(pg_backend_pid())", "database", True),
    ],
)
async def test_errors_of_the_database_are_classed(
    inbox: Site, statement: str, error_class: str, is_retried: bool
) -> None:
    attempts: list[int] = []

    async def handle(message: Message, connection: asyncpg.Connection) -> None:
        attempts.append(message.attempt)
        await connection.execute(statement)

    await inbox.declare()
    await inbox.start(inbox.consumer(handle, retry=RetryPolicy((0.05,), jitter=0.0)))
    await inbox.publish("m1")
    parked = await inbox.parked()
    assert parked.headers[names.ERROR_CLASS] == error_class
    assert attempts == ([0, 1] if is_retried else [0])


async def test_a_connection_that_was_closed_while_idle_costs_no_message_a_step(inbox: Site) -> None:
    def message(message_id: str) -> Message:
        properties = spec.Basic.Properties(message_id=message_id)
        return read(
            consumer="c", body=b'{"v":1}', properties=properties, exchange="", routing_key="", is_redelivered=False
        )

    ledger = AsyncpgLedger(lambda: inbox.database_url)
    assert await ledger.apply(message("m1"), apply) is Outcome.HANDLED
    (kept,) = ledger._idle
    await inbox.database.execute("SELECT pg_terminate_backend($1)", kept.get_server_pid())
    await eventually(kept.is_closed)
    assert await ledger.apply(message("m2"), apply) is Outcome.HANDLED
    assert await ledger.apply(message("m2"), apply) is Outcome.DUPLICATE
    await ledger.close()
    assert await inbox.effects() == {"m1": 1, "m2": 1}


async def test_a_handler_that_hangs_is_ended_and_tried_again(inbox: Site) -> None:
    """Whether the database hung, nobody knows: it is no sign that it is there either."""
    failures: list[int] = []

    async def handle(message: Message, connection: asyncpg.Connection) -> None:
        failures.append(consumer._station._shared.breaker._failures)
        await apply(message, connection)
        if message.attempt == 0:
            consumer._station._shared.breaker.failed(0.0)
            await connection.execute("SELECT pg_sleep(60)")

    await inbox.declare()
    consumer = inbox.consumer(handle, time_limit_s=0.3)
    await inbox.start(consumer)
    await inbox.publish("m1")
    await inbox.effects_are({"m1": 1})
    assert consumer.metrics.failures[ErrorClass.TIMEOUT] == 1
    assert failures == [0, 1]


async def test_too_old_is_parked_before_the_ladder_ends(inbox: Site) -> None:
    async def handle(message: Message, connection: asyncpg.Connection) -> None:
        raise Transient("not yet")

    await inbox.declare()
    await inbox.start(inbox.consumer(handle, retry=RetryPolicy(LADDER, age_max_s=60.0, jitter=0.0)))
    await inbox.publish("old", timestamp=datetime.now(UTC) - timedelta(hours=1))
    parked = await inbox.parked()
    assert parked.message_id == "old"
    assert str(parked.headers[names.LAST_ERROR]).startswith("too old after 36")
    assert parked.headers[names.RETRY_ATTEMPT] == 0


async def test_an_unknown_schema_version_is_parked_at_once(inbox: Site) -> None:
    await inbox.declare()
    await inbox.start(inbox.consumer())
    await inbox.publish("m1", headers={"schema_version": 2})
    await inbox.publish("m2", headers={"schema_version": "one"})
    await inbox.publish("m3", headers={})
    found = {parked.message_id: parked.headers[names.ERROR_CLASS] for parked in [await inbox.parked() for _ in "ab"]}
    assert found == {"m1": "schema_version", "m2": "malformed"}
    await inbox.effects_are({"m3": 1})


async def test_a_message_without_an_id_is_parked(inbox: Site) -> None:
    await inbox.declare()
    await inbox.start(inbox.consumer())
    await inbox.publish(None)
    parked = await inbox.parked()
    assert parked.headers[names.ERROR_CLASS] == "malformed"
    assert parked.headers[names.LAST_ERROR] == "the message has no id"
    assert await inbox.effects() == {}


# ---------------------------------------------------------------- order


def versioned(version: int) -> dict[str, Any]:
    return {
        "body": b'{"v":%d}' % version,
        "headers": {"aggregate_type": "order", "aggregate_id": "42", "aggregate_version": version},
    }


async def test_by_version_a_gap_waits_and_a_stale_one_is_never_applied(inbox: Site) -> None:
    await inbox.declare()
    consumer = await inbox.start(inbox.consumer(order=Order.VERSION, prefetch=1, workers=2))
    await inbox.publish("m2", **versioned(2))
    await eventually(lambda: consumer.metrics.failures[ErrorClass.GAP] >= 1)
    await inbox.publish("m1", **versioned(1))
    await inbox.effects_are({"m1": 1, "m2": 1})
    assert await inbox.versions() == [1, 2]
    await inbox.publish("late", **versioned(1))
    await eventually(lambda: consumer.metrics.messages[Outcome.STALE] == 1)
    assert await inbox.versions() == [1, 2]
    assert await inbox.database.fetchval("SELECT version FROM processed_versions") == 2


async def test_by_version_a_gap_that_stays_is_parked(inbox: Site) -> None:
    await inbox.declare()
    await inbox.start(inbox.consumer(order=Order.VERSION))
    await inbox.publish("m7", **versioned(7))
    parked = await inbox.parked()
    assert parked.headers[names.ERROR_CLASS] == "gap"
    assert parked.headers[names.LAST_ERROR] == "after 4 attempts: version 7 came after 0"


@pytest.mark.parametrize("first", [0, None])
async def test_by_version_zero_is_a_version(inbox: Site, first: int | None) -> None:
    await inbox.declare()
    await inbox.start(inbox.consumer(order=Order.VERSION, first_version=first))
    await inbox.publish("m0", **versioned(0))
    await inbox.effects_are({"m0": 1})
    await inbox.publish("m1", **versioned(1))
    await inbox.effects_are({"m0": 1, "m1": 1})


async def test_by_version_a_consumer_that_joins_later_begins_anywhere(inbox: Site) -> None:
    await inbox.declare()
    await inbox.start(inbox.consumer(order=Order.VERSION, first_version=None))
    await inbox.publish("m7", **versioned(7))
    # Together they would be in two workers' hands, and whichever commits first begins.
    await inbox.effects_are({"m7": 1})
    await inbox.publish("m8", **versioned(8))
    await inbox.effects_are({"m7": 1, "m8": 1})


# ---------------------------------------------------------------- the life of a consumer


async def test_a_stop_finishes_what_is_in_work_and_leaves_the_rest_to_others(inbox: Site) -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def handle(message: Message, connection: asyncpg.Connection) -> None:
        begun.set()
        await go_on.wait()
        await apply(message, connection)

    await inbox.declare()
    consumer = await inbox.start(inbox.consumer(handle, workers=1, prefetch=10))
    for number in range(5):
        await inbox.publish(f"m{number}")
    await begun.wait()
    consumer.stop()
    go_on.set()
    await inbox.stop(consumer)
    assert await inbox.effects() == {"m0": 1}
    assert await inbox.ready() == 4
    assert consumer.metrics.unacked_messages == 0


async def test_a_grace_that_runs_out_rolls_back_and_says_so(inbox: Site) -> None:
    begun = asyncio.Event()

    async def handle(message: Message, connection: asyncpg.Connection) -> None:
        await apply(message, connection)
        begun.set()
        await asyncio.Event().wait()

    await inbox.declare()
    consumer = await inbox.start(inbox.consumer(handle, grace_s=0.1))
    await inbox.publish("m1")
    await begun.wait()
    with pytest.raises(DrainIncomplete, match="1 messages in work"):
        await inbox.stop(consumer)
    assert await inbox.effects() == {}
    await inbox.start(inbox.consumer())
    await inbox.effects_are({"m1": 1})


async def test_over_tls_with_an_authority_of_ones_own(inbox: Site, rabbit_server: RabbitServer, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    await inbox.declare()
    async with TlsProxy.start(rabbit_server.port, authority.server_context("127.0.0.1")) as proxy:
        path = inbox.amqp_url.rpartition("/")[2]
        url = f"amqps://guest:guest@127.0.0.1:{proxy.port}/{path}"
        distrusting = await inbox.start(inbox.consumer(amqp_url=url), is_ready=False)
        await eventually(lambda: "local issuer certificate" in dict(distrusting.readiness.reasons).get("broker", ""))
        await inbox.stop(distrusting)
        consumer = await inbox.start(inbox.consumer(amqp_url=f"{url}?cafile={quote(str(authority.file))}"))
        await inbox.publish("m1")
        await inbox.effects_are({"m1": 1})
        await inbox.stop(consumer)


async def test_the_second_url_is_tried_and_a_password_shows_nowhere(
    inbox: Site, caplog: pytest.LogCaptureFixture
) -> None:
    await inbox.declare()
    nowhere = "amqp://guest:s3cret%2Fword@127.0.0.1:1/"
    refused = inbox.amqp_url.replace("guest:guest", "guest:s3cret%2Fword")
    waiting = await inbox.start(inbox.consumer(amqp_url=f"{nowhere},{refused}"), is_ready=False)
    await eventually(lambda: "cannot be reached" in dict(waiting.readiness.reasons).get("broker", ""))
    await inbox.stop(waiting)
    consumer = await inbox.start(inbox.consumer(amqp_url=f"{nowhere},{inbox.amqp_url}"))
    await inbox.publish("m1")
    await inbox.effects_are({"m1": 1})
    told = caplog.text + str(waiting.readiness.reasons) + str(consumer.readiness.reasons)
    assert "s3cret" not in told


async def test_a_deleted_queue_is_waited_for(inbox: Site) -> None:
    await inbox.declare()
    consumer = await inbox.start(inbox.consumer())
    await inbox.channel.queue_delete(QUEUE)
    await eventually(lambda: consumer.metrics.cancellations >= 1 and not consumer.readiness.is_ready)
    await inbox.declare()
    await inbox.settled(consumer)
    await inbox.publish("m1")
    await inbox.effects_are({"m1": 1})
    assert consumer.metrics.reconnects >= 1


async def test_a_missing_retry_queue_makes_it_not_ready(inbox: Site) -> None:
    await inbox.declare(LADDER[:2])
    consumer = await inbox.start(inbox.consumer(), is_ready=False)
    await eventually(lambda: "queues" in dict(consumer.readiness.reasons))
    assert names.retry_queue(QUEUE, LADDER[2]) in dict(consumer.readiness.reasons)["queues"]
    await inbox.declare()
    await inbox.settled(consumer)


async def test_a_missing_table_is_waited_for(inbox: Site) -> None:
    await inbox.declare()
    await inbox.database.execute("ALTER TABLE processed_messages RENAME TO elsewhere")
    consumer = await inbox.start(inbox.consumer(), is_ready=False)
    await inbox.publish("m1")
    await eventually(lambda: "processed_messages" in dict(consumer.readiness.reasons).get("database", ""))
    assert await inbox.ready() == 1
    await inbox.database.execute("ALTER TABLE elsewhere RENAME TO processed_messages")
    await inbox.effects_are({"m1": 1})


async def test_the_gauges_are_the_queues_own(inbox: Site) -> None:
    await inbox.declare()
    parking = names.parking_queue(QUEUE)
    await inbox.channel.default_exchange.publish(aio_pika.Message(b"{}"), parking)
    consumer = await inbox.start(inbox.consumer())
    await eventually(lambda: consumer.metrics.queue_messages.get(parking) == 1)
    assert set(consumer.metrics.queue_messages) == {QUEUE, parking, *(names.retry_queue(QUEUE, d) for d in LADDER)}


def test_settings_that_make_no_sense_are_all_named() -> None:
    with pytest.raises(ConfigError) as caught:
        ConsumerSettings(order=Order.SINGLE_ACTIVE, workers=2, prefetch=0)
    assert len(caught.value.problems) == 2
    with pytest.raises(ConfigError, match="longer than the longest replay"):
        ConsumerSettings(retention_s=14 * 86400.0)


async def test_what_no_replay_can_bring_any_more_is_forgotten(inbox: Site) -> None:
    await inbox.database.execute(
        "INSERT INTO processed_messages SELECT 'inventory', 'old' || n, now() - interval '30 days'"
        " FROM generate_series(1, 2500) n"
    )
    await inbox.database.execute("INSERT INTO processed_messages VALUES ('inventory', 'new'), ('other', 'old')")
    await inbox.database.execute(
        "UPDATE processed_messages SET processed_at = now() - interval '30 days' WHERE consumer_name = 'other'"
    )
    await inbox.declare()
    consumer = await inbox.start(inbox.consumer(retention_s=15 * 86400.0))
    await eventually(lambda: consumer.metrics.forgotten == 2500)
    rows = await inbox.database.fetch("SELECT consumer_name, message_id FROM processed_messages")
    assert {tuple(row) for row in rows} == {("inventory", "new"), ("other", "old")}


async def test_in_a_partitioned_table_of_somebody_elses_only_the_old_is_forgotten(inbox: Site) -> None:
    """A row's place (ctid) is one for each partition: the neighbour's row of the same place stays."""
    await inbox.database.execute(
        "DROP TABLE processed_messages;"
        "CREATE TABLE processed_messages (consumer_name text, message_id text, processed_at timestamptz DEFAULT now(),"
        " PRIMARY KEY (consumer_name, message_id)) PARTITION BY LIST (consumer_name);"
        "CREATE TABLE of_inventory PARTITION OF processed_messages FOR VALUES IN ('inventory');"
        "CREATE TABLE of_others PARTITION OF processed_messages DEFAULT"
    )
    await migrate.run(inbox.database_url)
    await inbox.database.execute(
        "INSERT INTO processed_messages VALUES ('inventory', 'old', now() - interval '30 days'), ('other', 'new', now())"
    )
    await inbox.declare()
    consumer = await inbox.start(inbox.consumer(retention_s=15 * 86400.0))
    await eventually(lambda: consumer.metrics.forgotten > 0)
    rows = await inbox.database.fetch("SELECT consumer_name, message_id FROM processed_messages")
    assert [tuple(row) for row in rows] == [("other", "new")]
