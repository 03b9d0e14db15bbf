"""How long a row at fault waits, and when it stops waiting.

Owns the ladder (`RELAY_RETRY_DELAYS`: n delays are n + 1 attempts) and the nacks' own backoff,
which uses up no attempt. Randomness comes in as a number in [0, 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

JITTER = 0.2
"""A delay varies by a fifth either way, so that rows set back together do not return together."""

NACK_BACKOFF_MIN_S = 0.1
NACK_BACKOFF_MAX_S = 30.0


@dataclass(frozen=True, slots=True)
class Step:
    """`delay_s` until the next attempt, `None`: the ladder is at its end, park."""

    attempts: int
    delay_s: float | None


def jittered(delay_s: float, roll: float) -> float:
    """`delay_s` plus or minus a fifth; `roll` in [0, 1)."""
    return delay_s * (1.0 + JITTER * (2.0 * roll - 1.0))


def next_step(attempts: int, delays_s: Sequence[float], roll: float) -> Step:
    """After one more failed attempt on top of `attempts`."""
    failed = attempts + 1
    if failed > len(delays_s):
        return Step(failed, None)
    return Step(failed, jittered(delays_s[failed - 1], roll))


def nack_backoff(nacks: int, roll: float) -> float:
    """Seconds until a row that was nacked `nacks` times in a row may go again (P2)."""
    assert nacks >= 1
    return jittered(min(NACK_BACKOFF_MAX_S, NACK_BACKOFF_MIN_S * 2.0 ** min(nacks - 1, 20)), roll)


def reconnect_backoff(failures: int, roll: float) -> float:
    """Seconds before the next try to reach a server: 0.1 s doubling to 5 s, full jitter above half."""
    ceiling = min(5.0, 0.1 * 2.0 ** min(failures, 10))
    return ceiling * (0.5 + 0.5 * roll)
