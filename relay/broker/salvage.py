"""What can be read of a content header that pamqp cannot decode: property by property, header by header. Pure.

Only ever asked for such a one. RabbitMQ reads the shape of what is published and refuses a broken one, so the parts have an
end, whatever stands in them (AMQP 0-9-1, 4.2.5 and 4.2.6; tried on 3.10).
"""

from __future__ import annotations

from struct import Struct, error
from typing import Any, Final

from aiormq import spec
from pamqp import decode
from pamqp.header import ContentHeader

_HEAD: Final = Struct(">HHQH").unpack_from
_U32: Final = Struct(">I").unpack_from

_SIZES: Final = {"octet": 1, "timestamp": 8}
_FIELD_SIZES: Final = {
    **dict.fromkeys(b"V\0", 0),
    **dict.fromkeys(b"tbB", 1),
    **dict.fromkeys(b"su", 2),
    **dict.fromkeys(b"Iif", 4),
    ord("D"): 5,
    **dict.fromkeys(b"lLdT", 8),
    **dict.fromkeys(b"SxAF", None),
}
"""Of values by their type; None: they begin with their length, in 32 bits."""

_SHAPELESS: Final = (IndexError, KeyError, error)
"""Where the data ends too early, or names a type that there is not."""

_AMQP_NAMES: Final = {"message_type": "type"}
"""Where the driver has another one."""

_SHOWN_BYTES_MAX: Final = 60


def text_of(data: bytes) -> str:
    """Bytes for people, cut."""
    return repr(data[:_SHOWN_BYTES_MAX]) + ("…" if len(data) > _SHOWN_BYTES_MAX else "")


def salvaged(payload: bytes) -> tuple[ContentHeader, list[str]]:
    """A content header with all that can be decoded, and what cannot: each with its bytes and the reason."""
    class_id, weight, body_size, flags = _HEAD(payload)
    properties, faults = spec.Basic.Properties(), list[str]()
    try:
        _read_properties(properties, flags, payload, faults)
    except _SHAPELESS:
        faults.append("the properties end too early")
    header = ContentHeader(weight, body_size, properties)
    header.class_id = class_id
    return header, faults


def _read_properties(properties: spec.Basic.Properties, flags: int, data: bytes, faults: list[str]) -> None:
    at = 14
    for name, flag in properties.flags.items():
        if not flags & flag:
            continue
        kind = properties.amqp_type(name)
        end = at + _property_size(kind, data, at)
        value = data[at:end]
        if kind == "table":
            properties.headers = _read_table(value[4:], faults)
        else:
            try:
                setattr(properties, name, decode.by_type(value, kind)[1])
            except Exception as failure:  # noqa: BLE001 - as in `Deliveries`
                faults.append(f"{_AMQP_NAMES.get(name, name)} {_shown(kind, value)}: {_reason(failure)}")
        at = end


def _read_table(data: bytes, faults: list[str]) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    at = 0
    try:
        while at < len(data):
            value_at = at + 1 + data[at]
            end = value_at + 1 + _field_size(data, value_at)
            name, value = data[at + 1 : value_at], data[value_at:end]
            try:
                kept[name.decode()] = decode.embedded_value(value)[1]
            except Exception as failure:  # noqa: BLE001 - as in `Deliveries`
                faults.append(f"header {text_of(name)} {text_of(value)}: {_reason(failure)}")
            at = end
    except _SHAPELESS:
        faults.append(f"the headers from {text_of(data[at:])} on")
    return kept


def _property_size(kind: str, data: bytes, at: int) -> int:
    match kind:
        case "shortstr":
            return 1 + data[at]
        case "table":
            return 4 + int(_U32(data, at)[0])
        case _:
            return _SIZES[kind]


def _field_size(data: bytes, at: int) -> int:
    """Of the value behind the type at `at`."""
    size = _FIELD_SIZES[data[at]]
    return 4 + int(_U32(data, at + 1)[0]) if size is None else size


def _shown(kind: str, data: bytes) -> str:
    return str(int.from_bytes(data)) if kind == "timestamp" else text_of(data[1:])


def _reason(failure: Exception) -> str:
    match failure:
        case UnicodeDecodeError():
            return "not UTF-8"
        case RecursionError():
            return "nested too deeply"
        case _:
            return str(failure)
