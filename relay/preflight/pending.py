"""What waits in the outbox, as far as the broker is concerned: where a sample of it goes, how large the largest is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from relay.database import fill, sql_file
from relay.errors import DatabaseRefused, MessageInvalid
from relay.message import PayloadType, Row
from relay.preflight.queries import fetch, fetch_one, is_too_slow
from relay.route import Router

if TYPE_CHECKING:
    from relay.database import Connection

ROWS_OF_A_SHARD: Final = 16
"""About a thousand rows of all 64 shards: routes repeat long before that."""

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
    None where nobody could look in time."""

    rows: int
    routes: frozenset[Route]
    unroutable: str | None
    largest_bytes: int | None


async def read(
    connection: Connection, names: Mapping[str, str], payload_type: PayloadType, router: Router, *, drops: bool
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
    return Pending(len(records), frozenset(routes), unroutable, await _largest(connection, names, payload_type))


async def _largest(connection: Connection, names: Mapping[str, str], payload_type: PayloadType) -> int | None:
    size = "octet_length(o.payload)" if payload_type is PayloadType.BYTEA else "octet_length(o.payload::text)"
    text = fill(sql_file("queries/preflight_largest.sql"), {**names, "size": size})
    try:
        return int((await fetch_one(connection, text))["largest_bytes"])
    except DatabaseRefused as refused:
        if not is_too_slow(refused):
            raise
        return None


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
