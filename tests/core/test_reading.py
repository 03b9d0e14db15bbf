"""What to read next: examples of R1-R5, and any history of writers against a small model of the database."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from relay.core.ports.outbox import Check, Page, PageRequest, Writer
from relay.core.reading import Reading
from relay.message import Row
from tests.conftest import examples

INLINE = 8192


def check(last_seq: int, *writers: Writer) -> Check:
    return Check(last_seq, writers, 0.0)


def make_row(seq: int, shard: int = 0) -> Row:
    return Row(shard, seq, f"m{seq}", "ok", aggregate_id="k")


def began(floor: int = 0, *shards: int) -> Reading:
    reading = Reading()
    for shard in shards or (0,):
        reading.add_shard(shard, floor)
    return reading


def test_what_was_inserted_lately_is_news_and_a_backlog_is_not() -> None:
    """By seq; but for what a writer brings that has ended lately, however long ago it drew its own."""
    reading = began()
    slow = Writer("3/1", 700)
    for time in (100.0, 100.05, 100.2):
        reading.on_check(Check(50, (slow,), time))

    def page(*seqs: int, ended: bool = False) -> bool:
        request = reading.request([0], 10, INLINE)
        reading.on_page(request, Page(request.numbers if ended else [], [make_row(seq) for seq in seqs]))
        return reading.has_news

    assert not page(*range(1, 11)), "there for 0.2 s"
    assert page(11, 51), "above S of then"
    reading.on_check(Check(51, (slow,), 100.25))
    assert page(51), "S of 0.1 s ago is not known to be as high"
    reading.on_check(Check(51, (slow,), 100.4))
    reading.on_check(Check(51, (slow,), 100.6))
    assert not page()
    assert page(5, ended=True), "it was read up to there before"
    assert not page()


# ---------------------------------------------------------------- R1


def test_nothing_is_asked_or_stored_before_the_first_check() -> None:
    reading = began(7)
    assert reading.behind([0]) == []
    assert reading.floor(0, None) is None
    reading.on_check(check(7))
    assert reading.floor(0, None) == 7


def test_how_long_the_oldest_writer_has_been_open() -> None:
    reading = began()
    assert reading.oldest_writer_s == 0.0
    reading.on_check(Check(1, (Writer("3/1", 700),), 100.0))
    reading.on_check(Check(2, (Writer("3/1", 700), Writer("4/1", None)), 130.0))
    assert (reading.open_writers, reading.oldest_writer_s) == (2, 30.0)
    reading.on_check(Check(3, (Writer("4/1", 701),), 131.0))
    assert (reading.open_writers, reading.oldest_writer_s) == (1, 1.0)


def test_a_writer_of_the_first_check_may_have_written_anywhere_above_the_lowest_floor() -> None:
    reading = began(5)
    reading.add_shard(1, 9)
    reading.on_check(check(20, Writer("3/1", 700)))
    assert reading.request([0, 1], 10, INLINE).lows == [5]


def test_a_later_writer_lies_above_s_of_the_check_before() -> None:
    reading = began()
    reading.on_check(check(20))
    reading.on_check(check(24, Writer("3/1", None)))
    assert reading.request([0], 10, INLINE).lows == [20]


def test_a_writer_that_was_away_is_a_new_one() -> None:
    """ROLLBACK TO SAVEPOINT gives up the table's lock; the next insert takes it again, under the same virtual id. The
    entry stayed marked as ended: cursor and floor passed the row while its transaction was open."""
    reading = began(0, 0, 1)
    reading.on_check(check(10))
    reading.on_page(reading.request([0, 1], 10, INLINE), Page([], []))
    reading.on_check(check(11, Writer("3/1", 700)))
    reading.on_check(check(11))
    # Shard 1 is full: the entry is struck for the other one only, and stays.
    reading.on_page(reading.request([0], 10, INLINE), Page([0], []))
    reading.on_check(check(12, Writer("3/1", 700)))
    assert reading.open_writers == 1
    request = reading.request([0], 10, INLINE)
    assert (request.lows, request.gone) == ([11], [False])
    reading.on_page(request, Page([], []))
    assert reading.floor(0, None) == 11


def test_writers_that_end_while_no_page_is_read_are_few() -> None:
    """I6: for hours, while the broker is blocked, each check listed who was open at that moment, and none was ever struck:
    floors and the next page took seconds of the loop's time."""
    reading = began(0, *range(64))
    reading.on_check(check(0))
    reading.on_page(reading.request(list(range(64)), 10, INLINE), Page([], []))
    for n in range(1, 2000):
        reading.on_check(check(n, Writer(f"3/{n}", n)))
    request = reading.request([0], 10, INLINE)
    assert sorted(zip(request.lows, request.gone, strict=True)) == [(0, True), (1998, False)]
    assert reading.floor(0, None) == 0
    ended = [number for number, gone in zip(request.numbers, request.gone, strict=True) if gone]
    reading.on_page(request, Page(ended, []))
    assert (reading.floor(0, None), reading.floor(1, None)) == (1998, 0)


