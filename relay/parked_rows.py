"""What `relay parked` speaks of: a filter, the rows that it selects, and what an action did. Plain values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum


class Action(StrEnum):
    """What becomes of the selected rows."""

    REDRIVE = "redrive"
    DISCARD = "discard"


def takes_expired(action: Action, *, ignore_expiry: bool) -> bool:
    """Whether rows past their deadline are meant too."""
    return action is Action.DISCARD or ignore_expiry


@dataclass(frozen=True, slots=True)
class Filter:
    """Which rows: every given criterion must hold, one of its values is enough; none given: all rows.

    `types` are event types; `keys` an aggregate_id or `type/id`; `errors` a failure class or a part of the error's
    text, in any case; `since_s` seconds before now, or `since_at`, an aware time; `ids` message ids.
    """

    types: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()
    ids: tuple[str, ...] = ()
    since_s: float | None = None
    since_at: datetime | None = None

    def as_document(self) -> dict[str, object]:
        """What was asked for, without what was not."""
        since = None if self.since_at is None else self.since_at.isoformat()
        values = {
            "type": list(self.types),
            "key": list(self.keys),
            "error": list(self.errors),
            "id": list(self.ids),
            "since": f"{self.since_s:g}s" if self.since_s is not None else since,
        }
        return {name: value for name, value in values.items() if value}

    def is_empty(self) -> bool:
        """Whether every row is meant."""
        return not self.as_document()


@dataclass(frozen=True, slots=True)
class ParkedRow:
    """One selected row. `state` is `parked` or `unmarkable`; the latter may have lost its outbox row (`shard` None)."""

    seq: int
    id: str
    shard: int | None
    event_type: str | None
    aggregate_type: str | None
    aggregate_id: str | None
    state: str
    failure_class: str
    error: str | None
    attempts: int
    parked_at: datetime | None
    is_expired: bool

    @property
    def is_fault(self) -> bool:
        return self.state == "unmarkable"


@dataclass(frozen=True, slots=True)
class Listing:
    """The first rows that a filter selects, and how many there are: by class, and such as need `--ignore-expiry`."""

    table: str
    role: str
    observed_at: datetime
    matched: int
    by_class: dict[str, int]
    expired: int
    rows: Sequence[ParkedRow]


@dataclass(slots=True)
class Outcome:
    """What an action did, or would do. `done` rows were changed; the others of those `matched` were not: they lie beyond
    the limit, `expired` ones need `--ignore-expiry`, `changed` ones were no longer parked, `locked` ones are kept by another transaction, `refused` ones by a trigger or
    constraint (id, error). `republished` are ids of unmarkable rows that will arrive a second time."""

    action: Action
    table: str
    role: str
    ignore_expiry: bool = False
    matched: int = 0
    done: int = 0
    expired: int = 0
    changed: int = 0
    locked: int = 0
    refused: list[tuple[str, str]] = field(default_factory=list)
    republished: list[str] = field(default_factory=list)

    @classmethod
    def begin(cls, action: Action, found: Listing, *, ignore_expiry: bool) -> Outcome:
        """Nothing is done yet: the same for a dry run and a real one."""
        expired = 0 if takes_expired(action, ignore_expiry=ignore_expiry) else found.expired
        return cls(action, found.table, found.role, ignore_expiry, matched=found.matched, expired=expired)

    def planned(self, limit: int | None) -> int:
        """How many rows are to be changed: those past their deadline use up none of the limit."""
        left = self.matched - self.expired
        return left if limit is None else min(left, limit)


Progress = Callable[[Outcome], None]
