"""What a message's body is: the payload as it is, or an envelope of JSON around it.

`none` the payload's bytes as stored; SQL NULL is an empty body.
`json` one object: id, type, schema_version, occurred_at, producer, correlation_id, causation_id, aggregate,
    data. All are always there (null where the column is null; `aggregate` is `{type, id, version}` or null),
    but for the last:
      `data`         a json or jsonb payload embedded byte for byte, a text payload as a JSON string;
      `data_base64`  instead of it for bytea, which JSON cannot hold;
      neither        for SQL NULL, so that it differs from the JSON null.
    A `content_type` or `content_encoding` that the row sets speaks of the payload and stands beside it as
    `data_content_type`, `data_content_encoding`.
`cloudevents` CloudEvents 1.0, structured JSON: `source` is the row's producer, else the table's name; `subject`
    the aggregate's id; the rest are extension attributes, lower-case as the specification wants (3.1).

The message's properties and headers are the same under every envelope, but for the content type and encoding,
which are the envelope's.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final
from urllib.parse import quote

import orjson

from relay.errors import MessageInvalid
from relay.message import DEFAULT_CONTENT_TYPE, PayloadType, Row

JSON_CONTENT_TYPE: Final = "application/json"
CLOUDEVENTS_CONTENT_TYPE: Final = "application/cloudevents+json"

_SECONDS_MAX: Final = 253_402_300_800
"""The year 10000: ISO 8601 has four digits for a year."""


@dataclass(frozen=True, slots=True)
class Envelope:
    """`content_type` of the body, `None` where it is the payload's own; `wrap` makes the body of a row.

    `wrap` raises MessageInvalid for what JSON cannot hold.
    """

    content_type: str | None
    wrap: Callable[[Row], bytes]


def envelope(name: str, payload_type: PayloadType, source: str) -> Envelope:
    """The envelope called `name` (`none`, `json`, `cloudevents`) around payloads of that type.

    `source` is CloudEvents' source of rows without a producer. A consumer tells events apart by source and
    id, so it has to be the same for every relay of a table. Raises ValueError for another name.
    """
    match name:
        case "none":
            return Envelope(None, _as_stored)
        case "json":
            return Envelope(JSON_CONTENT_TYPE, lambda row: _json(row, payload_type))
        case "cloudevents":
            reference = _uri_reference(source)
            return Envelope(CLOUDEVENTS_CONTENT_TYPE, lambda row: _cloudevents(row, payload_type, reference))
        case _:
            raise ValueError(f"no such envelope: {name!r}; allowed: none, json, cloudevents")


def instant(seconds: float) -> tuple[int, int] | None:
    """A time in epoch seconds as (whole seconds, microseconds); None for `nan`: the row has none.

    Raises MessageInvalid for what a message's timestamp cannot carry: infinite, before 1970, after 9999.
    """
    if math.isnan(seconds):
        return None
    # AMQP's timestamp is unsigned.
    if not 0 <= seconds < _SECONDS_MAX:
        raise MessageInvalid(f"occurred_at is outside of the years 1970-9999 ({seconds} s since 1970)")
    return divmod(round(seconds * 1_000_000), 1_000_000)


def iso_second(second: int) -> str:
    """`2026-11-29T18:00:00` in UTC, without fraction and zone."""
    return datetime.fromtimestamp(second, UTC).replace(tzinfo=None).isoformat()


def iso(seconds: float) -> str | None:
    """`2026-11-29T18:00:00.123456Z`; None, and raises MessageInvalid, as `instant`."""
    if (moment := instant(seconds)) is None:
        return None
    second, microsecond = moment
    return f"{iso_second(second)}.{microsecond:06d}Z"


def _as_stored(row: Row) -> bytes:
    return row.payload or b""


def _json(row: Row, payload_type: PayloadType) -> bytes:
    rare = row.rare or {}
    aggregate: dict[str, Any] | None = None
    if row.aggregate_type is not None or row.aggregate_id is not None or "aggregate_version" in rare:
        aggregate = {
            "type": row.aggregate_type,
            "id": row.aggregate_id,
            "version": rare.get("aggregate_version"),
        }
    document: dict[str, Any] = {
        "id": row.id,
        "type": row.event_type,
        "schema_version": rare.get("schema_version", 1),
        "occurred_at": iso(row.occurred_at),
        "producer": rare.get("producer"),
        "correlation_id": rare.get("correlation_id"),
        "causation_id": rare.get("causation_id"),
        "aggregate": aggregate,
    }
    for column in ("content_type", "content_encoding"):
        if column in rare:
            document[f"data_{column}"] = rare[column]
    _put_data(document, row, payload_type)
    return _dump(document)


def _cloudevents(row: Row, payload_type: PayloadType, source: str) -> bytes:
    rare = row.rare or {}
    document: dict[str, Any] = {
        "specversion": "1.0",
        "id": row.id,
        "source": _uri_reference(rare["producer"]) if rare.get("producer") else source,
        "type": row.event_type,
    }
    if (time := iso(row.occurred_at)) is not None:
        document["time"] = time
    document["schemaversion"] = rare.get("schema_version", 1)
    # CloudEvents' integers have 32 bits (its chapter on the type system); a bigint goes as text.
    version = rare.get("aggregate_version")
    attributes = {
        "subject": row.aggregate_id,
        "aggregatetype": row.aggregate_type,
        "aggregateid": row.aggregate_id,
        "aggregateversion": None if version is None else str(version),
        "correlationid": rare.get("correlation_id"),
        "causationid": rare.get("causation_id"),
        "traceparent": rare.get("traceparent"),
        "tracestate": rare.get("tracestate"),
        "contentencoding": rare.get("content_encoding"),
    }
    # An attribute's value is never null and never empty: it is left out.
    document.update((name, value) for name, value in attributes.items() if value)
    if row.payload is not None:
        document["datacontenttype"] = rare.get("content_type", DEFAULT_CONTENT_TYPE[payload_type])
    _put_data(document, row, payload_type)
    return _dump(document)


def _put_data(document: dict[str, Any], row: Row, payload_type: PayloadType) -> None:
    if row.payload is None:
        return
    match payload_type:
        case PayloadType.JSON | PayloadType.JSONB:
            # PostgreSQL has checked that it is JSON: embedded as it is, never parsed.
            document["data"] = orjson.Fragment(row.payload)
        case PayloadType.TEXT:
            try:
                document["data"] = row.payload.decode()
            except UnicodeDecodeError as error:
                raise MessageInvalid(f"the payload is not UTF-8: {error}") from error
        case PayloadType.BYTEA:
            document["data_base64"] = base64.b64encode(row.payload).decode("ascii")


def _dump(document: dict[str, Any]) -> bytes:
    try:
        return orjson.dumps(document)
    except orjson.JSONEncodeError as error:
        raise MessageInvalid(f"the envelope cannot be encoded: {error}") from error


def _uri_reference(text: str) -> str:
    """CloudEvents' source is a URI reference (RFC 3986): what may not stand in one is percent-encoded."""
    return quote(text, safe="%/:?#[]@!$&'()*+,;=~")
