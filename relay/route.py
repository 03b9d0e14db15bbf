"""Where a message goes: exchange and routing key of a row, from the row's own columns or from templates.

A template is text with `{column}` in it; `{{` and `}}` are braces. A row's own `exchange` or `routing_key`
column wins over the template. A column that is null makes the row's route invalid, never an empty name:
AMQP's empty exchange name is the default exchange, which would deliver to whatever queue bears the routing
key's name.
"""

from __future__ import annotations

from dataclasses import dataclass
from string import Formatter
from typing import Final

from relay.errors import MessageInvalid
from relay.message import Row

FIELDS: Final = (
    "id",
    "aggregate_type",
    "aggregate_id",
    "event_type",
    "schema_version",
    "producer",
    "correlation_id",
    "causation_id",
)
"""The columns that a template may name."""

_ATTRIBUTES: Final = frozenset(("aggregate_type", "aggregate_id", "event_type", "id"))
"""The fields that `Row` holds as attributes; the others are in `Row.rare`."""


@dataclass(frozen=True, slots=True)
class Template:
    """A parsed template: alternating literal text and field names; `fields` are the columns that it reads."""

    text: str
    parts: tuple[tuple[str, str | None], ...]
    fields: frozenset[str]

    @classmethod
    def parse(cls, text: str) -> Template:
        """Raises ValueError, naming what is wrong."""
        try:
            parsed = list(Formatter().parse(text))
        except ValueError:
            raise ValueError("a brace without its partner; a brace itself is written {{ or }}") from None
        for _, field, spec, conversion in parsed:
            if field is not None and (spec or conversion or field not in FIELDS):
                raise ValueError(f"no such field: {{{field}}}")
        parts = tuple((literal, field) for literal, field, _, _ in parsed)
        return cls(text, parts, frozenset(field for _, field in parts if field is not None))

    @property
    def constant(self) -> str | None:
        """The text of a template that names no column, else `None`."""
        return None if self.fields else "".join(literal for literal, _ in self.parts)

    def fill(self, row: Row) -> str:
        """The template over the row. Raises MessageInvalid where a column is null."""
        text = ""
        for literal, field in self.parts:
            text += literal if field is None else literal + self._value(row, field)
        return text

    def _value(self, row: Row, field: str) -> str:
        if field in _ATTRIBUTES:
            value = getattr(row, field)
        elif row.rare is not None and field in row.rare:
            value = row.rare[field]
        else:
            value = 1 if field == "schema_version" else None
        if value is None:
            raise MessageInvalid(f"the template {self.text!r} needs the column {field}, which is null")
        return str(value)


class Router:
    """Routes rows; `fields`: the columns that decide, beside the row's own `exchange`, `routing_key`."""

    __slots__ = ("_exchange", "_routing_key", "constant_exchange", "fields")

    def __init__(self, exchange: str, routing_key: str) -> None:
        """Both are templates. Raises ValueError for one that cannot be, and for an exchange that is always
        empty.
        """
        self._exchange = Template.parse(exchange)
        self._routing_key = Template.parse(routing_key)
        self.constant_exchange = self._exchange.constant
        """The one exchange that rows without a name of their own go to; `None` where the template reads the
        row.
        """
        if self.constant_exchange == "":
            raise ValueError("the exchange is empty, which is AMQP's default exchange; allowed: a name")
        self.fields = self._exchange.fields | self._routing_key.fields

    def route(self, row: Row) -> tuple[str, str]:
        """(exchange, routing key) of the row. Raises MessageInvalid."""
        rare = row.rare
        exchange = rare.get("exchange") if rare else None
        if exchange is None:
            exchange = self.constant_exchange or self._exchange.fill(row)
        if not exchange:
            raise MessageInvalid("the exchange name is empty, which is AMQP's default exchange: name one")
        routing_key = rare.get("routing_key") if rare else None
        if routing_key is None:
            routing_key = self._routing_key.fill(row)
        return exchange, routing_key
