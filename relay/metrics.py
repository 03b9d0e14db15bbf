"""The metrics: one table of names, and the plain numbers behind them.

The hot path pays for an integer's addition or one bisection, nothing else; `relay/http.py` reads the numbers when
it is scraped, from another thread, and may see a histogram's sum one observation behind its buckets.
docs/metrics.md is printed from the table by `python -m relay.metrics`.
"""

from __future__ import annotations

import sys
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import inf, isfinite

from relay import __version__


class Kind(StrEnum):
    """A metric's type as Prometheus has it."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


OUTCOMES = ("acked", "nacked", "returned", "lost")
FAILURES = ("unroutable", "refused", "invalid", "too_large", "expired", "max_age", "unmarkable", "unknown")
DEFERRALS = (*FAILURES, "nacked", "unanswered", "locked")
PEERS = ("database", "broker")
PRESSURES = ("in_flight", "bytes", "blocked", "rate", "broker_down", "database_down")

SECONDS_BUCKETS = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0),
)
"""From half a millisecond to ten minutes, 19 of them: three a decade where latencies live."""

ATTEMPTS_BUCKETS = (1.0, 2.0, 3.0, 5.0, 8.0, 13.0, 21.0)


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. `name` is the exposed one, `field` the attribute of `Metrics`, `values` its label's."""

    name: str
    field: str
    kind: Kind
    help: str
    label: str | None = None
    values: tuple[str, ...] = ()


def _counter(name: str, text: str, label: str | None = None, values: tuple[str, ...] = ()) -> Metric:
    return Metric(f"relay_{name}", name.removesuffix("_total"), Kind.COUNTER, text, label, values)


def _gauge(name: str, text: str, label: str | None = None, values: tuple[str, ...] = ()) -> Metric:
    return Metric(f"relay_{name}", name, Kind.GAUGE, text, label, values)


def _histogram(name: str, text: str) -> Metric:
    return Metric(f"relay_{name}", name, Kind.HISTOGRAM, text)


METRICS: tuple[Metric, ...] = (
    _counter("published_total", "Publishes by outcome; lost: the channel ended before one", "outcome", OUTCOMES),
    _counter("rows_sent_total", "Rows confirmed and settled as sent"),
    _counter("rows_deferred_total", "Rows set aside until a next attempt, by reason", "reason", DEFERRALS),
    _counter("rows_parked_total", "Rows that need an operator from now on, by reason", "reason", FAILURES),
    _counter("rows_discarded_total", "Parked rows deleted at RELAY_PARKED_RETENTION"),
    _counter("rows_read_total", "Rows read ahead, repeated reads included"),
    _gauge("backlog_rows", "Rows due, held, or deferred after a failure; take max over relays, not sum"),
    _gauge(
        "backlog_estimated",
        "1: backlog_rows is an estimate: above 100,000, or beside more than 200,000 rows aside or 100,000 deferred ones",
    ),
    _gauge("oldest_pending_age_seconds", "Age of the oldest row of backlog_rows, 0 when there is none"),
    _gauge("deferred_rows", "Rows waiting for their next attempt or their available_at; above 100,000 estimated"),
    _gauge(
        "parked_rows",
        "Rows that need an operator, unmarkable ones too; above 100,000 estimated where much else is aside",
    ),
    _gauge(
        "held_keys",
        "Keys whose rows wait behind a deferred or parked one; estimated where more than 100,000 rows are aside",
    ),
    _gauge("newest_seq", "The newest seq handed out: its rate is the writers' rate"),
    _gauge("late_commit_writers", "Open transactions that write to the outbox, whose rows may commit late"),
    _gauge("oldest_writer_age_seconds", "For how long the oldest of those has been seen open, 0 when there is none"),
    _gauge(
        "backlog_observed_timestamp_seconds",
        "When the table's gauges were read last, Unix time by the database's clock",
    ),
    _gauge("in_flight_messages", "Messages published and not yet confirmed"),
    _gauge("in_flight_bytes", "Bytes of bodies and headers published and not yet confirmed"),
    _histogram("confirm_seconds", "From publish to positive confirm"),
    _histogram("delivery_seconds", "From created_at, or available_at where later, to positive confirm"),
    _histogram("claim_seconds", "One read of rows"),
    _histogram("settle_seconds", "One transaction of settlements"),
    _histogram("publish_attempts", "Attempts of a row when it is sent or parked"),
    _gauge("shards_owned", "Shards whose lease this relay has; 0 while it has no session to renew them"),
    _counter("lease_lost_total", "Shards lost without having been given back"),
    _gauge("backpressure_active", "1: publishing waits for this reason", "reason", PRESSURES),
    _counter("backpressure_seconds_total", "Time for which publishing waited", "reason", PRESSURES),
    _gauge("connected", "1: connected; `broker` is the sink, whichever it is", "peer", PEERS),
    _counter("reconnects_total", "Connections made again after a loss", "peer", PEERS),
    _gauge("paused", "1: an operator has paused the relays of this table"),
    _gauge("last_confirm_timestamp_seconds", "When the last positive confirm came, Unix time by the database's clock"),
    _gauge("build_info", "1, with the relay's version", "version", (__version__,)),
)


