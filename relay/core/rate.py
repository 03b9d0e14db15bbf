"""`RELAY_MAX_RATE`: a token bucket. It fills at the rate, holds a tenth of a second's worth, and each message takes one.

So over any time `t` at most `rate * (t + BURST_S)` messages go, or `rate * t + 1` where that is more. Asks no clock: the time
is given, in seconds of whoever asks.
"""

from __future__ import annotations

BURST_S = 0.1
"""Long enough to be filled between two looks of a busy loop, short enough that nobody sees a burst."""


class TokenBucket:
    """Full at the start. Time that goes back counts as no time."""

    __slots__ = ("_at", "_rate", "_tokens", "size")

    def __init__(self, rate: float, now: float) -> None:
        assert rate > 0
        self._rate = rate
        self.size = max(1.0, rate * BURST_S)
        """What it holds at most."""
        self._tokens = self.size
        self._at = now

    def allowance(self, now: float) -> int:
        """How many messages may go now."""
        if now > self._at:
            self._tokens = min(self.size, self._tokens + (now - self._at) * self._rate)
            self._at = now
        return max(0, int(self._tokens))

    def take(self, count: int) -> None:
        """So many went, whether or not they were allowed (a probe of a suspect is not asked)."""
        self._tokens -= count

    @property
    def wait_s(self) -> float:
        """Until the next one may go, from the last `allowance` on."""
        return max(0.0, (1.0 - self._tokens) / self._rate)
