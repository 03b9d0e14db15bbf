"""The engine's settings, as the decisions need them (docs/configuration.md, in base units)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Ordering(StrEnum):
    """`RELAY_ORDERING`: when a key's next message goes out."""

    STRICT = "strict"
    PIPELINED = "pipelined"
    NONE = "none"


class Unroutable(StrEnum):
    """`RELAY_UNROUTABLE`: what becomes of a message that reaches no queue."""

    RETRY = "retry"
    PARK = "park"
    DROP = "drop"


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Durations in seconds, sizes in bytes."""

    ordering: Ordering = Ordering.STRICT
    on_unroutable: Unroutable = Unroutable.RETRY
    holds_when_parked: bool = True
    read_ahead_max: int = 4000
    page_span: int = 100_000
    """Seqs that a page covers at first (R2): 50 MB of table, a tenth of a second where all of them are sent."""
    held_keys_max: int = 4096
    """Held keys remembered a shard (H2)."""
    in_flight_max: int = 2000
    bytes_max: int = 64 * 1024 * 1024
    lease_s: float = 5.0
    rate_max: float | None = None
    """Messages a second."""
    retry_delays_s: Sequence[float] = (1.0, 5.0, 30.0, 300.0)
    age_max_s: float | None = None
    retention_s: float = 7 * 86400.0
    marks_sent: bool = True
    """False: sent rows are deleted."""
    parked_retention_s: float | None = None
    """Age, since it was parked, at which a parked row is discarded; none: never."""
    confirm_timeout_s: float = 30.0
    poll_interval_s: float = 0.5
