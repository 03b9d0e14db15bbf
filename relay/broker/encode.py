"""An outbox row -> the bytes of one `basic.publish` (AMQP 0-9-1): method, content header, body frames.

Owns: how columns become properties and headers (docs/message.md). Pure: no socket, no clock; the same row gives the same bytes.
What AMQP or RabbitMQ could not carry exactly raises MessageInvalid before a delivery tag is spent on it,
because the broker's own answer would be to close the channel or the connection under everybody's messages.
Lengths are bytes, not characters.

Two ways lead to the same bytes. A row with ordinary columns, headers and what traces an event is put together from segments
that are cached by its event type and aggregate type (its *shape*); rows with other columns take the general way. Both caches
are bounded: emptied when full, as shapes that never repeat are not worth an eviction order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from struct import Struct
from typing import Any, Final

from relay.broker.fields import I64, U8, U16, U32, U64, field, long, own_headers, refuse_unread, short, utf8
from relay.broker.unforeseen import of_the_row
from relay.envelope import envelope, instant, iso_second
from relay.errors import MessageInvalid
from relay.message import DEFAULT_CONTENT_TYPE, PayloadType, Row
from relay.route import Router

# AMQP 0-9-1, 4.2.3: type octet, channel, size, payload, this octet.
_END: Final = b"\xce"
_METHOD, _HEADER, _BODY = b"\x01", b"\x02", b"\x03"
FRAME_OVERHEAD: Final = 8
_SIZE_AND_END: Final = 5
"""What a header frame has beside its payload, and beside its type and channel, which stand at the method's end."""

_BASIC_PUBLISH: Final = U16(60) + U16(40) + U16(0)
# Class and weight as one 32-bit number.
_BASIC_CLASS: Final = 60 << 16

# Property flags of class basic, from the highest bit (AMQP 0-9-1, 4.2.6.1); properties follow in this order.
_CONTENT_TYPE, _CONTENT_ENCODING, _HEADERS, _DELIVERY_MODE = 1 << 15, 1 << 14, 1 << 13, 1 << 12
_PRIORITY, _CORRELATION_ID, _EXPIRATION, _MESSAGE_ID = 1 << 11, 1 << 10, 1 << 8, 1 << 7
_TIMESTAMP, _TYPE, _APP_ID = 1 << 6, 1 << 5, 1 << 3
_ALWAYS: Final = _HEADERS | _DELIVERY_MODE | _MESSAGE_ID | _TIMESTAMP | _TYPE
_PERSISTENT: Final = b"\x02"

# RabbitMQ refuses a longer expiration, ten years, and closes the channel (rabbit_misc:check_expiry, tried on
# 3.10). A deadline beyond it ("never") goes without an expiration.
_EXPIRATION_MS_MAX: Final = 315_360_000_000
# Here a double still holds microseconds; later times, and infinite ones, go the general way.
_SECONDS_MAX: Final = 9e9
_CACHE_ENTRIES_MAX: Final = 4096


