"""An outbox row -> one JSON line: the message that RabbitMQ would get, written out.

    {"id": …, "type": …, "exchange": …, "routing_key": …, "properties": {…}, "headers": {…}, "body": …}

Owns: that shape, which docs/file-sink.md explains. `id` comes first: the appender knows a torn line of ours by it.
Nothing is changed on the way: numbers keep their digits, and exactly one of these gives the body byte for byte:
    `body`         a body that is JSON in one line, embedded as it is;
    `body_text`    other UTF-8 text, JSON with line breaks in it too;
    `body_base64`  anything else.
Pure: no file, no clock.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any, Final

import orjson

from relay.broker.encode import expiration
from relay.broker.fields import header_object, refuse_unread
from relay.broker.unforeseen import of_the_row
from relay.envelope import envelope, instant, iso
from relay.errors import MessageInvalid
from relay.message import DEFAULT_CONTENT_TYPE, PayloadType, Row
from relay.route import Router

_JSON_TYPES: Final = (PayloadType.JSON, PayloadType.JSONB)
_HEADER_COLUMNS: Final = ("aggregate_version", "schema_version", "causation_id", "traceparent", "tracestate")


class LineEncoder:
    """Encodes rows of one payload type; `envelope_name` and `source` as in `relay.envelope`."""

    def __init__(
        self, router: Router, payload_type: PayloadType, *, envelope_name: str = "none", source: str = ""
    ) -> None:
        self._router = router
        self._envelope = envelope(envelope_name, payload_type, source)
        self._payload_type = payload_type
        self._is_plain = self._envelope.content_type is None
        self._is_json = not self._is_plain or payload_type in _JSON_TYPES

    @of_the_row
    def encode(self, row: Row, database_now: Callable[[], float]) -> bytes:
        """The row's line with its line break; `database_now` is asked, in epoch seconds, only if the row expires.

        Raises MessageInvalid with failure class `invalid`, `expired` or `unknown`.
        """
        assert row.is_loaded, "the body is fetched before the row goes"
        refuse_unread(row.headers)
        exchange, routing_key = self._router.route(row)
        document = {
            "id": row.id,
            "type": row.event_type,
            "exchange": exchange,
            "routing_key": routing_key,
            "properties": self._properties(row, database_now),
            "headers": _headers(row),
        }
        self._put_body(document, self._envelope.wrap(row))
        try:
            return orjson.dumps(document, option=orjson.OPT_APPEND_NEWLINE)
        except orjson.JSONEncodeError as error:
            raise MessageInvalid(f"the line cannot be encoded: {error}") from error

    def route_of(self, row: Row) -> tuple[str, str]:
        """(exchange, routing key) of a row, for a report; empty where it has none."""
        try:
            return self._router.route(row)
        except MessageInvalid:
            return "", ""

    def _properties(self, row: Row, database_now: Callable[[], float]) -> dict[str, Any]:
        rare = row.rare or {}
        found: dict[str, Any] = {"content_type": self._envelope.content_type}
        if self._is_plain:
            found["content_type"] = rare.get("content_type", DEFAULT_CONTENT_TYPE[self._payload_type])
            found["content_encoding"] = rare.get("content_encoding")
        found |= {
            "delivery_mode": 2,
            "priority": rare.get("priority"),
            "correlation_id": rare.get("correlation_id"),
            "expiration": expiration(rare.get("expires_at"), database_now),
            "timestamp": (instant(row.occurred_at) or (None, None))[0],
            "app_id": rare.get("producer"),
        }
        return {name: value for name, value in found.items() if value is not None}

    def _put_body(self, document: dict[str, Any], body: bytes) -> None:
        # PostgreSQL has checked that it is JSON, or it is our own envelope; a line break would end the line.
        if self._is_json and body and b"\n" not in body and b"\r" not in body:
            document["body"] = orjson.Fragment(body)
            return
        try:
            document["body_text"] = body.decode()
        except UnicodeDecodeError:
            document["body_base64"] = base64.b64encode(body).decode("ascii")


def _headers(row: Row) -> dict[str, Any]:
    """The row's own headers, their numbers as written, and over them the relay's, as in a message."""
    rare = row.rare or {}
    ours = {"schema_version": 1} | {name: rare[name] for name in _HEADER_COLUMNS if rare.get(name) is not None}
    ours |= {
        "aggregate_type": row.aggregate_type,
        "aggregate_id": row.aggregate_id,
        "occurred_at": iso(row.occurred_at),
    }
    headers = {} if row.headers is None else header_object(row.headers, orjson.Fragment, orjson.Fragment)
    return headers | {name: value for name, value in ours.items() if value is not None}
