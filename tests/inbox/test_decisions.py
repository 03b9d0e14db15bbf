"""What the consumer decides, without a server: outcomes, classes, the breaker, versions, copies."""

from __future__ import annotations

import itertools
import random
import struct
from collections import Counter
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from aiormq import spec
from aiormq.abc import DeliveredMessage
from hypothesis import given
from hypothesis import strategies as st
from pamqp import decode
from pamqp.header import ContentHeader

from relay.errors import ConfigError, DatabaseLost, DatabaseRefused, DatabaseUnavailable
from relay.http import Readiness
from relay.inbox import Consumer
from relay.inbox.breaker import COOLDOWN_MAX_S, COOLDOWN_MIN_S, FAILURES_MAX, RECHECK_S, Breaker
from relay.inbox.copies import Origin, parked_copy, retry_copy
from relay.inbox.faults import classify, is_database_away
from relay.inbox.hand import Shared
from relay.inbox.message import read
from relay.inbox.metrics import METRICS, InboxMetrics
from relay.inbox.order import NOTHING, Order, Place, place
from relay.inbox.outcome import (
    KINDS,
    BrokerRetry,
    ErrorClass,
    Failure,
    Park,
    Permanent,
    Retry,
    RetryPolicy,
    Transient,
    decide,
    neighbour,
    one_line,
)
from relay.inbox.outgoing import outgoing_id
from relay.inbox.returns import Returned, Returns
from relay.inbox.scribe import BATCH_BYTES_MAX, HEADERS_BYTES_MAX, Pair, batches
from relay.inbox.seldom import Seldom
from relay.inbox.settings import ConsumerSettings, queue_problems, shortest_retention_s
from relay.inbox.station import Standby
from relay.logs import get_logger
from relay.properties import copied, table
from relay.topology import names
from tests.inbox.site import apply

POLICY = RetryPolicy(delays_s=(5.0, 30.0, 300.0), jitter=0.0)
LATER = Failure(ErrorClass.TRANSIENT, "later")


def test_the_ladder_is_climbed_step_by_step_and_ends_in_the_parking_queue() -> None:
    steps = [decide(LATER, POLICY, attempt=attempt, age_s=None, roll=0.5) for attempt in range(4)]
    assert steps == [Retry(1, 5.0), Retry(2, 30.0), Retry(3, 300.0), Park("after 4 attempts: later")]


@pytest.mark.parametrize("error_class", list(ErrorClass))
def test_only_a_permanent_class_parks_at_once(error_class: ErrorClass) -> None:
    decision = decide(Failure(error_class, "x"), POLICY, attempt=0, age_s=None, roll=0.5)
    assert isinstance(decision, Park) == (KINDS[error_class] == "permanent")


def test_an_unknown_failure_may_have_a_bound_of_its_own() -> None:
    policy = RetryPolicy((1.0, 2.0), unknown_retries_max=1)
    unknown = Failure(ErrorClass.UNKNOWN, "x")
    assert isinstance(decide(unknown, policy, attempt=0, age_s=None, roll=0.5), Retry)
    assert isinstance(decide(unknown, policy, attempt=1, age_s=None, roll=0.5), Park)
    assert isinstance(decide(LATER, policy, attempt=1, age_s=None, roll=0.5), Retry)


def test_where_the_broker_delays_the_retries_are_counted_and_grow_by_the_first_delay() -> None:
    policy = BrokerRetry(delay_min_s=5.0, delay_max_s=12.0, retries_max=4, age_max_s=60.0)
    steps = [decide(LATER, policy, attempt=attempt, age_s=None, roll=0.0) for attempt in range(5)]
    assert steps == [Retry(1, 5.0), Retry(2, 10.0), Retry(3, 12.0), Retry(4, 12.0), Park("after 5 attempts: later")]
    assert isinstance(decide(LATER, policy, attempt=1, age_s=51.0, roll=0.0), Park)