class Histogram:
    """Counts of observations by upper bound, their sum. `bounds` ascend; the last bucket, +Inf, is implied."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        assert list(bounds) == sorted(set(bounds)), "bounds ascend"
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count one observation; a value equal to a bound belongs to it (`le`)."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def observe_many(self, values: list[float]) -> None:
        """Count many observations, those below 0 as 0 (clocks differ), infinite ones not at all: the sum would stay so.
        Sorts `values`. It costs a bisection a bucket that they fall in, not one a value."""
        values.sort()
        if values and (values[0] < 0.0 or values[-1] == inf):
            values = [max(0.0, value) for value in values if isfinite(value)]
        if not values:
            return
        bounds, counts = self.bounds, self.counts
        bucket = bisect_left(bounds, values[0])
        last = bisect_left(bounds, values[-1], bucket)
        counted = 0
        while bucket < last:
            up_to = bisect_right(values, bounds[bucket], counted)
            counts[bucket] += up_to - counted
            counted = up_to
            bucket += 1
        counts[last] += len(values) - counted
        self.sum += sum(values)


class Backpressure:
    """Which reasons hold publishing back, and for how long each has, in seconds of the caller's clock."""

    __slots__ = ("_seconds", "_since")

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(PRESSURES, 0.0)
        self._since: dict[str, float | None] = dict.fromkeys(PRESSURES)

    def set(self, reason: str, active: bool, now: float) -> None:
        """Note that a reason begins or ends; repeating it changes nothing."""
        since = self._since[reason]
        if active and since is None:
            self._since[reason] = now
        elif not active and since is not None:
            # First the sum, then the end: a scrape in between counts a moment twice rather than going back.
            self._seconds[reason] += max(0.0, now - since)
            self._since[reason] = None

    def is_active(self, reason: str) -> bool:
        """Whether this reason holds publishing back now."""
        return self._since[reason] is not None

    @property
    def active(self) -> tuple[str, ...]:
        """The reasons that hold publishing back now."""
        return tuple(reason for reason in PRESSURES if self._since[reason] is not None)

    def seconds(self, reason: str, now: float) -> float:
        """Seconds for which this reason has held publishing back, the present time included."""
        since = self._since[reason]
        return self._seconds[reason] + (0.0 if since is None else max(0.0, now - since))


