"""What becomes of a row that failed: its class, whether it parks, what it holds, when it is tried again.

Owns the table of docs/schema.md. Outages, alarms, nacks and timeouts never come here: they delay rows and use up no
attempt.

    class         tried again                              parked    holds its key while parked
    unroutable    the ladder, or not (RELAY_UNROUTABLE)    at its end   as RELAY_ON_PARKED says
    refused       where what is missing may come yet       at once      as RELAY_ON_PARKED says
    invalid       never                                    at once      as RELAY_ON_PARKED says
    too_large     never                                    at once      as RELAY_ON_PARKED says
    expired       never                                    at once      never
    unmarkable    never                                    at once      never
    unknown       the ladder                               at its end   as RELAY_ON_PARKED says

A row that is older than RELAY_MAX_AGE parks, as `max_age`, where it would be tried again.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from relay.core.ladder import next_step
from relay.core.settings import EngineSettings, Ordering, Unroutable
from relay.message import Aside, Row


class Failure(StrEnum):
    """The failure classes of docs/schema.md."""

    UNROUTABLE = "unroutable"
    REFUSED = "refused"
    INVALID = "invalid"
    TOO_LARGE = "too_large"
    EXPIRED = "expired"
    MAX_AGE = "max_age"
    UNMARKABLE = "unmarkable"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Verdict:
    """`attempts` is absolute; `delay_s` is 0 for parked rows."""

    failure: Failure
    aside: Aside
    holds: bool
    attempts: int
    delay_s: float


def classify(reason: str) -> Failure:
    """The class that a reason names; a reason that is none of them is `unknown`."""
    try:
        return Failure(reason)
    except ValueError:
        return Failure.UNKNOWN


def may_hold(row: Row, settings: EngineSettings) -> bool:
    """Whether the row, deferred, holds its key's later rows."""
    return row.key is not None and settings.ordering is not Ordering.NONE


def judge(
    row: Row, failure: Failure, settings: EngineSettings, *, is_final: bool, age_s: float | None, roll: float
) -> Verdict:
    """After one more failed attempt of the row.

    `is_final`: for `refused`, that nothing that may come yet would mend it. `age_s` since the row was created, `None`
    while the database's time is not known; `roll` in [0, 1) is the jitter.
    """
    step = next_step(row.attempts, settings.retry_delays_s, roll)
    holds = may_hold(row, settings)
    if _is_tried_again(failure, settings, is_final=is_final):
        if settings.age_max_s is not None and age_s is not None and age_s > settings.age_max_s:
            failure = Failure.MAX_AGE
        elif step.delay_s is not None:
            return Verdict(failure, Aside.DEFERRED, holds, step.attempts, step.delay_s)
    holds = holds and settings.holds_when_parked and failure not in _NEVER_HOLDS
    return Verdict(failure, Aside.PARKED, holds, step.attempts, 0.0)


def _is_tried_again(failure: Failure, settings: EngineSettings, *, is_final: bool) -> bool:
    match failure:
        case Failure.UNROUTABLE:
            return settings.on_unroutable is not Unroutable.PARK
        case Failure.REFUSED:
            return not is_final
        case Failure.UNKNOWN | Failure.MAX_AGE:
            return True
        case Failure.INVALID | Failure.TOO_LARGE | Failure.EXPIRED | Failure.UNMARKABLE:
            return False


_NEVER_HOLDS = frozenset({Failure.EXPIRED, Failure.UNMARKABLE})
