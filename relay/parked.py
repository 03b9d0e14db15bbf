"""What an operator does about rows that need one: `relay parked list | show | redrive | discard`.

Owns: the selection, the batches and their pace, and what becomes of a batch that the database refuses. Which relay owns a
row, and when a redriven row goes, is the relays' business: they find it deferred and due.

Invariants: ids, seqs and attempts stay. A selection is what was parked when the command began, by seq: a row that parks
again meanwhile is not redriven again, and rows of a key go back in their order. A refused row costs no other one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from datetime import datetime
from itertools import groupby
from typing import Any, Final

import asyncpg

from relay.config import Config
from relay.core.refusals import Blame
from relay.errors import DatabaseRefused, DatabaseUnavailable
from relay.parked_rows import Action as Action
from relay.parked_rows import Filter as Filter
from relay.parked_rows import Listing, Outcome, ParkedRow, Progress, takes_expired
from relay.parked_table import ParkedTable, open_parked
from relay.refusal import blame_of

BATCH_ROWS: Final = 500
"""Rows a transaction: 35 to 70 ms measured, which settlements of the same shards wait for."""

BREATH: Final = 1.0
"""After each transaction the shards are left alone for as long as it took. A renewal skips a locked shard and tries it
again every 100 ms (L2): without the pause a redrive of 100,000 rows let leases of 1 s run out, with it none."""

SELECTION_ROWS: Final = 50_000
"""Rows selected at a time: each look passes all rows aside, and what it found is kept in memory."""

SLICES_PER_S: Final = 4
"""A rate is kept in so many steps a second."""

PATIENCE_S: Final = 30.0
"""How long a batch is tried again while somebody keeps one of its shards locked."""

_BUSY: Final = (asyncpg.LockNotAvailableError, asyncpg.DeadlockDetectedError)


# ---------------------------------------------------------------- reading


async def listing(config: Config, chosen: Filter, limit: int, *, with_expired: bool = True) -> Listing:
    """At most `limit` rows by seq, those past their deadline too or not, and the count of all. Raises NothingMatched only
    for ids that are not parked; and what `relay status` raises of the schema and the database."""
    async with open_parked(config) as table:
        await table.refuse_unparked(chosen)
        return await table.look(chosen, limit, with_expired=with_expired)


async def details(config: Config, id_: str, *, with_payload: bool) -> dict[str, Any]:
    """The columns of `parked_show.sql` of one row; raises NothingMatched, naming its state, where it is not parked."""
    async with open_parked(config) as table:
        await table.refuse_unparked(Filter(ids=(id_,)))
        (record,) = await table.read("parked_show", id_, with_payload)
        return dict(record)


# ---------------------------------------------------------------- acting


async def act(
    config: Config,
    action: Action,
    chosen: Filter,
    *,
    until: datetime | None = None,
    limit: int | None = None,
    rate_per_s: float | None = None,
    ignore_expiry: bool = False,
    on_progress: Progress | None = None,
    on_end: Progress | None = None,
) -> Outcome:
    """Redrive or discard what `chosen` selects, the lowest seq first, at most `limit` rows, at most so many a second.
    Rows past their deadline are left, unless `ignore_expiry` or to be discarded, and use up none of the limit.

    Only rows that were parked `until` then (default: now). `on_progress` is told after each batch, `on_end` once,
    also when an error or an interruption ends it midway. Raises NothingMatched for ids that are not parked,
    DatabaseUnavailable (no lock), DatabaseRefused (rights), and what `relay status` raises.
    """
    async with open_parked(config, until=until, ignore_expiry=ignore_expiry) as table:
        await table.refuse_unparked(chosen)
        outcome = Outcome.begin(action, await table.look(chosen), ignore_expiry=ignore_expiry)
        try:
            await _Run(table, outcome).run(chosen, limit, _Pace(rate_per_s), on_progress or (lambda _: None))
        finally:
            if on_end is not None and outcome.matched:
                on_end(outcome)
        return outcome


class _Pace:
    """When the next batch may go: at most so many rows a second, and never one right after the other."""

    def __init__(
        self,
        rate_per_s: float | None,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._rate_per_s = rate_per_s
        self._now = now
        self._sleep = sleep
        self._began = now()
        self._next_at = self._began
        self.batch_rows = BATCH_ROWS
        if rate_per_s is not None:
            self.batch_rows = max(1, min(BATCH_ROWS, int(rate_per_s / SLICES_PER_S)))

    async def begin(self, rows: int) -> None:
        """Wait until `rows` more may go."""
        wait_s = self._next_at - self._now()
        if wait_s > 0:
            await self._sleep(wait_s)
        self._began = self._now()
        self._next_at = self._began
        if self._rate_per_s is not None:
            self._next_at += rows / self._rate_per_s

    def end(self) -> None:
        """They have gone."""
        now = self._now()
        self._next_at = max(self._next_at, now + BREATH * (now - self._began))


class _Run:
    """One action over a selection; counts in `outcome`."""

    def __init__(self, table: ParkedTable, outcome: Outcome) -> None:
        self._table = table
        self._outcome = outcome
        self._rows_max = BATCH_ROWS
        """Rows a transaction; fewer once one took too long."""

    async def run(self, chosen: Filter, limit: int | None, pace: _Pace, on_progress: Progress) -> None:
        """All batches, one after the other."""
        outcome = self._outcome
        with_expired = takes_expired(outcome.action, ignore_expiry=outcome.ignore_expiry)
        planned, selected, above = outcome.planned(limit), 0, -(2**63)
        while limit is None or selected < limit:
            room = SELECTION_ROWS if limit is None else min(SELECTION_ROWS, limit - selected)
            found = await self._table.select(chosen, above, room, with_expired=with_expired)
            selected += len(found)
            for batch in _batches(found, pace.batch_rows):
                await pace.begin(len(batch))
                await self._change(batch)
                pace.end()
                on_progress(outcome)
            if len(found) < room:
                break
            above = found[-1].seq
        # Redriven or discarded by somebody else since they were counted; or parked by a transaction that ended since.
        outcome.changed += max(0, planned - selected)
        outcome.matched += max(0, selected - planned)

    async def _change(self, rows: Sequence[ParkedRow]) -> None:
        """One transaction, or as many as it takes within the time that it has (L7): a slow trigger of the user's counts in it."""
        left = list(rows)
        while left:
            part = left[: self._rows_max]
            try:
                await self._change_part(part)
            except DatabaseRefused as error:
                if not isinstance(error.__cause__, asyncpg.QueryCanceledError):
                    raise
                if len(part) > 1:
                    self._rows_max = len(part) // 2
                    continue
                self._outcome.refused.append((part[0].id, error.message))
            del left[: len(part)]

    async def _change_part(self, rows: Sequence[ParkedRow]) -> None:
        """One transaction; where a row's trigger or constraint refuses, by halves, until only that row is left out."""
        outcome = self._outcome
        try:
            changed = await self._with_patience(rows)
        except DatabaseRefused as error:
            if not _is_row_fault(error):
                if isinstance(error.__cause__, asyncpg.InsufficientPrivilegeError):
                    raise DatabaseRefused(
                        error.message, hint=f"grant what is missing: relay migrate --role {outcome.role}"
                    ) from error.__cause__
                raise
            if len(rows) == 1:
                outcome.refused.append((rows[0].id, error.message))
                return
            half = len(rows) // 2
            await self._change(rows[:half])
            await self._change(rows[half:])
            return
        outcome.done += len(changed)
        if outcome.action is Action.REDRIVE:
            outcome.republished.extend(row.id for row in rows if row.is_fault and row.seq in changed)
        missed = [row.id for row in rows if row.seq not in changed]
        if missed:
            states = await self._table.states(missed)
            locked = sum(state in ("parked", "unmarkable") for state in states.values())
            outcome.locked += locked
            outcome.changed += len(missed) - locked

    async def _with_patience(self, rows: Sequence[ParkedRow]) -> set[int]:
        deadline = time.monotonic() + PATIENCE_S
        pause_s = 0.1
        while True:
            try:
                return await self._table.change(self._outcome.action, rows)
            except DatabaseRefused as error:
                if not isinstance(error.__cause__, _BUSY):
                    raise
                if time.monotonic() + pause_s > deadline:
                    raise DatabaseUnavailable(
                        "no lock: another transaction keeps a row or a shard of this outbox",
                        hint="look for old transactions in pg_stat_activity, then run it again",
                    ) from error.__cause__
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, 1.0)


def _batches(rows: Iterable[ParkedRow], size: int) -> Iterable[list[ParkedRow]]:
    """In their order; a fault by itself, for the database may refuse to delete its row."""
    for is_fault, run in groupby(rows, key=lambda row: row.is_fault):
        members = list(run)
        step = 1 if is_fault else size
        for at in range(0, len(members), step):
            yield members[at : at + step]


def _is_row_fault(error: DatabaseRefused) -> bool:
    cause = error.__cause__
    return isinstance(cause, asyncpg.PostgresError) and blame_of(cause) is not Blame.SERVER
