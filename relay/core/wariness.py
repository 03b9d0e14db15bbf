"""Which exchanges are doubted soon after a refusal, so that rows that name them are tried by themselves.

Those that are refused often come together, each for another exchange, and in the ordinary queue each would close
everybody's channel once more. An exchange that took a message in since is doubted no more; one that refused is, whatever it takes:
it may refuse by the routing key.

    trusted --any refusal--> doubted --took a probe in--> trusted, for a while
                               ^                            |
                               '------ it refused ----------'

Does not do: trying (`core/suspects.py`); the constant exchange, over which no row is at fault.
"""

from __future__ import annotations

import math
from typing import Final

from relay.message import Row

WARY_S: Final = 10.0
"""So long after a refusal exchanges are doubted; and so long what one of them did counts."""

_NAMES_MAX: Final = 1000


class Wariness:
    def __init__(self) -> None:
        self._until = -math.inf
        self._known: dict[str, tuple[bool, float]] = {}
        """Whether it is good, and until when that counts; the oldest first."""

    def beware(self, now: float) -> None:
        """A row was refused, nobody knows which yet."""
        self._until = now + WARY_S

    def refuse(self, exchange: str, now: float) -> None:
        """One was refused at this exchange."""
        self.beware(now)
        self._note(exchange, False, now)

    def take_in(self, exchange: str, now: float) -> bool:
        """It took a probe in; whether it is trusted from now on."""
        if self._known_as(exchange, now) is not None:
            return False
        self._note(exchange, True, now)
        return True

    def is_wary(self, now: float) -> bool:
        return now < self._until

    def doubts(self, row: Row, now: float) -> bool:
        exchange = own_exchange(row)
        return exchange is not None and self.is_wary(now) and not self._known_as(exchange, now)

    def _known_as(self, exchange: str, now: float) -> bool | None:
        is_good, until = self._known.get(exchange, (False, -math.inf))
        return is_good if now < until else None

    def _note(self, exchange: str, is_good: bool, now: float) -> None:
        self._known.pop(exchange, None)
        if len(self._known) >= _NAMES_MAX:
            del self._known[next(iter(self._known))]
        self._known[exchange] = (is_good, now + WARY_S)


def own_exchange(row: Row) -> str | None:
    """The exchange that the row itself names."""
    return None if row.rare is None else row.rare.get("exchange")
