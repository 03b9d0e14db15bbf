"""What may happen a thousand times a second and is said a few times a minute. Pure: the clock comes in."""

from __future__ import annotations

from typing import Final

INTERVAL_S: Final = 10.0


class Seldom:
    """By key: the first time at once, later ones together, at most every `interval_s`."""

    __slots__ = ("_interval_s", "_said_at", "_unsaid")

    def __init__(self, interval_s: float = INTERVAL_S) -> None:
        self._interval_s = interval_s
        self._said_at: dict[str, float] = {}
        self._unsaid: dict[str, int] = {}

    def count(self, key: str, now: float) -> int:
        """One more of them: how many to speak of now, 0 for none yet."""
        self._unsaid[key] = self._unsaid.get(key, 0) + 1
        said_at = self._said_at.get(key)
        if said_at is not None and now - said_at < self._interval_s:
            return 0
        self._said_at[key] = now
        return self._unsaid.pop(key)
