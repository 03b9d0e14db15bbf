"""The clock's interface."""

from __future__ import annotations

from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Boot-time seconds: goes on while the machine sleeps, never jumps (I7)."""
        ...

    async def sleep(self, seconds: float) -> None: ...