def test_no_retry_that_would_come_too_late() -> None:
    policy = RetryPolicy((5.0, 30.0), age_max_s=20.0, jitter=0.0)
    assert isinstance(decide(LATER, policy, attempt=0, age_s=14.0, roll=0.5), Retry)
    assert isinstance(decide(LATER, policy, attempt=0, age_s=16.0, roll=0.5), Park)
    assert isinstance(decide(LATER, policy, attempt=0, age_s=None, roll=0.5), Retry)


@given(st.integers(1, 6), st.floats(0, 1), st.floats(0, 1, exclude_max=True), st.data())
def test_jitter_takes_a_neighbour_and_no_other(steps: int, jitter: float, roll: float, data: st.DataObject) -> None:
    step = data.draw(st.integers(0, steps - 1))
    assert abs(neighbour(step, steps, jitter, roll) - step) <= 1
    assert 0 <= neighbour(step, steps, jitter, roll) < steps


def test_jitter_has_its_share() -> None:
    taken = Counter(neighbour(1, 3, 0.2, number / 1000) for number in range(1000))
    assert taken == {0: 100, 1: 800, 2: 100}


@pytest.mark.parametrize(
    ("error", "error_class", "is_away"),
    [
        (Permanent("no"), ErrorClass.PERMANENT, False),
        (Transient("later"), ErrorClass.TRANSIENT, False),
        (ValueError("x"), ErrorClass.UNKNOWN, False),
        (TimeoutError(), ErrorClass.TRANSIENT, False),
        (ConnectionResetError("x"), ErrorClass.TRANSIENT, False),
        (DatabaseUnavailable("x"), ErrorClass.DATABASE, True),
        (DatabaseLost("x"), ErrorClass.DATABASE, True),
        (DatabaseRefused("x"), ErrorClass.UNKNOWN, False),
        (asyncpg.DeadlockDetectedError("x"), ErrorClass.DATABASE, False),
        (asyncpg.SerializationError("x"), ErrorClass.DATABASE, False),
        (asyncpg.AdminShutdownError("x"), ErrorClass.DATABASE, True),
        (asyncpg.DiskFullError("x"), ErrorClass.DATABASE, True),
        (asyncpg.ReadOnlySQLTransactionError("x"), ErrorClass.DATABASE, True),
        (asyncpg.ConnectionDoesNotExistError("x"), ErrorClass.DATABASE, True),
        (asyncpg.InterfaceError("connection is closed"), ErrorClass.DATABASE, True),
        (asyncpg.InternalClientError("cannot switch to state 15"), ErrorClass.DATABASE, True),
        (asyncpg.QueryCanceledError("x"), ErrorClass.TIMEOUT, False),
        (asyncpg.UniqueViolationError("x"), ErrorClass.CONSTRAINT, False),
        (asyncpg.UndefinedTableError("x"), ErrorClass.UNKNOWN, False),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else str(value),
)
def test_classes(error: Exception, error_class: ErrorClass, is_away: bool) -> None:
    failure = classify(error)
    assert failure.error_class is error_class
    assert is_database_away(failure, error) is is_away


def test_what_is_wrapped_is_classed_by_its_cause() -> None:
    """SQLAlchemy's `orig`, and `raise … from`."""

    class Wrapped(Exception):
        orig: BaseException

    wrapped = Wrapped("(insert)")
    wrapped.orig = asyncpg.UniqueViolationError("x")
    assert classify(wrapped).error_class is ErrorClass.CONSTRAINT
    outer = RuntimeError("x")
    outer.__cause__ = Permanent("no such product")
    assert classify(outer) == Failure(ErrorClass.PERMANENT, "no such product")
    refused = DatabaseUnavailable("refused")
    refused.__cause__ = asyncpg.InvalidPasswordError("x")
    assert is_database_away(classify(refused), refused), "a password is no message's fault"


def test_a_text_is_one_line_without_what_drivers_quote() -> None:
    error = asyncpg.UniqueViolationError("duplicate key\nDETAIL: Key (card)=(4111) already exists")
    assert classify(error).text == "UniqueViolationError: duplicate key (23505)"
    assert len(one_line("x" * 9999)) == 501


class _Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("unknown sku \ud800"), "ValueError: unknown sku \\ud800"),
        (Transient("\udcff\nmore"), "\\udcff"),
        (Permanent("no \U0001f9ca here"), "no \U0001f9ca here"),
        (_Mute(), "_Mute: (it has no readable text)"),
    ],
)
def test_whatever_an_exception_says_a_copy_can_carry(error: Exception, text: str) -> None:
    """Half of a surrogate pair is no UTF-8: the copy could not be made, and the message was dropped."""
    failure = classify(error)
    assert failure.text == text
    table(dict.fromkeys(("retried", "parked"), failure.text))


