"""What the suite is made of: steps, and the form (short, long) that sizes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bench.rig import Rig

Run = dict[str, Any]
"""One measurement as the document's `runs` hold it: `variant` and its figures; the suite adds scenario and turn."""


@dataclass(frozen=True, slots=True)
class Form:
    """How much is measured. `scale` shrinks rows and seconds, for a quick look; figures then mean little."""

    name: str
    repeats: int
    scale: float = 1.0

    @property
    def is_long(self) -> bool:
        return self.name == "long"

    def rows(self, short: int, long: int | None = None) -> int:
        """So many rows; a scaled form keeps at least 200."""
        full = long if self.is_long and long is not None else short
        return full if self.scale == 1.0 else max(min(200, full), round(full * self.scale))

    def seconds(self, short: int, long: int | None = None) -> int:
        """So many whole seconds, at least one."""
        full = long if self.is_long and long is not None else short
        return max(1, round(full * self.scale))


@dataclass(frozen=True, slots=True)
class Step:
    """One piece of work of a scenario, from a quiet machine to its runs.

    `measure` raises BenchFailed, or Unavailable where a program is missing. `estimate_s` is what it takes on
    two quiet cores; ten times as long and a minute is its deadline. `is_once`: not repeated, whatever the form says.
    """

    scenario: str
    name: str
    estimate_s: float
    measure: Callable[[Rig], Sequence[Run]]
    is_once: bool = False

    @property
    def deadline_s(self) -> float:
        return 60.0 + 10.0 * self.estimate_s
