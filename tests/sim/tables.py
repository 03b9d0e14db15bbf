"""What the fake PostgreSQL of `database.py` holds: rows, leases, relays, sessions, writers' transactions, and its options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from relay.core.ports.outbox import Fault
from relay.message import Aside, Ctid, Key


@dataclass(frozen=True, slots=True)
class DbRow:
    """A stored row. `holds` is meant for rows aside only; `due_at` for deferred and scheduled ones."""

    seq: int
    id: str
    shard: int
    ctid: Ctid
    key: Key | None
    event_type: str
    payload: bytes
    created_at: float
    headers: str | None = None
    available_at: float | None = None
    aside: Aside | None = None
    holds: bool = False
    due_at: float | None = None
    attempts: int = 0
    sent_at: float | None = None
    failure_class: str = ""
    parked_at: float | None = None

    @property
    def identity(self) -> tuple[int, str]:
        return self.seq, self.id


@dataclass(frozen=True, slots=True)
class DbShard:
    epoch: int = 0
    owner: str | None = None
    owner_pid: int | None = None
    leased_until: float = 0.0
    floor: int = 0
    last_seq: int = 0
    """S when the shard was last claimed, renewed or released."""
    parked_hold: bool | None = None


@dataclass(frozen=True, slots=True)
class DbRelay:
    heartbeat: float
    is_available: bool
    pid: int


@dataclass(slots=True)
class DatabaseOptions:
    """Latencies in seconds: each statement waits twice `latency` (uniform); a share of them is slow."""

    latency: tuple[float, float] = (0.001, 0.001)
    slow_share: float = 0.0
    slow: tuple[float, float] = (0.05, 0.5)
    check_gap: tuple[float, float] = (0.0, 0.0)
    lock_lag: tuple[float, float] = (0.0, 0.0)
    xid_goes_first: float = 0.0
    """The share of ending transactions whose xid's lock is gone while the table's lock still shows."""
    session_linger: tuple[float, float] = (0.0, 0.0)
    delete_sent: bool = False
    lease_s: float = 5.0
    statement_timeout_s: float = 3.0
    settle_synchronous: bool = True
    others_synchronous: bool = True
    shards_used: int = 8
    due_inline_bytes: int = 16_384
    sequence_ahead_max: int = 32
    """How far above what was flushed the sequence may stand after a crash."""
    late_answers: float = 0.3
    """The share of answers that were on their way when a session was lost and are still taken."""
    page_refusals: float = 0.0
    settle_refusals: float = 0.0
    other_refusals: float = 0.0
    held_page_rows: int = 2000
    policy_rows: int = 2000
    """Caps of what a call may do at once, so that few rows need several."""


@dataclass(slots=True)
class Boundary:
    """A commit in the journal. `undone` is called when a crash loses it."""

    position: int
    time: float
    undone: Callable[[], None] | None


@dataclass(slots=True, eq=False)
class Session:
    """A backend. `on_gone` tells its client that the connection is lost."""

    pid: int
    instance: str
    on_gone: Callable[[str], None]
    is_alive: bool = True


@dataclass(slots=True)
class Promoted:
    """What a promotion came to: shards with a row due, keys that wait for a lock, rows recorded as unmarkable."""

    shards: set[int] = field(default_factory=set)
    moved: dict[int, Ctid] = field(default_factory=dict)
    unpromoted: list[tuple[int, Key]] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)


class TransactionGone(Exception):
    """The writer's transaction ended under it (the database crashed)."""


@dataclass(frozen=True, slots=True)
class Savepoint:
    """What a transaction had at that point: so many rows, and these locks."""

    rows: int
    is_locked: bool
    holds_bell: bool
    rings: bool


@dataclass(slots=True, eq=False)
class Transaction:
    """A writer's transaction. Locks outlive visibility: `is_locked` may still be true after the end."""

    vxid: str
    xid: int | None = None
    is_open: bool = True
    is_locked: bool = False
    is_prepared: bool = False
    is_xid_shown: bool = True
    holds_bell: bool = False
    rings: bool = False
    rows: list[DbRow] = field(default_factory=list)
    drawn: dict[str, int] = field(default_factory=dict)
    seqs: dict[int, int] = field(default_factory=dict)
    """Each seq it drew, and the tick of that."""
