"""What waits in the outbox, as far as the broker is concerned: where a sample of it goes, how large the largest is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from relay.choices import Envelope
from relay.database import fill, sql_file
from relay.errors import DatabaseRefused, MessageInvalid
from relay.message import PayloadType, Row
from relay.preflight.queries import fetch, fetch_one, is_too_slow
from relay.route import Router

if TYPE_CHECKING:
    from relay.database import Connection

ROWS_OF_A_SHARD: Final = 16
"""About a thousand rows of all 64 shards: routes repeat long before that."""

TEXT_BYTES_MAX: Final = 128 * 1024 * 1024
"""So long a text is measured as the JSON string that it becomes; what is longer is reckoned."""

ENVELOPE_BYTES_MAX: Final = 1024
"""An envelope's own words, numbers and times (about 400 bytes), and CloudEvents' `source` where that is the table's name."""

_ENVELOPED: Final = (
    *("id", "event_type", "aggregate_type", "aggregate_id", "aggregate_id", "correlation_id", "causation_id"),
    *("content_type", "content_encoding", "traceparent", "tracestate"),
    # Percent-encoded in CloudEvents' `source`: three bytes for one.
    *("producer", "producer", "producer"),
)
"""The columns whose texts an envelope repeats, as often as it may."""

_RARE: Final = ("exchange", "routing_key", "producer", "correlation_id", "causation_id", "mandatory")


@dataclass(frozen=True, slots=True)
class Route:
    """Where rows go. `needs_queue`: none of them said that no queue is fine, or one said that it is not."""

    exchange: str
    routing_key: str
    needs_queue: bool


@dataclass(frozen=True, slots=True)
class Pending:
    """`routes` are those of `rows` sampled rows, `unroutable` the first reason why one of them has none. `largest_bytes` is
    that of a body, under an envelope at most so much, and None where nobody could look in time."""

    rows: int
    routes: frozenset[Route]
    unroutable: str | None
    largest_bytes: int | None


async def read(
    connection: Connection,
    names: Mapping[str, str],
    payload_type: PayloadType,
    router: Router,
    envelope: Envelope,
    *,
    drops: bool,
) -> Pending:
    """Look at the outbox; `drops`: a row that says nothing about it needs no queue. Raises DatabaseLost, DatabaseRefused."""
    records = await fetch(connection, fill(sql_file("queries/preflight_pending.sql"), names), ROWS_OF_A_SHARD)
    routes: set[Route] = set()
    unroutable: str | None = None
    for record in records:
        try:
            exchange, routing_key = router.route(_row(record))
        except MessageInvalid as error:
            unroutable = unroutable or error.message
            continue
        mandatory = record["mandatory"]
        routes.add(Route(exchange, routing_key, not drops if mandatory is None else mandatory))
    largest_bytes = await _largest(connection, names, payload_type, envelope)
    return Pending(len(records), frozenset(routes), unroutable, largest_bytes)


async def _largest(
    connection: Connection, names: Mapping[str, str], payload_type: PayloadType, envelope: Envelope
) -> int | None:
    text = fill(sql_file("queries/preflight_largest.sql"), {**names, "size": size_sql(payload_type, envelope)})
    try:
        return int((await fetch_one(connection, text))["largest_bytes"])
    except DatabaseRefused as refused:
        if not is_too_slow(refused):
            raise
        return None


def size_sql(payload_type: PayloadType, envelope: Envelope) -> str:
    """How many bytes the body of a row `o` has; under an envelope (`relay.envelope`) at most, and not many more."""
    stored = "octet_length(o.payload)" if payload_type is PayloadType.BYTEA else "octet_length(o.payload::text)"
    if envelope is Envelope.NONE:
        return stored
    match payload_type:
        case PayloadType.JSON | PayloadType.JSONB:
            data = stored
        case PayloadType.BYTEA:
            data = f"4 * (({stored}::bigint + 2) / 3)"
        case PayloadType.TEXT:
            # PostgreSQL makes nothing above 1 GB, and a byte may become six.
            is_short = f"{stored} < {TEXT_BYTES_MAX}"
            data = f"CASE WHEN {is_short} THEN octet_length(to_json(o.payload)::text) ELSE 6 * {stored}::bigint END"
    columns = ", ".join(f"o.{column}" for column in _ENVELOPED)
    return f"coalesce({data}, 0) + octet_length(to_json(concat({columns}))::text) + {ENVELOPE_BYTES_MAX}"


def _row(record: Mapping[str, Any]) -> Row:
    rare = {name: record[name] for name in _RARE if record[name] is not None}
    if record["schema_version"] not in (None, 1):
        rare["schema_version"] = record["schema_version"]
    return Row(
        record["shard"],
        record["seq"],
        record["id"],
        record["event_type"],
        aggregate_type=record["aggregate_type"],
        aggregate_id=record["aggregate_id"],
        rare=rare or None,
    )
