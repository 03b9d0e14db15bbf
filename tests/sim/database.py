"""A fake PostgreSQL: rows, sequence, writers' transactions, leases; crashes that may lose commits.

Owns: the committed state, with an undo journal so that a crash under asynchronous commit can rewind it;
open transactions with their virtual ids, xids and table locks (a commit is visible before its lock
goes); row locks of applications; shard locks. Several relays share one `Database` through `FakeOutbox`.

Every method acts at one instant. What takes time (latency, statements in flight) is `FakeOutbox`'s and
the actors'. The database's clock is the loop's plus a constant.
"""

from __future__ import annotations

import random
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from relay.core.ports.outbox import SHARDS, Fault
from relay.message import Aside, Ctid, Key, Row

from .loop import OUTSIDE, VirtualLoop
from .oracle import Entry, History, Oracle
from .tables import (
    Boundary,
    DatabaseOptions,
    DbRelay,
    DbRow,
    DbShard,
    Promoted,
    Savepoint,
    Session,
    Transaction,
    TransactionGone,
)

EPOCH_S = 1_700_000_000.0


class Database:
    def __init__(
        self,
        loop: VirtualLoop,
        rng: random.Random,
        oracle: Oracle,
        history: History,
        options: DatabaseOptions,
    ) -> None:
        self.loop = loop
        self.random = rng
        self.oracle = oracle
        self.history = history
        self.options = options
        self.is_up = True
        self.has_schema = True
        self.was_set_back = False
        self.crashes = 0
        self.rows: dict[tuple[int, str], DbRow] = {}
        self.pending: dict[int, dict[tuple[int, str], DbRow]] = {shard: {} for shard in range(SHARDS)}
        """By shard, neither sent nor aside."""
        self.aside: dict[int, dict[tuple[int, str], DbRow]] = {shard: {} for shard in range(SHARDS)}
        """By shard, aside and not sent."""
        self.shards: dict[int, DbShard] = {shard: DbShard() for shard in range(SHARDS)}
        self.relays: dict[str, DbRelay] = {}
        self.meta: dict[str, int] = {"last_value": 1, "is_called": 0, "next_xid": 700, "paused": 0}
        self.transactions: dict[str, Transaction] = {}
        self.running: set[int] = set()
        self.sessions: set[Session] = set()
        self._alive: set[int | None] = set()
        """Their pids."""
        self.row_locks: set[str] = set()
        self.unseated: dict[int, str] = {}
        """Shards whose owner has not given them back since it was unseated."""
        self.unmarkable: set[str] = set()
        """Ids of rows whose every change a trigger refuses."""
        self.faults: set[tuple[int, str]] = set()
        self.key_share: Counter[int] = Counter()
        self.exclusive: set[int] = set()
        self.bell_owner: Session | None = None
        self.bell_waiters: set[Session] = set()
        self.listeners: dict[Session, Callable[[], None]] = {}
        self._journal: list[Callable[[], None]] = []
        self._boundaries: list[Boundary] = [Boundary(0, 0.0, None)]
        self._backends = 2
        self._pids = 100
        self._ids = 0
        self._ctids = 0
        self.clock_error_s = 0.0
        self._deaf: set[str] = set()
        """Relays one of whose sessions is gone, whether they know it or not."""

    def now(self) -> float:
        """Epoch seconds by the database's clock."""
        return EPOCH_S + self.loop.time() + self.clock_error_s

    def draw(self, span: tuple[float, float]) -> float:
        return span[0] if span[0] == span[1] else self.random.uniform(*span)

    def latency(self) -> float:
        if self.options.slow_share and self.random.random() < self.options.slow_share:
            return self.draw(self.options.slow)
        return self.draw(self.options.latency)

    def shard_of(self, key: Key | None, id_: str) -> int:
        text = f"{key[0]}\x1f{key[1]}" if key is not None else id_
        return zlib.crc32(text.encode()) % self.options.shards_used

    # -------------------------------------------------------- storage with a journal

    def put_row(self, row: DbRow) -> None:
        self._set_row(row.identity, row)

    def delete_row(self, row: DbRow) -> None:
        self._set_row(row.identity, None)

    def _set_row(self, identity: tuple[int, str], row: DbRow | None) -> None:
        before = self.rows.get(identity)
        self._place(identity, row, before)
        self._journal.append(lambda: self._place(identity, before, self.rows.get(identity)))

    def _place(self, identity: tuple[int, str], row: DbRow | None, before: DbRow | None) -> None:
        if before is not None:
            del self.rows[identity]
            self.pending[before.shard].pop(identity, None)
            self.aside[before.shard].pop(identity, None)
        if row is not None:
            self.rows[identity] = row
            if row.sent_at is None:
                where = self.pending if row.aside is None else self.aside
                where[row.shard][identity] = row

    def put_fault(self, identity: tuple[int, str]) -> None:
        if identity not in self.faults:
            self.faults.add(identity)
            entry = self.oracle.entries[identity[1]]
            if entry.copies == 0:
                # Refused before it could be published: nothing waits for it, an operator sees it.
                self.oracle.discarded(entry.id)
            self._journal.append(lambda: self.faults.discard(identity))

    def end_fault(self, identity: tuple[int, str]) -> None:
        self.faults.remove(identity)
        self._journal.append(lambda: self.faults.add(identity))

    def unsent(self) -> list[DbRow]:
        """In the order of the table."""
        return [row for row in self.rows.values() if row.sent_at is None]

    def is_sound(self, row: DbRow) -> bool:
        return row.identity not in self.faults

    def put_shard(self, shard: int, value: DbShard) -> None:
        before = self.shards[shard]
        self.shards[shard] = value
        self._journal.append(lambda: self.shards.__setitem__(shard, before))

    def put_relay(self, instance: str, value: DbRelay | None) -> None:
        before = self.relays.get(instance)

        def put(what: DbRelay | None) -> None:
            if what is None:
                self.relays.pop(instance, None)
            else:
                self.relays[instance] = what

        put(value)
        self._journal.append(lambda: put(before))

    def put_meta(self, name: str, value: int) -> None:
        before = self.meta[name]
        self.meta[name] = value
        self._journal.append(lambda: self.meta.__setitem__(name, before))

    def commit(self, *, synchronous: bool, undone: Callable[[], None] | None = None) -> None:
        """What was put since the last commit is one transaction; a synchronous one flushes all before it."""
        if synchronous:
            self._journal.clear()
            self._boundaries = [Boundary(0, self.loop.time(), None)]
        else:
            self._boundaries.append(Boundary(len(self._journal), self.loop.time(), undone))

    def new_ctid(self) -> Ctid:
        self._ctids += 1
        return f"({self._ctids // 60},{self._ctids % 60 + 1})"

    def updated(self, row: DbRow, **changes: object) -> DbRow:
        """A new version of the row (at a new address), stored."""
        version = replace(row, ctid=self.new_ctid(), **changes)  # type: ignore[arg-type]
        self.put_row(version)
        return version

    # -------------------------------------------------------- sequence and writers

    def last_seq(self) -> int:
        """S: what the sequence handed out last (R1, `is_called`)."""
        return self.meta["last_value"] if self.meta["is_called"] else self.meta["last_value"] - 1

    def setval(self, last_seq: int) -> None:
        """An operator's (or a restore's) setval: nothing notices (R5)."""
        self.history.note("operator", "sets", f"the sequence from {self.last_seq()} to {last_seq}")
        self.was_set_back = True
        self.put_meta("last_value", last_seq)
        self.put_meta("is_called", 1)
        self.commit(synchronous=True)

    def begin(self) -> Transaction:
        if not self.is_up:
            raise TransactionGone
        self._backends += 1
        transaction = Transaction(f"{self._backends % 40 + 3}/{self._backends}")
        self.transactions[transaction.vxid] = transaction
        return transaction

    def lock_table(self, transaction: Transaction) -> None:
        """An INSERT's first act."""
        self._require(transaction)
        transaction.is_locked = True

    def next_seq(self, transaction: Transaction) -> int:
        self._require(transaction)
        assert transaction.is_locked, "a seq is drawn under the table's lock"
        self.put_meta("last_value", self.last_seq() + 1)
        self.put_meta("is_called", 1)
        seq = self.meta["last_value"]
        transaction.seqs[seq] = self.oracle.step()
        return seq

    def write(
        self,
        transaction: Transaction,
        seq: int,
        *,
        key: str | None = "k",
        event_type: str = "ok",
        size: int = 10,
        headers_size: int = 0,
        available_in_s: float | None = None,
    ) -> str:
        """The rest of an INSERT: the xid, the row, the statement trigger; sizes as `outbox_suite.Table.insert` has them.
        Returns the id."""
        self._require(transaction)
        if transaction.xid is None:
            transaction.xid = self.meta["next_xid"]
            self.put_meta("next_xid", transaction.xid + 1)
            self.running.add(transaction.xid)
        self._ids += 1
        id_ = f"m{self._ids}"
        row_key = None if key is None else ("t", key)
        transaction.rows.append(
            DbRow(
                seq,
                id_,
                self.shard_of(row_key, id_),
                self.new_ctid(),
                row_key,
                event_type,
                b"x" * size,
                self.now(),
                headers=f'{{"h": "{"x" * (headers_size - 9)}"}}' if headers_size else None,
                available_at=None if available_in_s is None else self.now() + available_in_s,
            )
        )
        transaction.drawn[id_] = transaction.seqs[seq]
        if self.bell_owner is not None or self.bell_waiters:
            transaction.rings = True
        else:
            transaction.holds_bell = True
        return id_

    def insert(self, transaction: Transaction, key: str | None = "k", **columns: object) -> str:
        """One INSERT of one row at one instant; returns the id."""
        self.lock_table(transaction)
        seq = self.next_seq(transaction)
        return self.write(transaction, seq, key=key, **columns)  # type: ignore[arg-type]

    def savepoint(self, transaction: Transaction) -> Savepoint:
        self._require(transaction)
        return Savepoint(len(transaction.rows), transaction.is_locked, transaction.holds_bell, transaction.rings)

    def roll_back_to(self, transaction: Transaction, savepoint: Savepoint) -> None:
        """ROLLBACK TO SAVEPOINT: what was written behind it is gone, and so are locks that were taken there. The xid stays."""
        self._require(transaction)
        for row in transaction.rows[savepoint.rows :]:
            del transaction.seqs[row.seq], transaction.drawn[row.id]
        del transaction.rows[savepoint.rows :]
        transaction.is_locked = savepoint.is_locked
        transaction.holds_bell, transaction.rings = savepoint.holds_bell, savepoint.rings

    def prepare(self, transaction: Transaction) -> None:
        """PREPARE TRANSACTION: another virtual id, the same xid; flushed, survives a crash."""
        self._require(transaction)
        assert transaction.xid is not None, "a transaction without writes is not prepared"
        assert not transaction.rings, "NOTIFY forbids PREPARE TRANSACTION"
        del self.transactions[transaction.vxid]
        transaction.vxid = f"-1/{transaction.xid}"
        transaction.is_prepared = True
        self.transactions[transaction.vxid] = transaction
        self.commit(synchronous=True)

    def end(self, transaction: Transaction, *, commit: bool, release: bool = True) -> None:
        """COMMIT or ROLLBACK, prepared or not: visible now; `release` drops the locks at once, too."""
        self._require(transaction)
        transaction.is_open = False
        if transaction.xid is not None:
            self.running.discard(transaction.xid)
        if commit and transaction.rows:
            tick = self.oracle.step()
            ids = [row.id for row in transaction.rows]
            for row in transaction.rows:
                self.put_row(row)
                self.oracle.committed(
                    Entry(
                        row.id,
                        row.seq,
                        row.key,
                        row.shard,
                        row.event_type,
                        transaction.drawn[row.id],
                        tick,
                        row.available_at is not None and row.available_at > row.created_at,
                        row.available_at,
                    )
                )
            self.commit(
                synchronous=self.options.others_synchronous or transaction.is_prepared,
                undone=lambda: self.oracle.commit_lost(ids),
            )
            self.history.note(
                "writer",
                "commits",
                [f"{row.id}={row.seq}:{row.key and row.key[1]}" for row in transaction.rows],
            )
        if commit and transaction.rings:
            self.ring()
        if release:
            self.release_locks(transaction)
        else:
            share = self.options.xid_goes_first
            transaction.is_xid_shown = not share or self.random.random() >= share
            self.loop.call_later(self.draw(self.options.lock_lag), self.release_locks, transaction, context=OUTSIDE)

    def release_locks(self, transaction: Transaction) -> None:
        if self.transactions.get(transaction.vxid) is transaction:
            del self.transactions[transaction.vxid]
        transaction.is_locked = False
        transaction.holds_bell = False

    def _require(self, transaction: Transaction) -> None:
        if not transaction.is_open or not (self.is_up or transaction.is_prepared):
            raise TransactionGone(transaction.vxid)

    def is_bell_held_by_writers(self) -> bool:
        return any(each.holds_bell for each in self.transactions.values())

    def ring(self, but: str = "") -> None:
        """NOTIFY at a commit, to every listening session; a relay does not heed its own."""
        for session, on_ring in list(self.listeners.items()):
            if session.is_alive and session.instance != but:
                self.loop.call_later(self.draw(self.options.latency), on_ring, context=OUTSIDE)

    # -------------------------------------------------------- keys

    def holding_rows(self, key: Key | None, shard: int) -> list[DbRow]:
        """The key's holding rows by seq."""
        if key is None:
            return []
        found = [row for row in self.aside[shard].values() if row.key == key and row.holds and self.is_sound(row)]
        return sorted(found, key=lambda row: row.seq)

    def has_blocker(self, row: DbRow) -> bool:
        holding = self.holding_rows(row.key, row.shard)
        return bool(holding) and holding[0].seq < row.seq

    def is_stuck(self, shard: int, key: Key | None) -> bool:
        """Whether the key is held by nothing that will ever be released."""
        holding = self.holding_rows(key, shard)
        return bool(holding) and holding[0].aside is Aside.HELD

    def promote(self, touched: Iterable[tuple[int, Key | None]]) -> Promoted:
        """H3. A row that somebody keeps locked is left for later, one that refuses it is recorded."""
        promoted = Promoted()
        for shard, key in sorted(set(touched), key=repr):
            while key is not None and self.is_stuck(shard, key):
                lowest = self.holding_rows(key, shard)[0]
                if lowest.id in self.row_locks:
                    promoted.unpromoted.append((shard, key))
                    break
                if lowest.id in self.unmarkable:
                    self.put_fault(lowest.identity)
                    promoted.faults.append(Fault(shard, lowest.seq, lowest.id, lowest.attempts, "refused"))
                    continue
                promoted.moved[lowest.seq] = self.updated(lowest, aside=Aside.DEFERRED, due_at=self.now()).ctid
                promoted.shards.add(shard)
        return promoted

    def unseat(self, shard: int, floor: int | None = None) -> None:
        """Raise the epoch: an operator leaves the rest to who claims it next, or has lowered the floor."""
        before = self.shards[shard]
        lowest = before.floor if floor is None else min(floor, before.floor)
        unseated = replace(before, epoch=before.epoch + 1, floor=lowest)
        self.put_shard(shard, unseated)
        if before.owner is not None:
            self.unseated[shard] = before.owner

    def given_back(self, shard: int) -> None:
        """What its owner published after it was unseated is repeated."""
        if (owner := self.unseated.pop(shard, None)) is not None:
            self.oracle.taken(shard, owner)

    # -------------------------------------------------------- shard locks (FOR UPDATE)

    def is_shard_free(self, shard: int) -> bool:
        return not self.key_share[shard] and shard not in self.exclusive

    def lock_shards(self, shards: set[int]) -> Callable[[], None]:
        """Somebody outside the relays locks them; returns what unlocks them. A crash does that, too."""
        crashes = self.crashes
        self.exclusive |= shards

        def unlock() -> None:
            if self.crashes == crashes:
                self.exclusive -= shards
                for shard in shards:
                    self.oracle.locked_until[shard] = self.loop.time()

        return unlock

    # -------------------------------------------------------- what the oracle looks at

    def owner_of(self, shard: int) -> str | None:
        return self.shards[shard].owner

    def lower_holding(self, row: Row) -> Sequence[str]:
        """The ids of the holding rows of this row's key below it."""
        return [held.id for held in self.holding_rows(row.key, row.shard) if held.seq < row.seq]

    def is_deaf(self, relay: str) -> bool:
        """Whether it cannot know of everything that its sessions did."""
        return relay in self._deaf

    # -------------------------------------------------------- sessions, crashes

    def connect(self, instance: str, on_gone: Callable[[str], None]) -> Session:
        self._pids += 1
        self._deaf.discard(instance)
        session = Session(self._pids, instance, on_gone)
        self.sessions.add(session)
        self._alive.add(session.pid)
        return session

    def end_session(self, session: Session) -> None:
        session.is_alive = False
        self.sessions.discard(session)
        self._alive.discard(session.pid)
        self.listeners.pop(session, None)
        if self.bell_owner is session:
            self.bell_owner = None
        self.bell_waiters.discard(session)

    def is_pid_alive(self, pid: int | None) -> bool:
        return pid in self._alive

    def terminate(self, session: Session, why: str) -> None:
        """The server ends a session (pg_terminate_backend, a timeout): its client hears of it."""
        if session.is_alive:
            self._deaf.add(session.instance)
            self.oracle.ails(session.instance)
            self.end_session(session)
            session.on_gone(why)

    def terminate_unheard(self, instance: str) -> Callable[[], None]:
        """The same, of the session that renews, but its client hears of it only when what is returned is called."""
        sessions = [session for session in self.sessions if session.instance == instance]
        if not sessions:
            return lambda: None
        keeper = min(sessions, key=lambda session: session.pid)
        told, keeper.on_gone = keeper.on_gone, lambda why: None
        self.terminate(keeper, "")
        return lambda: told("terminated by an administrator")

    def crash(self, *, down_s: float, loses: bool, keeps: int | None = None) -> None:
        """All sessions die, open transactions are gone; `loses`: commits not flushed may be lost too,
        those after the boundary of index `keeps`, or after one drawn by chance."""
        self.history.note("database", "crashes", f"loses={loses} down={down_s:.3f}")
        self.is_up = False
        self.crashes += 1
        for session in sorted(self.sessions, key=lambda each: each.pid):
            self.terminate(session, "the database crashed")
        for transaction in list(self.transactions.values()):
            if not transaction.is_prepared:
                transaction.is_open = False
                self.release_locks(transaction)
                if transaction.xid is not None:
                    self.running.discard(transaction.xid)
        # A relay that connects again finds leases that the crash took back in time.
        self.oracle.all_ail_until(self.loop.time() + down_s)
        self.row_locks.clear()
        self.key_share.clear()
        self.exclusive.clear()
        self._backends = 2
        if loses:
            self._rewind(keeps)
        self.commit(synchronous=True)
        self.loop.call_later(down_s, self._come_up, context=OUTSIDE)

    def _come_up(self) -> None:
        self.is_up = True
        self.history.note("database", "is up")

    def _rewind(self, keeps: int | None) -> None:
        """Lose the commits after a boundary at most 0.6 s old; the sequence falls back, up to 32 ahead."""
        first = max(i for i, each in enumerate(self._boundaries) if i == 0 or each.time <= self.loop.time() - 0.6)
        chosen = self.random.randrange(first, len(self._boundaries)) if keeps is None else keeps
        self.rewind_to(self._boundaries[chosen], self._boundaries[chosen + 1 :])

    def rewind_to(self, boundary: Boundary, lost: list[Boundary]) -> None:
        reached = self.last_seq()
        while len(self._journal) > boundary.position:
            self._journal.pop()()
        for each in lost:
            if each.undone is not None:
                each.undone()
        kept = self.last_seq()
        ahead = self.random.randint(kept, max(kept, min(reached, kept + self.options.sequence_ahead_max)))
        if ahead > kept:
            self.meta["last_value"], self.meta["is_called"] = ahead, 1
        if lost:
            self.oracle.commits_rewound()
        self.history.note("database", "rewinds", f"{len(lost)} commits lost, sequence {reached} -> {self.last_seq()}")

    @property
    def boundaries(self) -> list[Boundary]:
        """The commits that a crash could lose, oldest first; [0] is what is flushed for sure."""
        return self._boundaries
