"""A change of the next rows, at most so many, where the database may refuse one of them: one such row keeps no others.

Owns: how the row is found that is refused. A change is a statement `name` of `sql/queries` that says how many rows it changed and which
it had locked and did not; `name_next` says which it would take. Both end with the values rows in all, seqs that are spared. Opens and
ends no transaction; each part is behind a savepoint.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import asyncpg

from relay.core.ports.outbox import Spared
from relay.core.refusals import Blame
from relay.refusal import blame_of, demand_change, said
from relay.settling import Statements


@dataclass(frozen=True, slots=True)
class Spent:
    """What a change in parts came to: so many `rows`, those that were `refused` and passed over, and whether that was all."""

    rows: int
    refused: list[Spared] = field(default_factory=list)
    is_all: bool = False


@dataclass(frozen=True, slots=True)
class Sparing:
    """The change `name` with its `values`, but for rows with the seqs `spared`."""

    session: Statements
    name: str
    values: Sequence[object]
    spared: Sequence[int]

    async def change(self, limit: int, passed_over: Sequence[int] = ()) -> int:
        """How many rows. Raises the driver's error where any is refused."""
        spared = [*self.spared, *passed_over]
        ((rows, untouched),) = await self.session.fetch(self.name, *self.values, limit, spared)
        demand_change(untouched)
        return int(rows)

    async def change_in_parts(self, limit: int, budget_s: float) -> Spent:
        """Half as many at a time until what is refused is the first row alone: it is passed over from then on. When `budget_s` is used
        up, the rest is left for the next time. Raises the driver's error where no row is at fault."""
        session = self.session
        deadline = time.monotonic() + budget_s
        part, rows = limit, 0
        refused: list[Spared] = []
        await session.execute("SET CONSTRAINTS ALL IMMEDIATE")
        while rows < limit and time.monotonic() < deadline:
            passed_over = [each.seq for each in refused]
            await session.execute("SAVEPOINT part")
            try:
                changed = await self.change(part, passed_over)
            except asyncpg.PostgresError as error:
                if blame_of(error) is Blame.SERVER:
                    raise
                await session.execute("ROLLBACK TO SAVEPOINT part; RELEASE SAVEPOINT part")
                if part == 1:
                    refused.append(await self._next(passed_over, said(error)))
                part = max(1, part // 2)
                continue
            await session.execute("RELEASE SAVEPOINT part")
            rows += changed
            if changed < part:
                return Spent(rows, refused, is_all=True)
            part = min(2 * part, limit)
        return Spent(rows, refused)

    async def _next(self, passed_over: Sequence[int], error: str) -> Spared:
        ((seq, id_),) = await self.session.fetch(f"{self.name}_next", *self.values, 1, [*self.spared, *passed_over])
        return Spared(seq, id_, error)