@given(st.text(st.characters(codec=None, categories=None), max_size=600))
def test_any_text_becomes_a_short_line_of_utf8(text: str) -> None:
    assert len(one_line(text)) <= 501 and "\n" not in one_line(text)
    one_line(text).encode()


def test_who_stands_by_has_a_database_and_no_link() -> None:
    """It stood by, the database went away and came back: it stands by again, and for no other reason."""
    shared = Shared(
        "inbox", "q", ConsumerSettings(), Breaker(), InboxMetrics(), Readiness(), random.Random(1), get_logger()
    )
    shared.metrics.connected.update(broker=True, database=True)
    shared.tell_away("database", DatabaseUnavailable("gone"))
    shared.tell_standby(Standby("another one"))
    assert {reason for reason, _ in shared.readiness.reasons} == {"broker", "standby"}
    assert shared.metrics.connected == {"broker": False, "database": True}


def _pair(size: int) -> Pair:
    properties = spec.Basic.Properties(message_id="m")
    body = bytes(size)
    message = read(consumer="c", body=body, properties=properties, exchange="", routing_key="", is_redelivered=False)
    return DeliveredMessage(spec.Basic.Deliver("t", 1), ContentHeader(), body, None), message  # type: ignore[arg-type]


@given(st.lists(st.integers(0, 50)), st.integers(0, 100))
def test_a_batch_has_so_many_bytes_or_one_message(sizes: list[int], room: int) -> None:
    pairs = [_pair(size) for size in sizes]
    bytes_max = 3 * HEADERS_BYTES_MAX + room
    found = list(batches(pairs, bytes_max))
    assert [pair for batch in found for pair in batch] == pairs
    weights = [[len(message.body) + HEADERS_BYTES_MAX for _, message in batch] for batch in found]
    assert all(len(each) == 1 or 0 < sum(each) <= bytes_max for each in weights)
    assert all(sum(each) + after[0] > bytes_max for each, after in itertools.pairwise(weights)), (
        "no smaller than needed"
    )


def test_a_sidecars_hand_of_large_messages_is_written_in_parts_that_postgresql_takes() -> None:
    """A hundred of 11 MB, ready together: as one statement PostgreSQL refuses them, after a restart too."""
    hand = [_pair(11_000_000)] * 100
    assert [len(batch) for batch in batches(hand, BATCH_BYTES_MAX)] == [6] * 16 + [4]
    assert [len(batch) for batch in batches([_pair(2 * BATCH_BYTES_MAX), _pair(0)], BATCH_BYTES_MAX)] == [1, 1]
    assert [len(batch) for batch in batches([_pair(1000)] * 100, BATCH_BYTES_MAX)] == [100]


# ---------------------------------------------------------------- the breaker


def test_the_breaker_opens_lets_one_probe_through_and_closes() -> None:
    breaker = Breaker()
    for _ in range(FAILURES_MAX):
        assert breaker.wait_s(0.0) == 0.0
        breaker.failed(0.0)
    assert breaker.is_open
    assert breaker.wait_s(0.0) == COOLDOWN_MIN_S
    assert breaker.wait_s(COOLDOWN_MIN_S) == 0.0, "the probe"
    assert breaker.wait_s(COOLDOWN_MIN_S) == RECHECK_S, "the others wait for it"
    breaker.failed(1.0)
    assert breaker.wait_s(1.0) == 2 * COOLDOWN_MIN_S
    assert breaker.wait_s(2.0) == 0.0
    breaker.succeeded()
    assert breaker.wait_s(2.0) == 0.0


