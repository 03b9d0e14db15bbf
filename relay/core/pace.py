"""How many messages may be in flight: at most the setting, and not more than the broker confirms in about a second.

A window that suits a fast broker is a long queue before a slow one: each message waits behind all others, and a cut
connection repeats them all (I4). So the window shrinks while confirms are slow and grows back when they are quick again.
By the mean of a period: one slow queue among many does not slow down the others, and a single late confirm
does nothing.

Does not do: measuring, counting what is in flight.
"""

from __future__ import annotations

from typing import Final

SLOW_S: Final = 1.0
"""Confirms that take longer on average make the window smaller."""

QUICK_S: Final = 0.5
"""Those that take less let it grow. In between it stays: shrinking to a second's worth ends there."""

PERIOD_S: Final = 0.5
WINDOW_MIN: Final = 32
"""Even a broker that syncs to a slow disk confirms so many together."""


class Pace:
    """The window of one link's life after another; `in_flight_max` is RELAY_MAX_IN_FLIGHT."""

    def __init__(self, in_flight_max: int) -> None:
        self._max = in_flight_max
        self._min = min(WINDOW_MIN, in_flight_max)
        self._since: float | None = None
        self._waited_s = 0.0
        self._confirms = 0
        self.window = in_flight_max

    def on_confirmed(self, waited_s: float, confirms: int, now: float) -> None:
        """So many confirms came by boot-time `now`, for which `waited_s` seconds were waited in all."""
        if self._since is None:
            self._since = now
        self._waited_s += waited_s
        self._confirms += confirms
        if now - self._since < PERIOD_S or not self._confirms:
            return
        mean_s = self._waited_s / self._confirms
        if mean_s > SLOW_S:
            self.window = max(self._min, int(self.window * max(0.5, SLOW_S / mean_s)))
        elif mean_s < QUICK_S:
            self.window = min(self._max, 2 * self.window)
        self._since, self._waited_s, self._confirms = now, 0.0, 0
