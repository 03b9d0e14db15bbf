"""What to read next, and how far everything has been read (R1-R5 of `docs/protocol.md`).

Owns: the cursor of each shard, the list of open writers with their lows, and S of the last check.
A *check* tells S and the open writers; a *page* is a later statement that tells, in its own
snapshot, which of the listed writers have ended and returns the rows above the lowest of a
shard's cursor and *their* lows. So a lower seq that commits late is read when its writer ends,
before anything that was serialised after it.

Invariant (I1): all rows up to a shard's cursor have been read, but for those of listed writers
that are not struck for the shard, and these lie above the writers' lows. A floor never passes
either, nor a row that is still unsettled in memory.

Does not do: reading, remembering rows (`chains.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from relay.core.ports.outbox import Check, Page, PageRequest
from relay.message import Row

PAGE_SPAN_MIN = 1_000
PAGE_SPAN_MAX = 1_000_000
"""So many seqs a page may span that meets nothing to bring: where all is sent, a look at each of their rows (about 1 us)."""

PAGE_QUICK_S, PAGE_SLOW_S = 0.05, 0.5
"""A page that its span cut off: quicker than the one, the next spans twice as many; slower than the other, half."""

PAGE_ROWS_MIN, PAGE_ROWS_MAX = 16, 1 << 20
PAGE_TIRING_S = 2.0
"""What rows cost is known when a page has brought them: there is no size of a compressed json value but by unpacking all of
it. A page that took longer than this was too large by half; one that was refused, by more than that."""

_PREPARED = "-1/"
"""A prepared transaction's virtual id: it changed its id when it was prepared (R1)."""


NEWS_S = 0.1
"""A row whose seq was drawn before a check so long ago, or longer, is a backlog's; the reader looks for no others then."""

ENDED_MAX = 64
"""Entries of writers that have ended and are not read everywhere: more of them become one."""


class _Writer:
    """A writing transaction that is open; or one, or several, that ended and are not yet read everywhere."""

    __slots__ = ("is_from_first_check", "low", "number", "seen_at", "struck", "xid")

    def __init__(self, number: int, low: int, xid: int | None, is_from_first_check: bool, seen_at: float) -> None:
        self.number = number
        self.low = low
        self.xid = xid
        self.is_from_first_check = is_from_first_check
        self.seen_at = seen_at
        self.struck: set[int] = set()

    def take_in(self, other: _Writer) -> None:
        """Stand for this one too, which has ended as well: pages read above the lowest of their lows in any case."""
        self.low = min(self.low, other.low)
        self.is_from_first_check = self.is_from_first_check or other.is_from_first_check
        self.struck &= other.struck