def test_a_probe_that_learnt_nothing_lets_the_next_one_try() -> None:
    breaker = Breaker(failures_max=1)
    breaker.failed(0.0)
    assert breaker.wait_s(9.0) == 0.0
    breaker.gave_up()
    assert breaker.wait_s(9.0) == 0.0


def test_a_success_in_between_keeps_it_closed_and_the_cooldown_is_bounded() -> None:
    breaker = Breaker(failures_max=2)
    for _ in range(5):
        breaker.failed(0.0)
        breaker.succeeded()
    assert not breaker.is_open
    now = 0.0
    for _ in range(20):
        breaker.failed(now)
        now += breaker.wait_s(now)
        breaker.wait_s(now)
    breaker.failed(now)
    assert breaker.wait_s(now) == COOLDOWN_MAX_S


def test_a_thousand_of_a_kind_are_a_few_lines() -> None:
    seldom = Seldom(10.0)
    said = [seldom.count("permanent", number / 100) for number in range(2_500)]
    assert [count for count in said if count] == [1, 1_000, 1_000]
    assert seldom.count("gap", 25.0) == 1


# ---------------------------------------------------------------- versions


def test_places() -> None:
    assert place(6, 7, 1) is Place.NEXT
    assert place(6, 8, 1) is Place.GAP
    assert place(7, 7, 1) is Place.STALE and place(7, 3, 1) is Place.STALE
    assert place(NOTHING, 1, 1) is Place.NEXT and place(NOTHING, 2, 1) is Place.GAP
    assert place(NOTHING, 7, None) is Place.NEXT and place(7, 9, None) is Place.GAP
    for first in 0, 1, None:
        assert place(NOTHING, 0, first) is Place.NEXT and place(0, 0, first) is Place.STALE
        assert place(0, 1, first) is Place.NEXT and place(0, 2, first) is Place.GAP


# ---------------------------------------------------------------- copies


def origin(headers: dict[str, Any], **changes: Any) -> Origin:
    fields: dict[str, Any] = {
        "queue": "inventory",
        "exchange": "events",
        "routing_key": "order.created",
        "body": b"{}",
        "properties": spec.Basic.Properties(message_id="m1", headers=headers, expiration="60000", user_id="shop"),
        "consumer": "inventory",
        "consumer_version": "1.2.3",
        "attempt": 0,
        "failed_at": "2026-11-29T18:00:00.000000+00:00",
    }
    return Origin(**{**fields, **changes})


def test_a_copy_keeps_the_first_route_and_the_first_failure() -> None:
    first = retry_copy(origin({"a": 1}), Retry(1, 5.0), LATER)
    assert (first.exchange, first.routing_key) == ("", "inventory.retry.5s")
    headers = first.properties.headers or {}
    second = origin(dict(headers), exchange="", routing_key="inventory", attempt=1, failed_at="later")
    parked = parked_copy(second, Park("after 2 attempts: later"), LATER, "dlx", "inventory.parking").properties
    assert parked.headers == {
        "a": 1,
        names.RETRY_ATTEMPT: 1,
        names.LAST_ERROR: "after 2 attempts: later",
        names.ERROR_CLASS: "transient",
        names.FIRST_FAILURE: "2026-11-29T18:00:00.000000+00:00",
        names.ORIGINAL_EXCHANGE: "events",
        names.ORIGINAL_ROUTING_KEY: "order.created",
        names.CONSUMER: "inventory",
        names.CONSUMER_VERSION: "1.2.3",
        "x-original-user-id": "shop",
    }
    assert (parked.expiration, parked.user_id, parked.delivery_mode, parked.message_id) == (None, None, 2, "m1")


