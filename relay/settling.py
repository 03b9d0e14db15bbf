"""One settlement: the transaction that writes decisions about rows (S1, S2, H1-H3).

Owns: the order of the statements between BEGIN and COMMIT, and which answer puts a row where in `Settled`.
Invariants: nothing of a shard is written unless its lease's row is locked under our epoch (S1); a row is marked
only by its identity, seq and id (I2); a key that was touched is not left held by nothing (H3), or is named as
owed. Opens and ends no transaction: `relay/outbox.py` does. When the database refuses a row, `relay/culprits.py`
takes the same steps in parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from relay import arrays
from relay.core.ports.outbox import Setback, Settled, Settlement
from relay.message import Aside, Key, Row
from relay.refusal import demand_change


class Statements(Protocol):
    """What a settlement needs of a session (`relay/sessions.py`)."""

    async def fetch(self, name: str, *arguments: object) -> list[Any]: ...

    async def fetch_one(self, name: str, *arguments: object) -> Any: ...

    async def execute(self, text: str) -> str: ...


@dataclass(slots=True)
class Progress:
    """What a settlement, or a part of it, has come to. `touched`: keys to be promoted, with their shards."""

    settled: Settled = field(default_factory=Settled)
    touched: dict[Key, int] = field(default_factory=dict)

    def touch(self, rows: Iterable[Row]) -> None:
        self.touched.update((row.key, row.shard) for row in rows if row.key is not None)

    def add(self, part: Progress) -> None:
        """A part that was written counts."""
        mine, its = self.settled, part.settled
        mine.done.extend(its.done)
        mine.locked.extend(its.locked)
        mine.unblocked.extend(its.unblocked)
        mine.changed.extend(its.changed)
        mine.promoted.update(its.promoted)
        mine.unpromoted.extend(its.unpromoted)
        mine.moved.update(its.moved)
        self.touched.update(part.touched)


@dataclass(frozen=True, slots=True)
class SettlementWriter:
    """How this relay settles. `instance` is the leases' owner; name and version are noted with failures."""

    instance: str
    name: str
    version: str
    marks_sent: bool

    async def write(self, session: Statements, settlement: Settlement) -> Settled:
        """Write all decisions, inside the caller's transaction; what became of them once it has committed."""
        progress = await self.fence(session, settlement)
        lost = progress.settled.lost
        if settlement.sent:
            await self.send(session, kept(settlement.sent, lost), progress)
        if len(settlement) > len(settlement.sent):
            setbacks = settlement.setbacks
            if setbacks:
                await self.set_back(session, [each for each in setbacks if each.row.shard not in lost], progress)
            if settlement.followers:
                await self.hold(session, kept(settlement.followers, lost), progress)
            if settlement.tested:
                await self.test(session, kept(settlement.tested, lost), progress)
            if settlement.scheduled:
                await self.schedule(session, kept(settlement.scheduled, lost), progress)
        if progress.touched:
            await self.promote(session, list(progress.touched), progress)
        return progress.settled

    async def fence(self, session: Statements, settlement: Settlement) -> Progress:
        """S1; and the promotions that are owed become part of the settlement."""
        fences = settlement.fences
        shards = sorted(fences)
        epochs = [fences[shard] for shard in shards]
        (ours,) = await session.fetch_one("fence", arrays.numbers(shards), arrays.numbers(epochs), self.instance)
        progress = Progress(Settled(lost=set(fences).difference(ours or ())))
        if settlement.promotions:
            lost = progress.settled.lost
            progress.touched.update((key, shard) for shard, key in settlement.promotions if shard not in lost)
        return progress

    async def send(self, session: Statements, rows: Sequence[Row], progress: Progress) -> None:
        """S2: by address, then by identity, then a look without a lock at what still misses."""
        if not rows:
            return
        settled = progress.settled
        by_address, by_id = ("mark", "mark_by_id") if self.marks_sent else ("delete", "delete_by_id")
        known = [row for row in rows if row.ctid is not None]
        missing: Sequence[Row] = rows
        if known:
            # Ordinary rows only: what was aside goes by identity, and frees its key.
            (found,) = await session.fetch_one(by_address, *_addresses(known))
            if found is not None:
                if len(found) == len(rows):
                    settled.done.extend(rows)
                    return
                missing = _parted(rows, found, settled.done)
        if untouched := await self._send_by_id(session, by_id, missing, progress):
            # They are locked by now: those that somebody had changed at that moment go this time.
            demand_change(await self._send_by_id(session, by_id, untouched, progress))
        done = set(settled.done)
        missing = [row for row in missing if row not in done]
        if missing:
            (unsent,) = await session.fetch_one("unsent", *_identities(missing))
            # Gone, or sent before (an unknown COMMIT that did happen): nothing is left to do.
            settled.done.extend(_parted(missing, unsent or (), settled.locked))

    async def _send_by_id(self, session: Statements, name: str, rows: Sequence[Row], progress: Progress) -> list[Row]:
        """Those that were locked and did not change."""
        found, freed, untouched = await session.fetch_one(name, *_identities(rows))
        if freed is not None:
            was_aside = set(freed)
            progress.touch(row for row in rows if row.seq in was_aside)
        _parted(rows, found or (), progress.settled.done)
        seqs = set(untouched or ())
        return [row for row in rows if row.seq in seqs]

    # ------------------------------------------------------------ by address only (S2)

    async def set_back(self, session: Statements, setbacks: Sequence[Setback], progress: Progress) -> None:
        """Failed rows become deferred or parked."""
        chosen = {each.row.seq: each for each in setbacks}
        rows = _addressed([each.row for each in setbacks], progress)
        if not rows:
            return
        setbacks = [chosen[row.seq] for row in rows]
        assert all(each.aside in (Aside.DEFERRED, Aside.PARKED) for each in setbacks), "set back elsewhere"
        found, untouched = await session.fetch_one(
            "set_back",
            *_addresses(rows),
            [each.aside.value for each in setbacks],
            [each.holds for each in setbacks],
            [each.delay_s for each in setbacks],
            [each.attempts for each in setbacks],
            [each.reason for each in setbacks],
            [storable(each.error) for each in setbacks],
            [storable(each.exchange) for each in setbacks],
            [storable(each.routing_key) for each in setbacks],
            self.name,
            self.version,
        )
        demand_change(untouched)
        await self._written(session, rows, found, progress)

    async def hold(self, session: Statements, rows: Sequence[Row], progress: Progress) -> None:
        """Followers of rows that were set back become held (H1)."""
        rows = _addressed(rows, progress)
        if rows:
            found, untouched = await session.fetch_one("hold", *_addresses(rows))
            demand_change(untouched)
            await self._written(session, rows, found, progress)

    async def test(self, session: Statements, rows: Sequence[Row], progress: Progress) -> None:
        """Rows that have a blocker become held, the others come back (H2)."""
        rows = _addressed(rows, progress)
        if rows:
            held, free, untouched = await session.fetch_one("test", *_addresses(rows))
            demand_change(untouched)
            rest = _parted(rows, free or (), progress.settled.unblocked)
            await self._written(session, rest, held, progress)

    async def schedule(self, session: Statements, rows: Sequence[Row], progress: Progress) -> None:
        """Rows read before their time wait for it (H6)."""
        rows = _addressed(rows, progress)
        if rows:
            found, untouched = await session.fetch_one("schedule", *_addresses(rows))
            demand_change(untouched)
            await self._written(session, rows, found, progress)

    async def _written(
        self, session: Statements, rows: Sequence[Row], found: Sequence[int] | None, progress: Progress
    ) -> None:
        """A row that was missed is locked by somebody, or was changed."""
        settled = progress.settled
        written: list[Row] = []
        missed = _parted(rows, found or (), written)
        settled.done.extend(written)
        progress.touch(written)
        if missed:
            (same,) = await session.fetch_one("unchanged", *_addresses(missed))
            settled.changed.extend(_parted(missed, same or (), settled.locked))

    # ------------------------------------------------------------ H3

    async def promote(self, session: Statements, keys: Sequence[Key], progress: Progress) -> None:
        """Where a key's lowest holding row is held, it becomes due."""
        # In a fixed order, so that two transactions lock rows in the same one.
        ordered = sorted(keys)
        records = await session.fetch("promote", [kind for kind, _ in ordered], [id_ for _, id_ in ordered])
        demand_change([each for each in records if each["is_untouched"]])
        for shard, kind, id_, is_promoted, seq, ctid, _ in records:
            if is_promoted:
                progress.settled.promoted.add(shard)
                progress.settled.moved[seq] = ctid
            else:
                progress.settled.unpromoted.append((shard, (kind, id_)))