def test_a_prepared_writer_takes_the_lowest_low_that_is_known() -> None:
    """R1 prepared: PREPARE changes a transaction's id; it is no new writer."""
    reading = began()
    reading.on_check(check(10))
    reading.on_check(check(11, Writer("3/1", 700)))
    reading.on_check(check(19, Writer("-1/700", 700)))
    request = reading.request([0], 10, INLINE)
    assert dict(zip(request.numbers, request.lows, strict=True)) == {0: 10, 1: 10}


def test_a_prepared_writer_of_the_first_check_goes_down_with_a_lower_floor() -> None:
    """Seen open at the first check, prepared by the second; then a shard is claimed with a lower floor. Its rows may lie
    anywhere above that floor too: with a low of 100 the floor of shard 1 would pass its row 60 (lost)."""
    reading = began(100)
    reading.on_check(check(120, Writer("3/1", 700)))
    reading.on_check(check(120, Writer("-1/700", 700)))
    request = reading.request([0], 10, INLINE)
    reading.on_page(request, Page([0], []))
    reading.add_shard(1, 50)
    reading.on_check(check(130, Writer("-1/700", 700)))
    request = reading.request([0, 1], 10, INLINE)
    reading.on_page(request, Page([], []))
    assert reading.floor(1, None) == 50


# ---------------------------------------------------------------- R2, R3


def test_a_page_moves_the_cursor_to_its_last_row_if_full_else_to_s() -> None:
    reading = began()
    reading.on_check(check(9))
    request = reading.request([0], 2, INLINE)
    assert [row.seq for row in reading.on_page(request, Page([], [make_row(3), make_row(5)]))] == [3, 5]
    assert reading.cursors == {0: 5}
    request = reading.request([0], 2, INLINE)
    reading.on_page(request, Page([], [make_row(7)]))
    assert reading.cursors == {0: 9}
    assert reading.behind([0]) == []


def test_the_cursor_never_passes_s_of_the_last_check() -> None:
    """A writer that begins and ends between two checks may lie below what a page beyond S brought."""
    reading = began()
    reading.on_check(check(4))
    request = reading.request([0], 2, INLINE)
    assert request.beyond
    reading.on_page(request, Page([], [make_row(8), make_row(9)]))
    assert reading.cursors == {0: 4}


def test_a_page_covers_no_more_seqs_than_is_quick() -> None:
    """A floor that is void over very many sent rows: a page that had to walk through all of them met the statement's
    timeout, each time anew."""
    reading = Reading(4000)
    reading.add_shard(0, 0)
    reading.add_shard(1, 7000)
    reading.on_check(check(9000))
    request = reading.request([0, 1], 2, INLINE)
    assert request.span == 4000
    reading.on_page(request, Page([], [make_row(8500, shard=1)]))
    assert reading.cursors == {0: 4000, 1: 9000}
    assert reading.behind([0, 1]) == [0]
    reading.on_page_took(0.2)
    assert reading.request([0], 2, INLINE).span == 4000
    reading.void_page()
    request = reading.request([0], 2, INLINE)
    assert request.span == 2000
    reading.on_page(request, Page([], [make_row(4100), make_row(4200)]))
    assert reading.cursors == {0: 4200, 1: 9000}, "full: up to its last row"
    reading.on_page_took(0.01)
    assert reading.request([0], 2, INLINE).span == 4000


def test_a_page_brings_no_more_rows_than_its_time_allows() -> None:
    reading = Reading()
    reading.add_shard(0, 0)
    reading.on_check(Check(1000, [], 0.0))
    assert reading.rows_max >= 100_000, "bounded by nothing at first"
    reading.request([0], 400, INLINE)
    reading.void_page()
    assert reading.rows_max == 50
    for took_s, rows_max in ((3.0, 20), (3.0, 20), (1.0, 20), (0.1, 40)):
        request = reading.request([0], 40, INLINE)
        reading.on_page(request, Page([], [make_row(seq) for seq in range(1, 41)]))
        reading.on_page_took(took_s)
        assert reading.rows_max == rows_max
    for expected in (5, 1, 1):
        reading.request([0], 400, INLINE)
        reading.void_page()
        assert reading.rows_max == expected, "one row at least, however large"
    request = reading.request([0], 1, INLINE)
    reading.on_page(request, Page([], []))
    reading.on_page_took(3.0)
    assert reading.rows_max == 1, "no row was what took so long"


