"""When a drain is looked at: seldom while much is left, often where it begins and ends. Pure."""

from __future__ import annotations

from typing import Final

LOOK_MIN_S: Final = 0.01
LOOK_MAX_S: Final = 0.5
"""Between two looks at a relay's metrics; one costs it some 2 ms of CPU."""


def pause_s(left: int, gained: int, interval_s: float, watched_s: float) -> float:
    """Until the next look: half the time that the rows `left` take at the rate of the last interval, in which `gained` rows went;
    not longer than the drain was `watched_s` for, since its first intervals say little of its rate.
    """
    if gained <= 0:
        return LOOK_MIN_S
    rest_s = left / gained * interval_s
    return min(LOOK_MAX_S, max(LOOK_MIN_S, min(rest_s / 2, watched_s)))
