"""The consumer's numbers: one table of names, and the plain numbers behind them, as in `relay.metrics`.

docs/inbox.md lists them; a test compares.
"""

from __future__ import annotations

from relay.inbox.outcome import ErrorClass, Outcome
from relay.metrics import ATTEMPTS_BUCKETS, SECONDS_BUCKETS, Histogram, Kind, Metric

OUTCOMES = tuple(Outcome)
CLASSES = tuple(ErrorClass)
PEERS = ("database", "broker")


def _metric(kind: Kind, name: str, text: str, label: str | None = None, values: tuple[str, ...] = ()) -> Metric:
    return Metric(f"relay_inbox_{name}", name.removesuffix("_total"), kind, text, label, values)


METRICS: tuple[Metric, ...] = (
    _metric(Kind.COUNTER, "messages_total", "Deliveries by how they ended", "outcome", OUTCOMES),
    _metric(Kind.COUNTER, "failures_total", "Failed attempts by class", "class", CLASSES),
    _metric(Kind.COUNTER, "parked_total", "Messages parked by class", "class", CLASSES),
    _metric(Kind.HISTOGRAM, "processing_seconds", "From the claim to the COMMIT, failed attempts included"),
    _metric(Kind.HISTOGRAM, "attempts", "Attempts of a message when it is handled or parked"),
    _metric(Kind.GAUGE, "unacked_messages", "Messages in hand and not yet acknowledged"),
    _metric(Kind.GAUGE, "busy_workers", "Workers with a message in work"),
    _metric(Kind.GAUGE, "waiting_copies", "Messages held because their copy cannot be made: backpressure"),
    _metric(Kind.GAUGE, "queue_messages", "Messages ready in the queue, its retry and parking queues", "queue"),
    _metric(Kind.GAUGE, "breaker_open", "1: the database is away, messages wait"),
    _metric(Kind.COUNTER, "copies_failed_total", "Copies that the broker did not take, each tried again"),
    _metric(Kind.COUNTER, "cancellations_total", "Consumers that the broker cancelled"),
    _metric(Kind.COUNTER, "reconnects_total", "Connections to the broker made again after a loss"),
    _metric(Kind.GAUGE, "connected", "1: connected", "peer", PEERS),
    _metric(Kind.GAUGE, "pending_rows", "`relay inbox run`: rows not done, parked ones included, counted to 100,000"),
    _metric(Kind.GAUGE, "oldest_pending_age_seconds", "`relay inbox run`: age of the oldest of them, 0 without any"),
    _metric(
        Kind.GAUGE,
        "oldest_due_age_seconds",
        "`relay inbox run`: since when the row that is next may be worked on, or 0",
    ),
    _metric(Kind.GAUGE, "parked_rows", "`relay inbox run`: rows that need an operator"),
    _metric(Kind.COUNTER, "forgotten_total", "Old rows deleted by the retention"),
)


class InboxMetrics:
    """Counters only grow; a gauge that is None is absent from the exposition."""

    def __init__(self) -> None:
        self.messages = dict.fromkeys(OUTCOMES, 0)
        self.failures = dict.fromkeys(CLASSES, 0)
        self.parked = dict.fromkeys(CLASSES, 0)
        self.processing_seconds = Histogram(SECONDS_BUCKETS)
        self.attempts = Histogram(ATTEMPTS_BUCKETS)
        self.unacked_messages = 0
        self.busy_workers = 0
        self.waiting_copies = 0
        self.queue_messages: dict[str, int] = {}
        self.breaker_open = False
        self.copies_failed = 0
        self.cancellations = 0
        self.reconnects = 0
        self.connected = dict.fromkeys(PEERS, False)
        self.pending_rows: int | None = None
        self.oldest_pending_age_seconds: float | None = None
        self.oldest_due_age_seconds: float | None = None
        self.parked_rows: int | None = None
        self.forgotten = 0

    def forget_rows(self) -> None:
        """What is in the table is not known."""
        self.pending_rows = self.parked_rows = None
        self.oldest_pending_age_seconds = self.oldest_due_age_seconds = None