def kept(rows: Sequence[Row], lost: set[int]) -> Sequence[Row]:
    """Those of shards that are still ours."""
    return rows if not lost else [row for row in rows if row.shard not in lost]


def _addressed(rows: Sequence[Row], progress: Progress) -> Sequence[Row]:
    """Rows whose address is known; without one (a session was lost) a row may have been changed meanwhile."""
    progress.settled.changed.extend(row for row in rows if row.ctid is None)
    return [row for row in rows if row.ctid is not None]


def _parted(rows: Sequence[Row], seqs: Iterable[int], into: list[Row]) -> list[Row]:
    """Rows with these seqs go `into`; the others are returned."""
    chosen = set(seqs)
    into.extend(row for row in rows if row.seq in chosen)
    return [row for row in rows if row.seq not in chosen]


def _addresses(rows: Sequence[Row]) -> tuple[str, str, str]:
    """ctids (all of them known), seqs and ids, as the texts of arrays."""
    return (
        arrays.texts([row.ctid for row in rows]),  # type: ignore[misc]
        arrays.numbers([row.seq for row in rows]),
        arrays.texts([row.id for row in rows]),
    )


def _identities(rows: Sequence[Row]) -> tuple[list[str], list[int]]:
    return [row.id for row in rows], [row.seq for row in rows]


def storable(text: str) -> str:
    """PostgreSQL's text holds no zero byte and no half of a surrogate pair; a broker's words may."""
    return text.replace("\0", "\ufffd").encode("utf-8", "replace").decode("utf-8")
