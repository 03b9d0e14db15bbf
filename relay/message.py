"""An outbox row, as the relay holds it in memory.

Owns: the row's columns as read (`Row`) and the few fields in which the engine keeps the row's
progress. Does not know where rows come from or which broker takes them.
"""

from __future__ import annotations

import math
from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from relay.core.chain import Chain

Ctid = str
"""A heap address as PostgreSQL writes it, "(block,offset)"; a hint only, a row's identity is `seq` and `id`."""

Key = tuple[str, str]
"""The ordering key: (aggregate_type or "", aggregate_id)."""


TEXTS_MAX: Final = 1024 * 1024
"""Bytes of a row's headers and rarer columns, as JSON text, that are read at all. A message has them in one frame, 128 KiB
by default, and of JSON at most six bytes become one there (an escaped control character)."""

TEXTS_UNREAD: Final = " bytes"
"""Behind a number, in the place of headers that were not read: no JSON text ends so."""


class Aside(StrEnum):
    """Why a row is out of the reading index (column `aside`; null for ordinary rows)."""

    DEFERRED = "deferred"
    SCHEDULED = "scheduled"
    HELD = "held"
    PARKED = "parked"


class State(IntEnum):
    """A row's place in the relay's memory. The transitions stand in `core/chains.py`."""

    WAITING = 0
    """Behind a lower row of its key."""
    READY = 1
    """May be published now."""
    IN_FLIGHT = 2
    """Published, no outcome yet."""
    BACKOFF = 3
    """Nacked; ready again after a delay."""
    SETTLING = 4
    """Its decision (sent, deferred, parked, held, scheduled) is being written."""
    TESTING = 5
    """May have a blocker: being tested under the shard's lock (H2)."""
    FORGOTTEN = 6
    """No longer this relay's row. In flight at that moment, it is an orphan (P3)."""

    @property
    def is_committed(self) -> bool:
        """Published or decided: a drain waits for it."""
        return self is State.IN_FLIGHT or self is State.SETTLING


class Row:
    """One row of the outbox.

    Times are seconds since the epoch by the database's clock, with microseconds (a float holds
    them exactly until 2255); an infinite time is `inf`, and `nan` says that the row has none. `payload` is the body exactly as stored,
    `None` for SQL NULL or while `is_loaded` is false (of a large row, body and headers are fetched
    only when it is about to go). `size` is what these and `rare` have together, in bytes. `rare`
    holds the columns that are seldom set, by name, only where set: aggregate_version, schema_version
    (when not 1), content_type, content_encoding, exchange, routing_key, correlation_id, causation_id,
    producer, traceparent, tracestate, priority, mandatory, expires_at, available_at (both as
    epoch seconds); before a large row is loaded it may be short of all but the last. `headers` is the
    JSON text of the row's headers, `None` when there are none; or what ends in `TEXTS_UNREAD`.
    Shard, seq, id and type are always given, except by `relay/rows.py`, which fills in a blank row.
    """

    __slots__ = (
        "aggregate_id",
        "aggregate_type",
        "aside",
        "attempts",
        "chain",
        "created_at",
        "ctid",
        "event_type",
        "headers",
        "id",
        "is_loaded",
        "key",
        "nacks",
        "occurred_at",
        "payload",
        "published_at",
        "rare",
        "seq",
        "shard",
        "size",
        "state",
    )

    def __init__(
        self,
        shard: int = 0,
        seq: int = 0,
        id: str = "",
        event_type: str = "",
        *,
        ctid: Ctid | None = None,
        aggregate_type: str | None = None,
        aggregate_id: str | None = None,
        payload: bytes | None = None,
        size: int = 0,
        is_loaded: bool = True,
        occurred_at: float = 0.0,
        created_at: float = 0.0,
        rare: dict[str, Any] | None = None,
        headers: str | None = None,
        aside: Aside | None = None,
        attempts: int = 0,
    ) -> None:
        self.shard = shard
        self.seq = seq
        self.id = id
        self.event_type = event_type
        self.ctid = ctid
        self.aggregate_type = aggregate_type
        self.aggregate_id = aggregate_id
        self.payload = payload
        self.size = size
        self.is_loaded = is_loaded
        self.occurred_at = occurred_at
        self.created_at = created_at
        self.rare = rare
        self.headers = headers
        self.aside = aside
        self.attempts = attempts
        self.key: Key | None = None if aggregate_id is None else (aggregate_type or "", aggregate_id)
        # The engine's own bookkeeping.
        self.state = State.WAITING
        self.chain: Chain | None = None
        """The chain of its key in which it stands (`core/chains.py`)."""
        self.nacks = 0
        self.published_at = 0.0
        """Boot-time seconds of the publish that is in flight."""

    def __repr__(self) -> str:
        return f"Row(seq={self.seq}, id={self.id!r}, shard={self.shard}, {self.state.name})"


def due_since(row: Row) -> float:
    """From when the row's delivery and its age are counted: it was created, and it might go. `nan`: it has no time."""
    created_at = row.created_at
    available_at: float = created_at if row.rare is None else row.rare.get("available_at", created_at)
    return available_at if math.isnan(created_at) else max(created_at, available_at)


class PayloadType(StrEnum):
    """The payload column's type, chosen at `migrate --payload`."""

    JSON = "json"
    JSONB = "jsonb"
    TEXT = "text"
    BYTEA = "bytea"


DEFAULT_CONTENT_TYPE: Final = {
    PayloadType.JSON: "application/json",
    PayloadType.JSONB: "application/json",
    PayloadType.TEXT: "text/plain",
    PayloadType.BYTEA: "application/octet-stream",
}
