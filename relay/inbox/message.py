"""A message as a handler sees it. Pure: what the broker delivered, read by the names of the message's contract.

Reading is lazy: a handler pays for what it asks for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import orjson
from aiormq import spec

from relay.inbox.outcome import ErrorClass, Permanent
from relay.topology import names


@dataclass(frozen=True, slots=True)
class Message:
    """One delivery. `id` names the fact and is the same for every copy and retry of it.

    `consumer` is who handles it. `exchange` and `routing_key` are those of the first delivery, also after retries.
    `attempt` counts the retries before this delivery: 0 the first time. `is_redelivered` is a hint, never proof.
    """

    id: str
    body: bytes
    consumer: str
    exchange: str
    routing_key: str
    attempt: int
    is_redelivered: bool
    headers: Mapping[str, Any] = field(repr=False)
    properties: spec.Basic.Properties = field(repr=False)

    @property
    def type(self) -> str:
        """The event's type; empty where the message has none."""
        return self.properties.message_type or ""

    @property
    def schema_version(self) -> int:
        """The version of the event's schema, 1 where the message does not say. Raises Permanent."""
        version = self._integer("schema_version")
        return 1 if version is None else version

    @property
    def occurred_at(self) -> datetime | None:
        """When the fact happened: the header with microseconds, else the timestamp in seconds."""
        text = self.headers.get("occurred_at")
        if isinstance(text, str):
            try:
                moment = datetime.fromisoformat(text)
            except ValueError:
                moment = None
            if moment is not None:
                return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
        return self.properties.timestamp

    @property
    def producer(self) -> str | None:
        """Who published the fact (`app_id`)."""
        return self.properties.app_id

    @property
    def correlation_id(self) -> str | None:
        """The business process that it belongs to."""
        return self.properties.correlation_id

    @property
    def causation_id(self) -> str | None:
        """The message or command that caused it."""
        return self._text("causation_id")

    @property
    def aggregate_type(self) -> str | None:
        """With `aggregate_id` the ordering key."""
        return self._text("aggregate_type")

    @property
    def aggregate_id(self) -> str | None:
        """None: the message has no order."""
        return self._text("aggregate_id")

    @property
    def aggregate_version(self) -> int | None:
        """Counts a key's events from 1. Raises Permanent where the header is no integer."""
        return self._integer("aggregate_version")

    @property
    def traceparent(self) -> str | None:
        """W3C trace context."""
        return self._text("traceparent")

    @property
    def tracestate(self) -> str | None:
        """W3C trace context."""
        return self._text("tracestate")

    def json(self) -> Any:
        """The body as JSON. Raises Permanent when it is none: no retry would mend it."""
        try:
            return orjson.loads(self.body)
        except orjson.JSONDecodeError as error:
            raise Permanent(f"the body is not JSON: {error}", error_class=ErrorClass.MALFORMED) from error

    def _text(self, header: str) -> str | None:
        value = self.headers.get(header)
        return None if value is None else str(value)

    def _integer(self, header: str) -> int | None:
        value = self.headers.get(header)
        if value is None or (isinstance(value, int) and not isinstance(value, bool)):
            return value
        raise Permanent(f"the header {header} is no integer", error_class=ErrorClass.MALFORMED)


def read(
    *,
    consumer: str,
    body: bytes,
    properties: spec.Basic.Properties,
    exchange: str,
    routing_key: str,
    is_redelivered: bool,
    counts_returns: bool = False,
) -> Message:
    """The message of one delivery; `counts_returns` where the queue counts the retries. Raises Permanent when it has no
    id: nobody could tell its copies apart.
    """
    message_id = properties.message_id
    headers = properties.headers or {}
    if not message_id:
        raise Permanent("the message has no id", error_class=ErrorClass.MALFORMED)
    if "\0" in message_id:
        raise Permanent("the message's id has a zero byte", error_class=ErrorClass.MALFORMED)
    if names.RETRY_ATTEMPT not in headers and not counts_returns:
        return Message(message_id, body, consumer, exchange, routing_key, 0, is_redelivered, headers, properties)
    return Message(
        message_id,
        body,
        consumer,
        *original_route(headers, exchange, routing_key),
        attempts_so_far(headers, counts_returns=counts_returns),
        is_redelivered,
        headers,
        properties,
    )


def attempts_so_far(headers: Mapping[str, Any], *, counts_returns: bool = False) -> int:
    """How often a message was retried: by its copies, and by its queue where that counts."""
    copies = _count(headers, names.RETRY_ATTEMPT)
    return copies + _count(headers, names.DELIVERY_COUNT) if counts_returns else copies


def _count(headers: Mapping[str, Any], header: str) -> int:
    """A value that makes no sense counts as 0."""
    value = headers.get(header)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def original_route(headers: Mapping[str, Any], exchange: str, routing_key: str) -> tuple[str, str]:
    """Exchange and routing key of the first delivery: what a copy kept, else those of this one."""
    kept = headers.get(names.ORIGINAL_EXCHANGE), headers.get(names.ORIGINAL_ROUTING_KEY)
    if isinstance(kept[0], str) and isinstance(kept[1], str):
        return kept[0], kept[1]
    return exchange, routing_key
