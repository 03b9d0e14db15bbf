"""The rows in memory: their states, and one chain per ordering key.

Owns every row between the page that brought it and the settlement that ended it, its `State`, and
what is known of keys that are held. States and their ways:

    admit -> WAITING -> READY -> IN_FLIGHT -> SETTLING -> (finished)
               |  ^       |        |   |
               |  |       |        |   +-- nack -> BACKOFF -> READY (its turn permitting)
               |  |       |        +------ link closed -> READY
               |  |       +-- cannot be sent, scheduled: SETTLING
               |  +-- no blocker -- TESTING (its key may be held; H2)
               +-- the row before it is set aside: SETTLING as `held` (H1)

Invariants: in `strict` at most one row of a key is in flight, and a row goes only when no lower
unsettled row of its key is here (P1, I3); a row is at most once in the ready queue's live part.
FORGOTTEN rows are no longer here; one that was in flight is an orphan, its outcome settles
nothing (P3).

What may go stands in a queue (`ready.py`), what was nacked in another (`backoff.py`).

Does not do: encoding, sending, writing decisions, reading clocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from relay.core.backoff import Backoff
from relay.core.chain import Chain
from relay.core.holding import Holding
from relay.core.ports.outbox import SHARDS
from relay.core.ready import ReadyQueue
from relay.core.settings import Ordering
from relay.message import Aside, Ctid, Key, Row, State

_WAITING: Final = State.WAITING
_READY: Final = State.READY
_IN_FLIGHT: Final = State.IN_FLIGHT
_BACKOFF: Final = State.BACKOFF
_SETTLING: Final = State.SETTLING
_TESTING: Final = State.TESTING
_FORGOTTEN: Final = State.FORGOTTEN


class Chains:
    """All rows that the relay holds."""

    def __init__(self, ordering: Ordering, inline_bytes: int = 8192, held_keys_max: int = 4096) -> None:
        self._inline_bytes = inline_bytes
        self._is_ordered = ordering is not Ordering.NONE
        self._is_strict = ordering is Ordering.STRICT
        self._rows: dict[int, Row] = {}
        self._chains: dict[Key, Chain] = {}
        self._counts = [0] * SHARDS
        self._queue = ReadyQueue()
        self.backoff = Backoff()
        self.holding = Holding(held_keys_max)
        self.bytes = 0
        """Bytes of bodies, headers and rarer columns in memory."""
        self.large_bytes = 0
        """Those of them that were fetched apart (of rows larger than a page carries)."""
        self.has_orphans = False
        """A row was forgotten in flight on the present link: ids are looked up before a publish (P1)."""

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, row: Row) -> bool:
        return self._rows.get(row.seq) is row

    def rows(self) -> Iterable[Row]:
        return self._rows.values()

    def count(self, shard: int) -> int:
        """Rows of the shard in memory."""
        return self._counts[shard]

    @property
    def ready(self) -> int:
        """Rows that may go; an upper bound, for some may have left the queue's live part."""
        return len(self._queue)

    @property
    def wanted(self) -> dict[int, Row]:
        """Rows next to go whose bodies were left behind, by seq."""
        return self._queue.wanted

    def kept_back_by(self, row: Row) -> int:
        """How many rows cannot go while this one cannot."""
        return len(row.chain.rows) if self._is_strict and row.chain is not None else 1

    def in_flight_bytes(self) -> int:
        """Bytes of the rows published and not yet confirmed."""
        return sum(row.size for row in self._rows.values() if row.state is _IN_FLIGHT)

    def lowest_unsettled(self) -> dict[int, int]:
        """Per shard the lowest seq in memory (R5)."""
        lowest: dict[int, int] = {}
        for seq, row in self._rows.items():
            shard = row.shard
            if shard not in lowest or seq < lowest[shard]:
                lowest[shard] = seq
        return lowest

    # ------------------------------------------------------------ held keys

    def note_holding(self, row: Row, serial: int) -> None:
        """The row goes aside and holds its key, in the settlement numbered `serial`."""
        if row.key is not None and self._is_ordered:
            self.holding.note(row.shard, row.key, row.seq, serial)

    def unknown(self, shards: Iterable[int]) -> list[int]:
        """Those of the shards in which a key may be held that nobody here knows of: whoever reads rows asks for them."""
        return [shard for shard in shards if not self.holding.is_known(shard)] if self._is_ordered else []

    def on_unblocked(self, row: Row) -> None:
        """A test found no blocker: the row joins its chain.

        A lower row that was set back since has taken it along as a follower; then it is not tested any more. The key
        is free only if no holding row lies *above* this one either, for the next row would stand behind that.
        """
        if row.state is not _TESTING or row not in self:
            return
        if row.key is not None:
            self.holding.note_free(row.shard, row.key, row.seq)
        row.state = _WAITING
        self._advance_chain_of(row)

    # ------------------------------------------------------------ in

    def admit(self, rows: Iterable[Row], known_until: int | None = None) -> list[Row]:
        """Take rows read from the table or released from aside; returns those to be tested (H2).

        A row read from the table is tested when its key may be held. One released from aside was the lowest of its
        key for a query that saw all settlements up to `known_until`: it is tested if its key was held since.
        A row that is here already (same seq and id) is skipped (R4). Another id under a known seq
        means that the database lost the old row: it is forgotten (identity).
        """
        to_test: list[Row] = []
        known = self._rows
        chains = self._chains
        counts = self._counts
        ready = self._queue.rows
        holding = self.holding if self.holding.is_any else None
        is_ordered = self._is_ordered
        lengthened: dict[int, Chain] = {}
        for row in rows:
            old = known.get(row.seq)
            if old is not None:
                if old.id == row.id:
                    continue
                self.forget(old)
            known[row.seq] = row
            counts[row.shard] += 1
            if row.is_loaded:
                self.bytes += row.size
                if row.size > self._inline_bytes:
                    self.large_bytes += row.size
            key = row.key
            if key is None or not is_ordered:
                row.state = _READY
                ready.append(row)
                continue
            is_suspect = holding is not None and holding.may_hold(row.shard, key, known_until)
            if is_suspect:
                row.state = _TESTING
                to_test.append(row)
            else:
                row.state = _WAITING
            chain = chains.get(key)
            if chain is None:
                chains[key] = Chain(row)
                if not is_suspect:
                    row.state = _READY
                    ready.append(row)
            elif chain.rows[-1].seq < row.seq:
                chain.append(row)
                if not self._is_strict:
                    lengthened[id(chain)] = chain
            else:
                self._insert(chain, row)
        for chain in lengthened.values():
            # Once a chain, however many rows a page brought: a hot key's chain is long.
            self._advance(chain)
        return to_test

    def _hold_body(self, row: Row) -> None:
        self.bytes += row.size
        if row.size > self._inline_bytes:
            self.large_bytes += row.size

    def _insert(self, chain: Chain, row: Row) -> None:
        """A lower seq that came later goes next (I3); what stood ready behind it waits again."""
        chain.insert(row)
        self._demote(chain, row)
        self._advance(chain)

    def _demote(self, chain: Chain, row: Row) -> None:
        """What stands ready behind this row of the chain waits again."""
        demoted = [later for later in chain.above(row) if later.state is _READY]
        for later in demoted:
            later.state = _WAITING
            self._queue.wanted.pop(later.seq, None)
            if later is chain.put_off:
                chain.put_off = None
        if demoted and not self._is_strict:
            # Here they may be ready again in this very turn: their old place in the queue is before this row's.
            self._queue.drop_stale()

    def _stand(self, row: Row) -> None:
        """Take the row into its key's chain, at its place."""
        if row.key is None or not self._is_ordered:
            return
        chain = self._chains.get(row.key)
        if chain is None:
            self._chains[row.key] = Chain(row)
        else:
            self._insert(chain, row)

    def _leave(self, row: Row) -> Chain | None:
        """Take the row out of its chain; the chain, where others are left in it."""
        chain = row.chain
        assert chain is not None
        chain.remove(row)
        if chain.rows:
            return chain
        assert row.key is not None
        del self._chains[row.key]
        return None

    def _advance_chain_of(self, row: Row) -> None:
        if row.chain is not None:
            self._advance(row.chain)
        elif row.state is _WAITING:
            row.state = _READY
            self._queue.rows.append(row)

    def _advance(self, chain: Chain) -> None:
        """Make ready what P1 allows."""
        if self._is_strict:
            head = chain.rows[0]
            if chain.flying == 0 and head.state is _WAITING:
                head.state = _READY
                self._queue.rows.append(head)
            return
        for row in chain.rows:
            if row.state is _WAITING:
                row.state = _READY
                self._queue.rows.append(row)
            elif row.state is _TESTING or row.state is _SETTLING:
                break
            if row.state is _READY and (not row.is_loaded or row is chain.put_off):
                # Its body, or its exchange's verdict, is still to come; those behind it would overtake it.
                break

    # ------------------------------------------------------------ out

    def take(self, room: int, bytes_room: int, writable: Sequence[bool]) -> list[Row]:
        """Up to `room` ready rows, in order; at most about `bytes_room` of bodies.

        They are IN_FLIGHT from now on; give back by `untake` what the link did not take. A row
        whose body was left behind is noted in `wanted` and waits for it.
        """
        return self._queue.take(room, bytes_room, writable)

    def untake(self, rows: Sequence[Row]) -> None:
        """The link did not take these: first in the queue again, in their order."""
        for row in rows:
            self._ground(row)
        self._queue.put_first(rows)

    def set_apart(self, rows: Sequence[Row]) -> None:
        """Taken rows whose id is still on the link as an orphan's: offered again later (P1)."""
        for row in rows:
            self._ground(row)
            self._queue.set_apart(row)

    def put_off(self, rows: Sequence[Row], exchange: str) -> Sequence[Row]:
        """Taken rows that the link did not take, for the exchange of the first is being asked for: this one waits for
        `on_verified`, and so do later rows of its key. Returns the others, which may go."""
        first, rest = rows[0], rows[1:]
        self._ground(first)
        self._queue.put_off(first, exchange)
        chain = first.chain
        if chain is None or self._is_strict:
            return rest
        for row in rest:
            if row.chain is chain and row.seq > first.seq:
                self._ground(row)
        self._demote(chain, first)
        chain.put_off = first
        return [row for row in rest if row.state is _IN_FLIGHT]

    def on_verified(self, exchange: str | None = None) -> None:
        """What waited for a verdict on this exchange, or on any, goes next."""
        rows = self._queue.verified(exchange)
        self.rejoin(rows)
        # Also of one that is not ready any more: the next row of its key would wait behind it for ever.
        for row in rows:
            chain = row.chain
            if chain is not None and chain.put_off is row:
                chain.put_off = None
                self._advance(chain)

    def offer_again(self) -> None:
        """What a lease or an orphan kept back gets its turn again, before the rest."""
        self._queue.offer_again()

    def on_loaded(self, rows: Iterable[Row]) -> None:
        """Bodies have come: the rows queue again, behind lower rows of their keys that are there already."""
        for row in sorted(rows, key=lambda r: r.seq):
            was_wanted = self._queue.wanted.pop(row.seq, None) is row
            if row not in self:
                continue
            self._hold_body(row)
            if row.state is not _READY:
                continue
            if was_wanted:
                # Else it was demoted meanwhile, is ready again, and stands in the queue.
                self._queue.rows.append(row)
            if not self._is_strict:
                self._advance_chain_of(row)

    def has_large_to_go(self) -> bool:
        """Whether a large body in memory is on its way out. If all of them wait behind other rows, one of those must
        get its body even where there is no room for it."""
        return any(
            row.is_loaded and row.size > self._inline_bytes and row.state is not _WAITING for row in self._rows.values()
        )

    def _ground(self, row: Row) -> None:
        """Taken, and not published: ready again, in no queue yet."""
        assert row.state is _IN_FLIGHT
        self._land(row)
        row.state = _READY

    def _land(self, row: Row) -> None:
        if row.chain is not None:
            row.chain.flying -= 1

    # ------------------------------------------------------------ outcomes

    def on_confirmed(self, rows: Iterable[Row]) -> list[Row]:
        """Positive confirms; the keys' next rows become ready. Returns the rows to settle,
        without orphans."""
        confirmed: list[Row] = []
        chains = self._chains
        is_strict = self._is_strict
        ready = self._queue.rows
        for row in rows:
            if row.state is not _IN_FLIGHT:
                assert row.state is _FORGOTTEN
                continue
            row.state = _SETTLING
            confirmed.append(row)
            if (chain := row.chain) is None:
                continue
            if len(chain.rows) == 1:
                # Nearly always: nobody waits behind it.
                row.chain = None
                del chains[row.key]  # type: ignore[arg-type]
                continue
            chain.flying -= 1
            if self._leave(row) is not None and is_strict and chain.flying == 0:
                head = chain.rows[0]
                if head.state is _WAITING:
                    head.state = _READY
                    ready.append(head)
        return confirmed

    def on_nacked(self, row: Row, due: float) -> None:
        """Again after its backoff, at boot-time `due`; nothing is written (P2)."""
        if row.state is not _IN_FLIGHT:
            return
        self._land(row)
        self.backoff.add(row, due, self.kept_back_by(row))
        if row.chain is not None:
            # A lower one of its key may have come meanwhile.
            self._advance(row.chain)

    def wake_backoff(self, now: float) -> None:
        """Nacked rows whose time has come are ready, if no lower row of their key came since."""
        while (row := self.backoff.pop(now)) is not None:
            row.state = _WAITING
            self._advance_chain_of(row)

    def on_lost(self, rows: Sequence[Row]) -> None:
        """A link closed over these: ready again, before everything else, in their order."""
        self._queue.put_first(self._back_from_link(rows))

    def keep_apart(self, rows: Iterable[Row]) -> None:
        """The same for rows that must not go with others (`core/suspects.py`): ready, in no queue, for `take_alone`."""
        self._back_from_link(rows)

    def rejoin(self, rows: Sequence[Row]) -> None:
        """Rows that were kept apart may go with others after all: before everything else, in their order."""
        self._queue.put_first([row for row in rows if row.state is _READY])

    def _back_from_link(self, rows: Iterable[Row]) -> list[Row]:
        """READY again, in no queue yet; but for those whose turn it is not, for a lower one of the key committed
        meanwhile: these wait, and come out of `take` in their turn."""
        again: list[Row] = []
        for row in rows:
            if row.state is not _IN_FLIGHT:
                continue
            self._land(row)
            chain = row.chain
            if chain is not None and self._is_strict and chain.rows[0] is not row:
                row.state = _WAITING
                self._advance(chain)
                continue
            row.state = _READY
            again.append(row)
        return again

    def take_alone(self, row: Row) -> None:
        """This one goes now: a ready row that stands in no queue."""
        assert row.state is _READY
        assert row in self
        row.state = _IN_FLIGHT
        if row.chain is not None:
            row.chain.flying += 1

    # ------------------------------------------------------------ decisions

    def set_back(self, row: Row, *, holds: bool) -> list[Row]:
        """The row goes aside (deferred, parked, scheduled). With `holds` returns its read-ahead
        followers, which go aside as `held` in the same transaction (H1)."""
        assert row.state is not _SETTLING
        assert row.state is not _FORGOTTEN
        followers: list[Row] = []
        chain = row.chain
        if row.state is _IN_FLIGHT:
            self._land(row)
        self.backoff.leave(row)
        self._queue.wanted.pop(row.seq, None)
        row.state = _SETTLING
        # Without holding it stays at its place until the commit is acknowledged (H7).
        if chain is None or not holds:
            return followers
        followers = [later for later in chain.above(row) if later.state in _MOVABLE]
        for later in followers:
            self.backoff.leave(later)
            self._queue.wanted.pop(later.seq, None)
            later.state = _SETTLING
            later.chain = None
        # It blocks nobody from here: those behind it went with it, newcomers are tested.
        row.chain = None
        chain.rows[:] = [each for each in chain.rows if each.chain is not None]
        if chain.rows:
            self._advance(chain)
        else:
            assert row.key is not None
            del self._chains[row.key]
        return followers

    def hold_places(self, rows: Iterable[Row]) -> None:
        """Decisions that missed, for somebody changed the rows: until they are loaded anew each stands where it stood,
        SETTLING, so that no later one of its key goes first (I3)."""
        for row in rows:
            if row.state is _SETTLING and row.chain is None and row in self:
                self._stand(row)

    # ------------------------------------------------------------ followers of a due row (H4)

    def has_no_followers(self, row: Row) -> bool:
        """Whether a released row goes alone: nothing of its key is here beside it, and it needs no test."""
        return row.chain is not None and len(row.chain.rows) == 1 and row.state is not _TESTING and row in self

    def drop_followers(self, row: Row) -> bool:
        """The row is aside, or goes there, and will not be sent from here: rows above it that were aside when they were
        loaded, behind a head that let them go, must not go before it (H4). True when there were any."""
        chain = self._chains.get(row.key) if row.key is not None and self._is_ordered else None
        if chain is None:
            return False
        gone = [later for later in chain.above(row) if later.aside is not None and later.state in _MOVABLE]
        self._forget_all(gone)
        return bool(gone)

    def test_behind(self, row: Row) -> list[Row]:
        """The row was tested and holds its key from now on, for a lower one came back beneath it: those above it that came
        when the key was free must not go before it, and are tested too (H2)."""
        if (chain := row.chain) is None:
            return []
        behind = [later for later in chain.above(row) if later.state in _UNTESTED]
        for later in behind:
            self.backoff.leave(later)
            self._queue.wanted.pop(later.seq, None)
            later.state = _TESTING
        return behind

    def note_moved(self, seq: int, ctid: Ctid) -> bool:
        """The row was promoted in the table: another address, and due by now. Whether it is here already."""
        row = self._rows.get(seq)
        if row is None:
            return False
        row.ctid, row.aside = ctid, Aside.DEFERRED
        return True

    def admit_blocked(self, rows: Iterable[Row]) -> list[Row]:
        """Rows that are due and had a blocker when they were read: tested under the lock, where they become `held`
        (H4). Returns those that are news."""
        fresh: list[Row] = []
        for row in rows:
            if not self._is_news(row):
                continue
            self._enter(row)
            row.state = _TESTING
            fresh.append(row)
            self._stand(row)
        return fresh

    def admit_scheduled(self, row: Row) -> bool:
        """A row read before its time: to be written as `scheduled`, holding nobody (H6). False when it is
        here already."""
        if not self._is_news(row):
            return False
        self._enter(row)
        row.state = _SETTLING
        return True

    def _is_news(self, row: Row) -> bool:
        """Not here already (R4). Another id under a known seq means that the database lost the old row: forgotten."""
        old = self._rows.get(row.seq)
        if old is None:
            return True
        if old.id == row.id:
            return False
        self.forget(old)
        return True

    def _enter(self, row: Row) -> None:
        self._rows[row.seq] = row
        self._counts[row.shard] += 1
        if row.is_loaded:
            self._hold_body(row)

    def finish(self, rows: Iterable[Row]) -> None:
        """Settled: no longer here. What waited for the commit goes on (H7)."""
        known = self._rows
        counts = self._counts
        wanted = self._queue.wanted
        for row in rows:
            if row.state is not _SETTLING or row.chain is not None or known.get(row.seq) is not row or wanted:
                self.forget(row)
                continue
            # Nearly all of them: confirmed, and out of their chain since.
            row.state = _FORGOTTEN
            del known[row.seq]
            counts[row.shard] -= 1
            if row.is_loaded:
                self.bytes -= row.size
                if row.size > self._inline_bytes:
                    self.large_bytes -= row.size

    def forget(self, row: Row) -> None:
        """Drop a row in whatever state; in flight it becomes an orphan (P3)."""
        state = row.state
        if self._rows.get(row.seq) is not row:
            row.state = _FORGOTTEN
            return
        self.backoff.leave(row)
        row.state = _FORGOTTEN
        del self._rows[row.seq]
        self._counts[row.shard] -= 1
        is_awaited = self._queue.wanted.pop(row.seq, None) is row
        if row.is_loaded and not is_awaited:
            self.bytes -= row.size
            if row.size > self._inline_bytes:
                self.large_bytes -= row.size
        if state is _IN_FLIGHT:
            self.has_orphans = True
        if (chain := row.chain) is None:
            return
        if state is _IN_FLIGHT:
            chain.flying -= 1
        if self._leave(row) is not None:
            self._advance(chain)

    def drop_shard(self, shard: int) -> None:
        """The shard is no longer ours: forget all of it."""
        gone = [row for row in self._rows.values() if row.shard == shard]
        self._forget_all(gone)
        self.holding.drop(shard)

    def drop_unpublished(self, shards: Iterable[int] | None = None) -> None:
        """Forget what was not published and not decided: of these shards (a hand-over), or of
        all (a lost session, R5). In flight and decided rows stay."""
        wanted = None if shards is None else set(shards)
        gone = [
            row
            for row in self._rows.values()
            if row.state is not _IN_FLIGHT and row.state is not _SETTLING and (wanted is None or row.shard in wanted)
        ]
        self._forget_all(gone)

    def _forget_all(self, gone: list[Row]) -> None:
        # Highest first: no row of a chain becomes ready only to be forgotten next.
        for row in sorted(gone, key=lambda r: r.seq, reverse=True):
            self.forget(row)
        if gone:
            # Nobody may take from the queues for hours.
            self._queue.drop_stale()

    def is_idle(self, shard: int) -> bool:
        """Whether nothing of the shard is in flight or unsettled (L5)."""
        return self._counts[shard] == 0


_MOVABLE = frozenset({_WAITING, _READY, _BACKOFF, _TESTING})
_UNTESTED = frozenset({_WAITING, _READY, _BACKOFF})
