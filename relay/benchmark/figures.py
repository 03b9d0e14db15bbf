"""What was measured, its percentiles, its one-line reading, its words. Pure: no clock, no server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

RELAY_IS_BUSY: Final = 0.85
"""Of a core: an event loop that has this much to do waits for nobody else."""

SESSION_IS_BUSY: Final = 0.7
"""Of the time in which a session of the relay waited for PostgreSQL: reading or settling is what all else waits for."""

RATE_HOLDS: Final = 0.3
TRAVELS: Final = 0.5
"""Share of an answer's time that is its way: above, a faster server would not help."""

ROUND_TRIPS: Final = {("reading", True): 1, ("settling", True): 4, ("reading", False): 4, ("settling", False): 6}
"""Of one read, and of one settlement of sent rows (relay/sessions.py, relay/settling.py), directly or through a proxy: BEGIN, fence,
rows and COMMIT; a direct read is one statement by itself. Through a proxy each statement is asked about before it is run."""

P99_9_VALUES_MIN: Final = 1_000


class Limit(StrEnum):
    """What a drain waited for."""

    BROKER = "broker"
    DATABASE = "database"
    RELAY = "relay"
    NETWORK = "network"


@dataclass(frozen=True, slots=True)
class Drain:
    """A backlog's way out. Times in seconds, summed over the drain; `*_calls` how many they were.

    `rate_s`: how long RELAY_MAX_RATE held publishing back. `database_rtt_s` and `broker_rtt_s`: an empty question's answer.
    `is_direct`: no pooling proxy stands before PostgreSQL.
    """

    rows: int
    seconds: float
    cpu_s: float | None
    read_s: float
    read_calls: int
    settle_s: float
    settle_calls: int
    confirm_s: float
    rate_s: float
    in_flight_max: int
    database_rtt_s: float
    broker_rtt_s: float
    is_direct: bool

    @property
    def messages_per_s(self) -> float:
        return self.rows / self.seconds

    @property
    def confirm_mean_s(self) -> float:
        return self.confirm_s / self.rows


