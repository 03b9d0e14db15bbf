"""Whether due rows get anywhere: stalled, and not ready, when none of them has been answered for too long (I8).

An answer is an ack, a return or a refusal: its row is due no more, or settled. A nack is none: its row stays as due as it
was, also while it stands aside to let others pass. Owns the reason `stalled` of /readyz and its two log lines.
"""

from __future__ import annotations

from typing import Final

from relay.core.ports.broker import Link
from relay.engine import Engine

NACK_MEMORY_S: Final = 60.0
"""Rows that are nacked time and again are out of memory for half a minute at a time; no nack for twice as long, and they
went elsewhere."""

_NEVER: Final = float("-inf")


class Stall:
    """Told of every answer; looked at once a second."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._since: float | None = None
        """Since when due rows have had no answer."""
        self._nacked_at = _NEVER
        self._is_stalled = False

    @property
    def is_told(self) -> bool:
        """That nothing is answered."""
        return self._is_stalled

    def on_due(self, now: float) -> None:
        """There is something to publish."""
        if self._since is None:
            self._since = now

    def on_answered(self, now: float) -> None:
        self._since = now
        self._nacked_at = _NEVER
        if self._end():
            self._engine.log.info("confirms_resumed")

    def on_nacked(self, now: float) -> None:
        self._nacked_at = now

    def on_lost(self, now: float) -> None:
        """What was in flight is due again, and waits anew."""
        self._since = now
        self._nacked_at = _NEVER
        self._end()

    def end(self) -> None:
        """Nothing is due, or something else holds it back, which is said elsewhere."""
        self._since = None
        self._nacked_at = _NEVER
        self._end()

    def look(self, link: Link | None, now: float) -> None:
        engine = self._engine
        pressure = engine.metrics.backpressure
        if engine.is_blocked or engine.is_paused or engine.is_stopping:
            self.end()
            return
        if link is None:
            return
        is_nacked = now - self._nacked_at <= NACK_MEMORY_S
        chains = engine.chains
        is_due = not pressure.is_active("rate") and (chains.ready or chains.backoff)
        if not (is_nacked or link.in_flight or is_due):
            self.end()
            return
        self.on_due(now)
        assert self._since is not None, "something is due"
        waited_s = now - self._since
        if waited_s < engine.settings.confirm_timeout_s:
            return
        what = "nothing but nacks" if is_nacked else "no confirm"
        engine.readiness.add("stalled", f"{what} for {waited_s:.0f} s")
        if not self._is_stalled:
            self._is_stalled = True
            engine.log.error("confirms_stalled", in_flight=link.in_flight, seconds=round(waited_s), nacked=is_nacked)

    def _end(self) -> bool:
        """Whether it was stalled."""
        was_stalled, self._is_stalled = self._is_stalled, False
        if was_stalled:
            self._engine.readiness.remove("stalled")
        return was_stalled
