"""What was returned to a queue that delays it by itself. Pure: the clock comes in.

The broker keeps no note of a failure, so the consumer does, as long as it lives: when a message failed first belongs to the
diagnosis of its parked copy, and when it was returned shows whether the queue delays at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

RETURNS_MAX: Final = 10_000
"""Remembered at a time, some 2 MB; the longest known go first."""


@dataclass(frozen=True, slots=True)
class Returned:
    """`failed_at` is the first failure, ISO 8601 in UTC; `returned_at` in seconds of one clock that does not jump."""

    failed_at: str
    returned_at: float


class Returns:
    """Shared by a consumer's workers: any of them may get a message back."""

    __slots__ = ("_known", "_limit")

    def __init__(self, limit: int = RETURNS_MAX) -> None:
        self._known: dict[str, Returned] = {}
        self._limit = limit

    def note(self, message_id: str, failed_at: str, now: float) -> None:
        """It goes back to the queue."""
        self._known.pop(message_id, None)
        self._known[message_id] = Returned(failed_at, now)
        if len(self._known) > self._limit:
            del self._known[next(iter(self._known))]

    def take(self, message_id: str) -> Returned | None:
        """It came back."""
        return self._known.pop(message_id, None)
