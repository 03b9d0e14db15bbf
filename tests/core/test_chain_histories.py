"""The rows in memory: any history against a naive model (P1-P3, H1-H7)."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from relay.core.chains import Chains
from relay.core.ports.outbox import SHARDS
from relay.core.settings import Ordering
from relay.message import Row, State
from tests.conftest import examples
from tests.core.test_chains import INLINE, ROOM, learn, make_row

KEYS = ["a", "a", "b", None]
DICE = st.integers(0, 9)
SOMETIMES = st.sampled_from([False, False, True])
MOSTLY = st.sampled_from([True, True, False])


class Histories(RuleBasedStateMachine):
    """Reader, publisher, broker and settler at random over a table of a few keys; the oracle: a key's first copies go in
    order, at most one of a key is in flight under `strict`, counts and bytes are exact, no row is left behind.

    The model keeps for each row where the *table* has it: pending, aside (with or without holding), gone.
    """

    ordering = Ordering.STRICT

    def __init__(self) -> None:
        super().__init__()
        self.chains = Chains(self.ordering, INLINE)
        self.seq = 0
        self.now = 0.0
        self.serial = 0
        self.table: dict[int, str] = {}  # seq -> pending, deferred, held; gone rows are missing
        self.keys: dict[int, str | None] = {}
        self.sizes: dict[int, int] = {}
        self.unread: list[int] = []
        self.link: list[Row] = []
        self.sent: list[Row] = []
        self.setbacks: list[tuple[Row, bool]] = []
        self.followers: list[Row] = []
        self.tested: list[Row] = []
        self.changed: list[Row] = []
        self.copies: dict[str | None, list[int]] = {}
        self.has_failed = False

    # -------------------------------------------------------- the table

    @rule(key=st.sampled_from(KEYS), size=st.sampled_from([10, 10, 1000]), is_late=SOMETIMES)
    def insert(self, key: str | None, size: int, is_late: bool) -> None:
        """Rows are read in order of seq; now and then one is skipped and comes later (a writer that commits late)."""
        self.seq += 1
        self.table[self.seq] = "pending"
        self.keys[self.seq] = key
        self.sizes[self.seq] = size
        self.unread.append(self.seq)
        if not is_late:
            self.read(self.seq)

    @precondition(lambda self: bool(self.unread))
    @rule()
    def read_all(self) -> None:
        self.read(*self.unread)

    def read(self, *seqs: int) -> None:
        """A page: above any row of its key that was not read before; those that went already overtook it."""
        rows = []
        for seq in seqs:
            self.unread.remove(seq)
            if self.table.get(seq) == "pending":
                rows.append(self.row(seq, is_loaded=self.sizes[seq] <= INLINE))
        self.test(self.chains.admit(rows))

    def row(self, seq: int, *, is_loaded: bool) -> Row:
        return make_row(seq, self.keys[seq], size=self.sizes[seq], is_loaded=is_loaded)

    def test(self, rows: list[Row]) -> None:
        self.tested += rows

    def lowest_holding(self, key: str | None) -> int | None:
        if key is None or self.ordering is Ordering.NONE:
            return None
        return min(
            (s for s, state in self.table.items() if state in ("deferred", "held") and self.keys[s] == key),
            default=None,
        )

    @rule(is_loaded=st.booleans())
    def due(self, is_loaded: bool) -> None:
        """H4: the lowest holding row of each key is released, in memory."""
        released = [
            self.row(seq, is_loaded=is_loaded)
            for seq, state in sorted(self.table.items())
            if state == "deferred" and self.lowest_holding(self.keys[seq]) in (seq, None)
        ]
        self.test(self.chains.admit(released, known_until=self.serial - 1))

    # -------------------------------------------------------- the broker

    @rule(
        room=st.integers(1, 6),
        writable=MOSTLY,
        taken=st.sampled_from([100, 100, 0, 1]),
        unverified=st.sampled_from([None, None, "x", "y"]),
    )
    def publish(self, room: int, writable: bool, taken: int, unverified: str | None) -> None:
        batch = self.chains.take(room, ROOM, [writable or shard != 0 for shard in range(SHARDS)])
        going, rest = batch[:taken], batch[taken:]
        if unverified is None or not rest:
            self.chains.untake(rest)
        else:
            going += self.chains.put_off(rest, unverified)
        for row in going:
            assert row.is_loaded
            self.link.append(row)
            key = self.keys[row.seq]
            if key is not None:
                self.went(key, row.seq)
        if not writable:
            self.chains.offer_again()

    @rule(exchange=st.sampled_from(["x", "y", None]))
    def verdict(self, exchange: str | None) -> None:
        self.chains.on_verified(exchange)

    def went(self, key: str, seq: int) -> None:
        copies = self.copies.setdefault(key, [])
        if seq in copies:
            return
        if self.ordering is Ordering.STRICT or (self.ordering is Ordering.PIPELINED and not self.has_failed):
            lower = [
                s for s in self.table if s < seq and self.keys[s] == key and s not in copies and s not in self.unread
            ]
            assert not lower, f"{seq} went before {lower}"
        copies.append(seq)

    @precondition(lambda self: bool(self.link))
    @rule(first=st.integers(0, 3), how=st.sampled_from(["ack", "ack", "ack", "nack", "return", "park", "cut"]))
    def outcome(self, first: int, how: str) -> None:
        row = self.link[first % len(self.link)]
        if how != "ack":
            self.has_failed = True
        if how == "cut":
            self.chains.has_orphans = False
            self.chains.on_lost(self.link)
            self.link = []
            return
        self.link.remove(row)
        if row.state is State.FORGOTTEN:
            assert self.chains.on_confirmed([row]) == []
            return
        match how:
            case "ack":
                self.sent += self.chains.on_confirmed([row])
            case "nack":
                self.chains.on_nacked(row, self.now + 1.0)
            case _:
                holds = how == "return" and row.key is not None and self.ordering is not Ordering.NONE
                followers = self.chains.set_back(row, holds=holds)
                self.setbacks.append((row, holds))
                self.followers += followers
                if holds:
                    for each in [row, *followers]:
                        self.chains.note_holding(each, self.serial)

    @rule()
    def time_passes(self) -> None:
        self.now += 1.0
        self.chains.wake_backoff(self.now)

    @precondition(lambda self: bool(self.chains.wanted))
    @rule()
    def load(self) -> None:
        rows = [row for row in self.chains.wanted.values() if row.state is State.READY]
        for row in rows:
            row.is_loaded = True
        self.chains.on_loaded(rows)

    # -------------------------------------------------------- the settler

    @rule(is_changed=SOMETIMES)
    def settle(self, is_changed: bool) -> None:
        """One transaction: sent, set back, followers, tests; then H3. Now and then a setback misses its row."""
        done: list[Row] = []
        changed: list[Row] = []
        unblocked: list[Row] = []
        held: list[Row] = []
        for row in self.sent:
            if row.state is State.SETTLING:
                self.table.pop(row.seq, None)
                done.append(row)
        for row, holds in self.setbacks:
            if row.state is not State.SETTLING:
                continue
            if is_changed:
                changed.append(row)
                continue
            if holds:
                self.table[row.seq] = "deferred"
            else:
                self.table.pop(row.seq)
            done.append(row)
        for row in self.followers:
            if row.state is State.SETTLING:
                self.table[row.seq] = "held"
                done.append(row)
        for row in self.tested:
            if row.state is not State.TESTING:
                continue
            lowest = self.lowest_holding(self.keys[row.seq])
            if lowest is not None and lowest < row.seq:
                self.table[row.seq] = "held"
                held.append(row)
                done.append(row)
            else:
                unblocked.append(row)
        self.sent, self.setbacks, self.followers, self.tested = [], [], [], []
        for key in KEYS:
            lowest = self.lowest_holding(key)
            if lowest is not None and self.table[lowest] == "held":
                self.table[lowest] = "deferred"
        # As the settler takes it in.
        self.chains.hold_places(changed)
        for row in held:
            self.chains.note_holding(row, self.serial)
        self.serial += 1
        self.chains.finish(done)
        for row in unblocked:
            self.chains.on_unblocked(row)
        self.changed += changed

    @precondition(lambda self: bool(self.changed))
    @rule()
    def reload(self) -> None:
        again = [row for row in self.changed if row.state is not State.FORGOTTEN and self.table[row.seq] == "pending"]
        self.chains.finish(self.changed)
        self.changed = []
        self.test(self.chains.admit([self.row(row.seq, is_loaded=False) for row in again]))

    # -------------------------------------------------------- losses

    @rule(what=st.sampled_from(["shard", "sessions"]), dice=DICE)
    def misfortune(self, what: str, dice: int) -> None:
        if dice != 5:
            return
        self.has_failed = True
        if what == "shard":
            self.chains.drop_shard(0)
            self.changed = []
            self.sent, self.setbacks, self.followers, self.tested = [], [], [], []
        else:
            undecided = [row for row, _ in self.setbacks] + self.followers + self.tested + self.changed
            self.changed = []
            self.setbacks, self.followers, self.tested = [], [], []
            self.serial += 1
            self.chains.finish(undecided)
            self.chains.drop_unpublished()
        held = {}
        for seq, state in sorted(self.table.items()):
            if state in ("deferred", "held") and self.keys[seq] is not None:
                held[self.keys[seq]] = self.row(seq, is_loaded=False)
        learn(self.chains, held.values(), self.serial - 1)
        # All is read again from the floor.
        self.unread = sorted(seq for seq, state in self.table.items() if state == "pending")
        self.read(*self.unread)

    # -------------------------------------------------------- what always holds

    @invariant()
    def counts_and_bytes_are_exact(self) -> None:
        rows = list(self.chains.rows())
        assert len(self.chains) == len(rows) == self.chains.count(0)
        bodies = [row.size for row in rows if row.is_loaded]
        assert self.chains.bytes == sum(bodies)
        assert self.chains.large_bytes == sum(size for size in bodies if size > INLINE)
        assert len(self.chains.backoff) == sum(1 for row in rows if row.state is State.BACKOFF)
        assert self.chains.lowest_unsettled() == ({0: min(row.seq for row in rows)} if rows else {})

    @invariant()
    def strict_has_one_of_a_key_in_flight(self) -> None:
        flying = [row.key for row in self.chains.rows() if row.state is State.IN_FLIGHT and row.key is not None]
        if self.ordering is Ordering.STRICT:
            assert len(flying) == len(set(flying))
        assert {id(row) for row in self.chains.rows() if row.state is State.IN_FLIGHT} <= {id(row) for row in self.link}

    @invariant()
    def what_is_decided_is_on_its_way(self) -> None:
        on_its_way = {
            id(row) for row in [*self.sent, *(row for row, _ in self.setbacks), *self.followers, *self.changed]
        }
        assert {id(row) for row in self.chains.rows() if row.state is State.SETTLING} <= on_its_way
        testing = {id(row) for row in self.chains.rows() if row.state is State.TESTING}
        assert testing <= {id(row) for row in self.tested}

    def teardown(self) -> None:
        """Everything works now: every row goes."""
        for _ in range(4 * self.seq + 20):
            if not self.table:
                break
            if self.unread:
                self.read_all()
            self.due(True)
            self.load()
            self.time_passes()
            self.verdict(None)
            self.publish(100, True, 100, None)
            while self.link:
                self.outcome(0, "ack")
            self.settle(False)
            self.reload()
        assert not self.table, "rows were left behind"
        assert len(self.chains) == 0
        assert (self.chains.bytes, self.chains.large_bytes, len(self.chains.backoff)) == (0, 0, 0)
        assert not self.chains.wanted


class PipelinedHistories(Histories):
    ordering = Ordering.PIPELINED


class UnorderedHistories(Histories):
    ordering = Ordering.NONE


TestHistories = Histories.TestCase
TestPipelinedHistories = PipelinedHistories.TestCase
TestUnorderedHistories = UnorderedHistories.TestCase
for _case in (TestHistories, TestPipelinedHistories, TestUnorderedHistories):
    _case.settings = settings(max_examples=examples(150), stateful_step_count=60)
