"""Bodies: as stored, in the relay's own envelope, as CloudEvents."""

from __future__ import annotations

import base64
import json
import math
from pathlib import Path
from typing import Any

import pytest

from relay.envelope import CLOUDEVENTS_CONTENT_TYPE, JSON_CONTENT_TYPE, envelope, iso
from relay.errors import MessageInvalid
from relay.message import PayloadType, Row

RARE = {
    "aggregate_version": 2**40,
    "schema_version": 3,
    "correlation_id": "corr",
    "causation_id": "cause",
    "producer": "order service",
    "traceparent": "00-aa-bb-01",
}


def make_row(payload: bytes | None, rare: dict[str, Any] | None = None, **columns: Any) -> Row:
    return Row(0, 1, "id-1", "order.created", payload=payload, rare=rare, occurred_at=1_764_439_200.123456, **columns)


def wrapped(name: str, row: Row, payload_type: PayloadType = PayloadType.JSON) -> dict[str, Any]:
    value = json.loads(envelope(name, payload_type, "/outbox").wrap(row))
    assert isinstance(value, dict)
    return value


@pytest.mark.parametrize("payload", [b'{"b":1, "a" : 1.10}', b"", b"\x00\xff"])
def test_none_is_the_payload_as_stored(payload: bytes) -> None:
    plain = envelope("none", PayloadType.BYTEA, "")
    assert plain.wrap(make_row(payload)) == payload
    assert plain.content_type is None


def test_none_makes_an_empty_body_of_null() -> None:
    assert envelope("none", PayloadType.JSON, "").wrap(make_row(None)) == b""


def test_json_is_the_articles_envelope() -> None:
    row = make_row(b'{"order_id":"42"}', RARE, aggregate_type="order", aggregate_id="42")
    assert wrapped("json", row) == {
        "id": "id-1",
        "type": "order.created",
        "schema_version": 3,
        "occurred_at": "2025-11-29T18:00:00.123456Z",
        "producer": "order service",
        "correlation_id": "corr",
        "causation_id": "cause",
        "aggregate": {"type": "order", "id": "42", "version": 2**40},
        "data": {"order_id": "42"},
    }
    assert envelope("json", PayloadType.JSON, "").content_type == JSON_CONTENT_TYPE


def test_json_keeps_every_key_where_nothing_is_set() -> None:
    value = wrapped("json", make_row(b"null"))
    assert value["producer"] is value["correlation_id"] is value["aggregate"] is value["data"] is None
    assert value["schema_version"] == 1


def test_a_json_payload_is_embedded_byte_for_byte() -> None:
    payload = b'{"b":1,"a":2,"a":3,"n":1e400,"f":1.10,"u":"\\u00e9","z":"\\u0000"}'
    for name in ("json", "cloudevents"):
        assert payload in envelope(name, PayloadType.JSON, "/outbox").wrap(make_row(payload))


def test_case_16_null_and_the_json_null_differ() -> None:
    """`none`: an empty body against `null`; in an envelope: no `data` against `"data": null`."""
    for name in ("json", "cloudevents"):
        assert "data" not in wrapped(name, make_row(None))
        assert wrapped(name, make_row(b"null"))["data"] is None
        assert wrapped(name, make_row(b""), PayloadType.TEXT)["data"] == ""
        assert wrapped(name, make_row(b""), PayloadType.BYTEA)["data_base64"] == ""


def test_text_is_a_json_string_and_bytea_is_base64() -> None:
    assert wrapped("json", make_row('né "x"'.encode()), PayloadType.TEXT)["data"] == 'né "x"'
    value = wrapped("json", make_row(b"\x00\xff", {"content_encoding": "gzip"}), PayloadType.BYTEA)
    assert "data" not in value
    assert base64.b64decode(value["data_base64"]) == b"\x00\xff"
    assert value["data_content_encoding"] == "gzip"


def test_text_that_is_no_unicode_is_invalid() -> None:
    with pytest.raises(MessageInvalid):
        wrapped("json", make_row(b"\xff"), PayloadType.TEXT)


def test_cloudevents() -> None:
    row = make_row(b'{"order_id":"42"}', RARE, aggregate_type="order", aggregate_id="42")
    assert wrapped("cloudevents", row) == {
        "specversion": "1.0",
        "id": "id-1",
        "source": "order%20service",
        "type": "order.created",
        "time": "2025-11-29T18:00:00.123456Z",
        "subject": "42",
        "datacontenttype": "application/json",
        "schemaversion": 3,
        "aggregatetype": "order",
        "aggregateid": "42",
        "aggregateversion": str(2**40),
        "correlationid": "corr",
        "causationid": "cause",
        "traceparent": "00-aa-bb-01",
        "data": {"order_id": "42"},
    }
    assert envelope("cloudevents", PayloadType.JSON, "").content_type == CLOUDEVENTS_CONTENT_TYPE


def test_cloudevents_of_a_bare_row_holds_no_null_and_names_the_relays_source() -> None:
    assert wrapped("cloudevents", make_row(None)) == {
        "specversion": "1.0",
        "id": "id-1",
        "source": "/outbox",
        "type": "order.created",
        "time": "2025-11-29T18:00:00.123456Z",
        "schemaversion": 1,
    }


def test_another_name_is_refused() -> None:
    with pytest.raises(ValueError, match="cloudevents"):
        envelope("xml", PayloadType.JSON, "")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "1970-01-01T00:00:00.000000Z"),
        (1_764_439_200.123456, "2025-11-29T18:00:00.123456Z"),
        (1_764_439_199.999999, "2025-11-29T17:59:59.999999Z"),
        (253_402_300_799.0, "9999-12-31T23:59:59.000000Z"),
    ],
)
def test_times_are_iso_8601_in_utc_with_microseconds(seconds: float, text: str) -> None:
    assert iso(seconds) == text


@pytest.mark.parametrize("seconds", [-1e-6, -1e12, float("inf"), float("-inf"), 253_402_300_800])
def test_times_that_a_timestamp_cannot_carry_are_invalid(seconds: float) -> None:
    with pytest.raises(MessageInvalid):
        iso(seconds)


def test_a_row_without_any_time_has_none_in_its_envelope() -> None:
    row = make_row(None)
    row.occurred_at = math.nan
    assert wrapped("json", row)["occurred_at"] is None
    assert "time" not in wrapped("cloudevents", row)


@pytest.mark.parametrize(("name", "begins"), [("json", '    {"id"'), ("cloudevents", '    {"specversion"')])
def test_the_page_shows_what_is_sent(name: str, begins: str) -> None:
    page = (Path(__file__).parents[2] / "docs" / "message.md").read_text(encoding="utf-8")
    example = page[page.index(begins) :].split("\n\n")[0]
    row = Row(
        0,
        1,
        "01K0ORDERCREATED",
        "order.created",
        aggregate_type="order",
        aggregate_id="42",
        payload=b'{"order_id":"42"}',
        rare={"aggregate_version": 7},
        occurred_at=1_795_975_200.0,
    )
    sent = envelope(name, PayloadType.JSON, "outbox").wrap(row)
    assert json.loads(sent) == json.loads(example)
    assert sent.decode() == "".join(line.strip() for line in example.splitlines())
