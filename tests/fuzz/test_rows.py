"""Any row becomes frames that another implementation reads as the row, or is refused as what it is."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relay.errors import MessageInvalid
from relay.message import PayloadType, Row
from tests.core.test_encode import NOW, Message, encoder, in_run

CLASSES = {"invalid", "too_large", "expired"}
"""What a row that is not sent can be called (docs/schema.md)."""

FRAME_MAX = 4096
# PostgreSQL's text has neither NUL nor surrogates.
characters = st.characters(codec="utf-8", exclude_characters="\0")
texts = st.text(characters, max_size=20) | st.text(characters, min_size=120, max_size=300)
times = st.floats(allow_nan=False) | st.integers(-(10**11), 10**13).map(lambda each: each / 7)
integers = st.integers(-(2**63), 2**63 - 1)
numbers = (
    integers | st.sampled_from([2**31, 2**63, -(2**63) - 1, 2**64]) | st.floats(allow_nan=False, allow_infinity=False)
)
scalars = st.none() | st.booleans() | numbers | texts
documents = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3))
headers = (
    st.dictionaries(texts | st.sampled_from(["CC", "BCC", "x-delay", "id", "aggregate_id"]), documents, max_size=4).map(
        lambda each: json.dumps(each, ensure_ascii=False)
    )
    | documents.map(json.dumps)
    | st.sampled_from(
        ['{"a":1e400}', '{"a":-1e400}', '{"a":1,"a":2}', '{"n":123456789012345678901234567890}', "[]", "{}"]
    )
)


def rare_columns(
    texts: st.SearchStrategy[str], times: st.SearchStrategy[float], priorities: st.SearchStrategy[int]
) -> st.SearchStrategy[dict[str, Any]]:
    names = (
        "content_type",
        "content_encoding",
        "exchange",
        "routing_key",
        "correlation_id",
        "causation_id",
        "producer",
    )
    optional: dict[str, st.SearchStrategy[Any]] = dict.fromkeys((*names, "traceparent", "tracestate"), texts)
    optional |= {
        "aggregate_version": integers,
        "schema_version": st.integers(-(2**31), 2**31 - 1),
        "priority": priorities,
        "mandatory": st.booleans(),
        "expires_at": times,
        "available_at": times,
    }
    return st.fixed_dictionaries({}, optional=optional)


odd = (texts, times, rare_columns(texts, times, st.integers(-(2**15), 2**15 - 1)))
short_texts = st.text(characters, min_size=1, max_size=20)
late_times = st.integers(1, 10**9).map(lambda each: NOW + each / 7)
plain = (short_texts, late_times, rare_columns(short_texts, late_times, st.integers(0, 255)))
"""Of odd columns alone hardly one row in twenty can be sent."""

long_texts = st.integers(FRAME_MAX - 20, FRAME_MAX * 3).map(lambda size: "x" * size)
documents_as_bytes = (documents | long_texts).map(lambda each: json.dumps(each).encode())
bodies = {
    PayloadType.JSON: documents_as_bytes,
    PayloadType.JSONB: documents_as_bytes,
    PayloadType.TEXT: (texts | long_texts).map(str.encode),
    PayloadType.BYTEA: st.binary(max_size=50) | long_texts.map(str.encode),
}
"""What PostgreSQL lets in."""


options = st.fixed_dictionaries(
    {
        "route": st.sampled_from(
            [("ev", "{event_type}"), ("{aggregate_type}", "{correlation_id}.{id}"), ("e{causation_id}", "k")]
        ),
        "envelope_name": st.sampled_from(["none", "json", "cloudevents"]),
        "payload_type": st.sampled_from(list(PayloadType)),
        "body_bytes_max": st.none() | st.integers(0, FRAME_MAX * 3),
    }
)


@st.composite
def rows_with_options(draw: st.DrawFn) -> tuple[Row, dict[str, Any]]:
    chosen: dict[str, Any] = dict(draw(options))
    is_plain = draw(st.booleans())
    texts, times, rare = plain if is_plain else odd
    if is_plain:
        chosen["route"] = ("ev", "{event_type}")
    payload = draw(st.none() | bodies[chosen["payload_type"]])
    row = Row(
        0,
        draw(integers),
        draw(texts),
        draw(texts),
        aggregate_type=draw(st.none() | texts),
        aggregate_id=draw(st.none() | texts),
        payload=payload,
        size=len(payload or b""),
        occurred_at=draw(times),
        created_at=draw(times),
        rare=draw(st.none() | rare),
        headers=draw(st.none() | headers),
    )
    return row, chosen


def look(row: Row, chosen: dict[str, Any]) -> bool:
    """Whether it can be sent."""
    one = encoder(frame_max=FRAME_MAX, source="urn:test", **chosen)
    refusal: MessageInvalid | None = None
    try:
        exchange, data = one.encode(row, lambda: NOW)
    except MessageInvalid as error:
        refusal = error
    if refusal is not None:
        assert refusal.failure_class in CLASSES
        assert refusal.message
        assert in_run(one, row) is None
        return False
    assert one.encode(row, lambda: NOW) == (exchange, data), "the same from the cache"
    assert in_run(one, row) in (data, None), "the same among others, or not there"
    message = Message(data, frame_max=FRAME_MAX)
    assert message.exchange == exchange
    assert message.properties["message_id"] == row.id
    if chosen["envelope_name"] == "none":
        assert message.body == (row.payload or b"")
        given_headers = json.loads(row.headers or "{}")
        reserved = {"aggregate_type", "aggregate_id", "aggregate_version", "schema_version", "causation_id"}
        reserved |= {"traceparent", "tracestate", "occurred_at"}
        for name, value in given_headers.items():
            assert name in reserved or same(message.headers[name], value), name
        assert message.headers.get("aggregate_id") == (row.aggregate_id or message.headers.get("aggregate_id"))
    else:
        json.loads(message.body)
    limit = chosen["body_bytes_max"]
    assert limit is None or len(message.body) <= limit
    return True


def same(found: object, wanted: object) -> bool:
    """Equal in value and type, all the way down."""
    match found, wanted:
        case dict(), dict():
            return found.keys() == wanted.keys() and all(same(found[name], wanted[name]) for name in found)
        case list(), list():
            return len(found) == len(wanted) and all(map(same, found, wanted))
        case float(), float():
            return found == wanted and math.copysign(1, found) == math.copysign(1, wanted)
    return type(found) is type(wanted) and found == wanted


def look_at(examples: int) -> None:
    sent = Counter[bool]()

    @given(rows_with_options())
    @settings(max_examples=examples)
    def any_row(both: tuple[Row, dict[str, Any]]) -> None:
        sent[look(*both)] += 1

    any_row()
    assert min(sent[True], sent[False]) > sent.total() / 10, f"one of the two is hardly tried: {sent}"


def test_any_row() -> None:
    look_at(300)


@pytest.mark.long
def test_any_row_at_length() -> None:
    look_at(50_000)
