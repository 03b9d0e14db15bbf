"""Nacked rows that wait for their next try, and how many rows cannot go for them (P2).

Does not do: deciding how long each waits (`ladder.py`), or what it is after it (`chains.py`).
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Final

from relay.core.ports.outbox import SHARDS
from relay.message import Row, State

_BACKOFF: Final = State.BACKOFF


class Backoff:
    """Rows in BACKOFF."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Row]] = []
        """By the time at which they are due; one that left meanwhile stays until then."""
        self._nacks = 0
        """So far; breaks ties, for rows do not compare."""
        self._weights: dict[int, int] = {}
        """By seq, how many rows cannot go for it."""
        self._kept_back = [0] * SHARDS
        """The sums of these, a shard."""

    def __len__(self) -> int:
        return len(self._weights)

    def add(self, row: Row, due: float, weight: int) -> None:
        """Until boot-time `due` this row, and with it `weight` rows in all, cannot go."""
        row.state = _BACKOFF
        self._weights[row.seq] = weight
        self._kept_back[row.shard] += weight
        self._nacks += 1
        heappush(self._heap, (due, self._nacks, row))

    def leave(self, row: Row) -> None:
        """Before its state changes; for a row in any state."""
        if row.state is _BACKOFF:
            self._kept_back[row.shard] -= self._weights.pop(row.seq)

    @property
    def next_due(self) -> float | None:
        """Boot-time seconds at which the next row is due."""
        return self._heap[0][0] if self._heap else None

    def pop(self, now: float) -> Row | None:
        """A row whose time has come; it has left."""
        while self._heap and self._heap[0][0] <= now:
            row = heappop(self._heap)[2]
            if row.state is _BACKOFF:
                self.leave(row)
                return row
        return None

    def kept_back(self, shard: int) -> int:
        """Rows of the shard that cannot go for a nack: those in BACKOFF, and in `strict` what stood behind them in their
        chains when they were nacked."""
        return self._kept_back[shard]

    def kept_back_in_all(self) -> int:
        return sum(self._kept_back)
