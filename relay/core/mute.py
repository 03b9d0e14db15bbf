"""Routes at which nothing is answered while others are: one queue without its majority must not take the window from all (P2).

    heard --unanswered when a link was built anew for its silence--> mute --any answer there--> heard

Of a mute route one row goes as a probe, and another one each `probe_s`; the others wait. Once another route has had an answer, or slowly
where none has (nobody knows then whether it is the whole broker that is silent), they are set aside and make room.

Does not do: publishing, setting aside; what a route is (`Link.route_of`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from enum import Enum, auto
from typing import Final

Route = tuple[str, str]
"""Exchange and routing key; empty where a row has none."""

PATIENCE_S: Final = 1.0
"""So long the first probe's answer is waited for before other rows of its route are set aside."""

ASIDE_PER_S: Final = 100.0
"""Rows a second that are set aside while no route at all has had an answer."""

_NOWHERE: Final = ("", "")


class Verdict(Enum):
    GO = auto()
    WAIT = auto()
    ASIDE = auto()


class Mute:
    """The mute routes of one relay. Times are boot-time seconds."""

    def __init__(self, probe_s: float) -> None:
        self._probe_s = probe_s
        self._probed_at: dict[Route, tuple[float, float] | None] = {}
        """When the first row went after it had fallen silent, and the last one."""
        self._is_other_heard = False
        """Since the last of them fell silent, another route has had an answer."""
        self._asked_at = 0.0
        self._may_aside = 0.0
        """Rows that may be set aside now, of a second's at most: they are judged once a second."""
        self._aside = 0
        """Rows set aside though no route was heard."""

    def __bool__(self) -> bool:
        return bool(self._probed_at)

    def __iter__(self) -> Iterator[Route]:
        return iter(list(self._probed_at))

    @property
    def aside_s(self) -> float:
        """For how long more than usual rows are set aside: those that come back are fewer than those that may make room, however many
        there are."""
        return 0.0 if self._is_other_heard else 2 * self._aside / ASIDE_PER_S

    def add(self, routes: Iterable[Route]) -> None:
        """A link was built anew for its silence; these had rows without an answer."""
        for route in routes:
            if route != _NOWHERE:
                self._probed_at[route] = None
        self._is_other_heard = False
        self._aside = 0

    def on_answered(self, routes: Iterable[Route]) -> list[Route]:
        """Returns those of them that are mute no more."""
        heard = [route for route in set(routes) if self._probed_at.pop(route, self) is not self]
        self._is_other_heard = True
        return heard

    def judge(self, route: Route, now: float) -> Verdict:
        """What a row of this route may do now; where it may go it is the route's probe."""
        if route not in self._probed_at:
            return Verdict.GO
        first_at, last_at = self._probed_at[route] or (now, -math.inf)
        if now - last_at >= self._probe_s:
            self._probed_at[route] = first_at, now
            return Verdict.GO
        if now - first_at < PATIENCE_S:
            return Verdict.WAIT
        if self._is_other_heard:
            return Verdict.ASIDE
        self._may_aside = min(ASIDE_PER_S, self._may_aside + (now - self._asked_at) * ASIDE_PER_S)
        self._asked_at = now
        if self._may_aside < 1:
            return Verdict.WAIT
        self._may_aside -= 1
        self._aside += 1
        return Verdict.ASIDE
