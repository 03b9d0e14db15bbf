"""One batch of `RELAY_RETENTION`: marked rows whose time is over are deleted (O3).

Owns: what a batch does where the database refuses to delete a row. Invariant: one such row keeps no others. Opens and ends no
transaction: `relay/outbox.py` does.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import asyncpg

from relay.core.ports.outbox import Purged, Spared
from relay.core.refusals import Blame
from relay.refusal import blame_of, demand_change, said
from relay.settling import Statements


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
        """Half as many at a time until what is refused is the oldest one alone: it is passed over from then on. When `budget_s` is
        used up, the rest is left for the next batch."""
        deadline = time.monotonic() + budget_s
        session, limit = self.session, self.limit
        refused: list[Spared] = []
        rows = 0
        await session.execute("SET CONSTRAINTS ALL IMMEDIATE")
        while rows < self.limit and time.monotonic() < deadline:
            spared = [*self.spared, *(each.seq for each in refused)]
            await session.execute("SAVEPOINT part")
            try:
                deleted = await self._delete(limit, spared)
            except asyncpg.PostgresError as error:
                if blame_of(error) is Blame.SERVER:
                    raise
                await session.execute("ROLLBACK TO SAVEPOINT part; RELEASE SAVEPOINT part")
                if limit == 1:
                    ((seq, id_),) = await session.fetch("purge_next", self.instance, self.older_than_s, 1, spared)
                    refused.append(Spared(seq, id_, said(error)))
                limit = max(1, limit // 2)
                continue
            await session.execute("RELEASE SAVEPOINT part")
            if deleted < limit:
                break
            rows += deleted
            limit = min(2 * limit, self.limit)
        return Purged(rows, refused)

    async def _delete(self, limit: int, spared: Sequence[int]) -> int:
        ((rows, untouched),) = await self.session.fetch("purge", self.instance, self.older_than_s, limit, spared)
        demand_change(untouched)
        return int(rows)