def test_a_writer_that_ended_is_looked_for_in_steps_too() -> None:
    reading = Reading(3000)
    reading.add_shard(0, 0)
    reading.on_check(check(0))
    reading.on_check(check(8000, Writer("3/1", 700)))
    reading.on_page(reading.request([0], 5, INLINE), Page([], []))
    reading.on_page(reading.request([0], 5, INLINE), Page([], []))
    reading.on_page(reading.request([0], 5, INLINE), Page([], []))
    assert reading.cursors == {0: 8000}
    reading.on_page(reading.request([0], 5, INLINE), Page([0], [make_row(10)]))
    assert reading.cursors == {0: 3000}
    assert reading.floor(0, None) == 3000, "struck: the rest lies above the cursor"


def test_a_writer_without_an_xid_is_not_asked_again_before_its_pages_are_through() -> None:
    """R3: it counts as ended after each check, and sends the pages back to its low. A check between them would never let
    them come to what is new."""
    reading = Reading(3000)
    reading.add_shard(0, 0)
    reading.on_check(check(0))
    reading.on_check(check(8000, Writer("3/1", None)))
    for cursor in (3000, 6000):
        reading.on_page(reading.request([0], 5, INLINE), Page([0] if cursor == 3000 else [], []))
        assert reading.cursors == {0: cursor}
        assert reading.must_go_on([0])
        assert not reading.must_go_on([1]), "of a shard that has no room nobody waits for pages"
    reading.on_page(reading.request([0], 5, INLINE), Page([], []))
    assert not reading.must_go_on([0])


def test_a_full_page_goes_on_before_the_next_check_too() -> None:
    """R3: that would send it back to the rows that it has just brought."""
    reading = began()
    reading.on_check(check(4, Writer("3/1", None)))
    rows = [make_row(seq) for seq in (1, 2, 3)]
    reading.on_page(reading.request([0], 2, INLINE), Page([0], rows[:2]))
    assert reading.must_go_on([0])
    reading.on_page(reading.request([0], 2, INLINE), Page([], rows[2:]))
    assert not reading.must_go_on([0])


def test_what_a_sequence_that_fell_back_has_cut_off_waits_for_no_page() -> None:
    reading = began()
    reading.on_check(check(4, Writer("3/1", None)))
    reading.on_page(reading.request([0], 1, INLINE), Page([0], [make_row(2)]))
    reading.on_check(check(2, Writer("3/1", None)))
    assert not reading.must_go_on([0])


def test_an_ended_writer_is_struck_for_the_shards_of_the_page_only() -> None:
    reading = began(0, 0, 1)
    reading.on_check(check(4))
    reading.on_check(check(6, Writer("3/1", 700)))
    request = reading.request([0], 10, INLINE)
    reading.on_page(request, Page([0], []))
    assert reading.request([0], 10, INLINE).numbers == []
    reading.void_page()
    assert reading.request([1], 10, INLINE).numbers == [0]


def test_a_writer_without_an_xid_is_asked_once_a_check_and_keeps_pages_at_s() -> None:
    """R3: it may have drawn its seq, and a slow trigger keeps it from its xid."""
    reading = began()
    reading.on_check(check(1, Writer("3/1", None)))
    assert not reading.may_read_beyond()
    first = reading.request([0], 10, INLINE)
    reading.on_page(first, Page([0], []))
    second = reading.request([0], 10, INLINE)
    reading.on_page(second, Page([], []))
    assert (first.asked, second.asked) == ([True], [False])
    assert (first.beyond, second.beyond) == (False, False)
    reading.on_check(check(1))
    third = reading.request([0], 10, INLINE)
    assert (third.gone, third.beyond) == ([True], True)


def test_the_first_page_after_a_check_looks_where_the_sequence_has_not_been() -> None:
    """Of each shard: after a `setval` rows lie there."""
    reading = began(0, 0, 1)
    reading.on_check(check(1))
    found = []
    for shards in ([0], [0], [0, 1], [0, 1]):
        page = reading.request(shards, 10, INLINE)
        found.append(page.beyond_drawn)
        reading.on_page(page, Page([], []))
    assert found == [True, False, True, False]


