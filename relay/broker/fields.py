"""The field types of AMQP 0-9-1 as bytes: short and long strings, header tables, JSON values as field values.

Lengths are bytes, not characters. What the protocol could not carry exactly raises MessageInvalid, never a silent
change. Pure; `encode` puts these together.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from decimal import Decimal
from struct import Struct
from typing import Any, Final

import orjson

from relay.errors import MessageInvalid
from relay.message import TEXTS_MAX, TEXTS_UNREAD

U8: Final = [bytes((n,)) for n in range(256)]
U16: Final = Struct(">H").pack
U32: Final = Struct(">I").pack
U64: Final = Struct(">Q").pack
I64: Final = Struct(">q").pack
_F64: Final = Struct(">d").pack

_RESERVED_HEADERS: Final = ("CC", "BCC")
"""RabbitMQ takes these for further routing keys (sender-selected distribution), which no route of ours
declares.
"""

_INT64_MIN: Final = -(2**63)
_INT64_MAX: Final = 2**63 - 1


def refuse_unread(headers: str | None) -> None:
    """Headers (and rarer columns) that were too large to be read: no message could carry them. Raises MessageInvalid."""
    if headers is not None and headers.endswith(TEXTS_UNREAD):
        raise MessageInvalid(
            f"properties and headers have {headers} of JSON, one frame could not hold them (above {TEXTS_MAX} none is read)"
        )


def own_headers(text: str) -> dict[str, bytes]:
    """A row's `headers` (JSON text) as encoded AMQP fields by name. Raises MessageInvalid."""
    value = _flat_object(text)
    if value is None:
        value = header_object(text, _parse_integer, _parse_fraction)
    for name in _RESERVED_HEADERS:
        if name in value:
            raise MessageInvalid(f"the header {name} would add routes at the broker; it is not allowed")
    try:
        return {name: field(each, name) for name, each in value.items()}
    except RecursionError as error:
        raise MessageInvalid("the headers are nested too deep") from error


def _flat_object(text: str) -> dict[str, Any] | None:
    """An object of texts, 64-bit integers, true, false and null only, as nearly all headers are: a quarter of the time that the
    exact parser below takes. None for everything else, which that one reads, or refuses."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(value, dict):
        return None
    for each in value.values():
        # (An integer beyond 64 bits comes as a float here.)
        if isinstance(each, str | None) or (isinstance(each, int) and each <= _INT64_MAX):
            continue
        return None
    return value


def header_object(
    text: str, parse_integer: Callable[[str], Any], parse_fraction: Callable[[str], Any]
) -> dict[str, Any]:
    """A row's `headers` (JSON text) as an object, its numbers as the parsers make them. Raises MessageInvalid."""
    try:
        value = json.loads(text, parse_int=parse_integer, parse_float=parse_fraction, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise MessageInvalid("the headers are nested too deep") from error
    except ValueError as error:
        raise MessageInvalid(f"the headers are not JSON: {error}") from error
    if not isinstance(value, dict):
        raise MessageInvalid(f"the headers are not an object but {type(value).__name__}")
    return value


def _parse_integer(text: str) -> int:
    # Longer ones are out of range anyway, and Python refuses to parse very long ones.
    if len(text) > 20 or not _INT64_MIN <= (value := int(text)) <= _INT64_MAX:
        raise MessageInvalid("an integer in the headers is beyond 64 bits")
    return value


def _parse_fraction(text: str) -> float:
    value = float(text)
    # Exact in the sense in which doubles are written and read: the shortest text of the double is this
    # number.
    if not math.isfinite(value) or Decimal(repr(value)) != Decimal(text):
        raise MessageInvalid("a fraction in the headers is not exact as a 64-bit double")
    return value


def _refuse_constant(text: str) -> float:
    raise MessageInvalid(f"{text} in the headers is not JSON")


def field(value: Any, name: str) -> bytes:
    """A typed field value (AMQP 0-9-1, 4.2.5.5, with RabbitMQ's letters)."""
    match value:
        case str():
            return b"S" + long(utf8(name, value))
        case bool():  # before int, of which it is a subclass
            return b"t" + U8[value]
        case int():
            return b"l" + I64(value)
        case float():
            return b"d" + _F64(value)
        case None:
            return b"V"
        case list():
            return b"A" + long(b"".join(field(each, name) for each in value))
        case dict():
            return b"F" + long(
                b"".join(short("a header's name", key) + field(each, key) for key, each in value.items())
            )
        case _:
            raise AssertionError(f"not a JSON value: {type(value).__name__}")


def short(what: str, text: str) -> bytes:
    """A short string: one octet of length. Raises MessageInvalid above 255 bytes."""
    try:
        data = text.encode()
    except UnicodeEncodeError:
        data = utf8(what, text)
    if len(data) > 255:
        raise MessageInvalid(f"{what} has {len(data)} bytes, AMQP allows 255")
    return U8[len(data)] + data


def long(data: bytes) -> bytes:
    return U32(len(data)) + data


def utf8(what: str, text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise MessageInvalid(f"{what} is not Unicode text: {error}") from error
