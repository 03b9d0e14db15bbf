"""The outbox's interface, and what is asked of it and answered."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from relay.message import Aside, Ctid, Key, PayloadType, Row

SHARDS = 64
"""How many shards the ordering keys hash into; a constant of the schema."""

DUE_INLINE_BYTES = 16 * 1024
"""Of larger rows that fall due bodies and headers stay behind, and are fetched when these are about to go."""


@dataclass(frozen=True, slots=True)
class OutboxInfo:
    """What `Outbox.open` found.

    `is_direct` is false behind a pooling proxy (then nobody listens, nobody arms the doorbell).
    """

    payload_type: PayloadType
    is_direct: bool
    has_doorbell: bool


@dataclass(frozen=True, slots=True)
class Claim:
    """A shard that is ours from now on (L1). `floor` is 0 where it could not be trusted (R5)."""

    shard: int
    epoch: int
    floor: int
    floor_was_void: bool = False
    has_other_policy: bool = False
    """Its parked rows may have been left under another `RELAY_ON_PARKED`: `Outbox.apply_policy` comes first."""


@dataclass(frozen=True, slots=True)
class Held:
    """A lease as the holder keeps it: what the fence asks for, and the floor to store.

    `floor` is `None` while nothing may be written (no check yet in this session, R5).
    """

    epoch: int
    floor: int | None


@dataclass(frozen=True, slots=True)
class Renewal:
    """One renewal's answer (L2).

    `renewed`: shards whose lease runs from before the statement was sent. `mine`: every shard
    that still carries our owner, with its epoch and its floor as now stored; one that is mine
    and not renewed was locked: try again soon. A shard that we thought ours and that is missing
    in `mine` (or has another epoch) is lost. `claimable`: free, run out or orphaned shards seen.
    `relays`: live relays with a broker, this one included when `available`. `next_due_in_s`: time
    until the next row aside of these shards falls due (<= 0: now), `None` when none waits.
    """

    renewed: frozenset[int]
    mine: Mapping[int, tuple[int, int]]
    claimable: int
    relays: int
    is_paused: bool
    database_time: float
    next_due_in_s: float | None


@dataclass(frozen=True, slots=True)
class Writer:
    """An open writing transaction: its virtual id, and its xid (xid8) once it has one."""

    vxid: str
    xid: int | None


@dataclass(frozen=True, slots=True)
class Check:
    """R1: S, read first, then the writers. `database_time` in epoch seconds."""

    last_seq: int
    writers: Sequence[Writer]
    database_time: float


@dataclass(frozen=True, slots=True)
class PageRequest:
    """R2: one page. Parallel sequences describe the listed writers, then the shards.

    A row is returned when it lies above the lowest of its shard's cursor and the lows of the
    writers that have ended, up to `last_seq` unless `beyond`, and up to `span` seqs above that
    lowest in any case; `limit` rows a shard, by seq; not the rows aside, not the sent ones. Of rows
    over `inline_bytes` body and headers stay behind (`is_loaded` false). Whether a row has a blocker is
    asked for rows of the shards `probed` only (H2). Rows above both `last_seq` and the last seq drawn, where there
    are none but after a `setval`, are looked for only with `beyond_drawn`.
    """

    numbers: Sequence[int]
    lows: Sequence[int]
    xids: Sequence[int | None]
    gone: Sequence[bool]
    asked: Sequence[bool]
    shards: Sequence[int]
    cursors: Sequence[int]
    last_seq: int
    beyond: bool
    beyond_drawn: bool
    limit: int
    inline_bytes: int
    span: int = 2**62
    probed: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Page:
    """`ended`: numbers of the listed writers that had ended in the page's own snapshot."""

    ended: Sequence[int]
    rows: Sequence[Row]
    """By shard, within a shard by seq."""
    blocked: Collection[int] = ()
    """Seqs of those rows of the `probed` shards that had a blocker."""


@dataclass(frozen=True, slots=True)
class Due:
    """Rows aside whose time has come, at or below the cursor of their shard (H4, H6).

    `released`: may go: the lowest holding row of its key, or a scheduled one without a blocker.
    `blocked`: due with a holding row of its key below: to be moved to `held` (under the lock).
    `next_due_in_s`: when to ask again; `None` when nothing waits. `has_more`: there may be more that is due by now.
    """

    released: Sequence[Row]
    blocked: Sequence[Row]
    next_due_in_s: float | None
    has_more: bool = False


@dataclass(frozen=True, slots=True)
class Setback:
    """A failed row's way aside: `deferred` until `delay_s` from now, or `parked`.

    `attempts` is absolute. `reason` is a failure class of docs/schema.md, `error` the full text,
    `exchange` and `routing_key` the route as resolved (empty where it could not be).
    """

    row: Row
    aside: Aside
    holds: bool
    delay_s: float
    attempts: int
    reason: str
    error: str
    exchange: str = ""
    routing_key: str = ""


