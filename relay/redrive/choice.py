"""Which messages of a queue go back to work, where to, and as what copy.

Pure. Invariants: the id, the body and every property stay; the copy counts its passes (`x-redrive-count`) and names the run
that made it (`x-redrive-run`), so that no run takes a message twice. What RabbitMQ wrote into the headers stays behind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from aiormq import spec

from relay.properties import NAMES, ExactProperties, copied
from relay.topology import names

_PROPERTIES: Final = {**{name: name for name in NAMES}, "type": "message_type"}
"""AMQP's names to the driver's."""

ROUTING_HEADERS: Final = ("CC", "BCC")
"""RabbitMQ takes these for further routing keys; a redriven message has the one route that was said."""


@dataclass(frozen=True, slots=True)
class Taken:
    """A message as the queue gave it; `tag` acknowledges it. `fault`: what of it cannot be decoded, so that there can be no
    exact copy; its properties and headers are the rest.
    """

    tag: int
    exchange: str
    routing_key: str
    properties: spec.Basic.Properties
    body: bytes
    fault: str | None = None

    @property
    def id(self) -> str:
        """The message id; empty where it has none."""
        return self.properties.message_id or ""

    @property
    def headers(self) -> Mapping[str, Any]:
        return self.properties.headers or {}


@dataclass(frozen=True, slots=True)
class Route:
    """Where a message goes."""

    exchange: str
    routing_key: str

    def __str__(self) -> str:
        return f"{self.exchange or '(default exchange)'} {self.routing_key}".rstrip()


@dataclass(frozen=True, slots=True)
class Order:
    """What the operator asked for. `where` is (name, value): of one name any value will do, every name must match.

    `exchange` and `routing_key` None: what the message remembers.
    """

    queue: str
    where: tuple[tuple[str, str], ...] = ()
    exchange: str | None = None
    routing_key: str | None = None
    limit: int | None = None
    rate_per_s: float | None = None
    is_dry: bool = False


def matches(taken: Taken, where: Sequence[tuple[str, str]]) -> bool:
    """Whether a message is selected: by headers, and by properties where it has no header of that name."""
    wanted: dict[str, set[str]] = {}
    for name, value in where:
        wanted.setdefault(name, set()).add(value)
    return all(as_text(_value(taken, name)) in values for name, values in wanted.items())


def as_text(value: object) -> str | None:
    """A header's or property's value as an operator writes it; None for none."""
    match value:
        case None:
            return None
        case bool():
            return str(value).lower()
        case bytes() | bytearray():
            return value.decode(errors="replace")
        case datetime():
            return value.isoformat()
        case _:
            return str(value)


def _value(taken: Taken, name: str) -> object:
    if name in taken.headers:
        return taken.headers[name]
    if name in ("exchange", "routing_key"):
        return taken.exchange if name == "exchange" else taken.routing_key
    return getattr(taken.properties, _PROPERTIES[name]) if name in _PROPERTIES else None


def route_of(taken: Taken, order: Order) -> Route | None:
    """Where a message goes: what was ordered, for the rest the route it first had. None: it remembers none."""
    if order.exchange is not None and order.routing_key is not None:
        return Route(order.exchange, order.routing_key)
    first = _first_route(taken.headers)
    if first is None:
        return None
    exchange = first.exchange if order.exchange is None else order.exchange
    return Route(exchange, first.routing_key if order.routing_key is None else order.routing_key)


def _first_route(headers: Mapping[str, Any]) -> Route | None:
    """The consumer's diagnosis, or what RabbitMQ tells of the latest death that was no end of a wait."""
    exchange, routing_key = headers.get(names.ORIGINAL_EXCHANGE), headers.get(names.ORIGINAL_ROUTING_KEY)
    if isinstance(exchange, str) and isinstance(routing_key, str):
        return Route(exchange, routing_key)
    deaths = headers.get("x-death")
    for death in deaths if isinstance(deaths, list) else ():
        if not isinstance(death, dict) or death.get("reason") == "expired":
            continue
        exchange, keys = death.get("exchange"), death.get("routing-keys")
        if isinstance(exchange, str) and isinstance(keys, list) and keys and isinstance(keys[0], str):
            return Route(exchange, keys[0])
    return None


def copy_of(taken: Taken, run: str, user: str | None) -> ExactProperties:
    """The properties of the copy. `user` is who publishes it, None where nobody here knows: RabbitMQ takes no other's
    `user_id` from him.
    """
    headers = {
        name: value
        for name, value in taken.headers.items()
        if not names.is_brokers_own(name) and name not in ROUTING_HEADERS
    }
    count = headers.get(names.REDRIVE_COUNT)
    headers[names.REDRIVE_COUNT] = (count if isinstance(count, int) and count > 0 else 0) + 1
    headers[names.REDRIVE_RUN] = run
    if names.RETRY_ATTEMPT in headers or names.ORIGINAL_EXCHANGE in headers:
        headers[names.RETRY_ATTEMPT] = 0
    changes: dict[str, Any] = {}
    if taken.properties.user_id and taken.properties.user_id != user:
        headers[names.ORIGINAL_USER_ID] = taken.properties.user_id
        changes["user_id"] = None
    return copied(taken.properties, headers, **changes)


def was_seen(taken: Taken, run: str) -> bool:
    """Whether this run sent it before: it came back already."""
    return taken.headers.get(names.REDRIVE_RUN) == run
