"""A row's frames, read back with pamqp, an independent implementation of AMQP."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pamqp import commands, frame
from pamqp.body import ContentBody
from pamqp.header import ContentHeader

from relay.broker.encode import FRAME_OVERHEAD, Encoder
from relay.errors import MessageInvalid
from relay.message import PayloadType, Row
from relay.route import Router

NOW = 1_764_440_000.0
OCCURRED_AT = 1_764_439_200.123456
FRAME_MAX = 131_072


def encoder(**options: Any) -> Encoder:
    exchange, routing_key = options.pop("route", ("events", "{event_type}"))
    options = dict[str, Any]() | {"channel": 1, "frame_max": FRAME_MAX, "payload_type": PayloadType.JSON} | options
    return Encoder(Router(exchange, routing_key), **options)


def make_row(**columns: Any) -> Row:
    columns = dict[str, Any]() | {"id": "01K0", "event_type": "order.created", "occurred_at": OCCURRED_AT} | columns
    return Row(0, 1, columns.pop("id"), columns.pop("event_type"), **columns)


class Message:
    """What a broker would read from the frames; asserts their order and sizes."""

    def __init__(self, data: bytes, channel: int = 1, frame_max: int = FRAME_MAX) -> None:
        frames = []
        while data:
            size, number, value = frame.unmarshal(data)
            assert number == channel
            assert size <= frame_max
            data = data[size:]
            frames.append(value)
        method, header, *bodies = frames
        assert isinstance(method, commands.Basic.Publish)
        assert isinstance(header, ContentHeader)
        self.exchange, self.routing_key = method.exchange, method.routing_key
        self.is_mandatory = bool(method.mandatory)
        assert not method.immediate
        self.properties = {key: value for key, value in dict(header.properties).items() if value is not None}
        # pamqp gives the unused property its empty value.
        assert self.properties.pop("cluster_id") == ""
        pieces = [body for body in bodies if isinstance(body, ContentBody)]
        assert len(pieces) == len(bodies)
        self.body = b"".join(piece.value for piece in pieces)
        assert header.body_size == len(self.body)

    @property
    def headers(self) -> dict[str, Any]:
        headers = self.properties["headers"]
        assert isinstance(headers, dict)
        return headers


def in_run(one: Encoder, row: Row, exchange: str | None = None) -> bytes | None:
    """The frames of an ordinary row; None for any other."""
    out: list[bytes] = []
    count, size = one.encode_run([row], 0, one.route_of(row)[0] if exchange is None else exchange, 2**30, out)
    assert (count > 0) == bool(out)
    assert size == len(b"".join(out))
    return b"".join(out) if count else None


def encoded(row: Row, **options: Any) -> Message:
    exchange, data = encoder(**options).encode(row, lambda: NOW)
    message = Message(data, options.get("channel", 1), options.get("frame_max", FRAME_MAX) or 2**32)
    assert message.exchange == exchange
    return message


def invalid(row: Row, **options: Any) -> MessageInvalid:
    with pytest.raises(MessageInvalid) as caught:
        encoder(**options).encode(row, lambda: NOW)
    return caught.value


RARE = {
    "aggregate_version": 2**40,
    "schema_version": 3,
    "content_type": "text/csv",
    "content_encoding": "gzip",
    "correlation_id": "corr",
    "causation_id": "cause",
    "producer": "orders",
    "traceparent": "00-aa-bb-01",
    "tracestate": "k=v",
    "priority": 255,
    "expires_at": NOW + 60.0,
}


def test_every_column_has_its_place() -> None:
    row = make_row(aggregate_type="order", aggregate_id="42", payload=b'{"a":1}', rare=RARE)
    message = encoded(row)
    assert (message.exchange, message.routing_key, message.is_mandatory) == ("events", "order.created", True)
    assert message.properties == {
        "content_type": "text/csv",
        "content_encoding": "gzip",
        "delivery_mode": 2,
        "priority": 255,
        "correlation_id": "corr",
        "expiration": "60000",
        "message_id": "01K0",
        "timestamp": datetime(2025, 11, 29, 18, 0, tzinfo=UTC),
        "message_type": "order.created",
        "app_id": "orders",
        "headers": {
            "aggregate_type": "order",
            "aggregate_id": "42",
            "aggregate_version": 2**40,
            "schema_version": 3,
            "causation_id": "cause",
            "traceparent": "00-aa-bb-01",
            "tracestate": "k=v",
            "occurred_at": "2025-11-29T18:00:00.123456Z",
        },
    }
    assert message.body == b'{"a":1}'


def test_what_is_not_set_is_not_there() -> None:
    message = encoded(make_row())
    assert set(message.properties) == {
        "content_type",
        "delivery_mode",
        "headers",
        "message_id",
        "message_type",
        "timestamp",
    }
    assert message.headers == {"schema_version": 1, "occurred_at": "2025-11-29T18:00:00.123456Z"}
    assert message.body == b""


@pytest.mark.parametrize("rare", [None, {"priority": 1}])
def test_a_row_without_any_time_carries_none(rare: dict[str, Any] | None) -> None:
    """Both columns were written as null: it went out as of 1970, and consumers that end retries by age parked it."""
    message = encoded(make_row(occurred_at=math.nan, headers='{"occurred_at": "then"}', rare=rare))
    assert "timestamp" not in message.properties
    assert message.headers == {"schema_version": 1, "occurred_at": "then"}


def attempt(encode: Callable[[Row, Callable[[], float]], tuple[str, bytes]], row: Row) -> tuple[str, bytes] | str:
    """What came of it: the frames, or why there are none."""
    try:
        return encode(row, lambda: NOW)
    except MessageInvalid as error:
        return error.message


texts = st.text(st.characters(codec="utf-8"), max_size=80)
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts.map(lambda t: t[:60]), inner, max_size=4),
    max_leaves=20,
)
own_names = texts.filter(lambda name: name not in ("CC", "BCC"))
ours = st.sampled_from(["schema_version", "occurred_at", "traceparent"])
traced = st.fixed_dictionaries(
    {},
    optional={
        "aggregate_version": st.integers(-(2**63), 2**63 - 1),
        "correlation_id": st.text(st.characters(codec="utf-8"), max_size=300),
        "causation_id": texts,
        "producer": st.text(st.characters(codec="utf-8"), max_size=300),
        "traceparent": texts,
        "tracestate": texts,
        "available_at": st.floats(0, 4e9),
    },
)
plain_rows = st.builds(
    make_row,
    rare=st.none() | traced,
    headers=st.none() | st.dictionaries(own_names | ours, json_values, max_size=3).map(json.dumps),
    id=texts,
    event_type=texts,
    aggregate_type=st.none() | texts,
    aggregate_id=st.none() | st.text(st.characters(codec="utf-8"), max_size=300),
    occurred_at=st.integers(0, 4_000_000_000_000_000).map(lambda micros: micros / 1_000_000),
    payload=st.none() | st.binary(max_size=300),
)


@given(plain_rows, st.sampled_from(["json", "cloudevents"]))
def test_both_ways_lead_to_the_same_bytes_in_an_envelope(row: Row, name: str) -> None:
    row.payload = b'{"a": 1}'
    one = encoder(route=("e", "k"), envelope_name=name, source="/orders")
    expected = attempt(one.encode, row)
    assert in_run(one, row) == (None if isinstance(expected, str) else expected[1])


@given(plain_rows, st.sampled_from([("ev", "{event_type}"), ("{id}x", "{id}.{event_type}"), ("e", "k")]))
def test_both_ways_lead_to_the_same_bytes(row: Row, route: tuple[str, str]) -> None:
    one = encoder(route=route, frame_max=4096)
    expected = attempt(one.encode, row)
    if isinstance(expected, str):
        assert in_run(one, row) is None, "left to the way that says why"
        return
    exchange, data = expected
    is_short = len(row.payload or b"") <= 4096 - FRAME_OVERHEAD
    for _ in ("made", "from the cache"):
        assert in_run(one, row) == (data if is_short else None)
    assert in_run(one, row, f"not {exchange}") is None
    message = Message(expected[1], frame_max=4096)
    assert message.properties["message_id"] == row.id
    assert message.properties["message_type"] == row.event_type
    assert message.headers.get("aggregate_type") == row.aggregate_type
    assert message.headers.get("aggregate_id") == row.aggregate_id
    assert message.body == (row.payload or b"")
    for column in row.rare or {}:
        if column != "available_at":
            where = {"correlation_id": message.properties, "producer": message.properties}.get(column, message.headers)
            assert row.rare is not None
            assert where[{"producer": "app_id"}.get(column, column)] == row.rare[column]
    moment = datetime.fromisoformat(message.headers["occurred_at"])
    assert abs(moment.timestamp() - row.occurred_at) < 5e-7
    assert message.properties["timestamp"] == moment.replace(microsecond=0)


def typed(value: Any) -> Any:
    """Equality that tells 1 from 1.0 and from True."""
    if isinstance(value, dict):
        return {key: typed(each) for key, each in value.items()}
    if isinstance(value, list):
        return [typed(each) for each in value]
    return type(value).__name__, value


@given(st.dictionaries(own_names, json_values, max_size=5))
def test_headers_arrive_equal_in_value_and_type(headers: dict[str, Any]) -> None:
    expected = headers | {"schema_version": 1, "occurred_at": "2025-11-29T18:00:00.123456Z"}
    if any(len(name.encode()) > 255 for name in expected):
        invalid(make_row(headers=json.dumps(headers)))
        return
    message = encoded(make_row(headers=json.dumps(headers)))
    assert typed(message.headers) == typed(expected)


def test_the_letters_of_the_field_types() -> None:
    """pamqp reads many integer types alike: the letters themselves, as docs/message.md wants them."""
    headers = '{"i":200,"d":1.5,"t":true,"v":null,"a":[-1],"f":{"k":"é"}}'
    _, data = encoder().encode(make_row(headers=headers), lambda: NOW)
    assert b"\x01il" + (200).to_bytes(8, "big") in data
    assert b"\x01dd\x3f\xf8\x00\x00\x00\x00\x00\x00" in data
    assert b"\x01tt\x01" in data
    assert b"\x01vV" in data
    assert b"\x01aA\x00\x00\x00\x09l" + b"\xff" * 8 in data
    assert b"\x01fF\x00\x00\x00\x09\x01kS\x00\x00\x00\x02\xc3\xa9" in data


def test_the_relays_headers_win_over_the_rows() -> None:
    message = encoded(make_row(aggregate_type="order", headers='{"aggregate_type":"x","tracestate":"own"}'))
    assert message.headers["aggregate_type"] == "order"
    assert message.headers["tracestate"] == "own"


@pytest.mark.parametrize("name", ["CC", "BCC"])
@pytest.mark.parametrize("value", ["[]", '["q"]', "null"])
def test_case_02_a_header_that_adds_routes_is_invalid(name: str, value: str) -> None:
    error = invalid(make_row(headers=f'{{"{name}":{value}}}'))
    assert error.failure_class == "invalid"
    assert name in error.message


def test_only_the_exact_names_add_routes() -> None:
    assert encoded(make_row(headers='{"cc":1,"Bcc":2}')).headers["cc"] == 1


@pytest.mark.parametrize("column", ["id", "event_type", "correlation_id", "routing_key", "producer"])
@pytest.mark.parametrize(("characters", "fits"), [(127, True), (128, False)])
def test_case_12_short_strings_at_the_limit(column: str, characters: int, fits: bool) -> None:
    """127 two-byte characters are 254 bytes and arrive exactly; 128 are 256 and park as `invalid`."""
    text = "é" * characters
    row = make_row(**({column: text} if column in ("id", "event_type") else {"rare": {column: text}}))
    if not fits:
        assert invalid(row).failure_class == "invalid"
        return
    message = encoded(row)
    names = {"id": "message_id", "event_type": "message_type", "producer": "app_id"}
    found = message.properties.get(names.get(column, column), message.routing_key)
    assert found == text


@pytest.mark.parametrize("column", ["content_type", "content_encoding", "exchange"])
def test_other_short_strings_have_the_same_limit(column: str) -> None:
    encoded(make_row(rare={column: "x" * 255}))
    assert invalid(make_row(rare={column: "x" * 256})).failure_class == "invalid"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("null", None),
        ('{"a":{"b":[null,true]}}', {"a": {"b": [None, True]}}),
        ("false", False),
        (str(2**53 + 1), 2**53 + 1),
        ("200", 200),
        ("-1", -1),
        (str(-(2**63)), -(2**63)),
        ("1e300", 1e300),
        ("1.10", 1.1),
        ("-0.0", -0.0),
        ("5e-324", 5e-324),
    ],
)
def test_case_13_headers_that_amqp_can_carry(text: str, value: Any) -> None:
    message = encoded(make_row(headers=f'{{"h":{text}}}'))
    assert typed(message.headers["h"]) == typed(value)


@pytest.mark.parametrize(
    "text",
    [
        str(2**63),
        str(-(2**63) - 1),
        "1" + "0" * 300,
        "9" * 5000,
        "1e400",
        "0.1234567890123456789",
        "1e-400",
        "NaN",
        "Infinity",
        "[" * 100_000 + "]" * 100_000,
    ],
    ids=lambda text: text[:24],
)
def test_case_13_headers_that_amqp_cannot_carry(text: str) -> None:
    error = invalid(make_row(headers=f'{{"h":{text}}}'))
    assert error.failure_class == "invalid"
    assert len(error.message) < 300


@pytest.mark.parametrize("text", ["[]", '"x"', "1", "null", "{", ""])
def test_headers_that_are_no_object_are_invalid(text: str) -> None:
    invalid(make_row(headers=text))


@pytest.mark.parametrize("priority", [300, -1])
def test_case_13_a_priority_beyond_an_octet_is_invalid(priority: int) -> None:
    assert "priority" in invalid(make_row(rare={"priority": priority})).message


def test_case_13_a_300_byte_id_is_invalid() -> None:
    assert "300 bytes" in invalid(make_row(id="x" * 300)).message


@pytest.mark.parametrize(("left_s", "expiration"), [(60.0, "60000"), (0.001, "1"), (0.0019, "1")])
def test_case_14_a_deadline_is_the_milliseconds_left(left_s: float, expiration: str) -> None:
    assert encoded(make_row(rare={"expires_at": NOW + left_s})).properties["expiration"] == expiration


@pytest.mark.parametrize("left_s", [0.0, 0.0009, -1.0, -1e303, float("-inf")])
def test_case_14_a_deadline_that_is_past_is_expired(left_s: float) -> None:
    assert invalid(make_row(rare={"expires_at": NOW + left_s})).failure_class == "expired"


@pytest.mark.parametrize("expires_at", [float("inf"), 1.8e302, NOW + 315_360_000.001])
def test_a_deadline_beyond_the_brokers_limit_has_no_expiration(expires_at: float) -> None:
    assert "expiration" not in encoded(make_row(rare={"expires_at": expires_at})).properties


def test_the_database_is_asked_for_the_time_only_where_a_row_expires() -> None:
    def never() -> float:
        raise AssertionError("asked")

    encoder().encode(make_row(rare={"priority": 1}), never)


@pytest.mark.parametrize("payload_type", list(PayloadType))
def test_case_15_the_queues_bytes_are_the_stored_ones(payload_type: PayloadType) -> None:
    payload = b'{"b":1,"a":2,"a":3,"n":1e400,"f":1.10,"u":"\\u00e9","z":"\\u0000"}'
    message = encoded(make_row(payload=payload), payload_type=payload_type)
    assert hashlib.sha256(message.body).digest() == hashlib.sha256(payload).digest()


def test_case_16_the_content_type_follows_the_payloads_type() -> None:
    """NULL, `null`, `''` and empty bytea: an empty body or `null`, under the content type of the column."""
    expected = {
        (PayloadType.JSON, None): ("application/json", b""),
        (PayloadType.JSON, b"null"): ("application/json", b"null"),
        (PayloadType.TEXT, b""): ("text/plain", b""),
        (PayloadType.BYTEA, b""): ("application/octet-stream", b""),
    }
    for (payload_type, payload), (content_type, body) in expected.items():
        message = encoded(make_row(payload=payload), payload_type=payload_type)
        assert (message.properties["content_type"], message.body) == (content_type, body)


@pytest.mark.parametrize("occurred_at", [-1.0, float("inf"), float("-inf"), 253_402_300_800.0])
def test_a_time_that_no_timestamp_holds_is_invalid(occurred_at: float) -> None:
    assert invalid(make_row(occurred_at=occurred_at)).failure_class == "invalid"


@pytest.mark.parametrize(
    ("mandatory", "policy", "expected"),
    [(None, True, True), (None, False, False), (True, False, True), (False, True, False)],
)
def test_mandatory(mandatory: bool | None, policy: bool, expected: bool) -> None:
    rare = None if mandatory is None else {"mandatory": mandatory}
    assert encoded(make_row(rare=rare), is_mandatory=policy).is_mandatory is expected


@pytest.mark.parametrize("size", [0, 1, 4087, 4088, 4089, 8176, 8177, 100_000])
def test_a_body_is_cut_into_frames_of_the_negotiated_size(size: int) -> None:
    body = bytes(n % 251 for n in range(size))
    for rare in (None, {"priority": 1}):
        assert encoded(make_row(payload=body, rare=rare), frame_max=4096).body == body


def test_no_negotiated_size_is_no_limit() -> None:
    assert len(encoded(make_row(payload=b"x" * 300_000), frame_max=0).body) == 300_000


def test_headers_beyond_one_frame_are_invalid() -> None:
    """RabbitMQ answers 501 and closes the connection under everybody."""
    big = make_row(headers=json.dumps({"h": "x" * 5000}))
    assert "one frame" in invalid(big, frame_max=4096).message
    encoded(big, frame_max=8192)
    assert "one frame" in invalid(make_row(aggregate_id="x" * 5000), frame_max=4096).message


def test_headers_that_were_not_read_are_invalid_and_say_how_large_they_are() -> None:
    """Whatever else is wrong, and missing, with the row: its route was not read either."""
    unread = make_row(headers="5242889 bytes", rare={})
    failure = invalid(unread, frame_max=0, route=("events", "{producer}"))
    assert failure.failure_class == "invalid"
    assert failure.message.startswith("properties and headers have 5242889 bytes of JSON, one frame")


def test_a_body_above_the_known_limit_is_too_large() -> None:
    encoded(make_row(payload=b"x" * 10), body_bytes_max=10)
    assert invalid(make_row(payload=b"x" * 11), body_bytes_max=10).failure_class == "too_large"


def test_an_envelope_brings_its_own_content_type() -> None:
    row = make_row(payload=b"abc", rare={"content_type": "text/csv", "content_encoding": "gzip"})
    message = encoded(row, envelope_name="json", payload_type=PayloadType.BYTEA)
    assert message.properties["content_type"] == "application/json"
    assert "content_encoding" not in message.properties
    assert json.loads(message.body)["data_content_type"] == "text/csv"
    plain = encoded(make_row(payload=b"{}"), envelope_name="cloudevents", source="/outbox")
    assert plain.properties["content_type"] == "application/cloudevents+json"
    assert json.loads(plain.body)["source"] == "/outbox"


def test_a_row_without_a_route_is_invalid_in_both_ways() -> None:
    for rare in (None, {"priority": 1}):
        error = invalid(make_row(rare=rare), route=("{aggregate_type}", "k"))
        assert "aggregate_type" in error.message


def test_the_caches_are_bounded() -> None:
    one = encoder()
    for number in range(10_000):
        row = make_row(event_type=f"t{number}", occurred_at=float(number))
        assert Message(in_run(one, row) or b"").properties["message_type"] == f"t{number}"
    for cache in (one._shapes, one._methods, one._seconds):
        assert len(cache) <= 4096


def test_a_run_ends_where_a_row_needs_a_closer_look_or_the_room_is_used_up() -> None:
    one = encoder()
    rows = [make_row(id=f"m{number}", payload=b"x" * 100) for number in range(6)]
    rows[2].rare = {"correlation_id": "c", "traceparent": "00-aa-bb-01"}
    rows[3].rare = {"correlation_id": "c", "priority": 1}
    alone = [in_run(one, row) for row in rows]
    out: list[bytes] = []
    assert one.encode_run(rows, 0, "events", 2**30, out)[0] == 3
    assert b"".join(out) == b"".join(frames or b"" for frames in alone[:3])
    assert one.encode_run(rows, 3, "events", 2**30, [])[0] == 0
    assert one.encode_run(rows, 4, "events", 2**30, [])[0] == 2
    assert one.encode_run(rows, 0, "events", 150, [])[0] == 1, "the row that uses it up still goes"


def test_the_channel_is_in_every_frame() -> None:
    assert encoded(make_row(payload=b"x" * 9000), channel=258, frame_max=4096).body
