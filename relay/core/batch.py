"""How many rows a statement is given, where one may run into its time limit: a quarter after that, twice as many after a quick one.

Does not do: telling what ran into a limit (`errors.StatementTooSlow`), nor what a statement does with them.
"""

from __future__ import annotations

QUICK_S = 0.5


class Batch:
    """`rows`: so many, between 1 and `rows_max`."""

    __slots__ = ("_rows_max", "rows")

    def __init__(self, rows_max: int) -> None:
        self._rows_max = rows_max
        self.rows = rows_max

    @property
    def is_cut(self) -> bool:
        """Whether it is smaller than it would be."""
        return self.rows < self._rows_max

    def too_slow(self, rows: int) -> None:
        """A statement with so many `rows` ran into its limit."""
        self.rows = max(1, min(rows, self.rows) // 4)

    def took(self, seconds: float) -> None:
        """One went well."""
        if seconds < QUICK_S:
            self.rows = min(2 * self.rows, self._rows_max)