class Reading:
    """The cursors and the list of writers of one relay, for one life of its sessions."""

    def __init__(self, span: int = 100_000) -> None:
        """`span`: how many seqs a page may cover at first; where there are very many sent rows above a floor that is
        void, one statement must not walk through all of them."""
        self._span = span
        self._cut: set[int] = set()
        """Shards whose last page ended where its span did."""
        self._partly: set[int] = set()
        """Those, and shards whose last page was full: there is more below S."""
        self.rows_max = PAGE_ROWS_MAX
        """How many rows the next page may bring in all."""
        self._brought = 0
        self._cursors: dict[int, int] = {}
        self._open: dict[str, _Writer] = {}
        """By virtual id: those that the last check found."""
        self._ended: list[_Writer] = []
        """Those that it found no more. Few (I6), however long no page is read."""
        self._last_seq: int | None = None
        self._checked_at = 0.0
        self._seq_before = self._seq_then = -1
        """S of two checks, each at least NEWS_S before the next."""
        self._seq_then_at = float("-inf")
        self.has_news = False
        """The last page brought a row that was inserted lately, or whose writer has ended lately: not a backlog's."""
        self._next_number = 0
        self._unasked: set[int] = set()
        self._outstanding: PageRequest | None = None
        self._settled_since: dict[int, str] = {}
        self._forgotten_since: set[int] = set()

    # ------------------------------------------------------------ shards

    def add_shard(self, shard: int, floor: int) -> None:
        """A shard is ours (again): everything above its floor is unread."""
        self._cursors[shard] = floor
        self._cut.discard(shard)
        self._partly.discard(shard)
        self._unasked.add(shard)
        self._forgotten_since.add(shard)
        for writer in self._all():
            writer.struck.discard(shard)
            if writer.is_from_first_check:
                # Nobody saw it begin: its rows may lie anywhere above this floor.
                writer.low = min(writer.low, floor)

    def drop_shard(self, shard: int) -> None:
        """Forget a shard with its cursor and strikes (R4); a page on its way brings nothing."""
        self._cursors.pop(shard, None)
        self._cut.discard(shard)
        self._partly.discard(shard)
        self._unasked.discard(shard)
        self._forgotten_since.add(shard)
        self._prune()

    def reset(self) -> None:
        """A session is gone: all of it is void (R5). Shards come back by `add_shard`."""
        self._cursors.clear()
        self._cut.clear()
        self._partly.clear()
        self._open.clear()
        self._ended.clear()
        self._last_seq = None
        self._seq_before = self._seq_then = -1
        self._seq_then_at = float("-inf")
        self._unasked.clear()
        self._outstanding = None

    @property
    def cursors(self) -> Mapping[int, int]:
        return self._cursors

    @property
    def last_seq(self) -> int | None:
        """S of the last check, `None` before the first."""
        return self._last_seq

    @property
    def open_writers(self) -> int:
        return len(self._open)

    @property
    def oldest_writer_s(self) -> float:
        """For how long the oldest open writer has been seen, in the database's seconds; 0 without one."""
        return max((self._checked_at - writer.seen_at for writer in self._open.values()), default=0.0)

    @property
    def newest_writer_s(self) -> float | None:
        """The same of the newest; none without one."""
        return min((self._checked_at - writer.seen_at for writer in self._open.values()), default=None)

    def _all(self) -> list[_Writer]:
        return [*self._open.values(), *self._ended]

    # ------------------------------------------------------------ R1

    def on_check(self, check: Check) -> None:
        """Take a check's answer: new writers get their low, vanished ones have ended.

        A transaction may vanish and come back: ROLLBACK TO SAVEPOINT gives up the table's lock if it was taken behind the
        savepoint, and what was written with it. The next insert is that of a new writer, above S of the check that saw none.
        """
        assert self._outstanding is None, "entries that a page asks for do not change under it"
        previous = self._last_seq
        self._checked_at = check.database_time
        known = self._all()
        before, self._open = self._open, {}
        for found in check.writers:
            writer = before.pop(found.vxid, None)
            if writer is not None:
                if writer.xid is None:
                    writer.xid = found.xid
                self._open[found.vxid] = writer
                continue
            is_from_first_check = previous is None
            if previous is None:
                low = min(self._cursors.values(), default=0)
            elif found.vxid.startswith(_PREPARED):
                # It may be any of those known, also one that nobody saw begin.
                low = min([*(each.low for each in known), previous])
                is_from_first_check = any(each.is_from_first_check for each in known)
            else:
                low = previous
            self._open[found.vxid] = _Writer(
                self._next_number, low, found.xid, is_from_first_check, check.database_time
            )
            self._next_number += 1
        for writer in before.values():
            self._end(writer)
        # A sequence that fell back (a rewound database that kept our session is impossible, a
        # setval is not) leaves cursors above S: they would skip what is drawn anew.
        self._last_seq = check.last_seq
        if check.database_time - self._seq_then_at >= NEWS_S:
            self._seq_before, self._seq_then, self._seq_then_at = self._seq_then, check.last_seq, check.database_time
        for shard, cursor in self._cursors.items():
            if cursor > check.last_seq:
                self._cursors[shard] = check.last_seq
        self._unasked = set(self._cursors)
        self._prune()

    def _end(self, writer: _Writer) -> None:
        like = next((each for each in self._ended if each.struck == writer.struck), None)
        if like is None and len(self._ended) < ENDED_MAX:
            self._ended.append(writer)
        else:
            (like or self._ended[-1]).take_in(writer)

    # ------------------------------------------------------------ R2, R3

    def behind(self, shards: Iterable[int]) -> list[int]:
        """Those of the shards in which a page can find something that the last check knows of."""
        last = self._last_seq
        if last is None:
            return []
        cursors = self._cursors
        if not self._ended:
            return [shard for shard in shards if cursors[shard] < last]
        struck = set.intersection(*(writer.struck for writer in self._ended))
        return [shard for shard in shards if cursors[shard] < last or shard not in struck]

    def may_read_beyond(self) -> bool:
        """Whether a page may go past S: no listed writer is without an xid (R3)."""
        return all(writer.xid is not None for writer in self._open.values())

    def request(self, shards: Sequence[int], limit: int, inline_bytes: int, probed: Sequence[int] = ()) -> PageRequest:
        """The next page over `shards`; there is at most one outstanding."""
        assert self._last_seq is not None, "a page needs a check before it"
        assert self._outstanding is None, "one page at a time"
        wanted = set(shards)
        listed = [writer for writer in self._open.values() if not writer.struck.issuperset(wanted)]
        still_open = len(listed)
        listed += [writer for writer in self._ended if not writer.struck.issuperset(wanted)]
        asked = not self._unasked.isdisjoint(wanted)
        self._unasked -= wanted
        request = PageRequest(
            numbers=[w.number for w in listed],
            lows=[w.low for w in listed],
            xids=[w.xid for w in listed],
            gone=[at >= still_open for at in range(len(listed))],
            asked=[asked] * len(listed),
            shards=list(shards),
            cursors=[self._cursors[shard] for shard in shards],
            last_seq=self._last_seq,
            beyond=self.may_read_beyond(),
            beyond_drawn=asked,
            limit=limit,
            inline_bytes=inline_bytes,
            span=self._span,
            probed=probed,
        )
        self._outstanding = request
        self.expect_rows()
        self._forgotten_since.clear()
        return request

    def expect_rows(self) -> None:
        """A query that brings rows is about to be sent: what is settled from here on, its result skips (R4)."""
        self._settled_since.clear()

    def note_settled(self, rows: Iterable[Row]) -> None:
        """Rows whose decision was just written. By seq and id: of a row that the database lost another has the seq by now."""
        self._settled_since.update([(row.seq, row.id) for row in rows])

    def fresh(self, rows: Iterable[Row]) -> list[Row]:
        """Those of a query's rows that were not settled since it was sent, of shards still read (R4)."""
        settled = self._settled_since
        return [row for row in rows if settled.get(row.seq) != row.id and row.shard in self._cursors]

    def on_page(self, request: PageRequest, page: Page) -> list[Row]:
        """Take a page: move cursors, strike the ended; returns the rows that are news (R4)."""
        assert self._outstanding is request, "this page was not asked for, or is void"
        self._outstanding = None
        self._brought = len(page.rows)
        counts = Counter([row.shard for row in page.rows])
        last = {row.shard: row.seq for row in page.rows}
        settled = self._settled_since
        dropped = self._forgotten_since
        rows = [row for row in page.rows if settled.get(row.seq) != row.id and row.shard not in dropped]
        ended = set(page.ended)
        low = min(
            (low for number, low in zip(request.numbers, request.lows, strict=True) if number in ended), default=None
        )
        self.has_news = any(seq > self._seq_before for seq in last.values())
        if low is not None and not self.has_news:
            cursors = dict(zip(request.shards, request.cursors, strict=True))
            self.has_news = any(row.seq <= cursors[row.shard] for row in rows)
        live: list[int] = []
        for shard, cursor in zip(request.shards, request.cursors, strict=True):
            if shard not in self._cursors or shard in dropped:
                continue
            live.append(shard)
            end = (cursor if low is None else min(cursor, low)) + request.span
            if end < request.last_seq:
                self._cut.add(shard)
            else:
                self._cut.discard(shard)
                end = request.last_seq
            if counts.get(shard, 0) >= request.limit:
                end = min(end, last[shard])
            self._cursors[shard] = end
            if end < request.last_seq:
                self._partly.add(shard)
            else:
                self._partly.discard(shard)
        # Without an xid it only counted as ended for this page; struck when gone (R3).
        ended.difference_update(
            number
            for number, gone, xid in zip(request.numbers, request.gone, request.xids, strict=True)
            if xid is None and not gone
        )
        for writer in self._all():
            if writer.number in ended:
                writer.struck.update(live)
        self._prune()
        return rows

    def on_page_took(self, seconds: float) -> None:
        """How long the last page took: the next one spans, and brings, as much as is quick."""
        if self._cut and seconds < PAGE_QUICK_S:
            self._span = min(2 * self._span, PAGE_SPAN_MAX)
        elif self._cut and seconds > PAGE_SLOW_S:
            self._halve_span()
        if seconds < PAGE_SLOW_S:
            self.rows_max = min(2 * self.rows_max, PAGE_ROWS_MAX)
        elif seconds > PAGE_TIRING_S and self._brought:
            self.rows_max = min(self.rows_max, max(PAGE_ROWS_MIN, self._brought // 2))

    def must_go_on(self, shards: Iterable[int]) -> bool:
        """Whether pages over the shards come before the next check: it would send them back to where a writer without an
        xid began (R3), and one that is there for long would never let them through."""
        if not self._partly or self.may_read_beyond():
            return False
        return bool(self.behind(self._partly.intersection(shards)))

    def void_page(self) -> None:
        """The outstanding page failed for sure, maybe for it took too long: nothing of it counts."""
        if self._outstanding is not None:
            self._halve_span()
            asked = len(self._outstanding.shards) * self._outstanding.limit
            self.rows_max = max(1, min(self.rows_max, asked) // 8)
            self._unasked.update(shard for shard in self._outstanding.shards if shard in self._cursors)
            self._outstanding = None

    def _halve_span(self) -> None:
        self._span = max(self._span // 2, min(self._span, PAGE_SPAN_MIN))

    def _prune(self) -> None:
        shards = self._cursors.keys()
        self._ended = [writer for writer in self._ended if not writer.struck.issuperset(shards)]

    # ------------------------------------------------------------ R5

    def floor(self, shard: int, lowest_unsettled: int | None) -> int | None:
        """What may be stored as the shard's floor; `None` before a check in this session."""
        if self._last_seq is None or shard not in self._cursors:
            return None
        floor = self._cursors[shard]
        for writer in self._all():
            if shard not in writer.struck:
                floor = min(floor, writer.low)
        if lowest_unsettled is not None:
            floor = min(floor, lowest_unsettled - 1)
        return floor
