"""A settlement that the database refused over some row: the same steps in parts, until the culprits stand alone.

A trigger or a constraint can refuse one row's mark, and then refuses any other change of that row too. So each step
is halved behind savepoints, deferred constraints checked at once, until what is refused is one row: it is recorded
in the fault table, under the shards' fence and in the transaction that settles all the others. Its key is promoted
like any other that was touched, for a recorded row holds nothing.

Owns: what of a refused settlement is written, what is recorded and what is left for later. Decides in
`core/refusals.py` whose fault a refusal is. Opens and ends no transaction.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

import asyncpg

from relay.core.ports.outbox import Fault, Setback, Settled, Settlement
from relay.core.refusals import Blame
from relay.message import Key, Row
from relay.refusal import blame_of, said
from relay.settling import Progress, SettlementWriter, Statements, kept, storable

T = TypeVar("T")
_Step: TypeAlias = Callable[[Statements, Sequence[T], Progress], Awaitable[None]]


@dataclass(slots=True)
class _Refused:
    """What one row was refused. `route`: as resolved, where known."""

    fault: Fault
    error: asyncpg.PostgresError
    route: tuple[str, str] | None = None


@dataclass(slots=True)
class CulpritHunt:
    """One careful settlement. `budget_s`: when it is used up, the rest is left for later, decided as it was."""

    writer: SettlementWriter
    session: Statements
    budget_s: float
    _deadline: float = 0.0
    _refused: list[_Refused] = field(default_factory=list)
    _has_written: bool = False

    async def write(self, settlement: Settlement) -> Settled:
        """As `SettlementWriter.write`. Raises the driver's error when no row is at fault."""
        self._deadline = time.monotonic() + self.budget_s
        session, writer = self.session, self.writer
        progress = await writer.fence(session, settlement)
        lost = progress.settled.lost
        await session.execute("SET CONSTRAINTS ALL IMMEDIATE")
        await self._rows(kept(settlement.sent, lost), writer.send, progress, "published, but its mark is refused", 1)
        setbacks = [each for each in settlement.setbacks if each.row.shard not in lost]
        for setback, error in await self._divide(
            setbacks, writer.set_back, progress, lambda rest: progress.settled.locked.extend(each.row for each in rest)
        ):
            self._refuse_setback(setback, error, progress)
        for rows, step, what in (
            (settlement.followers, writer.hold, "not published: it cannot be held behind the row before it"),
            (settlement.tested, writer.test, "not published: it cannot be held behind the row before it"),
            (settlement.scheduled, writer.schedule, "not published: it cannot be set aside until it is due"),
        ):
            await self._rows(kept(rows, lost), step, progress, what, 0)
        await self._record(progress)
        await self._promote(progress)
        return progress.settled

    async def _rows(self, rows: Sequence[Row], step: _Step[Row], progress: Progress, what: str, attempts: int) -> None:
        for row, error in await self._divide(rows, step, progress, progress.settled.locked.extend):
            fault = Fault(row.shard, row.seq, row.id, row.attempts + attempts, f"{what}: {said(error)}")
            self._refused.append(_Refused(fault, error))
            progress.settled.done.append(row)
            progress.touch([row])

    def _refuse_setback(self, setback: Setback, error: asyncpg.PostgresError, progress: Progress) -> None:
        row = setback.row
        text = f"{setback.reason}, and that it is {setback.aside} is refused: {said(error)}; {setback.error}"
        fault = Fault(row.shard, row.seq, row.id, setback.attempts, text)
        self._refused.append(_Refused(fault, error, (setback.exchange, setback.routing_key)))
        progress.settled.done.append(row)
        progress.touch([row])

    async def _divide(
        self, items: Sequence[T], step: _Step[T], progress: Progress, leave: Callable[[Sequence[T]], object]
    ) -> list[tuple[T, asyncpg.PostgresError]]:
        """Take the step with all items but those that are refused alone, which are returned, and those to `leave`."""
        session = self.session
        refused: list[tuple[T, asyncpg.PostgresError]] = []
        parts = [items] if items else []
        while parts:
            part = parts.pop()
            if time.monotonic() >= self._deadline:
                leave(part)
                continue
            written = Progress()
            await session.execute("SAVEPOINT part")
            try:
                await step(session, part, written)
            except asyncpg.PostgresError as error:
                if blame_of(error) is Blame.SERVER:
                    raise
                await session.execute("ROLLBACK TO SAVEPOINT part; RELEASE SAVEPOINT part")
                if len(part) == 1:
                    refused.append((part[0], error))
                    continue
                half = len(part) // 2
                # The lower half is taken first.
                parts += [part[half:], part[:half]]
                continue
            await session.execute("RELEASE SAVEPOINT part")
            progress.add(written)
            self._has_written |= bool(written.settled.done or written.settled.promoted)
        return refused

    async def _record(self, progress: Progress) -> None:
        """Into the fault table, unless it may be the schema's or the server's fault and nothing at all went well."""
        refused, self._refused = self._refused, []
        if not refused:
            return
        for each in refused:
            if not self._has_written and blame_of(each.error) is Blame.DOUBTFUL:
                raise each.error
        await self.session.fetch(
            "fault",
            [each.fault.seq for each in refused],
            [each.fault.id for each in refused],
            [storable(each.fault.error) for each in refused],
            [each.fault.attempts for each in refused],
            [None if each.route is None else storable(each.route[0]) for each in refused],
            [None if each.route is None else storable(each.route[1]) for each in refused],
            self.writer.name,
            self.writer.version,
        )
        progress.settled.faults.extend(each.fault for each in refused)

    async def _promote(self, progress: Progress) -> None:
        """H3. A held row that refuses even this is recorded, and the key's next one is tried."""
        shards = dict(progress.touched)
        unpromoted = progress.settled.unpromoted

        def leave(keys: Sequence[Key]) -> None:
            unpromoted.extend((shards[key], key) for key in keys)

        keys = list(shards)
        while keys:
            refused = await self._divide(keys, self.writer.promote, progress, leave)
            keys = []
            for key, error in refused:
                for shard, seq, id_, attempts in await self.session.fetch("first_held", *key):
                    text = f"not published: that it is due is refused: {said(error)}"
                    self._refused.append(_Refused(Fault(shard, seq, id_, attempts, text), error))
                    keys.append(key)
            await self._record(progress)
