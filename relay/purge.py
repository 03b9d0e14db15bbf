"""One batch of `RELAY_RETENTION`: marked rows whose time is over are deleted (O3).

Opens and ends no transaction: `relay/outbox.py` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from relay.core.ports.outbox import Purged
from relay.refusal import demand_change
from relay.settling import Statements
from relay.sparing import in_parts


@dataclass(frozen=True, slots=True)
class Purge:
    """At most `limit` rows, but for those with the seqs `spared`."""

    session: Statements
    instance: str
    older_than_s: float
    limit: int
    spared: Sequence[int]

    async def delete(self) -> Purged:
        """Raises the driver's error where any row is refused."""
        return Purged(await self._delete(self.limit, self.spared), ())

    async def delete_in_parts(self, budget_s: float) -> Purged:
        """The same, but for rows that are refused, which are told."""
        return Purged(*await in_parts(self.session, self._delete, self._next, self.limit, self.spared, budget_s))

    async def _delete(self, limit: int, spared: Sequence[int]) -> int:
        ((rows, untouched),) = await self.session.fetch("purge", self.instance, self.older_than_s, limit, spared)
        demand_change(untouched)
        return int(rows)

    async def _next(self, spared: Sequence[int]) -> tuple[int, str]:
        ((seq, id_),) = await self.session.fetch("purge_next", self.instance, self.older_than_s, 1, spared)
        return seq, id_