def boot_time() -> float:
    """Seconds since the machine started, its sleep included; never jumps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Metrics:
    """The numbers. Counters only grow; a gauge that is None is absent from the exposition.

    Labelled ones are dicts by the label's value, complete from the start, so that every series exists at 0. `now` is
    the clock that `backpressure` is set by.
    """

    def __init__(self, now: Callable[[], float] = boot_time) -> None:
        self.now = now
        self.published = dict.fromkeys(OUTCOMES, 0)
        self.rows_sent = 0
        self.rows_deferred = dict.fromkeys(DEFERRALS, 0)
        self.rows_parked = dict.fromkeys(FAILURES, 0)
        self.rows_discarded = 0
        self.rows_read = 0
        self.backlog_rows: int | None = None
        self.backlog_estimated: bool | None = None
        self.oldest_pending_age_seconds: float | None = None
        self.deferred_rows: int | None = None
        self.parked_rows: int | None = None
        self.held_keys: int | None = None
        self.newest_seq: int | None = None
        self.late_commit_writers: int | None = None
        self.oldest_writer_age_seconds: float | None = None
        self.backlog_observed_timestamp_seconds: float | None = None
        self.in_flight_messages = 0
        self.in_flight_bytes = 0
        self.confirm_seconds = Histogram(SECONDS_BUCKETS)
        self.delivery_seconds = Histogram(SECONDS_BUCKETS)
        self.claim_seconds = Histogram(SECONDS_BUCKETS)
        self.settle_seconds = Histogram(SECONDS_BUCKETS)
        self.publish_attempts = Histogram(ATTEMPTS_BUCKETS)
        self.shards_owned = 0
        self.lease_lost = 0
        self.backpressure = Backpressure()
        self.connected = dict.fromkeys(PEERS, False)
        self.reconnects = dict.fromkeys(PEERS, 0)
        self.paused: bool | None = None
        self.last_confirm_timestamp_seconds: float | None = None

    def forget_backlog(self) -> None:
        """The table cannot be read: its gauges are absent rather than frozen as if fresh."""
        self.backlog_rows = self.backlog_estimated = self.oldest_pending_age_seconds = None
        self.deferred_rows = self.parked_rows = self.held_keys = None
        self.newest_seq = self.late_commit_writers = self.oldest_writer_age_seconds = None

    def forget_database(self) -> None:
        """The sessions are gone: nothing that only the database knows is known any more."""
        self.forget_backlog()
        self.paused = None

    @property
    def backpressure_active(self) -> Mapping[str, bool]:
        """By reason, from `backpressure`."""
        return {reason: self.backpressure.is_active(reason) for reason in PRESSURES}

    @property
    def backpressure_seconds(self) -> Mapping[str, float]:
        """By reason, from `backpressure`, up to now."""
        now = self.now()
        return {reason: self.backpressure.seconds(reason, now) for reason in PRESSURES}

    @property
    def build_info(self) -> Mapping[str, int]:
        """The version of this relay."""
        return {__version__: 1}


def page() -> str:
    """The text of docs/metrics.md."""
    lines = [
        "# Metrics",
        "",
        "<!-- Printed from relay/metrics.py by `python -m relay.metrics`; a test compares. -->",
        "",
        "Prometheus scrapes `/metrics` at `RELAY_LISTEN`. No label ever holds an id, a key or a routing key. A gauge that",
        "cannot be read is absent, or old by `relay_backlog_observed_timestamp_seconds`. Several relays of one table export",
        "the same table gauges (`relay_backlog_rows` …): take `max` over them, not `sum`. What is Unix time by the database's",
        "clock is that clock's at every relay; Prometheus' `time()` may be another. Ask whether it changes, as the alerts do.",
        "",
        "| metric | type | label | meaning |",
        "| --- | --- | --- | --- |",
    ]
    for metric in METRICS:
        label = f"`{metric.label}`" if metric.label else ""
        if metric.label and metric.label != "version":
            label += f": {', '.join(metric.values)}"
        lines.append(f"| `{metric.name}` | {metric.kind} | {label} | {metric.help} |")
    lines += [
        "",
        f"Buckets of seconds: {_listed(SECONDS_BUCKETS)}. Of attempts: {_listed(ATTEMPTS_BUCKETS)}.",
        "",
        "Beside them stand the usual `process_*` series (CPU, resident memory, open files) of prometheus-client.",
        "",
    ]
    return "\n".join(lines)


def _listed(bounds: Iterable[float]) -> str:
    return ", ".join(f"{bound:g}" for bound in bounds)


if __name__ == "__main__":
    sys.stdout.write(page())
