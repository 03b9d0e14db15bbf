"""One batch of `RELAY_PARKED_RETENTION`: parked rows whose time is over are deleted (O2, H3).

Owns: the order of the statements between BEGIN and COMMIT, and what becomes of a row that the database refuses to
delete. Invariants: a row goes only if it is parked now, and has been for longer than the retention by the
database's clock, under its shard's lock; no key is left held by nothing, or it is named as owed. Opens and ends no
transaction: `relay/outbox.py` does.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import asyncpg

from relay.core.ports.outbox import Discarded, Spared
from relay.core.refusals import Blame
from relay.message import Key
from relay.refusal import blame_of, changed, said
from relay.sessions import Session

FAULTS_MAX: Final = 10
"""Rows of the fault table a batch: each is tried by itself, for the database may refuse to delete it."""


@dataclass(slots=True)
class Retention:
    """One batch of at most `limit` rows, but for those with the seqs `spared`. When `budget_s` is used up, the rest is
    left for the next one."""

    session: Session
    instance: str
    older_than_s: float
    limit: int
    spared: Sequence[int]
    budget_s: float
    _deadline: float = 0.0
    _rows: int = 0
    _refused: list[Spared] = field(default_factory=list)
    _shards: dict[int, int] = field(default_factory=dict)
    """By seq, of the rows looked at."""
    _touched: dict[Key, int] = field(default_factory=dict)

    async def discard(self) -> Discarded:
        """Inside the caller's transaction. Raises the driver's error when no row is at fault."""
        self._deadline = time.monotonic() + self.budget_s
        session = self.session
        await session.execute("SET CONSTRAINTS ALL IMMEDIATE")
        (shards,) = await session.fetch_one("retention_lock", self.instance, self.older_than_s)
        shards = shards or []
        rows = await session.fetch("retention_rows", shards, self.older_than_s, self.limit, self.spared)
        faults = await session.fetch("retention_faults", shards, self.older_than_s, FAULTS_MAX, self.spared)
        self._shards = {record["seq"]: record["shard"] for record in (*rows, *faults)}
        await self._delete([(record["seq"], record["id"]) for record in rows])
        for record in faults:
            await self._delete_fault(record["seq"], record["id"])
        owed = await self._promote()
        is_full = len(rows) >= self.limit or len(faults) >= FAULTS_MAX
        return Discarded(self._rows, self._refused, owed, is_full)

    async def _delete(self, rows: list[tuple[int, str]]) -> None:
        """By halves where a trigger or a constraint refuses, until only the culprits are left."""
        parts = [rows] if rows else []
        while parts and time.monotonic() < self._deadline:
            part = parts.pop()
            try:
                async with self._part():
                    ids, seqs = [id_ for _, id_ in part], [seq for seq, _ in part]
                    self._count(changed(await self.session.fetch("parked_discard", ids, seqs)))
            except asyncpg.PostgresError as error:
                _raise_unless_a_rows(error)
                if len(part) == 1:
                    self._refused.append(Spared(*part[0], said(error)))
                    continue
                half = len(part) // 2
                # The older half is taken first.
                parts += [part[half:], part[:half]]

    async def _delete_fault(self, seq: int, id_: str) -> None:
        """With its outbox row, or not at all: without the fault the row would be published a second time."""
        if time.monotonic() >= self._deadline:
            return
        try:
            async with self._part():
                if await self.session.fetch("parked_fault_end", id_, seq):
                    records = changed(await self.session.fetch("parked_fault_discard", id_, seq))
                    self._count(records or [(seq, "", None)])
        except asyncpg.PostgresError as error:
            _raise_unless_a_rows(error)
            self._refused.append(Spared(seq, id_, said(error)))

    @contextlib.asynccontextmanager
    async def _part(self) -> AsyncIterator[None]:
        """A savepoint: what is refused inside, over a row, undoes no more than this."""
        await self.session.execute("SAVEPOINT part")
        try:
            yield
        except asyncpg.PostgresError as error:
            if blame_of(error) is not Blame.SERVER:
                await self.session.execute("ROLLBACK TO SAVEPOINT part; RELEASE SAVEPOINT part")
            raise
        await self.session.execute("RELEASE SAVEPOINT part")

    def _count(self, records: Sequence[tuple[int, str, str | None]]) -> None:
        """What was deleted: (seq, type and id of the key)."""
        self._rows += len(records)
        self._touched.update((((kind, key), self._shards[seq]) for seq, kind, key in records if key is not None))

    async def _promote(self) -> list[tuple[int, Key]]:
        """H3; the keys that are owed it: the row is locked, or refuses it, and a settlement sees to that."""
        keys = sorted(self._touched)
        if not keys:
            return []
        try:
            async with self._part():
                records = await self.session.fetch("promote", [kind for kind, _ in keys], [key for _, key in keys])
        except asyncpg.PostgresError as error:
            _raise_unless_a_rows(error)
            return [(self._touched[key], key) for key in keys]
        return [(shard, (kind, key)) for shard, kind, key, is_promoted, *_ in records if not is_promoted]


def _raise_unless_a_rows(error: asyncpg.PostgresError) -> None:
    if blame_of(error) is Blame.SERVER:
        raise error