@dataclass(slots=True)
class Settlement:
    """One transaction of decisions; `fences` gives the epoch of every shard that appears (S1).

    `sent`: confirmed rows. `setbacks`: with their read-ahead `followers`, which become `held`
    unconditionally (H1). `tested`: become `held` if they have a blocker, else come back (H2).
    `scheduled`: read before their time (H6). `promotions`: keys, with their shards, whose promotion
    is still owed. All ends with the promotion of touched keys (H3).
    """

    fences: dict[int, int] = field(default_factory=dict)
    sent: list[Row] = field(default_factory=list)
    setbacks: list[Setback] = field(default_factory=list)
    followers: list[Row] = field(default_factory=list)
    tested: list[Row] = field(default_factory=list)
    scheduled: list[Row] = field(default_factory=list)
    promotions: list[tuple[int, Key]] = field(default_factory=list)

    def __len__(self) -> int:
        rows = len(self.sent) + len(self.setbacks) + len(self.followers) + len(self.tested) + len(self.scheduled)
        return rows + len(self.promotions)


@dataclass(frozen=True, slots=True)
class Fault:
    """A row that the database lets nobody change: recorded as `unmarkable`, left alone, holding nothing.

    It need not be a row of the settlement: one that was to be promoted can be it. `attempts` is absolute.
    """

    shard: int
    seq: int
    id: str
    attempts: int
    error: str


@dataclass(slots=True)
class Settled:
    """What became of a settlement that committed.

    Every row of the settlement is in exactly one place: in a `lost` shard, `done` (written, or
    gone: forget it), `locked` (somebody keeps the row locked: decide about it again a little later),
    `unblocked` (tested, no blocker: ready) or `changed` (somebody else changed the row: load it
    anew by id). `promoted`: shards in which a held row became due, `moved` the new addresses of such rows by seq; `unpromoted`: keys whose lowest
    holding row is held and locked by somebody: the promotion is owed. `faults`: what was recorded;
    those of them that are rows of the settlement are `done` too.
    """

    lost: set[int] = field(default_factory=set)
    done: list[Row] = field(default_factory=list)
    locked: list[Row] = field(default_factory=list)
    unblocked: list[Row] = field(default_factory=list)
    changed: list[Row] = field(default_factory=list)
    promoted: set[int] = field(default_factory=set)
    moved: dict[int, Ctid] = field(default_factory=dict)
    unpromoted: list[tuple[int, Key]] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)


Place = tuple[int, int]
"""A row aside in the order of walks: the hash of its key, its seq."""


@dataclass(frozen=True, slots=True)
class HeldKey:
    """A key that something holds, as far as one page of a walk saw it: the seq of its highest holding row, and whether the
    lowest is held."""

    hash: int
    shard: int
    key: Key
    highest: int
    is_lowest_held: bool


@dataclass(frozen=True, slots=True)
class HeldPage:
    """`reached`: where the page ended; `None` when that was the last row aside."""

    keys: Sequence[HeldKey]
    reached: Place | None


@dataclass(frozen=True, slots=True)
class Searched:
    """What a look at rows below their floors came to (R5).

    `reached`: for each position the last seq looked at, or `None` where the floor was reached. `rows`: looked at in
    all. `lowered`: shards, with their new floors, in which an unsent row was found: their owner is unseated.
    """

    reached: Sequence[int | None]
    rows: int
    lowered: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class Spared:
    """A row that the database lets nobody delete, though its retention is over, or change; and what it said."""

    seq: int
    id: str
    error: str


@dataclass(frozen=True, slots=True)
class Purged:
    """What a batch of the marked rows' retention came to (O3): so many `rows` were deleted."""

    rows: int
    refused: Sequence[Spared]


@dataclass(frozen=True, slots=True)
class PolicyApplied:
    """What a batch of parked rows that get their owner's policy came to; `is_done`: that was all, but for those that are refused."""

    is_done: bool
    refused: Sequence[Spared] = ()


@dataclass(frozen=True, slots=True)
class Discarded:
    """What a batch of the parked rows' retention came to (O2).

    `rows`: so many were deleted. `unpromoted`: keys, with their shards, whose promotion is owed.
    `is_full`: there may be more.
    """

    rows: int
    refused: Sequence[Spared]
    unpromoted: Sequence[tuple[int, Key]]
    is_full: bool


@dataclass(frozen=True, slots=True)
class Backlog:
    """The table's state for the gauges. `is_estimated` is said of `backlog_rows`: what is above 100,000 is. The scheduled rows are
    among the deferred ones, and the backlog has neither them nor the parked."""

    backlog_rows: int
    is_estimated: bool
    oldest_pending_age_s: float | None
    deferred_rows: int
    parked_rows: int
    held_rows: int
    held_keys: int
    scheduled_rows: int
    newest_seq: int


