"""The confirm window: which published rows still lack the broker's word.

Owns: the delivery tags of one channel life and the rows behind them.

    add --> in flight --ack or nack of its tag, or of a later one with `multiple`--> settled
                 \\--returned (no tag in it, matched by message id)--> in flight, returned --ack--> settled

Invariants:
  W1  Tags count from 1 without gaps (AMQP 0-9-1, `confirm.select`; RabbitMQ, "Publisher Confirms").
  W2  A message id is in flight at most once: a return carries no tag, the id is all that ties it to its row.
  W3  Each row leaves exactly once: by the first ack or nack that covers it, or by `drain`. A later
      `multiple` that covers it too does not see it: a nack that came first stays a nack.
  W4  A broker that settles what is not in flight, or returns what it was never given, is not believed:
      `ProtocolViolation`; what is still in the window then counts as unconfirmed.

`multiple` costs what it settles: each tag is stepped over once or twice in the life of the channel. Memory is that of what is in
flight: a row that stays while those after it are settled (its queue is mute) is kept apart.
It does not know channels or sockets, and does not decide what an outcome leads to.
"""

from __future__ import annotations

from collections.abc import Sequence

from relay.core.ports.broker import Returned
from relay.errors import BrokerError
from relay.message import Row

Settled = tuple[list[Row], list[Returned]]
"""Rows that an ack or nack settled, and those among the settled that had been returned before."""

_NOTHING_RETURNED: list[Returned] = []

SETTLED_MAX = 4096
"""Tags that are settled behind one that is not, and as many as are in flight: with more of them what is in the way is kept apart."""


class ProtocolViolation(BrokerError):
    """The broker broke AMQP's rules; nothing that it says on this channel can be trusted any longer."""


