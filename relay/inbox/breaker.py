"""The breaker in front of a database that is down. Pure: the clock comes in.

    closed --[failures in a row]--> open --[cooldown over]--> probing --success--> closed
                                      ^-----------failure, cooldown doubled----------'

While it is open the messages in hand wait; while it probes one of them goes through and, if that fails, climbs its
ladder. So an outage that is longer than the ladder costs each step of it for a few messages, not for all.
"""

from __future__ import annotations

from typing import Final

FAILURES_MAX: Final = 5
"""In a row before it opens: more than the workers' own share of one hiccup."""

COOLDOWN_MIN_S: Final = 0.5
COOLDOWN_MAX_S: Final = 30.0

RECHECK_S: Final = 0.1
"""How soon the others look again while one probes."""


class Breaker:
    """Shared by a consumer's workers. Times are in seconds of one clock that does not jump."""

    __slots__ = ("_cooldown_s", "_failures", "_is_probing", "_limit", "_open_until")

    def __init__(self, failures_max: int = FAILURES_MAX) -> None:
        self._limit = failures_max
        self._failures = 0
        self._cooldown_s = COOLDOWN_MIN_S
        self._open_until: float | None = None
        self._is_probing = False

    @property
    def is_open(self) -> bool:
        """Whether messages wait."""
        return self._open_until is not None

    def wait_s(self, now: float) -> float:
        """0 when the caller may go, else when to ask again. Who may go while it is open is its probe: it has to
        report `succeeded`, `failed` or `gave_up`.
        """
        if self._open_until is None:
            return 0.0
        if now < self._open_until:
            return self._open_until - now
        if self._is_probing:
            return RECHECK_S
        self._is_probing = True
        return 0.0

    def succeeded(self) -> None:
        """The database answered."""
        self._failures = 0
        self._cooldown_s = COOLDOWN_MIN_S
        self._open_until = None
        self._is_probing = False

    def failed(self, now: float) -> None:
        """The database could not be reached."""
        self._failures += 1
        if self._is_probing:
            self._cooldown_s = min(COOLDOWN_MAX_S, 2 * self._cooldown_s)
        elif self._failures < self._limit or self._open_until is not None:
            return
        self._is_probing = False
        self._open_until = now + self._cooldown_s

    def gave_up(self) -> None:
        """The probe ended without having learnt anything."""
        self._is_probing = False
