"""One batch of parked rows that get their owner's `RELAY_ON_PARKED` (L1).

Opens and ends no transaction, and is under the shards' fence: `relay/outbox.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import asyncpg

from relay.core.ports.outbox import Spared
from relay.core.refusals import Blame
from relay.refusal import blame_of, demand_change
from relay.settling import Statements
from relay.sparing import in_parts


@dataclass(frozen=True, slots=True)
class Policy:
    """At most `limit` rows of `shards`, but for those with the seqs `spared`; `holds`: whether parked rows hold their keys."""

    session: Statements
    shards: Sequence[int]
    holds: bool
    limit: int
    spared: Sequence[int]

    async def apply(self, budget_s: float) -> tuple[int, list[Spared]]:
        """How many were changed, and those whose change is refused, which stay as they are."""
        await self.session.execute("SAVEPOINT policy")
        try:
            return await self._change(self.limit, self.spared), []
        except asyncpg.PostgresError as error:
            if blame_of(error) is Blame.SERVER:
                raise
        await self.session.execute("ROLLBACK TO SAVEPOINT policy")
        return await in_parts(self.session, self._change, self._next, self.limit, self.spared, budget_s)

    async def _change(self, limit: int, spared: Sequence[int]) -> int:
        ((rows, untouched),) = await self.session.fetch("park_policy", self.shards, self.holds, limit, spared)
        demand_change(untouched)
        return int(rows)

    async def _next(self, spared: Sequence[int]) -> tuple[int, str]:
        ((seq, id_),) = await self.session.fetch("park_policy_next", self.shards, self.holds, 1, spared)
        return seq, id_
