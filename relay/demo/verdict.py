"""What the demo saw, and whether the guarantees held. Pure: evidence in, a table out.

Order is judged on first copies only: a copy that arrives again late is a duplicate, which at-least-once
allows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Event:
    """A fact about an order. Versions of one order count from 1, in the order of its transactions."""

    id: str
    order: str
    version: int


@dataclass(frozen=True, slots=True)
class Evidence:
    """Everything that the verdict rests on.

    `committed` is read back from the producer's database, `acknowledged` is what the writers were told.
    `arrivals` holds every copy in the order in which a queue delivered it, those that the broker delivered again left
    out. `effects` counts the changes of the consumer's database, by order; `duplicates`, `retried` and `parked` count
    what the consumer did with deliveries, `redriven` what the operator sent back.
    """

    committed: Sequence[Event]
    acknowledged: frozenset[str]
    rolled_back: frozenset[str]
    arrivals: Sequence[str]
    duplicates: int
    retried: int
    parked: int
    redriven: int
    left_parked: int
    crashes: int
    effects: Mapping[str, int]
    marked_sent: int
    kills: int
    exit_code: int
    elapsed_s: float


@dataclass(frozen=True, slots=True)
class Line:
    """One row of the table; `holds` is None where the number promises nothing."""

    name: str
    value: str
    holds: bool | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """The table, and one sentence."""

    lines: Sequence[Line]
    summary: str

    @property
    def holds(self) -> bool:
        """Whether every guarantee held."""
        return all(line.holds is not False for line in self.lines)


def judge(evidence: Evidence) -> Verdict:
    """The table of the demo's end."""
    committed = {event.id for event in evidence.committed}
    seen = set(evidence.arrivals)
    lost = committed - seen
    phantoms = seen - committed
    overtaken = overtakings(evidence.committed, evidence.arrivals)
    wrong_effects = _difference(Counter(event.order for event in evidence.committed), evidence.effects)
    lines = (
        Line("events committed", _count(len(committed)), committed == evidence.acknowledged and bool(committed)),
        Line("events rolled back", _count(len(evidence.rolled_back))),
        Line("rolled back, yet published", _count(len(phantoms)), not phantoms),
        Line("relay killed with SIGKILL", _count(evidence.kills), evidence.kills > 0),
        Line("messages delivered", _count(len(evidence.arrivals))),
        Line("duplicates (allowed, same id)", _count(len(evidence.arrivals) - len(seen))),
        Line("events lost", _count(len(lost)), not lost),
        Line("order violations per key", _count(overtaken), overtaken == 0),
        Line("consumer crashed after a COMMIT", _count(evidence.crashes), evidence.crashes > 0),
        Line("known to the consumer's inbox already", _count(evidence.duplicates), evidence.duplicates > 0),
        Line("retried by the consumer's ladder", _count(evidence.retried), evidence.retried > 0),
        Line("parked by the consumer", _count(evidence.parked), evidence.parked > 0),
        Line("redriven by the operator", _count(evidence.redriven), evidence.redriven > 0),
        Line("left in the parking queue", _count(evidence.left_parked), evidence.left_parked == 0),
        Line("effects applied", _count(sum(evidence.effects.values()))),
        Line("effects missing or applied twice", _count(wrong_effects), wrong_effects == 0),
        Line("rows marked sent", _count(evidence.marked_sent), evidence.marked_sent == len(committed)),
        Line("relay's exit code after SIGTERM", str(evidence.exit_code), evidence.exit_code == 0),
        Line("seconds", f"{evidence.elapsed_s:.1f}"),
    )
    failed = [line.name for line in lines if line.holds is False]
    if failed:
        return Verdict(lines, f"A guarantee did not hold: {', '.join(failed)}.")
    return Verdict(lines, "Every committed event arrived, in order per key, and took effect once; none was invented.")


def overtakings(committed: Iterable[Event], arrivals: Iterable[str]) -> int:
    """How many first copies arrived after a first copy of a later version of their order."""
    events = {event.id: event for event in committed}
    newest: dict[str, int] = {}
    seen: set[str] = set()
    overtaken = 0
    for message_id in arrivals:
        event = events.get(message_id)
        if event is None or message_id in seen:
            continue
        seen.add(message_id)
        if event.version < newest.get(event.order, 0):
            overtaken += 1
        else:
            newest[event.order] = event.version
    return overtaken


def _difference(expected: Mapping[str, int], found: Mapping[str, int]) -> int:
    return sum(abs(expected.get(order, 0) - found.get(order, 0)) for order in expected.keys() | found.keys())


def _count(number: int) -> str:
    return f"{number:,}"