def test_a_refused_page_counts_for_nothing() -> None:
    reading = began()
    reading.on_check(check(1, Writer("3/1", None)))
    reading.request([0], 10, INLINE)
    reading.void_page()
    assert reading.request([0], 10, INLINE).asked == [True]


# ---------------------------------------------------------------- R4, R5


def test_rows_settled_since_the_page_was_sent_are_skipped() -> None:
    reading = began()
    reading.on_check(check(5))
    request = reading.request([0], 10, INLINE)
    reading.note_settled([make_row(3)])
    assert [row.seq for row in reading.on_page(request, Page([], [make_row(3), make_row(4)]))] == [4]


def test_a_row_that_has_the_seq_of_one_that_was_lost_is_not_taken_for_it() -> None:
    """The database went back in time and drew the seq again; what was settled had it before."""
    reading = began()
    reading.on_check(check(5))
    request = reading.request([0], 10, INLINE)
    lost, row = make_row(3), make_row(3)
    lost.id = "another"
    reading.note_settled([lost])
    assert reading.fresh([row]) == [row]
    assert reading.on_page(request, Page([], [row])) == [row]


def test_a_page_of_a_shard_that_was_lost_and_claimed_meanwhile_brings_nothing() -> None:
    reading = began()
    reading.on_check(check(5))
    request = reading.request([0], 10, INLINE)
    reading.drop_shard(0)
    reading.add_shard(0, 2)
    assert reading.on_page(request, Page([], [make_row(3)])) == []
    assert reading.cursors == {0: 2}


def test_the_floor_stays_below_cursor_lows_and_unsettled_rows() -> None:
    reading = began()
    reading.on_check(check(5))
    reading.on_check(check(9, Writer("3/1", 700)))
    reading.on_page(reading.request([0], 10, INLINE), Page([], []))
    assert reading.floor(0, None) == 5
    assert reading.floor(0, 4) == 3
    reading.on_check(check(9))
    reading.on_page(reading.request([0], 10, INLINE), Page([0], []))
    assert reading.floor(0, None) == 9


def test_a_lost_session_voids_everything() -> None:
    reading = began()
    reading.on_check(check(5, Writer("3/1", 700)))
    reading.request([0], 10, INLINE)
    reading.reset()
    assert reading.cursors == {}
    assert reading.last_seq is None
    reading.add_shard(0, 2)
    assert reading.floor(0, None) is None


# ---------------------------------------------------------------- any history


@dataclass(eq=False)
class Transaction:
    vxid: str
    xid: int | None = None
    drawn: int | None = None
    """A seq whose row is not written yet: a slow trigger."""
    seqs: list[tuple[int, int]] = field(default_factory=list)
    """(seq, shard) of its rows."""
    is_open: bool = True
    is_prepared: bool = False


SHARDS = (0, 1)
DICE = st.integers(0, 9)
"""Hypothesis draws its rules evenly; a history in which all is lost at every turn shows nothing."""