class Encoder:
    """Encodes rows for one channel of one connection.

    `frame_max` is what was negotiated, in bytes (0: no limit); `is_mandatory` what a row gets whose
    `mandatory` is null; `envelope_name` and `source` as in `relay.envelope`; `body_bytes_max` the largest
    body that the broker is known to accept, `None` where that is not known.
    """

    def __init__(
        self,
        router: Router,
        *,
        channel: int,
        frame_max: int,
        payload_type: PayloadType,
        envelope_name: str = "none",
        source: str = "",
        is_mandatory: bool = True,
        body_bytes_max: int | None = None,
    ) -> None:
        self._router = router
        self._envelope = envelope(envelope_name, payload_type, source)
        self._is_plain = self._envelope.content_type is None
        self._content_type = self._envelope.content_type or DEFAULT_CONTENT_TYPE[payload_type]
        self._is_mandatory = is_mandatory
        self._body_bytes_max = 0
        self.limit_body(body_bytes_max)
        self._channel = U16(channel)
        self._body_head = _BODY + self._channel
        self._frame_payload_max = frame_max - FRAME_OVERHEAD if frame_max else 2**32 - 1
        self._shapes: dict[tuple[str, str | None], _Shape] = {}
        self._methods: dict[tuple[str, str, bool], bytes] = {}
        self._seconds: dict[int, tuple[bytes, bytes]] = {}
        # The shape fixes the route only if nothing else that the templates read can vary.
        self._shape_routes = router.fields <= {"event_type", "aggregate_type", "schema_version"}
        # What stands between the frame's size and the header table: class and weight, body size, flags,
        # content type, the table's length.
        content_type = short("content_type", self._content_type)
        properties = U16(_CONTENT_TYPE | _ALWAYS) + content_type
        self._sizes = Struct(f">IIQ{len(properties)}sI").pack
        self._properties = properties
        self._traced_properties = {
            flags: U16(_CONTENT_TYPE | _ALWAYS | flags) + content_type
            for flags in (0, _CORRELATION_ID, _APP_ID, _CORRELATION_ID | _APP_ID)
        }
        self._fixed_size = 4 + 8 + len(properties) + 4

    def encode_run(
        self, rows: Sequence[Row], first: int, exchange: str, bytes_room: int, out: list[bytes]
    ) -> tuple[int, int]:
        """Append the frames, in pieces, of `rows[first]` and those behind it to `out`, as long as they are ordinary: without
        rarer columns other than `_traced` knows, for this exchange, with nothing that has to be refused (all others take
        `encode`), and until `bytes_room` is used up. Returns how many rows these are, and their bytes. Raises nothing.
        """
        # Once a message: local names, nothing called that need not be.
        shapes, seconds, sizes = self._shapes, self._seconds, self._sizes
        is_plain, wrap, route = self._is_plain, self._envelope.wrap, self._router.route
        ordinary, body_head, frame_max = self._properties, self._body_head, self._frame_payload_max
        body_max = min(frame_max, self._body_bytes_max)
        stamp_of, occurred_at, timestamp = math.nan, b"", b""
        at, total = first, 0
        try:
            for at in range(first, len(rows)):
                row = rows[at]
                assert row.is_loaded, "the body is fetched before the row goes"
                if total >= bytes_room:
                    break
                shape = shapes.get((row.event_type, row.aggregate_type)) or self._shape(row)
                if (method := shape.method) is not None:
                    goes_to = shape.exchange
                else:
                    goes_to, routing_key = route(row)
                    method = self._method(goes_to, routing_key, self._is_mandatory)
                body = (row.payload or b"") if is_plain else wrap(row)
                length = len(body)
                message_id = row.id.encode()
                if (aggregate_id := row.aggregate_id) is None:
                    key = key_head = b""
                    table_size = shape.table_size
                else:
                    key = aggregate_id.encode()
                    key_head = _KEY_HEAD(_AGGREGATE_ID, len(key))
                    table_size = shape.table_size + _KEY_OVERHEAD + len(key)
                # (An id beyond what a short string holds is an IndexError here.)
                properties, mode, type_ = ordinary, _MODE_AND_LENGTH[len(message_id)], shape.type_
                table = shape.table
                size = shape.fixed_size + table_size + len(message_id)
                if (rare := row.rare) is not None:
                    if (traced := self._traced(rare)) is None:
                        break
                    properties, entries, correlation_id, app_id = traced
                    key += entries
                    table_size += len(entries)
                    mode = b"".join((_PERSISTENT, correlation_id, U8[len(message_id)]))
                    type_ = type_[:-1] + app_id + _END
                    size += len(entries) + len(correlation_id) + len(app_id)
                if row.headers is not None:
                    own = self._own_entries(row, row.headers)
                    table = own + table
                    table_size += len(own)
                    size += len(own)
                if row.occurred_at != stamp_of:
                    # Rows of one transaction share their time.
                    stamp_of = row.occurred_at
                    if not 0.0 <= stamp_of < _SECONDS_MAX:
                        break
                    second, micro = divmod(round(stamp_of * 1e6), 1_000_000)
                    up_to_second, timestamp = seconds.get(second) or self._second(second)
                    occurred_at = up_to_second + b"%06dZ" % micro
                if goes_to != exchange or size > frame_max or length > body_max:
                    break
                out += (
                    method,
                    sizes(size, _BASIC_CLASS, length, properties, table_size),
                    table,
                    occurred_at,
                    key_head,
                    key,
                    mode,
                    message_id,
                    timestamp,
                    type_,
                )
                total += len(method) + _SIZE_AND_END + size
                if length:
                    total += FRAME_OVERHEAD + length
                    out += (body_head, U32(length), body, _END)
            else:
                at += 1
        except Exception:  # noqa: BLE001 - `encode` meets it again, and says what is wrong with that row
            return at - first, total
        return at - first, total

    def _traced(self, rare: dict[str, Any]) -> tuple[bytes, bytes, bytes, bytes] | None:
        """(flags and content type, entries of the header table, correlation id, app id) of a row that has no rarer columns than these,
        as most have where events are traced; None for any other. Raises MessageInvalid."""
        # When it was due says nothing to a consumer.
        found, flags = int("available_at" in rare), 0
        entries = correlation_id = app_id = b""
        for column, name in _HEADER_COLUMNS:
            if (value := rare.get(column)) is not None:
                found += 1
                entries += name + field(value, column)
        if (value := rare.get("correlation_id")) is not None:
            found += 1
            flags = _CORRELATION_ID
            correlation_id = short("correlation_id", value)
        if (value := rare.get("producer")) is not None:
            found += 1
            flags |= _APP_ID
            app_id = short("producer", value)
        if found != len(rare):
            return None
        return self._traced_properties[flags], entries, correlation_id, app_id

    @of_the_row
    def encode(self, row: Row, database_now: Callable[[], float]) -> tuple[str, bytes]:
        """(exchange, frames) of any row; `database_now` is asked, in epoch seconds, only if the row expires.

        Raises MessageInvalid with failure class `invalid`, `expired`, `too_large` or `unknown`.
        """
        assert row.is_loaded, "the body is fetched before the row goes"
        refuse_unread(row.headers)
        rare = row.rare or {}
        exchange, routing_key = self._router.route(row)
        mandatory = rare.get("mandatory")
        method = self._method(exchange, routing_key, self._is_mandatory if mandatory is None else mandatory)
        body = self._envelope.wrap(row)
        if len(body) > self._body_bytes_max:
            raise MessageInvalid(
                f"the body has {len(body)} bytes, the broker takes {self._body_bytes_max}",
                failure_class="too_large",
            )
        flags, properties = self._properties_of(row, rare, database_now)
        payload = b"".join((U32(_BASIC_CLASS), U64(len(body)), U16(flags), *properties))
        if len(payload) > self._frame_payload_max:
            # AMQP 0-9-1, 4.2.6: a content header is one frame. RabbitMQ answers 501 and closes the
            # connection.
            raise MessageInvalid(
                f"properties and headers have {len(payload)} bytes, one frame holds {self._frame_payload_max}"
            )
        return exchange, b"".join((method, U32(len(payload)), payload, _END, *self._body_frames(body)))

    def limit_body(self, bytes_max: int | None) -> None:
        """The broker takes no larger body than this; `None`: who knows."""
        self._body_bytes_max = 2**63 if bytes_max is None else bytes_max

    def route_of(self, row: Row) -> tuple[str, str]:
        """(exchange, routing key) of a row, for a report; empty where it has none."""
        try:
            return self._router.route(row)
        except MessageInvalid:
            return "", ""

    def _properties_of(
        self, row: Row, rare: dict[str, Any], database_now: Callable[[], float]
    ) -> tuple[int, list[bytes]]:
        """Property flags and the properties in their order."""
        flags = _ALWAYS | _CONTENT_TYPE
        content_type, content_encoding = self._content_type, None
        if self._is_plain:
            content_type = rare.get("content_type", content_type)
            content_encoding = rare.get("content_encoding")
        out = [short("content_type", content_type)]
        if content_encoding is not None:
            flags |= _CONTENT_ENCODING
            out.append(short("content_encoding", content_encoding))
        occurred_at = timestamp = b""
        if (moment := instant(row.occurred_at)) is None:
            flags &= ~_TIMESTAMP
        else:
            second, micro = moment
            up_to_second, timestamp = self._seconds.get(second) or self._second(second)
            occurred_at = up_to_second + b"%06dZ" % micro
        out += (self._header_table(row, rare, occurred_at), _PERSISTENT)
        if (priority := rare.get("priority")) is not None:
            if not 0 <= priority <= 255:
                raise MessageInvalid(f"priority {priority} is outside of 0-255")
            flags |= _PRIORITY
            out.append(U8[priority])
        if (correlation_id := rare.get("correlation_id")) is not None:
            flags |= _CORRELATION_ID
            out.append(short("correlation_id", correlation_id))
        if (left := expiration(rare.get("expires_at"), database_now)) is not None:
            flags |= _EXPIRATION
            out.append(short("expires_at", left))
        out += (short("id", row.id), timestamp, short("event_type", row.event_type))
        if (producer := rare.get("producer")) is not None:
            flags |= _APP_ID
            out.append(short("producer", producer))
        return flags, out

    def _header_table(self, row: Row, rare: dict[str, Any], occurred_at: bytes) -> bytes:
        """The row's own headers and over them the relay's; `occurred_at` is its entry, empty where there is none."""
        version = rare.get("schema_version", 1)
        entries = [_SCHEMA_VERSION_1 if version == 1 else _SCHEMA_VERSION + I64(version)]
        if row.aggregate_type is not None:
            entries += (_AGGREGATE_TYPE, long(utf8("aggregate_type", row.aggregate_type)))
        entries.append(occurred_at)
        if row.aggregate_id is not None:
            entries += (_AGGREGATE_ID, long(utf8("aggregate_id", row.aggregate_id)))
        for column, name in _HEADER_COLUMNS:
            if (value := rare.get(column)) is not None:
                entries += (name, field(value, column))
        if row.headers is not None:
            entries.insert(0, self._own_entries(row, row.headers))
        return long(b"".join(entries))

    @staticmethod
    def _own_entries(row: Row, headers: str) -> bytes:
        """The row's own headers, which give way to those of columns that are set. Raises MessageInvalid."""
        own = own_headers(headers)
        own.pop("schema_version", None)
        if not math.isnan(row.occurred_at):
            own.pop("occurred_at", None)
        if row.aggregate_type is not None:
            own.pop("aggregate_type", None)
        if row.aggregate_id is not None:
            own.pop("aggregate_id", None)
        if (rare := row.rare) is not None:
            for column, _ in _HEADER_COLUMNS:
                if rare.get(column) is not None:
                    own.pop(column, None)
        return b"".join([short("a header's name", each) + value for each, value in own.items()])

    def _shape(self, row: Row) -> _Shape:
        """The cached segments of the row's event type and aggregate type. Raises MessageInvalid."""
        if len(self._shapes) >= _CACHE_ENTRIES_MAX:
            self._shapes.clear()
        method, exchange = None, ""
        if self._shape_routes:
            exchange, routing_key = self._router.route(row)
            method = self._method(exchange, routing_key, self._is_mandatory)
        table = _SCHEMA_VERSION_1
        if row.aggregate_type is not None:
            table += _AGGREGATE_TYPE + long(utf8("aggregate_type", row.aggregate_type))
        type_ = short("event_type", row.event_type)
        shape = _Shape(
            exchange=exchange,
            method=method,
            table=table,
            table_size=len(table) + _STAMP_SIZE,
            type_=type_ + _END,
            # mode 1, length of the id 1, timestamp 8; the table's entries are counted with the row
            fixed_size=self._fixed_size + 1 + 1 + 8 + len(type_),
        )
        self._shapes[row.event_type, row.aggregate_type] = shape
        return shape

    def _method(self, exchange: str, routing_key: str, is_mandatory: bool) -> bytes:
        """The method frame, and the type and channel of the header frame that follows it."""
        cached = self._methods.get((exchange, routing_key, is_mandatory))
        if cached is not None:
            return cached
        payload = b"".join(
            (
                _BASIC_PUBLISH,
                short("the exchange", exchange),
                short("the routing key", routing_key),
                U8[1 if is_mandatory else 0],
            )
        )
        frame = b"".join((_METHOD, self._channel, U32(len(payload)), payload, _END, _HEADER, self._channel))
        if len(self._methods) >= _CACHE_ENTRIES_MAX:
            self._methods.clear()
        self._methods[exchange, routing_key, is_mandatory] = frame
        return frame

    def _second(self, second: int) -> tuple[bytes, bytes]:
        """(header entry occurred_at up to the microseconds, property timestamp) of a whole second."""
        if len(self._seconds) >= _CACHE_ENTRIES_MAX:
            self._seconds.clear()
        stamp = (_OCCURRED_AT + iso_second(second).encode("ascii") + b".", U64(second))
        self._seconds[second] = stamp
        return stamp

    def _body_frames(self, body: bytes) -> list[bytes | memoryview]:
        """The pieces of the body in frames of at most the negotiated size; none for an empty body. A body of a hundred MiB is copied
        once, into its message."""
        step, whole = self._frame_payload_max, memoryview(body)
        pieces: list[bytes | memoryview] = []
        for start in range(0, len(body), step):
            piece = whole[start : start + step]
            pieces += (_BODY, self._channel, U32(len(piece)), piece, _END)
        return pieces