def test_no_copy_carries_on_what_would_change_its_fate() -> None:
    given_headers = {"x-death": [{"queue": "inventory"}], "x-delivery-count": 3, "CC": ["a"], "BCC": ["b"]}
    headers = retry_copy(origin(given_headers), Retry(1, 5.0), LATER).properties.headers or {}
    assert not {"x-death", "x-delivery-count", "CC", "BCC"} & headers.keys()
    assert (headers["x-original-cc"], headers["x-original-bcc"]) == (["a"], ["b"])


def _like_amqp(value: Any) -> Any:
    match value:
        case list():
            return [_like_amqp(each) for each in value]
        case dict():
            return {name: _like_amqp(each) for name, each in value.items()}
        case _:
            return value


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=60), VALUES, max_size=5))
def test_headers_are_written_by_value(headers: dict[str, Any]) -> None:
    _, read_back = decode.field_table(table(headers))
    assert read_back == _like_amqp(headers)


def test_headers_that_the_driver_reads_and_would_not_write() -> None:
    moment = datetime(2026, 11, 29, 18, 0, 0, tzinfo=UTC)
    headers: dict[str, Any] = {
        "n" * 255: 0.1,
        "bytes": bytearray(b"\xff"),
        "odd": b"\xff",
        "at": moment,
        "money": Decimal("1.10"),
    }
    _, read_back = decode.field_table(table(headers))
    assert read_back == headers
    for wrong in (
        {"n" * 256: 1},
        {"n": 2**63},
        {"n": object()},
        {"n": Decimal("1e400")},
        {"n": Decimal("99999999999")},
    ):
        with pytest.raises((TypeError, ValueError, OverflowError)):
            table(wrong)


def test_a_copy_of_properties_marshals_as_the_original_did() -> None:
    original = spec.Basic.Properties(
        message_id="m1", content_type="application/json", priority=3, timestamp=datetime(2026, 1, 1, tzinfo=UTC)
    )
    same = copied(original, {})
    flags = struct.unpack(">H", original.marshal()[:2])[0]
    assert struct.unpack(">H", same.marshal()[:2])[0] == flags | 1 << 13, "and an empty table of headers"


# ---------------------------------------------------------------- messages


def message_of(headers: dict[str, Any], message_id: str = "m1", **options: bool) -> Any:
    properties = spec.Basic.Properties(message_id=message_id, headers=headers)
    return read(
        consumer="c", body=b"{", properties=properties, exchange="e", routing_key="k", is_redelivered=False, **options
    )


@pytest.mark.parametrize("value", [-1, True, "3", None, 2.5])
def test_an_attempt_that_makes_no_sense_counts_as_none(value: Any) -> None:
    assert message_of({names.RETRY_ATTEMPT: value}).attempt == 0


def test_a_queues_own_count_counts_only_where_it_counts_retries() -> None:
    """RabbitMQ counts consumers that died as well, on every version: no step of a ladder is used up by that."""
    headers = {names.RETRY_ATTEMPT: 1, names.DELIVERY_COUNT: 2}
    assert message_of(headers).attempt == 1
    assert message_of(headers, counts_returns=True).attempt == 3
    assert message_of({}, counts_returns=True).attempt == 0


def test_what_a_message_says_wrongly_is_permanent() -> None:
    for message_id in ("", "a\0b"):
        with pytest.raises(Permanent) as caught:
            message_of({}, message_id)
        assert caught.value.error_class is ErrorClass.MALFORMED
    with pytest.raises(Permanent, match="not JSON"):
        message_of({}).json()
    with pytest.raises(Permanent):
        _ = message_of({"aggregate_version": "7"}).aggregate_version
    assert message_of({"occurred_at": "yesterday"}).occurred_at is None
    assert message_of({"occurred_at": "2026-11-29T18:00:00"}).occurred_at == datetime(2026, 11, 29, 18, tzinfo=UTC)


