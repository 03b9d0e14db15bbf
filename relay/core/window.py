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

`multiple` costs what it settles: each tag is stepped over once in the life of the channel.
It does not know channels or sockets, and does not decide what an outcome leads to.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from relay.core.ports import Returned
from relay.errors import BrokerError
from relay.message import Row

Settled = tuple[list[Row], list[Returned]]
"""Rows that an ack or nack settled, and those among the settled that had been returned before."""

_NOTHING_RETURNED: list[Returned] = []


class ProtocolViolation(BrokerError):
    """The broker broke AMQP's rules; nothing that it says on this channel can be trusted any longer."""


class Window:
    """Rows in flight on one channel, by delivery tag."""

    __slots__ = ("_ids", "_last", "_low", "_returned", "_rows")

    def __init__(self) -> None:
        self._rows: dict[int, Row] = {}
        self._ids: dict[str, int] = {}
        self._returned: dict[int, Returned] = {}
        self._last = 0
        # Every tag below is settled: where the next `multiple` begins.
        self._low = 1

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def last_tag(self) -> int:
        """The tag given last; 0 before the first."""
        return self._last

    def is_in_flight(self, message_id: str) -> bool:
        return message_id in self._ids

    def add(self, rows: Iterable[Row]) -> None:
        """These rows are about to be published, in this order; each gets the next tag."""
        in_flight, ids, tag = self._rows, self._ids, self._last
        for row in rows:
            tag += 1
            assert row.id not in ids, "a row is in flight at most once per channel (W2)"
            in_flight[tag] = row
            ids[row.id] = tag
        self._last = tag

    def ack(self, tag: int, multiple: bool = False) -> Settled:
        """The broker took the message of this tag, or (`multiple`) all up to it; tag 0 then means all so far.

        Returns the rows that are settled by it as (delivered, returned): an ack after a return is not
        delivery. Raises ProtocolViolation when a tag was never given or nothing up to it is in flight.
        """
        if not multiple:
            row = self._rows.pop(tag, None)
            if row is None:
                raise ProtocolViolation(f"the broker confirmed delivery tag {tag}, which is not in flight")
            del self._ids[row.id]
            if self._returned and (returned := self._returned.pop(tag, None)) is not None:
                return [], [returned]
            return [row], _NOTHING_RETURNED
        return self._multiple(tag or self._last)

    def nack(self, tag: int, multiple: bool = False) -> Settled:
        """The broker could not take the message; else as `ack`. A row that was returned stays returned."""
        return self.ack(tag, multiple)

    def mark_returned(self, message_id: str, error: str, exchange: str, routing_key: str) -> None:
        """`basic.return`: the message reached no queue; its confirm follows. Raises ProtocolViolation."""
        tag = self._ids.get(message_id)
        if tag is None:
            raise ProtocolViolation(f"the broker returned message {message_id!r}, which is not in flight")
        self._returned[tag] = Returned(self._rows[tag], error, exchange, routing_key)

    def rows(self) -> Sequence[Row]:
        """The rows without an outcome, in publish order."""
        return list(self._rows.values())

    def drain(self) -> Sequence[Row]:
        """The channel is gone: the rows without an outcome, in publish order. The window is then empty."""
        rows = list(self._rows.values())
        self._rows.clear()
        self._ids.clear()
        self._returned.clear()
        self._low = self._last + 1
        return rows

    def _multiple(self, tag: int) -> Settled:
        if tag > self._last:
            raise ProtocolViolation(
                f"the broker confirmed all up to delivery tag {tag}; the last one given is {self._last}"
            )
        rows, ids = self._rows, self._ids
        settled: list[Row] = []
        returned = _NOTHING_RETURNED
        take = rows.pop
        if self._returned:
            returned = []
            for each in range(self._low, tag + 1):
                row = take(each, None)
                if row is not None:
                    del ids[row.id]
                    sent_back = self._returned.pop(each, None)
                    if sent_back is None:
                        settled.append(row)
                    else:
                        returned.append(sent_back)
        else:
            for each in range(self._low, tag + 1):
                row = take(each, None)
                if row is not None:
                    del ids[row.id]
                    settled.append(row)
        if not settled and not returned:
            raise ProtocolViolation(f"the broker confirmed all up to delivery tag {tag}, of which none is in flight")
        self._low = tag + 1
        return settled, returned
