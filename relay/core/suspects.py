"""Rows over one of which the broker closed a link, until each is tried by itself.

A broker that refuses a message closes the channel, or the connection, under everybody's messages and does not say
which it was. What was in flight then are the suspects:

    in flight --the broker closes--> suspect --tried--> probed --broker took it in--> cleared
                                        ^                 |-----broker closes over it--> the culprit
                                        '--link lost------'

They are tried one at a time, on a channel of their own, the last published first. A broker looks at messages in the order
of the channel: those after the culprit were never looked at, those before it were taken in. So down to the first
culprit a try is a row's first copy, below it the second; and a row that was taken in by the probes' channel before that
closed too is cleared, and goes again with everybody: each innocent row is repeated at most once for it. A culprit
costs one close, an innocent row one round trip, without waiting for its confirm.

Behind them come those that were never published and are doubted all the same (`core/wariness.py`), the oldest first: they
come as long as there is traffic, and the other way round some would wait for as long.

Does not do: sending; states of rows (`core/chains.py` keeps a suspect READY and in no queue, where it blocks its own
key and nobody else).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, takewhile

from relay.core.wariness import own_exchange
from relay.message import Row, State


class Suspects:
    """The suspects of one relay. `probed` is the one that is being tried."""

    def __init__(self) -> None:
        self._closed_over: dict[int, Row] = {}
        """A link was closed over these, in publish order."""
        self._doubted: dict[int, Row] = {}
        self._put_off: dict[int, str] = {}
        """Exchanges that are being asked for, by the seqs of rows over which a link was closed."""
        self._awaiting: dict[str, dict[int, Row]] = {}
        """Who is doubted and put off: by the exchange that is being asked for."""
        self.probed: Row | None = None
        self.are_alone = False
        """A whole connection was closed over them: while there are such, nothing else is published (a probe's answer
        would not count). Probes that have passed may be unconfirmed yet: the broker has looked at them."""

    def __len__(self) -> int:
        return len(self._closed_over) + len(self._doubted) + sum(map(len, self._awaiting.values()))

    def __contains__(self, row: Row) -> bool:
        return any(rows.get(row.seq) is row for rows in self._all())

    def is_alone(self, row: Row) -> bool:
        """Whether it is tried while nothing else is in flight."""
        return self.are_alone and self._closed_over.get(row.seq) is row

    def add(self, rows: Iterable[Row], *, alone: bool) -> None:
        """A link was closed over these, given in publish order."""
        for row in rows:
            for doubted in (self._doubted, *self._awaiting.values()):
                doubted.pop(row.seq, None)
            self._closed_over[row.seq] = row
        if self._closed_over:
            self.are_alone = self.are_alone or alone

    def doubt(self, row: Row) -> None:
        """It was not published yet, and its exchange may refuse it."""
        if row not in self:
            self._doubted[row.seq] = row

    def trust(self, exchange: str) -> list[Row]:
        """Nobody is doubted over this exchange any more; returns who was, the oldest first."""
        doubted = [*self._awaiting.get(exchange, {}).values(), *self._doubted.values()]
        trusted = [row for row in doubted if own_exchange(row) == exchange and row is not self.probed]
        for row in trusted:
            self.clear(row)
        return trusted

    def next(self, writable: Sequence[bool]) -> Row | None:
        """The row to try next; `None` while one is being tried, or where none may go now."""
        if self.probed is not None:
            return None
        found: Row | None = None
        ended: list[Row] = []
        # Of those over which a link was closed none that was published before one that is put off.
        last_first = takewhile(lambda row: row.seq not in self._put_off, reversed(self._closed_over.values()))
        for row in chain(last_first, self._doubted.values()):
            if row.state in _ENDED:
                ended.append(row)
            elif row.state is State.READY and writable[row.shard]:
                found = row
                break
        for row in ended:
            self.clear(row)
        return found

    def begin(self, row: Row) -> None:
        """It was published as a probe."""
        assert row in self
        assert self.probed is None, "one at a time"
        self.probed = row

    def clear(self, row: Row) -> None:
        """It is no suspect any more: taken in, refused, rejected, or not here any longer."""
        if self.probed is row:
            self.probed = None
        for rows in self._all():
            if rows.get(row.seq) is row:
                del rows[row.seq]
        if row.seq not in self._closed_over:
            self._put_off.pop(row.seq, None)
        if not self._closed_over:
            self.are_alone = False

    def put_off(self, row: Row, exchange: str) -> None:
        """It is not tried before there is a verdict on its exchange; nor, if a link was closed over it, are those published
        before it: tried first, they would have a copy more when it turns out to be the culprit. Nor is any other that is doubted
        for the same exchange."""
        if self._closed_over.get(row.seq) is row:
            self._put_off[row.seq] = exchange
            return
        doubted = self._doubted.values()
        same = {each.seq: each for each in doubted if each is row or own_exchange(each) == exchange}
        self._awaiting.setdefault(exchange, {}).update(same)
        for seq in same:
            del self._doubted[seq]

    def on_verified(self, exchange: str | None = None) -> None:
        """There is one on this exchange, or on any."""
        self._put_off = {seq: name for seq, name in self._put_off.items() if exchange not in (None, name)}
        answered = list(self._awaiting) if exchange is None else [exchange]
        back = [row for name in answered for row in self._awaiting.pop(name, {}).values()]
        if back:
            # In their old places: the oldest first.
            doubted = sorted([*back, *self._doubted.values()], key=lambda row: row.seq)
            self._doubted = {row.seq: row for row in doubted}

    def _all(self) -> Iterator[dict[int, Row]]:
        yield self._closed_over
        yield self._doubted
        yield from self._awaiting.values()

    def lose_probe(self) -> Row | None:
        """The link is gone, for another reason: the row that was being tried is a suspect still."""
        row, self.probed = self.probed, None
        return row


_ENDED = frozenset({State.SETTLING, State.FORGOTTEN})
"""A follower that was set aside, or a row of a shard that is lost: read again, it is no suspect."""
