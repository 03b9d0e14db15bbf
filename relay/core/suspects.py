"""Rows over one of which the broker closed a link, until each is tried by itself.

A broker that refuses a message closes the channel, or the connection, under everybody's messages and does not say
which it was. What was in flight then are the suspects:

    in flight --the broker closes--> suspect --tried--> probed --broker took it in--> cleared
                                        ^                 |-----broker closes over it--> the culprit
                                        '--link lost------'

They are tried one at a time, on a channel of their own, the highest first. A broker looks at messages in the order
of the channel: those after the culprit were never looked at, those before it were taken in. So down to the first
culprit a try is a row's first copy, below it the second; and a row that was taken in by the probes' channel before that
closed too is cleared, and goes again with everybody: each innocent row is repeated at most once for it. A culprit
costs one close, an innocent row one round trip, without waiting for its confirm.

Does not do: sending; states of rows (`core/chains.py` keeps a suspect READY and in no queue, where it blocks its own
key and nobody else).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from relay.message import Row, State


class Suspects:
    """The suspects of one relay. `probed` is the one that is being tried."""

    def __init__(self) -> None:
        self._rows: dict[int, Row] = {}
        self._order: list[Row] = []
        self.probed: Row | None = None
        self.are_alone = False
        """They closed a whole connection: while there are suspects, nothing else is published (a probe's answer
        would not count). Probes that have passed may be unconfirmed yet: the broker has looked at them."""

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, row: Row) -> bool:
        return self._rows.get(row.seq) is row

    def add(self, rows: Iterable[Row], *, alone: bool) -> None:
        """A link was closed over these, given in publish order."""
        for row in rows:
            if row in self:
                continue
            self._rows[row.seq] = row
            self._order.append(row)
        if self._rows:
            self.are_alone = self.are_alone or alone

    def next(self, writable: Sequence[bool]) -> Row | None:
        """The row to try next; `None` while one is being tried, or where none may go now."""
        if self.probed is not None:
            return None
        order = self._order
        while order and (order[-1] not in self or order[-1].state in _ENDED):
            self.clear(order.pop())
        for row in reversed(order):
            if row.state is State.READY and row in self and writable[row.shard]:
                return row
        return None

    def begin(self, row: Row) -> None:
        """It was published as a probe."""
        assert row in self
        assert self.probed is None, "one at a time"
        self.probed = row

    def clear(self, row: Row) -> None:
        """It is no suspect any more: taken in, refused, rejected, or not here any longer."""
        if self.probed is row:
            self.probed = None
        if row in self:
            del self._rows[row.seq]
        if not self._rows:
            self._order.clear()
            self.are_alone = False

    def lose_probe(self) -> Row | None:
        """The link is gone, for another reason: the row that was being tried is a suspect still."""
        row, self.probed = self.probed, None
        return row


_ENDED = frozenset({State.SETTLING, State.FORGOTTEN})
"""A follower that was set aside, or a row of a shard that is lost: read again, it is no suspect."""
