"""One settlement: the transaction that writes decisions about rows (S1, S2, H1-H3).

Owns: the order of the statements between BEGIN and COMMIT, and which answer puts a row where in `Settled`.
Invariants: nothing of a shard is written unless its lease's row is locked under our epoch (S1); a row is marked
only by its identity, seq and id (I2); a key that was touched is not left held by nothing (H3). Opens and ends no
transaction: `relay/outbox.py` does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from relay.core.ports import Settled, Settlement
from relay.message import Aside, Key, Row


class Statements(Protocol):
    """What a settlement needs of a session (`relay/sessions.py`)."""

    async def fetch(self, name: str, *arguments: object) -> list[Sequence[object]]: ...

    async def fetch_one(self, name: str, *arguments: object) -> Sequence[list[int] | None]: ...


@dataclass(frozen=True, slots=True)
class SettlementWriter:
    """How this relay settles. `instance` is the leases' owner; name and version are noted with failures."""

    instance: str
    name: str
    version: str
    marks_sent: bool

    async def write(self, session: Statements, settlement: Settlement) -> Settled:
        """Write all decisions, inside the caller's transaction; what became of them once it has committed."""
        fences = settlement.fences
        shards = sorted(fences)
        (ours,) = await session.fetch_one("fence", shards, [fences[shard] for shard in shards], self.instance)
        settled = Settled(lost=set(fences).difference(ours or ()))
        touched: set[Key] = set()
        sent = self._kept(settlement.sent, settled)
        if sent:
            await self._send(session, sent, settled)
            touched.update(row.key for row in sent if row.aside is not None and row.key is not None)
        if len(settlement) > len(settlement.sent):
            await self._move(session, settlement, settled, touched)
        if touched:
            records = await session.fetch("promote", *_keys(touched))
            settled.promoted.update(shard for (shard,) in records if isinstance(shard, int))
        return settled

    def _kept(self, rows: Sequence[Row], settled: Settled) -> Sequence[Row]:
        lost = settled.lost
        return rows if not lost else [row for row in rows if row.shard not in lost]

    async def _send(self, session: Statements, rows: Sequence[Row], settled: Settled) -> None:
        """S2: by address, then by identity, then a look without a lock at what still misses."""
        by_address, by_id = ("mark", "mark_by_id") if self.marks_sent else ("delete", "delete_by_id")
        known = [row for row in rows if row.ctid is not None]
        missing: Sequence[Row] = rows
        if known:
            (found,) = await session.fetch_one(by_address, *_addresses(known))
            if found is not None:
                if len(found) == len(rows):
                    settled.done.extend(rows)
                    return
                missing = _parted(rows, found, settled.done)
        (found,) = await session.fetch_one(by_id, *_identities(missing))
        missing = _parted(missing, found or (), settled.done)
        if missing:
            (unsent,) = await session.fetch_one("unsent", *_identities(missing))
            # Gone, or sent before (an unknown COMMIT that did happen): nothing is left to do.
            settled.done.extend(_parted(missing, unsent or (), settled.locked))

    async def _move(self, session: Statements, settlement: Settlement, settled: Settled, touched: set[Key]) -> None:
        """Set back, hold, test, schedule: by address only, for a miss means that somebody changed the row."""
        setbacks = {each.row.seq: each for each in settlement.setbacks if each.row.shard not in settled.lost}
        rows = _addressed([each.row for each in setbacks.values()], settled)
        if rows:
            chosen = [setbacks[row.seq] for row in rows]
            assert all(each.aside in (Aside.DEFERRED, Aside.PARKED) for each in chosen), "set back elsewhere"
            (found,) = await session.fetch_one(
                "set_back",
                *_addresses(rows),
                [each.aside.value for each in chosen],
                [each.holds for each in chosen],
                [each.delay_s for each in chosen],
                [each.attempts for each in chosen],
                [each.reason for each in chosen],
                [_storable(each.error) for each in chosen],
                [_storable(each.exchange) for each in chosen],
                [_storable(each.routing_key) for each in chosen],
                self.name,
                self.version,
            )
            self._written(rows, found, settled, touched)
        rows = _addressed(self._kept(settlement.followers, settled), settled)
        if rows:
            (found,) = await session.fetch_one("hold", *_addresses(rows))
            self._written(rows, found, settled, touched)
        rows = _addressed(self._kept(settlement.tested, settled), settled)
        if rows:
            held, free = await session.fetch_one("test", *_addresses(rows))
            rest = _parted(rows, free or (), settled.unblocked)
            self._written(rest, held, settled, touched)
        rows = _addressed(self._kept(settlement.scheduled, settled), settled)
        if rows:
            (found,) = await session.fetch_one("schedule", *_addresses(rows))
            self._written(rows, found, settled, touched)

    def _written(self, rows: Sequence[Row], found: Sequence[int] | None, settled: Settled, touched: set[Key]) -> None:
        written: list[Row] = []
        settled.changed.extend(_parted(rows, found or (), written))
        settled.done.extend(written)
        touched.update(row.key for row in written if row.key is not None)


def _addressed(rows: Sequence[Row], settled: Settled) -> Sequence[Row]:
    """Rows whose address is known; without one (a session was lost) a row may have been changed meanwhile."""
    settled.changed.extend(row for row in rows if row.ctid is None)
    return [row for row in rows if row.ctid is not None]


def _parted(rows: Sequence[Row], seqs: Iterable[int], into: list[Row]) -> list[Row]:
    """Rows with these seqs go `into`; the others are returned."""
    chosen = set(seqs)
    into.extend(row for row in rows if row.seq in chosen)
    return [row for row in rows if row.seq not in chosen]


def _addresses(rows: Sequence[Row]) -> tuple[list[object], list[int], list[str]]:
    return [row.ctid for row in rows], [row.seq for row in rows], [row.id for row in rows]


def _identities(rows: Sequence[Row]) -> tuple[list[str], list[int]]:
    return [row.id for row in rows], [row.seq for row in rows]


def _keys(keys: Iterable[Key]) -> tuple[list[str], list[str]]:
    """In a fixed order, so that two transactions lock rows in the same one."""
    ordered = sorted(keys)
    return [kind for kind, _ in ordered], [id_ for _, id_ in ordered]


def _storable(text: str) -> str:
    """PostgreSQL's text holds no zero byte and no half of a surrogate pair; a broker's words may."""
    return text.replace("\0", "\ufffd").encode("utf-8", "replace").decode("utf-8")