class Histories(RuleBasedStateMachine):
    """A table with open writers of all kinds, one reader, and the oracle: every committed row is read, rows whose
    writers were serialised come in order, no floor passes a row that is yet to be read, nothing is read twice.

    A check takes S and the writers at two instants; a page is sent, runs and arrives at three.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reading = Reading()
        # The database.
        self.sequence = 0
        self.next_xid = 700
        self.backends = 0
        self.alive: list[Transaction] = []
        self.pending: dict[int, int] = {}  # committed, not sent: seq -> shard
        self.tick = 0
        self.drawn_at: dict[int, int] = {}
        self.committed_at: dict[int, int] = {}
        self.shard_of: dict[int, int] = {}
        self.floors = dict.fromkeys(SHARDS, 0)
        # The reader.
        self.memory: set[int] = set()
        self.ever_read: set[int] = set()
        self.check_s: int | None = None
        self.request: PageRequest | None = None
        self.page: Page | None = None
        for shard in SHARDS:
            self.reading.add_shard(shard, 0)

    @initialize(span=st.sampled_from([1, 5, 100_000]))
    def pages_span(self, span: int) -> None:
        self.reading = Reading(span)
        for shard in SHARDS:
            self.reading.add_shard(shard, 0)

    # -------------------------------------------------------- writers

    @precondition(lambda self: len(self.alive) < 4)
    @rule(steps=st.integers(0, 3), shard=st.sampled_from(SHARDS))
    def begin(self, steps: int, shard: int) -> None:
        self.backends += 1
        self.alive.append(Transaction(f"3/{self.backends}"))
        for _ in range(steps):
            self.go_on(self.alive[-1], shard, True)

    @precondition(lambda self: bool(self.alive))
    @rule(number=st.integers(0, 3), shard=st.sampled_from(SHARDS), commits=st.sampled_from([True, True, False]))
    def one_goes_on(self, number: int, shard: int, commits: bool) -> None:
        self.go_on(self.alive[number % len(self.alive)], shard, commits)

    @precondition(lambda self: bool(self.alive))
    @rule(number=st.integers(0, 3), shard=st.sampled_from(SHARDS))
    def one_inserts_again(self, number: int, shard: int) -> None:
        transaction = self.alive[number % len(self.alive)]
        if transaction.is_open and not transaction.is_prepared:
            self.draw(transaction)
            self.write(transaction, shard)

    @precondition(lambda self: bool(self.alive))
    @rule(number=st.integers(0, 3))
    def one_prepares(self, number: int) -> None:
        """Another virtual id, the same xid."""
        transaction = self.alive[number % len(self.alive)]
        if transaction.is_open and transaction.xid is not None and transaction.drawn is None:
            transaction.is_prepared = True
            transaction.vxid = f"-1/{transaction.xid}"

    def go_on(self, transaction: Transaction, shard: int, commits: bool) -> None:
        """The lock, a seq, the row, COMMIT or ROLLBACK (visible at once), the lock's release."""
        if not transaction.is_open:
            self.alive.remove(transaction)
        elif transaction.drawn is not None:
            self.write(transaction, shard)
        elif not transaction.seqs:
            self.draw(transaction)
        else:
            self.end(transaction, commits)

    def draw(self, transaction: Transaction) -> None:
        if transaction.drawn is None:
            self.sequence += 1
            self.tick += 1
            transaction.drawn = self.sequence
            self.drawn_at[self.sequence] = self.tick

    def write(self, transaction: Transaction, shard: int) -> None:
        assert transaction.drawn is not None
        if transaction.xid is None:
            transaction.xid = self.next_xid
            self.next_xid += 1
        transaction.seqs.append((transaction.drawn, shard))
        transaction.drawn = None

    def end(self, transaction: Transaction, commits: bool) -> None:
        transaction.is_open = False
        self.tick += 1
        if commits:
            for seq, shard in transaction.seqs:
                self.pending[seq] = shard
                self.shard_of[seq] = shard
                self.committed_at[seq] = self.tick

    # -------------------------------------------------------- the reader

    @precondition(lambda self: self.check_s is None and self.request is None)
    @rule()
    def check_begins(self) -> None:
        self.check_s = self.sequence

    @precondition(lambda self: self.check_s is not None)
    @rule()
    def check_ends(self) -> None:
        assert self.check_s is not None
        self.reading.on_check(Check(self.check_s, [Writer(each.vxid, each.xid) for each in self.alive], 0.0))
        self.check_s = None

    @precondition(lambda self: self.check_s is None and self.request is None)
    @rule()
    def checks(self) -> None:
        self.check_begins()
        self.check_ends()

    @precondition(lambda self: self.check_s is None and self.request is None and self.reading.last_seq is not None)
    @rule(limit=st.sampled_from([1, 2, 50]), is_checked=st.booleans())
    def reads(self, limit: int, is_checked: bool) -> None:
        if is_checked:
            self.checks()
        self.page_is_sent(SHARDS, limit)
        if self.request is not None:
            self.page_runs()
            self.page_arrives()

    @precondition(lambda self: self.check_s is None and self.request is None and self.reading.last_seq is not None)
    @rule(shards=st.sampled_from([(0,), (1,), (0, 1)]), limit=st.sampled_from([1, 2, 50]))
    def page_is_sent(self, shards: tuple[int, ...], limit: int) -> None:
        wanted = [shard for shard in shards if shard in self.reading.cursors]
        if wanted:
            self.request = self.reading.request(wanted, limit, INLINE)

    @precondition(lambda self: self.request is not None and self.page is None)
    @rule()
    def page_runs(self) -> None:
        request = self.request
        assert request is not None
        running = {each.xid for each in self.alive if each.is_open and each.xid is not None}
        ended = [
            number
            for number, xid, gone, asked in zip(request.numbers, request.xids, request.gone, request.asked, strict=True)
            if gone or (xid is None and asked) or (xid is not None and xid not in running)
        ]
        lows = [low for number, low in zip(request.numbers, request.lows, strict=True) if number in ended]
        rows: list[Row] = []
        for shard, cursor in zip(request.shards, request.cursors, strict=True):
            above = min([cursor, *lows])
            found = [
                seq
                for seq in sorted(self.pending)
                if self.pending[seq] == shard
                and above < seq <= above + request.span
                and (request.beyond or seq <= request.last_seq)
            ]
            rows += [make_row(seq, shard) for seq in found[: request.limit]]
        self.page = Page(ended, rows)

    @precondition(lambda self: self.page is not None)
    @rule()
    def page_arrives(self) -> None:
        assert self.request is not None
        assert self.page is not None
        news = [row.seq for row in self.reading.on_page(self.request, self.page)]
        self.request = self.page = None
        self.reading.on_page_took(0.0 if len(news) % 2 else 1.0)
        for seq in news:
            if seq in self.memory:
                continue
            assert seq in self.pending, f"{seq} was settled, and comes again (R4)"
            for lower, shard in self.shard_of.items():
                if shard == self.shard_of[seq] and self.committed_at[lower] < self.drawn_at[seq]:
                    assert lower in self.ever_read, f"{seq} before {lower}, which committed before it was drawn (I3)"
            self.memory.add(seq)
            self.ever_read.add(seq)

    def page_is_refused(self) -> None:
        self.reading.void_page()
        self.request = None

    @precondition(lambda self: bool(self.memory))
    @rule(are_all=st.booleans(), renews=st.booleans())
    def settle(self, are_all: bool, renews: bool) -> None:
        for seq in sorted(self.memory) if are_all else [min(self.memory)]:
            del self.pending[seq]
            self.memory.discard(seq)
            self.reading.note_settled([make_row(seq)])
        if renews:
            self.renew()

    @rule()
    def renew(self) -> None:
        for shard in SHARDS:
            mine = [seq for seq in self.memory if self.shard_of[seq] == shard]
            floor = self.reading.floor(shard, min(mine, default=None))
            if floor is None:
                continue
            assert floor <= self.sequence
            unread = [seq for seq, where in self.pending.items() if where == shard]
            unread += [seq for each in self.alive if each.is_open for seq, where in each.seqs if where == shard]
            unread += [each.drawn for each in self.alive if each.is_open and each.drawn is not None]
            assert floor < min(unread, default=floor + 1), f"floor {floor} of shard {shard} passes {min(unread)} (R5)"
            self.floors[shard] = floor

    @rule(
        what=st.sampled_from(["refused", "shard", "session"]), shards=st.sampled_from([(0,), (1,), (0, 1)]), dice=DICE
    )
    def misfortune(self, what: str, shards: tuple[int, ...], dice: int) -> None:
        if dice != 5:
            return
        match what:
            case "refused":
                if self.request is not None and self.page is None:
                    self.page_is_refused()
            case "shard":
                self.shard_is_lost(shards[0])
            case "session":
                self.session_is_lost(shards)

    def shard_is_lost(self, shard: int) -> None:
        if shard in self.reading.cursors:
            self.reading.drop_shard(shard)
            self.memory = {seq for seq in self.memory if self.shard_of[seq] != shard}

    @rule(shard=st.sampled_from(SHARDS))
    def shard_is_claimed(self, shard: int) -> None:
        if shard not in self.reading.cursors and self.check_s is None:
            self.reading.add_shard(shard, self.floors[shard])

    def session_is_lost(self, shards: tuple[int, ...]) -> None:
        self.reading.reset()
        self.memory.clear()
        self.check_s = self.request = self.page = None
        for shard in shards:
            self.reading.add_shard(shard, self.floors[shard])

    # -------------------------------------------------------- the end

    def teardown(self) -> None:
        if self.page is not None:
            self.page_arrives()
        if self.request is not None:
            self.page_is_refused()
        if self.check_s is not None:
            self.check_ends()
        for transaction in self.alive:
            if transaction.is_open:
                self.end(transaction, transaction.drawn is None)
        self.alive.clear()
        for shard in SHARDS:
            self.shard_is_claimed(shard)
        for _ in range(2):
            self.check_begins()
            self.check_ends()
            pages = 0
            while self.reading.behind(SHARDS):
                pages += 1
                assert pages < 1000, "behind for ever"
                self.page_is_sent(SHARDS, 2)
                self.page_runs()
                self.page_arrives()
        assert self.memory == self.pending.keys(), "committed, and never read (I1)"
        self.renew()


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=examples(300), stateful_step_count=50)
