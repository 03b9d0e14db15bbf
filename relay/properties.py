"""A received message's properties, to be published again exactly as they came.

The driver reads every type of AMQP but writes fractions with 32 bits, cuts header names off after 128 bytes and
refuses what is not UTF-8; a copy would differ from its original without a word. Here headers are written by value:
a fraction as a 64-bit double (which holds a 32-bit one exactly), an integer as 64 bits.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from datetime import datetime
from decimal import Decimal
from typing import Any, Final

from aiormq import spec

_U32: Final = struct.Struct(">I").pack
_I64: Final = struct.Struct(">q").pack
_U64: Final = struct.Struct(">Q").pack
_F64: Final = struct.Struct(">d").pack
_DECIMAL: Final = struct.Struct(">Bi").pack

NAMES: Final = tuple(spec.Basic.Properties.__slots__)
"""Every property's name as the driver has it: `message_type` is AMQP's `type`."""


class ExactProperties(spec.Basic.Properties):
    """Properties whose headers are written as above. (No `__slots__`: the driver reads those of its own class.)"""

    def encode_property(self, name: str, value: Any) -> bytes:
        """Called by the driver for each property. Raises TypeError or ValueError for what AMQP cannot carry."""
        return table(value) if name == "headers" else super().encode_property(name, value)


def copied(original: spec.Basic.Properties, headers: Mapping[str, Any], **changes: Any) -> ExactProperties:
    """The properties of `original` with other headers, and with `changes` by property (None leaves one out)."""
    kept = {name: getattr(original, name) for name in NAMES if name not in ("headers", "cluster_id")}
    return ExactProperties(**{**kept, **changes}, headers=dict(headers))


def table(value: Mapping[str, Any]) -> bytes:
    """A field table (AMQP 0-9-1, 4.2.5.5). Raises TypeError, ValueError, OverflowError."""
    parts = []
    for name, each in value.items():
        encoded = name.encode()
        if len(encoded) > 255:
            raise ValueError(f"a header's name has {len(encoded)} bytes, AMQP allows 255")
        parts.append(bytes((len(encoded),)) + encoded + _field(each))
    return _long(b"".join(parts))


def _field(value: Any) -> bytes:
    match value:
        case str():
            return b"S" + _long(value.encode())
        case bool():  # before int, of which it is a subclass
            return b"t" + bytes((value,))
        case int():
            return _integer(value)
        case float():
            return b"d" + _F64(value)
        case None:
            return b"V"
        case Decimal():
            return b"D" + _decimal(value)
        case datetime():
            return b"T" + _U64(int(value.timestamp()))
        case bytearray():
            return b"x" + _long(bytes(value))
        case bytes():
            # A long string that is not UTF-8.
            return b"S" + _long(value)
        case list():
            return b"A" + _long(b"".join(_field(each) for each in value))
        case dict():
            return b"F" + table(value)
        case _:
            raise TypeError(f"AMQP has no type for {type(value).__name__}")


def _integer(value: int) -> bytes:
    try:
        return b"l" + _I64(value)
    except struct.error:
        raise OverflowError(f"the integer {value} is beyond 64 bits") from None


def _decimal(value: Decimal) -> bytes:
    exponent = value.as_tuple().exponent
    if not isinstance(exponent, int) or not -255 <= exponent <= 0:
        raise ValueError("a decimal that AMQP cannot carry")
    try:
        return _DECIMAL(-exponent, int(value.scaleb(-exponent)))
    except struct.error:
        raise OverflowError("a decimal beyond 32 bits") from None


def _long(data: bytes) -> bytes:
    return _U32(len(data)) + data