@dataclass(frozen=True, slots=True)
class Trickle:
    """Rows at a steady rate. Latencies in seconds, one a row: to the consumer, from the commit and from when it was due."""

    rate_per_s: float
    seconds: float
    from_commit_s: Sequence[float]
    from_due_s: Sequence[float]
    cpu_s: float | None


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure. `queue` is quorum or classic."""

    rows: int = 20_000
    keys: int = 5_000
    payload_bytes: int = 250
    rate_per_s: int = 200
    seconds: int = 10
    queue: str = "quorum"


@dataclass(frozen=True, slots=True)
class Outcome:
    """Everything; `version` is the relay's."""

    plan: Plan
    version: str
    drain: Drain
    trickle: Trickle


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of the values does not exceed (nearest rank)."""
    assert values, "a percentile of nothing"
    assert 0.0 < share <= 1.0, "a share of all values"
    ordered = sorted(values)
    # In thousandths, so that no rounding of a product moves the rank.
    rank = -(-len(ordered) * round(share * 1000) // 1000)
    return ordered[max(0, rank - 1)]


def percentiles_ms(seconds: Sequence[float]) -> dict[str, float]:
    """p50, p99 and the largest, in milliseconds; p99.9 of a thousand values or more, for of fewer it is the largest."""
    shares = {"p50_ms": 0.5, "p99_ms": 0.99, "p99_9_ms": 0.999, "max_ms": 1.0}
    if len(seconds) < P99_9_VALUES_MIN:
        del shares["p99_9_ms"]
    return {name: round(percentile(seconds, share) * 1e3, 3) for name, share in shares.items()}


def limit_of(drain: Drain) -> tuple[Limit, str]:
    """What the drain waited for most, and the sentence that says why."""
    cpu_share = 0.0 if drain.cpu_s is None else drain.cpu_s / drain.seconds
    if drain.rate_s / drain.seconds >= RATE_HOLDS:
        return Limit.RELAY, f"RELAY_MAX_RATE held publishing back for {drain.rate_s / drain.seconds:.0%} of the time"
    if cpu_share >= RELAY_IS_BUSY:
        return Limit.RELAY, f"the relay's process was busy for {cpu_share:.0%} of the time: its core is the limit"
    read_share, settle_share = drain.read_s / drain.seconds, drain.settle_s / drain.seconds
    if max(read_share, settle_share) >= SESSION_IS_BUSY:
        what, share = ("reading", read_share) if read_share >= settle_share else ("settling", settle_share)
        calls = drain.read_calls if what == "reading" else drain.settle_calls
        mean_s = share * drain.seconds / max(1, calls)
        way_s = ROUND_TRIPS[what, drain.is_direct] * drain.database_rtt_s
        if way_s / mean_s >= TRAVELS:
            return Limit.NETWORK, (
                f"{what} waited for PostgreSQL {share:.0%} of the time, and {_ms(way_s)} of the "
                f"{_ms(mean_s)} a transaction takes are the way there and back"
            )
        return Limit.DATABASE, f"{what} waited for PostgreSQL {share:.0%} of the time, {_ms(mean_s)} a transaction"
    if drain.broker_rtt_s / drain.confirm_mean_s >= TRAVELS:
        return Limit.NETWORK, (
            f"a confirm took {_ms(drain.confirm_mean_s)}, of which {_ms(drain.broker_rtt_s)} are the way to the broker "
            f"and back; a larger RELAY_MAX_IN_FLIGHT ({drain.in_flight_max:,} now) or more keys use it better"
        )
    busy = "" if drain.cpu_s is None else f", while the relay used {cpu_share:.0%} of a core"
    return (
        Limit.BROKER,
        f"a confirm took {_ms(drain.confirm_mean_s)} with up to {drain.in_flight_max:,} in flight{busy}",
    )


def document(outcome: Outcome) -> dict[str, object]:
    """The JSON document; its keys are stable, `p99_9_ms` is there from a thousand rows on."""
    plan, drain, trickle = outcome.plan, outcome.drain, outcome.trickle
    limit, reading = limit_of(drain)
    return {
        "relay_version": outcome.version,
        "payload_bytes": plan.payload_bytes,
        "keys": plan.keys,
        "queue": plan.queue,
        "drain": {
            "rows": drain.rows,
            "seconds": round(drain.seconds, 3),
            "messages_per_s": round(drain.messages_per_s, 1),
            "cpu_us_per_message": _us(drain.cpu_s, drain.rows),
            "confirm_mean_ms": round(drain.confirm_mean_s * 1e3, 3),
            "read_mean_ms": round(drain.read_s / max(1, drain.read_calls) * 1e3, 3),
            "settle_mean_ms": round(drain.settle_s / max(1, drain.settle_calls) * 1e3, 3),
        },
        "trickle": {
            "rows": len(trickle.from_commit_s),
            "rate_per_s": trickle.rate_per_s,
            "commit_to_consumer": percentiles_ms(trickle.from_commit_s),
            "due_to_consumer": percentiles_ms(trickle.from_due_s),
            "cpu_us_per_message": _us(trickle.cpu_s, len(trickle.from_commit_s)),
        },
        "round_trip_ms": {
            "database": round(drain.database_rtt_s * 1e3, 3),
            "broker": round(drain.broker_rtt_s * 1e3, 3),
        },
        "limit": {"by": limit.value, "reading": reading},
    }


def lines(outcome: Outcome) -> list[tuple[str, str]]:
    """Names and values for a terminal."""
    plan, drain, trickle = outcome.plan, outcome.drain, outcome.trickle
    limit, reading = limit_of(drain)
    load = f"{drain.rows:,} rows of {plan.payload_bytes:,} bytes, {plan.keys:,} keys, {plan.queue} queue"
    return [
        ("drain", f"{drain.messages_per_s:,.0f} messages/s ({load}, {drain.seconds:.1f} s)"),
        ("CPU a message", _cpu(drain.cpu_s, drain.rows)),
        ("trickle", f"{len(trickle.from_commit_s):,} rows at {trickle.rate_per_s:g}/s"),
        ("commit to consumer", _words(percentiles_ms(trickle.from_commit_s))),
        ("due to consumer", _words(percentiles_ms(trickle.from_due_s))),
        ("CPU a message", _cpu(trickle.cpu_s, len(trickle.from_commit_s))),
        ("round trips", f"PostgreSQL {_ms(drain.database_rtt_s)}, RabbitMQ {_ms(drain.broker_rtt_s)}"),
        ("the limit", f"{limit.value}: {reading}"),
    ]


def _words(found: Mapping[str, float]) -> str:
    shown = {"p50_ms": "p50", "p99_ms": "p99", "p99_9_ms": "p99.9"}
    return ", ".join(f"{word} {found[name]:.1f} ms" for name, word in shown.items() if name in found)


def _us(cpu_s: float | None, rows: int) -> float | None:
    return None if cpu_s is None else round(cpu_s / rows * 1e6, 2)


def _cpu(cpu_s: float | None, rows: int) -> str:
    found = _us(cpu_s, rows)
    return "not known on this system" if found is None else f"{found:.1f} µs of the relay's process"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