@dataclass(frozen=True, slots=True)
class _Shape:
    """Segments shared by all rows of an event type and aggregate type; `method` is None where the route
    varies.
    """

    exchange: str
    method: bytes | None
    table: bytes
    table_size: int
    type_: bytes
    fixed_size: int


def expiration(expires_at: float | None, database_now: Callable[[], float]) -> str | None:
    """The milliseconds left, as text; `None` without a deadline. Raises MessageInvalid (`expired`)."""
    if expires_at is None:
        return None
    left_s = expires_at - database_now()
    if left_s > _EXPIRATION_MS_MAX / 1000:
        return None
    # Down to whole milliseconds, after the float's noise below a microsecond is gone. -inf is long past.
    left_ms = round(max(left_s, -1.0) * 1_000_000) // 1000
    if left_ms <= 0:
        raise MessageInvalid(f"the deadline passed {-left_s:.3f} s ago", failure_class="expired")
    return str(left_ms)


_SCHEMA_VERSION: Final = short("", "schema_version") + b"l"
_SCHEMA_VERSION_1: Final = _SCHEMA_VERSION + I64(1)
_AGGREGATE_TYPE: Final = short("", "aggregate_type") + b"S"
_AGGREGATE_ID: Final = short("", "aggregate_id") + b"S"
_KEY_OVERHEAD: Final = len(_AGGREGATE_ID) + 4
_KEY_HEAD: Final = Struct(f">{len(_AGGREGATE_ID)}sI").pack
_MODE_AND_LENGTH: Final = [_PERSISTENT + length for length in U8]
"""The delivery mode, and the length of the message id that follows it."""
_HEADER_COLUMNS: Final = [
    (column, short("", column)) for column in ("aggregate_version", "causation_id", "traceparent", "tracestate")
]
_OCCURRED_AT: Final = short("", "occurred_at") + b"S" + U32(27)
_STAMP_SIZE: Final = len(_OCCURRED_AT) + 27