class Armed(StrEnum):
    """What came of asking for the doorbell's lock."""

    GRANTED = "granted"
    """Every insert rings from now on; read once more before sleeping."""
    TIMED_OUT = "timed_out"
    """A writer that did not ring is still open: poll."""
    ELSEWHERE = "elsewhere"
    """Another relay holds it: inserts ring already; listen."""


class Outbox(Protocol):
    """The outbox table and the relays' tables beside it.

    Calls of one group never overlap: (claim, renew, release, leave, check) run on the keeper's
    session, (page, load, reload, due, followers, arm, disarm, backlog, purge, search, discard_parked, apply_policy,
    held_keys) on the reader's,
    (settle) on the settler's; groups do overlap. Every call raises `DatabaseLost` when a session
    died or answered not in time: then an effect is unknown and *all* sessions are closed (R5);
    `DatabaseRefused` when the server rolled the statement back for sure.
    """

    async def open(self, on_ring: Callable[[], None], on_lost: Callable[[str], None]) -> OutboxInfo:
        """Open all sessions. Raises SchemaMissing, SchemaIncompatible, DatabaseUnavailable.

        `on_ring` is called when the doorbell rings, `on_lost(why)` once when a session is gone.
        """
        ...

    async def close(self) -> None:
        """Close all sessions; never raises, safe to repeat."""
        ...

    async def claim(self, shards_max: int) -> Sequence[Claim]: ...

    async def renew(self, held: Mapping[int, Held], *, available: bool) -> Renewal:
        """Renew all leases and the membership; `available` is false without a broker (L6)."""
        ...

    async def release(self, held: Mapping[int, Held]) -> frozenset[int]:
        """Give shards back at once, with their floors (L5); returns those that stay, for somebody keeps their row locked."""
        ...

    async def leave(self) -> None:
        """A clean stop: the membership row goes, and with it whatever is still ours in the table."""
        ...

    async def check(self) -> Check: ...

    async def page(self, request: PageRequest) -> Page: ...

    async def load(self, rows: Sequence[Row]) -> Sequence[Row]:
        """Fetch what was left behind into the rows; returns the rows that are gone."""
        ...

    async def reload(self, rows: Sequence[Row]) -> Sequence[Row]:
        """New `Row`s (bodies and headers left behind) by id and seq for those still pending and not aside."""
        ...

    async def due(self, cursors: Mapping[int, int], limit: int, here: Sequence[int] = ()) -> Due:
        """The oldest due rows at or below the shards' cursors, at most `limit` and each shard's share of that, but for those with
        the `seq`s in `here`."""
        ...

    async def followers(self, heads: Sequence[Row], cursors: Mapping[int, int], limit: int) -> Sequence[Row]:
        """Of each of these released rows the next held ones of its key, without a gap, at most `limit` a head and at or
        below the shard's cursor (H4); by seq."""
        ...

    async def apply_policy(self, epochs: Mapping[int, int], limit: int, spared: Sequence[int] = ()) -> PolicyApplied:
        """Give at most `limit` parked rows of these shards, ours under these epochs, our `RELAY_ON_PARKED`, but for those with the
        seqs `spared`. Before they are read."""
        ...

    async def held_keys(self, shards: Sequence[int], after: Place | None, limit: int) -> HeldPage:
        """Look at the next `limit` rows aside, whosever, for keys of these shards that something holds (H2, H3)."""
        ...

    async def arm(self, wait_s: float) -> Armed: ...

    async def disarm(self) -> None:
        """Unlock first, then ring once for the others."""
        ...

    async def settle(self, settlement: Settlement) -> Settled: ...

    async def purge(self, older_than_s: float, limit: int, spared: Sequence[int] = ()) -> Purged:
        """Delete at most `limit` marked rows older than that (O3), but for those with the seqs `spared`."""
        ...

    async def search(self, positions: Sequence[tuple[int, int]], limit: int) -> Searched:
        """From each position (a shard of ours and a seq) on, look at the next `limit` rows up to the floor for unsent
        ones, and lower the floors that hide one (R5)."""
        ...

    async def discard_parked(self, older_than_s: float, limit: int, spared: Sequence[int]) -> Discarded:
        """Delete at most `limit` rows of our shards that were parked longer ago than that (O2), but for those with
        the seqs `spared`; their keys are promoted."""
        ...

    async def backlog(self, starts: Mapping[int, int] | None = None) -> Backlog:
        """`starts`: by shard, up to where the caller knows that nothing waits; elsewhere the floors say it."""
        ...
