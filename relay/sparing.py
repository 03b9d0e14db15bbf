"""A change of some of the next rows, at most so many, where the database may refuse one of them: one such row keeps no others.

Owns: how the row is found that is refused. Opens and ends no transaction; each part is behind a savepoint.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence

import asyncpg

from relay.core.ports.outbox import Spared
from relay.core.refusals import Blame
from relay.refusal import blame_of, said
from relay.settling import Statements

Change = Callable[[int, Sequence[int]], Awaitable[int]]
"""Changes at most so many rows, but for those with the seqs that are spared; how many. Raises the driver's error where any is refused."""

Next = Callable[[Sequence[int]], Awaitable[tuple[int, str]]]
"""The first that `Change` would take: its seq and id."""


async def in_parts(
    session: Statements, change: Change, first: Next, limit: int, spared: Sequence[int], budget_s: float
) -> tuple[int, list[Spared]]:
    """Half as many at a time until what is refused is the first row alone: it is passed over from then on. How many were changed, and
    those that were passed over; when `budget_s` is used up, the rest is left for the next time. Raises the driver's error where no row
    is at fault."""
    deadline = time.monotonic() + budget_s
    part, rows = limit, 0
    refused: list[Spared] = []
    await session.execute("SET CONSTRAINTS ALL IMMEDIATE")
    while rows < limit and time.monotonic() < deadline:
        passed_over = [*spared, *(each.seq for each in refused)]
        await session.execute("SAVEPOINT part")
        try:
            changed = await change(part, passed_over)
        except asyncpg.PostgresError as error:
            if blame_of(error) is Blame.SERVER:
                raise
            await session.execute("ROLLBACK TO SAVEPOINT part; RELEASE SAVEPOINT part")
            if part == 1:
                refused.append(Spared(*await first(passed_over), said(error)))
            part = max(1, part // 2)
            continue
        await session.execute("RELEASE SAVEPOINT part")
        rows += changed
        if changed < part:
            break
        part = min(2 * part, limit)
    return rows, refused
