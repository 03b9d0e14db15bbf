"""Looks at a relay that drains: when (seldom while much is left, often where it begins and ends), and whether all is well. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

PUBLISHED: Final = 'relay_published_total{outcome="'

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


def published(metrics: Mapping[str, float]) -> dict[str, int]:
    """Messages by outcome, out of a relay's series."""
    return {
        name.removeprefix(PUBLISHED).removesuffix('"}'): int(count)
        for name, count in metrics.items()
        if name.startswith(PUBLISHED)
    }


def disturbance(outcomes: Mapping[str, int], rows: int) -> str | None:
    """What tells that servers or relay were in trouble: more acks than rows, or any other outcome. None where there was none."""
    if outcomes.get("acked", 0) <= rows and not any(n for outcome, n in outcomes.items() if outcome != "acked"):
        return None
    counts = ", ".join(f"{count:,} {outcome}" for outcome, count in outcomes.items() if count)
    return f"the relay published more than {rows:,} rows, each once: {counts}"
