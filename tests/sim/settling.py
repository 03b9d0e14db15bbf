"""The settler's statement over the fake PostgreSQL: S1, S2, H1-H3, atomic at its commit."""

from __future__ import annotations

from relay.core.ports.outbox import Fault, Setback, Settled, Settlement
from relay.message import Aside, Key, Row

from .wire import Statement, Wait, Wire, ids

Touched = list[tuple[int, Key | None]]


class Settling(Wire):
    async def settle(self, settlement: Settlement) -> Settled:
        return await self._call("settle", "settler", self._settle(settlement), settlement)

    def _settle(self, settlement: Settlement) -> Statement[Settled]:
        database = self.database
        fences = dict(settlement.fences)
        yield from self._await_unlocked(fences)
        lost = {
            number
            for number, epoch in fences.items()
            if (database.shards[number].owner, database.shards[number].epoch) != (self.instance, epoch)
        }
        locked = [number for number in fences if number not in lost]
        for number in locked:
            database.oracle.settles(self.instance, number)
        crashes = database.crashes
        database.key_share.update(locked)
        try:
            yield Wait(database.latency(), by_client=True)
            self._maybe_refuse(database.options.settle_refusals)
            return self._decide(settlement, lost)
        finally:
            if database.crashes == crashes:
                database.key_share.subtract(locked)

    def _decide(self, settlement: Settlement, lost: set[int]) -> Settled:
        database = self.database
        settled = Settled(lost=lost)
        touched: Touched = []
        unsent: list[str] = []
        every = [
            *settlement.sent,
            *(each.row for each in settlement.setbacks),
            *settlement.followers,
            *settlement.tested,
            *settlement.scheduled,
        ]
        for row in every:
            assert row.shard in settlement.fences, f"{row!r} has no fence"
        assert len({id(row) for row in every}) == len(every), "a row with two decisions"

        for row in settlement.sent:
            if row.shard not in lost:
                self._mark(row, settled, touched, unsent)
        for setback in settlement.setbacks:
            if setback.row.shard not in lost:
                self._set_back(setback, settled, touched)
        for row in settlement.followers:
            if row.shard not in lost:
                self._move(row, settled, touched, aside=Aside.HELD, holds=True, due_at=None)
        for row in settlement.tested:
            if row.shard in lost:
                continue
            stored = database.rows.get((row.seq, row.id))
            is_same = stored is not None and stored.ctid == row.ctid and stored.sent_at is None
            if is_same and stored is not None and not database.has_blocker(stored):
                settled.unblocked.append(row)
            else:
                self._move(row, settled, touched, aside=Aside.HELD, holds=True, due_at=None)
        for row in settlement.scheduled:
            if row.shard not in lost:
                due_at = (row.rare or {})["available_at"]
                self._move(row, settled, touched, aside=Aside.SCHEDULED, holds=False, due_at=due_at)
        touched += [(shard, key) for shard, key in settlement.promotions if shard not in lost]
        promoted = database.promote(touched)
        settled.promoted = promoted.shards
        settled.moved = promoted.moved
        settled.unpromoted = promoted.unpromoted
        settled.faults.extend(promoted.faults)
        database.commit(
            synchronous=database.options.settle_synchronous,
            undone=(lambda: database.oracle.marks_lost(unsent)) if unsent else None,
        )
        self._note(
            "settles",
            f"sent {ids(settlement.sent)} back "
            f"{[(each.row.id, str(each.aside), each.attempts) for each in settlement.setbacks]} "
            f"followers {ids(settlement.followers)} tested {ids(settlement.tested)} "
            f"scheduled {ids(settlement.scheduled)} lost {sorted(lost)} "
            f"changed {ids(settled.changed)} unblocked {ids(settled.unblocked)} locked {ids(settled.locked)} "
            f"unpromoted {settled.unpromoted} faults {[each.id for each in settled.faults]}",
        )
        return settled

    def _mark(self, row: Row, settled: Settled, touched: Touched, unsent: list[str]) -> None:
        """S2: by ctid, then by id; a locked row is kept, a missing one is done."""
        database = self.database
        stored = database.rows.get((row.seq, row.id))
        if stored is not None and stored.sent_at is None:
            if stored.id in database.row_locks:
                settled.locked.append(row)
                return
            if stored.aside is not None:
                touched.append((stored.shard, stored.key))
            if stored.id in database.unmarkable:
                self._fault(row, settled, touched)
                return
            database.oracle.sent(self.instance, row.id, row.seq)
            unsent.append(row.id)
            if database.options.delete_sent:
                database.delete_row(stored)
            else:
                database.updated(stored, sent_at=database.now(), aside=None, holds=False, due_at=None)
        settled.done.append(row)

    def _set_back(self, setback: Setback, settled: Settled, touched: Touched) -> None:
        database = self.database
        assert setback.aside in (Aside.DEFERRED, Aside.PARKED), setback
        due_at = database.now() + setback.delay_s if setback.aside is Aside.DEFERRED else None
        if self._move(
            setback.row,
            settled,
            touched,
            aside=setback.aside,
            holds=setback.holds,
            due_at=due_at,
            attempts=setback.attempts,
            failure_class=setback.reason,
            parked_at=database.now() if setback.aside is Aside.PARKED else None,
        ):
            database.oracle.setback(self.instance, setback.row.id, setback.aside, setback.attempts)

    def _move(self, row: Row, settled: Settled, touched: Touched, **changes: object) -> bool:
        """By ctid and seq only: a miss means that somebody changed the row."""
        stored = self.database.rows.get((row.seq, row.id))
        if stored is None or stored.ctid != row.ctid or stored.sent_at is not None:
            settled.changed.append(row)
            return False
        if stored.id in self.database.row_locks:
            settled.locked.append(row)
            return False
        if stored.id in self.database.unmarkable:
            self._fault(row, settled, touched)
            return False
        self.database.updated(stored, **changes)
        touched.append((stored.shard, stored.key))
        settled.done.append(row)
        return True

    def _fault(self, row: Row, settled: Settled, touched: Touched) -> None:
        """A trigger refuses the row's change: recorded beside it, holding nothing."""
        self.database.put_fault((row.seq, row.id))
        touched.append((row.shard, row.key))
        settled.faults.append(Fault(row.shard, row.seq, row.id, row.attempts + 1, "refused"))
        settled.done.append(row)
