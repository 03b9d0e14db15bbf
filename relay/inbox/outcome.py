"""What becomes of a message after a failure. Pure: no clock, randomness, driver.

    handled, duplicate, stale          -> ack
    transient, unknown                 -> a copy to a retry queue, one step up the ladder, then ack;
                                          or returned to a queue that delays it itself
    permanent, exhausted, too old      -> a copy to the parking queue, then ack

A business result (no stock, payment declined) is none of these: it is an event of its own, published through the
outbox; its message was handled.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final, assert_never

TEXT_CHARACTERS_MAX: Final = 500
"""Of an error's text in a header: enough for a person, far below a frame's size."""


class ErrorClass(StrEnum):
    """Why a message failed, as `x-error-class` names it."""

    TRANSIENT = "transient"
    """The handler said so, or a network did."""
    DATABASE = "database"
    """Connection lost, deadlock, serialisation failure, a COMMIT without an answer, no resources."""
    TIMEOUT = "timeout"
    """The time limit of one message."""
    GAP = "gap"
    """An earlier version of its aggregate is missing."""
    UNKNOWN = "unknown"
    """An exception that nobody has classed."""
    PERMANENT = "permanent"
    """The handler said so."""
    CONSTRAINT = "constraint"
    """PostgreSQL refuses the data: a violated constraint, a value out of range."""
    MALFORMED = "malformed"
    """No id, no JSON, a header of the wrong type."""
    SCHEMA_VERSION = "schema_version"
    """A version that this consumer does not know."""


class Kind(StrEnum):
    """What a class means for the next step."""

    TRANSIENT = "transient"
    UNKNOWN = "unknown"
    PERMANENT = "permanent"


KINDS: Final = {
    ErrorClass.TRANSIENT: Kind.TRANSIENT,
    ErrorClass.DATABASE: Kind.TRANSIENT,
    ErrorClass.TIMEOUT: Kind.TRANSIENT,
    ErrorClass.GAP: Kind.TRANSIENT,
    ErrorClass.UNKNOWN: Kind.UNKNOWN,
    ErrorClass.PERMANENT: Kind.PERMANENT,
    ErrorClass.CONSTRAINT: Kind.PERMANENT,
    ErrorClass.MALFORMED: Kind.PERMANENT,
    ErrorClass.SCHEMA_VERSION: Kind.PERMANENT,
}


class Outcome(StrEnum):
    """How a delivery ended."""

    HANDLED = "handled"
    DUPLICATE = "duplicate"
    """Processed before: acknowledged without calling the handler."""
    STALE = "stale"
    """An older version than the one that was applied: recorded, acknowledged, never rolled back to."""
    RETRIED = "retried"
    PARKED = "parked"
    REJECTED = "rejected"
    """No copy can be made of it: left to the queue's own dead letter policy."""


class _Classed(Exception):
    """An exception that carries its class."""

    default: ErrorClass

    def __init__(self, text: str = "", *, error_class: ErrorClass | None = None) -> None:
        super().__init__(text)
        self.error_class = error_class or self.default


class Permanent(_Classed):
    """Raised by a handler: no retry will mend it, park it now."""

    default = ErrorClass.PERMANENT


class Transient(_Classed):
    """Raised by a handler: try again later."""

    default = ErrorClass.TRANSIENT


@dataclass(frozen=True, slots=True)
class Failure:
    """One failed attempt. `text` is one line without payload."""

    error_class: ErrorClass
    text: str

    @property
    def kind(self) -> Kind:
        """What it means for the next step."""
        return KINDS[self.error_class]


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """The retry budget. `delays_s` is the ladder: n delays are n + 1 attempts.

    `age_max_s` ends retries early, by the message's `occurred_at`. `unknown_retries_max` bounds the retries of an
    unclassed failure (None: the whole ladder). `jitter` is the share of retries that take the next lower or the next
    higher step's queue instead, so that those that failed together do not return together.
    """

    delays_s: tuple[float, ...] = (5.0, 30.0, 300.0)
    age_max_s: float | None = None
    unknown_retries_max: int | None = None
    jitter: float = 0.2


@dataclass(frozen=True, slots=True)
class BrokerRetry:
    """The retry budget where the queue itself delays and counts what is returned to it: RabbitMQ 4.3 or later, `retry =
    "broker"` in the topology.

    The n-th retry comes after `min(n * delay_min_s, delay_max_s)`, which the queue's policy decides: these two repeat it.
    `retries_max` is below the queue's delivery limit, so that the consumer parks with a diagnosis before the broker does
    without one: the queue counts consumers that died with the message in hand, too. The rest as in `RetryPolicy`; there
    is no jitter.
    """

    delay_min_s: float = 5.0
    delay_max_s: float = 300.0
    retries_max: int = 8
    age_max_s: float | None = None
    unknown_retries_max: int | None = None

    @property
    def delays_s(self) -> tuple[float, ...]:
        """As a ladder."""
        return tuple(min(count * self.delay_min_s, self.delay_max_s) for count in range(1, self.retries_max + 1))

    @property
    def jitter(self) -> float:
        """None: a broker's delay is the same for all."""
        return 0.0


RetryBudget = RetryPolicy | BrokerRetry


@dataclass(frozen=True, slots=True)
class Retry:
    """Retry number `attempt`, after `delay_s`: that is which retry queue the copy waits in."""

    attempt: int
    delay_s: float


@dataclass(frozen=True, slots=True)
class Park:
    """A copy goes to the parking queue; `text` is its last error, with the reason why there is no retry."""

    text: str


Decision = Retry | Park


def decide(failure: Failure, policy: RetryBudget, *, attempt: int, age_s: float | None, roll: float) -> Decision:
    """After a delivery that had `attempt` retries before it failed.

    `age_s` since the fact happened, None where the message does not say; `roll` in [0, 1).
    """
    delays_s = policy.delays_s
    limit = len(delays_s)
    match failure.kind:
        case Kind.PERMANENT:
            return Park(failure.text)
        case Kind.UNKNOWN:
            limit = min(limit, limit if policy.unknown_retries_max is None else policy.unknown_retries_max)
        case Kind.TRANSIENT:
            pass
        case _ as never:
            assert_never(never)
    if attempt >= limit:
        return Park(f"after {attempt + 1} attempts: {failure.text}")
    delay_s = delays_s[neighbour(attempt, len(delays_s), policy.jitter, roll)]
    if policy.age_max_s is not None and age_s is not None and age_s + delay_s > policy.age_max_s:
        return Park(f"too old after {age_s:.0f} s, {attempt + 1} attempts: {failure.text}")
    return Retry(attempt + 1, delay_s)


def neighbour(step: int, steps: int, jitter: float, roll: float) -> int:
    """The step itself, or with the probability `jitter` one of its neighbours, as far as there are some."""
    assert 0 <= step < steps
    if roll < jitter / 2:
        return max(0, step - 1)
    if roll < jitter:
        return min(steps - 1, step + 1)
    return step


def one_line(text: str, limit: int = TEXT_CHARACTERS_MAX) -> str:
    """The first line of a text, cut: what follows in a driver's message quotes rows. It is UTF-8, so that a header can
    carry it: half of a surrogate pair, which JSON can name, is written as its number.
    """
    line = text.strip().partition("\n")[0].strip().encode("utf-8", "backslashreplace").decode()
    return line if len(line) <= limit else f"{line[:limit]}…"