class Window:
    """Rows in flight on one channel, in the order of their delivery tags."""

    __slots__ = ("_apart", "_below", "_head", "_ids", "_ids_last", "_in_flight", "_returned", "_rows", "_settled_max")

    def __init__(self, settled_max: int = SETTLED_MAX) -> None:
        self._settled_max = settled_max
        # `_rows[i]` has tag `_below + 1 + i`; settled ones are None. All before `_head` are: they are cut off in bulk.
        self._rows: list[Row | None] = []
        self._below = 0
        self._head = 0
        self._apart: dict[int, Row] = {}
        """By tag, ascending: rows in flight whose tags are not above `_below`."""
        self._in_flight = 0
        self._returned: dict[int, Returned] = {}
        # Tags by message id, as of the tag `_ids_last`; settled ones may be among them.
        self._ids: dict[str, int] = {}
        self._ids_last = 0

    def __len__(self) -> int:
        return self._in_flight

    @property
    def last_tag(self) -> int:
        """The tag given last; 0 before the first."""
        return self._below + len(self._rows)

    def is_in_flight(self, message_id: str) -> bool:
        """Costs a look at the whole window for the first question after an `add`."""
        return self._tag_of(message_id) is not None

    def add(self, rows: Sequence[Row]) -> None:
        """These rows are about to be published, in this order; each gets the next tag. None of their ids is in flight (W2)."""
        self._rows += rows
        self._in_flight += len(rows)
        if len(self._rows) > 2 * self._in_flight + self._settled_max:
            self._keep_apart()

    @property
    def oldest(self) -> Row | None:
        """The row that was published first of those in flight."""
        if self._apart:
            return next(iter(self._apart.values()))
        return self._rows[self._head] if self._head < len(self._rows) else None

    def ack(self, tag: int, multiple: bool = False) -> Settled:
        """The broker took the message of this tag, or (`multiple`) all up to it; tag 0 then means all so far.

        Returns the rows that are settled by it as (delivered, returned): an ack after a return is not
        delivery. Raises ProtocolViolation when a tag was never given or nothing up to it is in flight.
        """
        if multiple:
            return self._multiple(tag or self.last_tag)
        rows = self._rows
        at = tag - self._below - 1
        row = rows[at] if 0 <= at < len(rows) else None
        if row is not None:
            rows[at] = None
            if at == self._head:
                self._advance(at + 1)
        elif (row := self._apart.pop(tag, None)) is None:
            raise ProtocolViolation(f"the broker confirmed delivery tag {tag}, which is not in flight")
        self._in_flight -= 1
        if self._returned and (returned := self._returned.pop(tag, None)) is not None:
            return [], [returned]
        return [row], _NOTHING_RETURNED

    def nack(self, tag: int, multiple: bool = False) -> Settled:
        """The broker could not take the message; else as `ack`. A row that was returned stays returned."""
        return self.ack(tag, multiple)

    def mark_returned(self, message_id: str, error: str, exchange: str, routing_key: str) -> None:
        """`basic.return`: the message reached no queue; its confirm follows. Raises ProtocolViolation."""
        tag = self._tag_of(message_id)
        if tag is None:
            raise ProtocolViolation(f"the broker returned message {message_id!r}, which is not in flight")
        row = self._row_of(tag)
        assert row is not None, "looked up just now"
        self._returned[tag] = Returned(row, error, exchange, routing_key)

    def rows(self) -> Sequence[Row]:
        """The rows without an outcome, in publish order."""
        return [*self._apart.values(), *(row for row in self._rows if row is not None)]

    def drain(self) -> Sequence[Row]:
        """The channel is gone: the rows without an outcome, in publish order. The window is then empty."""
        rows = self.rows()
        self._below = self.last_tag
        self._rows.clear()
        self._apart.clear()
        self._head = self._in_flight = 0
        self._ids.clear()
        self._returned.clear()
        return rows

    def _multiple(self, tag: int) -> Settled:
        last = self.last_tag
        if tag > last:
            raise ProtocolViolation(f"the broker confirmed all up to delivery tag {tag}; the last one given is {last}")
        head, end = self._head, tag - self._below
        settled = [self._apart.pop(each) for each in [each for each in self._apart if each <= tag]]
        if end > head:
            settled += [row for row in self._rows[head:end] if row is not None]
        if not settled:
            raise ProtocolViolation(f"the broker confirmed all up to delivery tag {tag}, of which none is in flight")
        self._in_flight -= len(settled)
        returned = _NOTHING_RETURNED
        if self._returned:
            tags = [each for each in self._returned if each <= tag]
            returned = [self._returned.pop(each) for each in sorted(tags)]
            sent_back = {back.row for back in returned}
            settled = [row for row in settled if row not in sent_back]
        if end > head:
            self._rows[head:end] = [None] * (end - head)
            self._advance(end)
        return settled, returned

    def _keep_apart(self) -> None:
        """Cut off what is mostly settled; of the rest there are as many as in flight, and so of those kept apart."""
        cut = len(self._rows) - self._in_flight
        below = self._below
        self._apart |= {below + 1 + at: row for at, row in enumerate(self._rows[:cut]) if row is not None}
        del self._rows[:cut]
        self._below += cut
        self._head = 0
        self._advance(0)

    def _row_of(self, tag: int) -> Row | None:
        at = tag - self._below - 1
        return self._rows[at] if at >= 0 else self._apart.get(tag)

    def _advance(self, head: int) -> None:
        """All before `head` are settled, and so may be some behind it."""
        rows = self._rows
        while head < len(rows) and rows[head] is None:
            head += 1
        if 2 * head > len(rows):
            # Each row is moved once for as many that were settled.
            del rows[:head]
            self._below += head
            head = 0
        self._head = head

    def _tag_of(self, message_id: str) -> int | None:
        if self._ids_last != self.last_tag:
            # Asked for a return, which is rare: kept up with every row it would cost more than all else here.
            self._ids_last = self.last_tag
            self._ids = {row.id: tag for tag, row in self._apart.items()}
            self._ids |= {row.id: tag for tag, row in enumerate(self._rows, self._below + 1) if row is not None}
            assert len(self._ids) == self._in_flight, "a row is in flight at most once per channel (W2)"
        tag = self._ids.get(message_id)
        # Settled since?
        return tag if tag is not None and self._row_of(tag) is not None else None
