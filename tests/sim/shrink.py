"""A failing history made smaller: parts are left out, and its end brought forward, while it still fails alike."""

from __future__ import annotations

from dataclasses import dataclass

from .faults import Faults
from .seeds import play
from .weather import CALMS, climate

PLAYS_MAX = 80


@dataclass(frozen=True, slots=True)
class Failure:
    """A history that fails: how to play it, and what it says."""

    seed: int
    without: frozenset[str]
    seconds: float
    kind: str
    text: str

    @property
    def command(self) -> str:
        left_out = f" --without {','.join(sorted(self.without))}" if self.without else ""
        return f"python -m tests.sim --seeds 1 --from {self.seed}{left_out} --seconds {self.seconds:g}"


def kind_of(error: Exception) -> str:
    """The rule that was broken, as the oracle names it (I1, R5, liveness …), else the exception's name."""
    lines = str(error).splitlines()
    first = lines[1].strip() if len(lines) > 1 and " violations, the first:" in lines[0] else ""
    return first.partition(":")[0] or type(error).__name__


def failure(seed: int, without: frozenset[str] = frozenset(), seconds: float | None = None) -> Failure | None:
    """Play it; what broke, or None."""
    try:
        play(seed, without=without, seconds=seconds)
    except Exception as error:  # noqa: BLE001 - whatever a history raises is its finding
        return Failure(
            seed, without, seconds or climate(seed).seconds, kind_of(error), f"{type(error).__name__}: {error}"
        )
    return None


def shrink(found: Failure) -> Failure:
    """The smallest that so many plays find: fewer parts, then less time; failing by the same rule."""
    plays = 0

    def still(without: frozenset[str], seconds: float) -> Failure | None:
        nonlocal plays
        plays += 1
        again = failure(found.seed, without, seconds) if plays <= PLAYS_MAX else None
        return again if again is not None and again.kind == found.kind else None

    smallest = found
    for name in (*CALMS, *Faults.names()):
        if name not in smallest.without and not (name in Faults.names() and "faults" in smallest.without):
            smallest = still(smallest.without | {name}, smallest.seconds) or smallest
    step = smallest.seconds / 2
    while step > 0.05:
        shorter = still(smallest.without, smallest.seconds - step)
        smallest = shorter or smallest
        step /= 2
    return smallest
