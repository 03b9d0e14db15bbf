"""The copy of a failed message: its headers, its properties, where it goes. Pure.

Kept: the id, the body, every property and header of the original. Not kept: `expiration` (the retry queue has a TTL of
its own, and a deadline counted from a copy would be another deadline), and what would change the copy's fate: headers
that the broker writes, `CC` and `BCC`, which would route it to more queues, and `user_id`, which the broker compares
with the connection's user. The last three stay readable under `x-original-…`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from aiormq import spec

from relay.inbox.message import original_route
from relay.inbox.outcome import Failure, Park, Retry
from relay.properties import ExactProperties, copied
from relay.topology import names

_ROUTING_HEADERS: Final = {"CC": "x-original-cc", "BCC": "x-original-bcc"}


@dataclass(frozen=True, slots=True)
class Copy:
    """What is published instead of the original."""

    exchange: str
    routing_key: str
    body: bytes
    properties: ExactProperties


@dataclass(frozen=True, slots=True)
class Origin:
    """The delivery that is copied, and who failed on it. `attempt` counts the retries so far, those in place too.

    `failed_at` is when this delivery failed first, ISO 8601 in UTC.
    """

    queue: str
    exchange: str
    routing_key: str
    body: bytes
    properties: spec.Basic.Properties
    consumer: str
    consumer_version: str
    attempt: int
    failed_at: str


def retry_copy(origin: Origin, retry: Retry, failure: Failure) -> Copy:
    """Waits in the queue of its delay and comes back to the queue that it was consumed from."""
    headers = _headers(origin, failure, failure.text)
    headers[names.RETRY_ATTEMPT] = retry.attempt
    return Copy(
        names.DEFAULT_EXCHANGE,
        names.retry_queue(origin.queue, retry.delay_s),
        origin.body,
        _properties(origin, headers),
    )


def parked_copy(origin: Origin, park: Park, failure: Failure, exchange: str, parking_queue: str) -> Copy:
    """Waits for an operator, with everything that is needed to judge it."""
    headers = _headers(origin, failure, park.text)
    headers[names.CONSUMER] = origin.consumer
    headers[names.CONSUMER_VERSION] = origin.consumer_version
    return Copy(exchange, parking_queue, origin.body, _properties(origin, headers))


def _headers(origin: Origin, failure: Failure, text: str) -> dict[str, Any]:
    original: Mapping[str, Any] = origin.properties.headers or {}
    headers: dict[str, Any] = {
        _ROUTING_HEADERS.get(name, name): value for name, value in original.items() if not names.is_brokers_own(name)
    }
    exchange, routing_key = original_route(original, origin.exchange, origin.routing_key)
    headers[names.ORIGINAL_EXCHANGE] = exchange
    headers[names.ORIGINAL_ROUTING_KEY] = routing_key
    headers.setdefault(names.FIRST_FAILURE, origin.failed_at)
    headers[names.LAST_ERROR] = text
    headers[names.ERROR_CLASS] = failure.error_class.value
    headers[names.RETRY_ATTEMPT] = origin.attempt
    if origin.properties.user_id:
        headers[names.ORIGINAL_USER_ID] = origin.properties.user_id
    return headers


def _properties(origin: Origin, headers: dict[str, Any]) -> ExactProperties:
    return copied(origin.properties, headers, expiration=None, user_id=None, delivery_mode=2)