def test_an_outgoing_id_follows_from_the_message() -> None:
    assert outgoing_id("c", "m1", 0) == outgoing_id("c", "m1", 0)
    assert len({outgoing_id(c, m, n) for c in "cd" for m in ("m1", "m2") for n in (0, 1)}) == 8


def test_retention_is_longer_than_any_replay() -> None:
    settings = ConsumerSettings(longest_replay_s=100.0, retry=RetryPolicy((5.0, 30.0)))
    assert shortest_retention_s(settings) == 135.0


def test_a_retry_by_the_broker_that_makes_no_sense_is_refused_with_all_its_faults() -> None:
    with pytest.raises(ConfigError) as caught:
        ConsumerSettings(
            workers=1,
            order=Order.SINGLE_ACTIVE,
            retry=BrokerRetry(delay_min_s=0.0, delay_max_s=-1.0, retries_max=-1),
        )
    words = ("retry.delay_min_s", "retry.delay_max_s", "retry.retries_max", "order=single_active retries in place")
    assert len(caught.value.problems) == 4 and all(word in str(caught.value) for word in words)
    assert shortest_retention_s(ConsumerSettings(longest_replay_s=9.0, retry=BrokerRetry(1.0, 2.0, 3))) == 14.0


@pytest.mark.parametrize("delay_s", [0.0, -1.0, float("inf"), float("nan"), 1e300])
def test_a_ladder_of_impossible_delays_is_refused(delay_s: float) -> None:
    """An endless one was an OverflowError in the name of its queue."""
    with pytest.raises(ConfigError, match=r"retry\.delays_s"):
        ConsumerSettings(retry=RetryPolicy((delay_s,)), longest_replay_s=1.0)


def test_an_exchange_that_the_driver_publishes_nothing_to_is_refused() -> None:
    """Its ValueError came with the first message that was parked, and ended the consumer."""
    for exchange in ("ü", "e" * 128):
        with pytest.raises(ConfigError, match=r"parking_exchange=.*: allowed is what the driver publishes to"):
            ConsumerSettings(parking_exchange=exchange)
    ConsumerSettings(parking_exchange="events.dlx")


def test_a_queue_is_refused_whose_companions_can_have_no_name() -> None:
    """The driver's ValueError came with the first message that was retried or parked, and ended the consumer."""
    settings = ConsumerSettings(retry=RetryPolicy((5.0, 30.0)))
    assert queue_problems("ü" * 122, settings) == []
    told = "\n".join(queue_problems("q" * 246, settings))
    assert ".retry.30s': longer than 255 bytes" in told and ".parking'" not in told and ".retry.5s'" not in told
    (line,) = queue_problems("q" * 248, ConsumerSettings(retry=RetryPolicy(())))
    assert ".parking': longer than 255 bytes" in line
    assert queue_problems("q" * 255, ConsumerSettings(retry=RetryPolicy(()), parking_queue="p")) == []
    assert len(queue_problems("\udcff", settings)) == 4
    with pytest.raises(ConfigError, match="longer than 255 bytes"):
        Consumer(name="c", queue="q" * 256, handler=apply, amqp_url="amqp://h/", database_url="postgresql://h/d")


def test_returned_messages_are_remembered_to_a_bound() -> None:
    returns = Returns(limit=2)
    for number, message_id in enumerate(("a", "b", "a", "c")):
        returns.note(message_id, f"t{number}", float(number))
    assert returns.take("b") is None, "the longest known"
    assert returns.take("a") == Returned("t2", 2.0) and returns.take("a") is None
    assert returns.take("c") == Returned("t3", 3.0)


def test_every_metric_is_documented() -> None:
    text = (Path(__file__).parents[2] / "docs" / "inbox.md").read_text()
    for metric in METRICS:
        assert f"| `{metric.name}` | {metric.kind} |" in text
        assert metric.help in text
        assert all(value in text for value in metric.values)
