"""The queue of the rows that may go, and those of them that something else than their key keeps back: a lease, an orphan
on the link, the verdict on an exchange, a body that is still in the table.

Owns the order in which ready rows go; an entry whose row is READY no more is stale and passed over. Does not decide
which rows are ready (`chains.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final

from relay.message import Row, State

_READY: Final = State.READY
_IN_FLIGHT: Final = State.IN_FLIGHT


class ReadyQueue:
    """A row is at most once in its live part."""

    def __init__(self) -> None:
        self.rows: deque[Row] = deque()
        self.wanted: dict[int, Row] = {}
        """Rows next to go whose bodies were left behind, by seq."""
        self._apart: list[Row] = []
        """Those that their lease or an orphan on the link keeps back; offered again."""
        self._unverified: dict[str, list[Row]] = {}
        """Those that wait for a verdict on their exchange, by its name."""

    def __len__(self) -> int:
        """An upper bound: stale entries count."""
        return len(self.rows)

    def take(self, room: int, bytes_room: int, writable: Sequence[bool]) -> list[Row]:
        """Up to `room` rows, in order, IN_FLIGHT from now on; at most about `bytes_room` of bodies."""
        taken: list[Row] = []
        rows = self.rows
        while rows and len(taken) < room and bytes_room > 0:
            row = rows.popleft()
            if row.state is not _READY:
                continue
            if not writable[row.shard]:
                self._apart.append(row)
                continue
            if not row.is_loaded:
                self.wanted[row.seq] = row
                continue
            row.state = _IN_FLIGHT
            bytes_room -= row.size
            if (chain := row.chain) is not None:
                chain.flying += 1
            taken.append(row)
        return taken

    def put_first(self, rows: Sequence[Row]) -> None:
        """These go before everything else, in their order."""
        self.rows.extendleft(reversed(rows))

    def set_apart(self, row: Row) -> None:
        self._apart.append(row)

    def offer_again(self) -> None:
        """What a lease or an orphan kept back gets its turn again, before the rest."""
        if self._apart:
            self.put_first(self._apart)
            self._apart = []

    def put_off(self, row: Row, exchange: str) -> None:
        self._unverified.setdefault(exchange, []).append(row)

    def verified(self, exchange: str | None) -> list[Row]:
        """What waited for a verdict on this exchange, or on any; it waits no more."""
        names = list(self._unverified) if exchange is None else [exchange]
        return [row for name in names for row in self._unverified.pop(name, ())]

    def drop_stale(self) -> None:
        """Nobody may take from the queue for hours; or a row is about to be ready again, at another place."""
        live = _ready(self.rows)
        self.rows.clear()
        self.rows.extend(live)
        self._apart = _ready(self._apart)
        for name, rows in self._unverified.items():
            self._unverified[name] = _ready(rows)


def _ready(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if row.state is _READY]
