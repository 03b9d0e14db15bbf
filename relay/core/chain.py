"""One key's chain: its rows in memory, by seq.

Does not do: states, but for asking which rows stand where; whose turn it is (`chains.py`).
"""

from __future__ import annotations

from bisect import bisect_left

from relay.message import Row


class Chain:
    """The unconfirmed rows of one key, by seq; `flying` of them are in flight. A row in it names it (`row.chain`).
    `put_off`: the one that waits for a verdict on its exchange (`pipelined`)."""

    __slots__ = ("flying", "put_off", "rows")

    def __init__(self, row: Row) -> None:
        self.rows = [row]
        self.flying = 0
        self.put_off: Row | None = None
        row.chain = self

    def append(self, row: Row) -> None:
        """The row stands above all others."""
        self.rows.append(row)
        row.chain = self

    def insert(self, row: Row) -> None:
        """At its place."""
        self.rows.insert(self._at(row), row)
        row.chain = self

    def remove(self, row: Row) -> None:
        if self.rows[0] is row:
            del self.rows[0]
        else:
            del self.rows[self._at(row)]
        row.chain = None

    def above(self, row: Row) -> list[Row]:
        """Those of a higher seq than this row, whether it stands here or not."""
        at = self._at(row)
        return self.rows[at + (at < len(self.rows) and self.rows[at] is row) :]

    def _at(self, row: Row) -> int:
        return bisect_left(self.rows, row.seq, key=_seq)


def _seq(row: Row) -> int:
    return row.seq
