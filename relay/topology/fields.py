"""The keys of a topology file: for each kind of table one row a key, how its value is read, and what is allowed in words.

Pure. `relay/topology/file.py` reads by these tables, and every error names what is allowed from them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from relay import values
from relay.topology.description import ExchangeType, Hash, Overflow, QueueType, Strategy

BROKER: Final = "broker"
"""`retry = "broker"`: no retry queues, RabbitMQ delays by itself."""

POLICY_PRIORITY: Final = 10
"""Above a policy for all queues, which by default has priority 0."""

SHARDS_MAX: Final = 256

DURATION: Final = "a duration: 250ms 5s 2m 1h 7d"
_NAME: Final = "a name of up to 255 bytes that does not begin with amq."
_COUNT: Final = "a whole number, 1 or more"


@dataclass(frozen=True, slots=True)
class Field:
    """One key: how its value is read (ValueError where it cannot be), and what is allowed, in words."""

    key: str
    parse: Callable[[Any], Any]
    allowed: str
    default: Any = None
    is_required: bool = False


# ---------------------------------------------------------------- values


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("not a text")
    return values.short_string(value)


def name(value: Any) -> str:
    """Of an exchange or queue that may be declared."""
    text = _text(value)
    if not text:
        raise ValueError("empty")
    if text.startswith("amq."):
        raise ValueError("reserved for RabbitMQ itself")
    return text


def _name_or_none(value: Any) -> str:
    return value if value == "" else name(value)


def some_text(value: Any) -> str:
    """Not empty, and an AMQP short string."""
    if not (text := _text(value)):
        raise ValueError("empty")
    return text


def _whole(minimum: int, maximum: int) -> Callable[[Any], int]:
    def parse(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError("not a whole number")
        if not minimum <= value <= maximum:
            raise ValueError("too small" if value < minimum else "too large")
        return value

    return parse


def _duration(value: Any) -> float:
    if not isinstance(value, str):
        raise ValueError("not a duration")
    seconds = values.duration_between(0.001, values.DURATION_S_MAX / 10)(value)
    return round(seconds, 3)


def _bytes(value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return _whole(1, 2**50)(value)
    if not isinstance(value, str):
        raise ValueError("not a size")
    return values.size(value)


def _switch(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("not true or false")
    return value


def _choice(members: type[values.E]) -> Callable[[Any], values.E]:
    def parse(value: Any) -> values.E:
        if value not in tuple(members):
            raise ValueError("unknown")
        return members(value)

    return parse


def _retry(value: Any) -> tuple[float, ...] | str:
    if value == BROKER:
        return BROKER
    if not isinstance(value, list) or len(value) > 32:
        raise ValueError("not a ladder")
    return tuple(_duration(delay) for delay in value)


def _arguments(value: Any) -> tuple[tuple[str, str | int | bool], ...]:
    if not isinstance(value, dict) or not all(isinstance(item, str | int) for item in value.values()):
        raise ValueError("not a table of texts, whole numbers and booleans")
    if not all(-(2**63) <= item < 2**63 for item in value.values() if isinstance(item, int)):
        raise ValueError("a number of more than 64 bits")
    return tuple(sorted(value.items()))


def _tables(value: Any) -> Any:
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ValueError("not an array of tables")
    return value


def _table(value: Any) -> Any:
    if not isinstance(value, dict):
        raise ValueError("not a table")
    return value


# ---------------------------------------------------------------- fields

TOP: Final = (
    Field("vhost", some_text, "a vhost's name", "/"),
    Field("policy_priority", _whole(-1000, 1000), "a whole number from -1000 to 1000", POLICY_PRIORITY),
    Field("exchange", _tables, "[[exchange]] tables", []),
    Field("queue", _tables, "[[queue]] tables", []),
)

EXCHANGE: Final = (
    Field("name", name, _NAME, is_required=True),
    Field("type", _choice(ExchangeType), ", ".join(ExchangeType), ExchangeType.TOPIC),
)

QUEUE: Final = (
    Field("name", name, _NAME, is_required=True),
    Field("type", _choice(QueueType), ", ".join(QueueType), QueueType.QUORUM),
    Field("bind", _tables, 'an array of tables: [{ exchange = "orders", key = "order.*" }]', []),
    Field("single_active_consumer", _switch, "true or false"),
    Field("shards", _whole(2, SHARDS_MAX), f"a whole number from 2 to {SHARDS_MAX}"),
    Field("hash", _choice(Hash), ", ".join(Hash)),
    Field("shard_by", some_text, "a header's name, or routing_key, message_id, correlation_id"),
    Field("retry", _retry, f'up to 32 durations, ["5s", "30s", "5m"], or "{BROKER}"', ()),
    Field("retry_min", _duration, DURATION),
    Field("retry_max", _duration, DURATION),
    Field("dead_letter", _name_or_none, 'an exchange\'s name; "" for none'),
    Field("parking", _table, "a table: [queue.parking]"),
    Field("strategy", _choice(Strategy), ", ".join(Strategy)),
    Field("overflow", _choice(Overflow), ", ".join(Overflow), Overflow.REJECT_PUBLISH),
    Field("delivery_limit", _whole(0, 2**31 - 1), "a whole number, 0 or more"),
    Field("max_length", _whole(1, 2**50), _COUNT),
    Field("max_bytes", _bytes, "a size: 64KiB 1MiB 2GiB, or bytes"),
)

BIND: Final = (
    Field(
        "exchange", some_text, "the name of an [[exchange]], or one of RabbitMQ's own (amq.topic …)", is_required=True
    ),
    Field("key", _text, "a routing key of up to 255 bytes", ""),
    Field("arguments", _arguments, "a table of texts, whole numbers and booleans", ()),
)

PARKING: Final = (
    Field("name", name, _NAME),
    Field("retention", _duration, DURATION),
    Field("user", some_text, "an existing user's name"),
    Field("max_length", _whole(1, 2**50), _COUNT),
    Field("max_bytes", _bytes, "a size: 64KiB 1MiB 2GiB, or bytes"),
)
