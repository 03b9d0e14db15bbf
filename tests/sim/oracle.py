"""The oracle: what was committed, published, delivered and decided, and whether I1-I5 held.

Most rules are judged at the instant at which they are broken, so that a history ends with its cause:

- I1 a row becomes sent only after a confirm of a delivered copy of it (`sent`); at the end every committed
  row is sent, discarded, or parked with good reason (`World.verdict`).
- I2 a delivered id is a committed one, with the key and seq it was committed with (`delivered`).
- I3 a first copy arrives after the first copy of every lower row of its key whose writer was serialised
  before its own (`delivered`); strict: one unconfirmed message a key and link (`published`).
- I4 a message is published again only with an excuse: no confirm of the earlier copy (nack, return, lost
  link), its relay killed, its shard taken over, or its settlement lost with the database (`published`).
- I5 a row's attempts never exceed the returns and rejections that it had itself (`setback`).
- H6 nothing is published before its `available_at` by the database's clock (`published`).
- L2 a lease runs out only if something ailed its relay (`run_out`); L3, L4 nothing is written after the loss of the
  sessions was heard, nor after the lease (`published`).
- P1 nothing is published over a row of its key that holds it in the table, but for one that this relay heard confirmed
  and is about to mark (`published`).
- S1 only a shard's owner settles (`settles`). O1 a redriven row is tried before it is set back again (`setback`).

Time is a counter of events (`tick`), which orders what happened at one virtual instant.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from relay.message import Aside, Key, Row, State

TIME_S = 1e-6
"""A float's error in epoch seconds, and more."""


class Violation(AssertionError):
    """An invariant was broken; carries the readable end of the history."""


class History:
    """The readable record of a run; the last `kept` steps of it."""

    def __init__(self, now: Callable[[], float], kept: int = 4000) -> None:
        self._now = now
        self._steps: collections.deque[tuple[float, str, str, object]] = collections.deque(maxlen=kept)
        self.count = 0
        self.digest = 0

    def note(self, who: str, what: str, detail: object = "") -> None:
        self.count += 1
        self._steps.append((self._now(), who, what, detail))

    def text(self, last: int = 120, about: Iterable[str] = ()) -> str:
        """The last steps; with `about` only those that name one of these words."""
        words = tuple(about)
        lines = [f"{time:10.4f}  {who:<9} {what:<12} {detail}" for time, who, what, detail in self._steps]
        if words:
            lines = [line for line in lines if any(word in line for word in words)]
        return "\n".join(lines[-last:])


@dataclass(slots=True)
class Entry:
    """One committed row, as the writers know it."""

    id: str
    seq: int
    key: Key | None
    shard: int
    event_type: str
    drawn: int
    committed: int
    is_scheduled: bool
    available_at: float | None = None
    """Past or not: where the clock jumps, the row may count as scheduled."""
    is_alive: bool = True
    """False once its commit was lost with the database."""
    lost: int = -1
    """The tick of that loss."""
    was_parked: bool = False
    is_discarded: bool = False
    tried: int = -1
    """The tick of its last publish or rejection."""
    redriven: int = -1
    """The tick at which an operator redrove it last."""
    is_back_beneath: bool = False
    """An operator brought it back while it held nobody: rows above it may be on their way."""
    released: int = -1
    """The tick at which an operator ended its fault: it goes again, whatever became of it."""
    is_sent: bool = False
    failures: int = 0
    copies: int = 0
    accepted: int = 0
    """Copies that reached the queue and were confirmed."""


class Outcome:
    ACKED = "acked"
    NACKED = "nacked"
    RETURNED = "returned"
    LOST = "lost"


@dataclass(slots=True, eq=False)
class Publication:
    """One publish of one row by one relay; `outcome` as the relay's link reported it."""

    id: str
    relay: str
    shard: int
    tick: int
    time: float
    is_owned: bool
    """Whether the shard was the relay's when it published; the relay cannot always know at once that it is not."""
    outcome: str = ""


@dataclass(slots=True)
class Rules:
    """What this history promises."""

    is_ordered: bool = True
    is_strict: bool = True
    parked_holds: bool = True


class Table(Protocol):
    """What the oracle looks up in the database at the instant of a decision."""

    def now(self) -> float: ...
    def owner_of(self, shard: int) -> str | None: ...
    def lower_holding(self, row: Row) -> Sequence[str]: ...
    def is_deaf(self, relay: str) -> bool: ...


@dataclass(slots=True)
class Delivery:
    time: float
    relay: str
    id: str
    seq: int
    key: Key | None


@dataclass(slots=True)
class Oracle:
    history: History
    rules: Rules = field(default_factory=Rules)
    table: Table | None = None
    tick: int = 0
    entries: dict[str, Entry] = field(default_factory=dict)
    by_key: dict[Key, list[Entry]] = field(default_factory=dict)
    publications: dict[str, list[Publication]] = field(default_factory=dict)
    log: list[Delivery] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    ended: dict[str, int] = field(default_factory=dict)
    """Relays that were killed, or ended with work unsettled: the tick of it."""
    overtaken: dict[tuple[str, int], int] = field(default_factory=dict)
    """(relay, shard): the last tick at which somebody took the shard from it."""
    rewound: int = 0
    """The last tick at which the database lost commits."""
    granted: dict[tuple[str, int], float] = field(default_factory=dict)
    """(relay, shard): until when (boot time) the relay may write for it at most, whatever the database's clock says."""
    granted_at: dict[tuple[str, int], int] = field(default_factory=dict)
    """(relay, shard): the tick of the last grant."""
    heard_loss: dict[str, int] = field(default_factory=dict)
    """The tick at which a relay heard last that its sessions are gone."""
    ailing_until: dict[str, float] = field(default_factory=dict)
    """Until when something kept a relay from renewing its leases; `inf` while it does."""
    locked_until: dict[int, float] = field(default_factory=dict)
    """Until when somebody kept a shard's row locked."""
    everybody_ailed_until: float = 0.0
    has_clock_jumped: bool = False
    frozen: set[str] = field(default_factory=set)

    def step(self) -> int:
        self.tick += 1
        return self.tick

    def blame(self, text: str) -> None:
        self.history.note("oracle", "VIOLATION", text)
        self.violations.append(text)

    # -------------------------------------------------------- writers and database

    def committed(self, entry: Entry) -> None:
        assert entry.id not in self.entries, entry
        self.entries[entry.id] = entry
        if entry.key is not None:
            self.by_key.setdefault(entry.key, []).append(entry)

    def commit_lost(self, ids: Iterable[str]) -> None:
        for each in ids:
            entry = self.entries[each]
            entry.is_alive = False
            entry.lost = self.step()

    def commits_rewound(self) -> None:
        self.rewound = self.step()

    def taken(self, shard: int, owner_before: str) -> None:
        """A claim took a shard that had not been given back."""
        self.overtaken[owner_before, shard] = self.step()

    def relay_ended(self, relay: str) -> None:
        self.ended[relay] = self.step()
        self.ails(relay)

    # -------------------------------------------------------- leases

    def ails(self, relay: str, until: float = float("inf")) -> None:
        self.ailing_until[relay] = until

    def ails_for(self, relay: str, until: float) -> None:
        """Until then at least."""
        self.ails(relay, max(until, self.ailing_until.get(relay, until)))

    def freezes(self, relay: str, now: float, *, on: bool) -> None:
        if on:
            self.frozen.add(relay)
        else:
            self.frozen.discard(relay)
            self.ails(relay, max(now, self.ailing_until.get(relay, now)))

    def all_ail_until(self, until: float) -> None:
        self.everybody_ailed_until = max(until, self.everybody_ailed_until)

    def grant(self, relay: str, shard: int, until: float) -> None:
        self.granted[relay, shard] = until
        self.granted_at[relay, shard] = self.step()

    def hears_of_loss(self, relay: str) -> None:
        self.heard_loss[relay] = self.step()

    def run_out(self, shard: int, owner: str, now: float, lease_s: float) -> None:
        """A claim takes a shard whose lease ran out."""
        if owner in self.frozen:
            return
        ailed = max(
            self.ailing_until.get(owner, float("inf")), self.everybody_ailed_until, self.locked_until.get(shard, 0.0)
        )
        if now - ailed > 2 * lease_s:
            self.blame(
                f"L2: the lease of {owner} for shard {shard} ran out, and nothing ailed it for {now - ailed:.1f} s"
            )

    def settles(self, relay: str, shard: int) -> None:
        if self.table is not None and self.table.owner_of(shard) != relay:
            self.blame(f"S1: {relay} settles shard {shard}, which is not its own")

    # -------------------------------------------------------- decisions

    def sent(self, relay: str, id_: str, seq: int) -> None:
        entry = self.entries.get(id_)
        if entry is None or entry.seq != seq:
            self.blame(f"I2: {relay} marked {id_} (seq {seq}), which nobody committed")
            return
        entry.is_sent = True
        if entry.accepted == 0:
            self.blame(f"I1: {relay} marked {id_} (seq {seq}) sent; no copy of it was confirmed and kept")
        elif not any(each.relay == relay and each.outcome == Outcome.ACKED for each in self.publications.get(id_, ())):
            self.blame(f"I1: {relay} marked {id_} (seq {seq}) sent; it heard no confirm of its own publish")

    def marks_lost(self, ids: Iterable[str]) -> None:
        """A settlement was lost with the database."""
        for each in ids:
            self.entries[each].is_sent = False

    def setback(self, relay: str, id_: str, aside: Aside, attempts: int) -> None:
        entry = self.entries[id_]
        if attempts > entry.failures:
            self.blame(
                f"I5: {relay} charges {id_} (seq {entry.seq}) {attempts} attempts; it failed {entry.failures} times"
            )
        if entry.redriven > entry.tried:
            self.blame(f"O1: {relay} sets {id_} (seq {entry.seq}) back, which was redriven and not tried since")
        if aside is Aside.PARKED:
            entry.was_parked = True

    def discarded(self, id_: str) -> None:
        self.entries[id_].is_discarded = True

    def retired(self, relay: str, id_: str, parked_for_s: float, retention_s: float) -> None:
        self.discarded(id_)
        if parked_for_s < retention_s:
            self.blame(f"O2: {relay} deletes {id_}, parked for {parked_for_s:.1f} s of {retention_s:.1f} s")

    def was_redriven(self, id_: str, *, held: bool) -> None:
        """`held`: whether it held its key while it was parked."""
        entry = self.entries[id_]
        entry.redriven = self.step()
        entry.is_back_beneath |= not held

    def was_released(self, id_: str) -> None:
        """An operator ended the row's fault: it will be published, perhaps once more."""
        entry = self.entries[id_]
        entry.released = self.step()
        entry.is_back_beneath = True
        entry.is_discarded = False

    # -------------------------------------------------------- broker

    def published(self, relay: str, row: Row, now: float) -> Publication:
        tick = self.step()
        table = self.table
        is_owned = table is None or table.owner_of(row.shard) == relay
        if row.id in self.entries:
            self.entries[row.id].tried = tick
        for earlier in self.publications.get(row.id, ()):
            if is_owned and not self._is_excused(earlier):
                self.blame(
                    f"I4: {relay} publishes {row.id} (seq {row.seq}) again; the copy of {earlier.relay} at "
                    f"{earlier.time:.4f} ({earlier.outcome or 'unconfirmed'}) has no fault as excuse"
                )
        until = self.granted.get((relay, row.shard), 0.0)
        if now > until:
            self.blame(f"L4: {relay} writes {row.id} for shard {row.shard} {now - until:.3f} s after its lease")
        if self.heard_loss.get(relay, -1) > self.granted_at.get((relay, row.shard), tick):
            self.blame(f"L3: {relay} writes {row.id} for shard {row.shard}, its sessions gone and no renewal since")
        if table is not None and is_owned and self.rules.is_strict and not table.is_deaf(relay):
            for lower in table.lower_holding(row):
                if self._is_held_by(row, lower) and not self._has_confirmed(relay, lower):
                    self.blame(f"P1: {relay} publishes {row.id} (seq {row.seq}) over {lower}, which holds its key")
                    break
        self._judge_alive(relay, row)
        self._judge_time(relay, row)
        publication = Publication(row.id, relay, row.shard, tick, now, is_owned)
        self.publications.setdefault(row.id, []).append(publication)
        return publication

    def _judge_alive(self, relay: str, row: Row) -> None:
        """R5: with new sessions nothing goes that the old ones read and nobody had published."""
        entry = self.entries.get(row.id)
        if entry is None or entry.is_alive or entry.lost > self.granted_at.get((relay, row.shard), -1):
            return
        if not any(each.relay == relay for each in self.publications.get(row.id, ())):
            self.blame(f"R5: {relay} publishes {row.id} (seq {row.seq}), which the database has lost since")

    def _judge_time(self, relay: str, row: Row) -> None:
        """H6: nothing goes before its `available_at` by the database's clock."""
        entry = self.entries.get(row.id)
        if self.table is None or entry is None or entry.available_at is None or self.has_clock_jumped:
            return
        early_s = entry.available_at - self.table.now()
        if early_s > TIME_S:
            self.blame(f"H6: {relay} publishes {row.id} (seq {row.seq}) {early_s:.3f} s before its time")

    def _is_held_by(self, row: Row, lower: str) -> bool:
        """Not by one that an operator brought back beneath it, nor by a scheduled one, whose place is where it falls due;
        nor after the sequence was set back."""
        below = self.entries[lower]
        is_dated = below.is_scheduled or (below.available_at is not None and self.has_clock_jumped)
        return self.rules.is_ordered and row.id in self.entries and not below.is_back_beneath and not is_dated

    def _has_confirmed(self, relay: str, id_: str) -> bool:
        """Its mark is under way: a follower that was loaded behind it goes on the confirm, as in any chain (H4)."""
        return any(each.relay == relay and each.outcome == Outcome.ACKED for each in self.publications.get(id_, ()))

    def _is_excused(self, earlier: Publication) -> bool:
        entry = self.entries.get(earlier.id)
        if entry is not None and entry.released > earlier.tick:
            return True
        if earlier.outcome in (Outcome.NACKED, Outcome.RETURNED, Outcome.LOST) or not earlier.is_owned:
            return True
        return (
            self.ended.get(earlier.relay, -1) > earlier.tick
            or self.overtaken.get((earlier.relay, earlier.shard), -1) > earlier.tick
            or self.rewound > earlier.tick
        )

    def one_of_a_key(self, relay: str, row: Row, in_flight: Iterable[Row]) -> None:
        """Before a publish: what the relay has on this link."""
        if not self.rules.is_strict or row.key is None:
            return
        for other in in_flight:
            if other.key == row.key and other.state != State.FORGOTTEN:
                self.blame(f"I3 strict: {relay} publishes {row.id} while {other.id} of its key is unconfirmed")

    def failed(self, id_: str) -> None:
        """The row itself was returned or rejected."""
        entry = self.entries[id_]
        entry.failures += 1
        entry.tried = self.step()

    def delivered(self, relay: str, row: Row, now: float) -> None:
        self.log.append(Delivery(now, relay, row.id, row.seq, row.key))
        self.taken_in(relay, row)

    def taken_in(self, relay: str, row: Row) -> None:
        """A copy has reached every queue that is bound, which may be none where that is fine."""
        self.step()
        entry = self.entries.get(row.id)
        if entry is None or (entry.seq, entry.key) != (row.seq, row.key):
            self.blame(f"I2: {relay} delivered {row!r}, which nobody committed so")
            return
        entry.copies += 1
        if entry.copies == 1 and entry.key is not None and self.rules.is_ordered and entry.is_alive:
            for lower in self.by_key[entry.key]:
                if self._goes_before(lower, entry) and lower.copies == 0:
                    self.blame(
                        f"I3: {relay} delivered {entry.id} (seq {entry.seq}) before "
                        f"{lower.id} (seq {lower.seq}) of key {entry.key[1]}"
                    )

    def _goes_before(self, lower: Entry, upper: Entry) -> bool:
        return (
            lower.seq < upper.seq
            and lower.committed < upper.drawn
            and lower.is_alive
            and not lower.is_discarded
            and not (lower.is_scheduled or (lower.available_at is not None and self.has_clock_jumped))
            # It never holds its key, and nobody ever gets it.
            and lower.event_type != "expired"
            and lower.released < 0
            and not (lower.was_parked and not self.rules.parked_holds)
        )

    def accepted(self, id_: str) -> None:
        """A delivered copy was confirmed by the broker."""
        if id_ in self.entries:
            self.entries[id_].accepted += 1

    # -------------------------------------------------------- the end

    def duplicates(self) -> int:
        return len(self.log) - len({each.id for each in self.log})

    def check(self, seed: object = "") -> None:
        """Raises Violation when anything was broken, with the end of the history."""
        if not self.violations:
            return
        words = {word.strip("(),;") for text in self.violations[:1] for word in text.split() if word[:1] == "m"}
        raise Violation(
            f"seed {seed}: {len(self.violations)} violations, the first:\n  "
            + "\n  ".join(self.violations[:5])
            + f"\n-- steps that name {sorted(words)}:\n{self.history.text(60, words) if words else ''}"
            + f"\n-- the last steps:\n{self.history.text(80)}"
        )
