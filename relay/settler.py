"""Writes the decisions behind everything else: one transaction a batch (S1-S3, H1-H3 of `docs/protocol.md`).

Owns the settler's session and the settlement that is under way. A settlement that was refused is tried again with
the same decisions; one whose outcome is unknown is void but for what was sent (the runner closes all sessions).
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence

from relay.core.batch import Batch
from relay.core.ladder import reconnect_backoff
from relay.core.ports.outbox import Fault, Settled, Settlement
from relay.engine import Decisions, Engine
from relay.errors import DatabaseLost, DatabaseRefused, StatementTooSlow
from relay.message import Aside, Key, Row, State

_SETTLING = State.SETTLING
_TESTING = State.TESTING

BATCH_ROWS_MAX = 1000

LINGER_S = 0.02
"""How long a small batch of confirmed rows waits for more. Nothing waits for it, and each transaction costs 0.5 ms of the
relay's CPU, as much of PostgreSQL's, and a sync of the disk that a broker beside it may share."""

LINGER_AWAITED_S = 0.003
"""The same with anything else in it, for rows that are tested keep their keys waiting; and where bodies fill the memory."""

LOCKED_RETRY_S = 0.1
"""A row that an application keeps locked is tried again after this (S2): its mark, test or hold, a promotion."""

UNDONE_RETRY_S = 0.5
UNDONE_RETRY_S_MAX = 30.0
"""A failed row that an application keeps locked is not set aside: after this it is loaded, and goes, anew. Twice as long
each time, for each time it is published."""

UNDONE_MAX = 1000
"""Rows whose vain tries are counted."""

SLOW_S = 1.0
"""A settlement that was lost with its session after so long may have been too large (a trigger, a disk that takes milliseconds a row)."""

REFUSALS_MAX = 20
"""Refused so many times in a row, new sessions are opened: the schema may have changed."""


class Settler:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._batch = Batch(BATCH_ROWS_MAX)
        self._locked: list[Row] = []
        """Sent rows; what else somebody's lock made miss waits in the three below. All until `_locked_until`."""
        self._tested: list[Row] = []
        self._scheduled: list[Row] = []
        self._unpromoted: dict[Key, int] = {}
        self._locked_until = 0.0
        self._undone: list[tuple[float, Row]] = []
        """Rows that could not be set aside, in their places, each until its time."""
        self._tries: dict[tuple[int, str], int] = {}
        """How often that was tried in vain, by seq and id: each time the row is another `Row`."""

    async def run(self) -> None:
        """For one life of the sessions; raises DatabaseLost."""
        try:
            await self._run()
        finally:
            # Void with everything else that is not sent (Engine.lose_sessions); a promotion that is owed is found again
            # when the shard is taken up.
            self._engine.decisions.scheduled.extend(self._scheduled)
            self._engine.reread.extend(row for _, row in self._undone)
            self._scheduled, self._undone, self._tested, self._unpromoted = [], [], [], {}

    async def _run(self) -> None:
        engine = self._engine
        refusals = 0
        # What a former session left undecided of the locked ones is settled again (S3).
        engine.decisions.sent.extend(self._locked)
        self._locked = []
        if len(engine.decisions):
            engine.to_settle.set()
        while True:
            await self._gather()
            self._offer_locked()
            settlement, serial, rest = self._build()
            engine.settling = len(settlement.sent) + len(self._locked)
            if not len(settlement):
                # What was counted is forgotten by now, its shard lost: the window has room again.
                engine.to_publish.set()
                continue
            started = engine.clock.now()
            try:
                settled = await engine.outbox.settle(settlement)
            except DatabaseRefused as error:
                refusals += 1
                if isinstance(error, StatementTooSlow):
                    self._batch.too_slow(len(settlement))
                self._put_back(settlement)
                if refusals == 1:
                    engine.log.warning("settlement_refused", error=error, rows=len(settlement))
                if refusals >= REFUSALS_MAX:
                    raise
                await engine.clock.sleep(reconnect_backoff(refusals, engine.random.random()))
                continue
            except (DatabaseLost, asyncio.CancelledError):
                # Another part may have noticed the loss first, and this one is cancelled. Sent rows stay decided;
                # the rest is dropped by Engine.lose_sessions with their rows.
                if engine.clock.now() - started >= SLOW_S:
                    self._batch.too_slow(len(settlement))
                self._put_back(settlement)
                raise
            if refusals:
                engine.log.info("settlement_resumed")
                refusals = 0
            took_s = engine.clock.now() - started
            self._batch.took(took_s)
            engine.metrics.settle_seconds.observe(took_s)
            self._apply(settlement, settled, serial)
            if rest:
                engine.to_settle.set()

    async def _gather(self) -> None:
        """Until there is something; a little longer while it is not much."""
        engine = self._engine
        if not len(engine.decisions):
            waits = []
            if self._is_locked:
                waits.append(self._locked_until)
            if self._undone:
                waits.append(min(until for until, _ in self._undone))
            await engine.to_settle.wait(max(0.0, min(waits) - engine.clock.now()) if waits else None)
        began = engine.clock.now()
        while 0 < len(engine.decisions) < engine.batch_rows and not engine.is_stopping:
            is_awaited = engine.is_short_of_bytes or len(engine.decisions) > len(engine.decisions.sent)
            linger_s = LINGER_AWAITED_S if is_awaited else LINGER_S
            if not await engine.to_settle.wait(max(0.0, began + linger_s - engine.clock.now())):
                break

    @property
    def _is_locked(self) -> bool:
        return bool(self._locked or self._tested or self._scheduled or self._unpromoted)

    def _offer_locked(self) -> None:
        engine = self._engine
        now = engine.clock.now()
        if self._is_locked and now >= self._locked_until:
            decisions = engine.decisions
            decisions.sent.extend(self._locked)
            decisions.tested.extend(self._tested)
            decisions.scheduled.extend(self._scheduled)
            decisions.promotions.extend((shard, key) for key, shard in self._unpromoted.items())
            self._locked, self._tested, self._scheduled, self._unpromoted = [], [], [], {}
        over = [row for until, row in self._undone if now >= until or engine.is_stopping]
        if over:
            self._undone = [each for each in self._undone if each[1] not in over]
            engine.reread.extend(over)
            engine.to_read.set()

    # ------------------------------------------------------------ building

    def _build(self) -> tuple[Settlement, int, bool]:
        """The next settlement, its serial, and whether something was left for the one after."""
        engine = self._engine
        decisions = engine.decisions
        engine.decisions = Decisions(serial=decisions.serial + 1)
        sent = [row for row in decisions.sent if row.state is _SETTLING]
        if len(sent) > BATCH_ROWS_MAX:
            engine.decisions.sent = sent[BATCH_ROWS_MAX:]
            del sent[BATCH_ROWS_MAX:]
        settlement = Settlement(
            sent=sent,
            setbacks=[s for s in decisions.setbacks if s.row.state is _SETTLING],
            followers=[row for row in decisions.followers if row.state is _SETTLING],
            tested=[row for row in decisions.tested if row.state is _TESTING],
            scheduled=[row for row in decisions.scheduled if row.state is _SETTLING],
            promotions=[each for each in decisions.promotions if each[0] in engine.leases],
        )
        if self._batch.is_cut and len(settlement) > self._batch.rows:
            settlement = self._part_of(settlement)
        # A row here is never of a shard that we know lost: such rows are forgotten at once.
        shards = {row.shard for row in settlement.sent}
        if len(settlement) > len(settlement.sent):
            shards.update(setback.row.shard for setback in settlement.setbacks)
            for rows in (settlement.followers, settlement.tested, settlement.scheduled):
                shards.update(row.shard for row in rows)
            shards.update(shard for shard, _ in settlement.promotions)
        epoch = engine.leases.epoch
        settlement.fences.update((shard, epoch(shard)) for shard in shards)
        return settlement, decisions.serial, bool(len(engine.decisions))

    def _part_of(self, whole: Settlement) -> Settlement:
        """As many of one kind as may go together; the others are put back."""
        part = Settlement()
        for name in ("sent", "setbacks", "followers", "tested", "scheduled", "promotions"):
            if items := getattr(whole, name):
                setattr(part, name, items[: self._batch.rows])
                setattr(whole, name, items[self._batch.rows :])
                break
        self._put_back(whole)
        for follower in whole.followers:
            self._engine.note_holding(follower, ())
        return part

    def _put_back(self, settlement: Settlement) -> None:
        """Refused: the decisions stand, before what was decided since."""
        self._engine.settling = len(self._locked)
        decisions = self._engine.decisions
        decisions.sent[:0] = settlement.sent
        decisions.setbacks[:0] = settlement.setbacks
        decisions.followers[:0] = settlement.followers
        decisions.tested[:0] = settlement.tested
        decisions.scheduled[:0] = settlement.scheduled
        decisions.promotions[:0] = settlement.promotions
        for setback in settlement.setbacks:
            if setback.holds:
                self._engine.note_holding(setback.row, settlement.followers)
        self._engine.to_settle.set()

    # ------------------------------------------------------------ applying

    def _apply(self, settlement: Settlement, settled: Settled, serial: int) -> None:
        engine = self._engine
        engine.applied_serial = serial
        # Lost by then, and claimed again since, is another lease.
        fences = settlement.fences
        lost = [
            shard for shard in settled.lost if shard in engine.leases and engine.leases.epoch(shard) == fences[shard]
        ]
        engine.lose_leases(lost, seen="settlement")
        if settled.locked or settled.unpromoted:
            self._keep_locked(settlement, settled)
        engine.settling = len(self._locked)
        self._count(settlement, settled)
        engine.reading.note_settled(settled.done)
        if settlement.tested:
            done = set(settled.done)
            for row in settlement.tested:
                if row in done:
                    engine.chains.note_holding(row, serial)
                    if engine.chains.drop_followers(row):
                        engine.note_due(0.0)
                    engine.test(engine.chains.test_behind(row))
        if settled.changed:
            # Before anything of their keys becomes ready.
            self._load_anew(settled.changed)
        if self._tries:
            for row in (*settled.done, *settled.changed):
                self._tries.pop((row.seq, row.id), None)
        engine.chains.finish(settled.done)
        for row in settled.unblocked:
            engine.chains.on_unblocked(row)
        if settled.promoted:
            moved = [engine.chains.note_moved(seq, ctid) for seq, ctid in settled.moved.items()]
            if not all(moved):
                engine.note_due(0.0)
        for setback in settlement.setbacks:
            if setback.aside is Aside.DEFERRED:
                engine.note_due(setback.delay_s)
        if settlement.scheduled:
            engine.note_due(0.0)
        engine.to_publish.set()
        engine.note_room()
        engine.changed.set()

    def _load_anew(self, changed: Sequence[Row]) -> None:
        """Somebody else changed these rows: what we decided is void, their present state counts."""
        engine = self._engine
        kept = [row for row in changed if row.state is not State.FORGOTTEN]
        engine.chains.hold_places(kept)
        engine.reread.extend(kept)
        engine.to_read.set()

    def _keep_locked(self, settlement: Settlement, settled: Settled) -> None:
        """Somebody keeps these rows locked; they alone wait."""
        engine = self._engine
        now = engine.clock.now()
        if not self._is_locked:
            # Counted from the first: rows locked one after the other would put each other off for ever.
            self._locked_until = now + LOCKED_RETRY_S
        sent, scheduled = set(settlement.sent), set(settlement.scheduled)
        undone: list[Row] = []
        for row in settled.locked:
            if row.state is _TESTING:
                self._tested.append(row)
            elif row.state is not _SETTLING:
                continue
            elif row in sent:
                self._locked.append(row)
            elif row in scheduled:
                self._scheduled.append(row)
            else:
                undone.append(row)
        self._unpromoted.update((key, shard) for shard, key in settled.unpromoted)
        if undone:
            self._keep_undone(undone, {each.row for each in settlement.setbacks})

    def _keep_undone(self, rows: Sequence[Row], failed: Collection[Row]) -> None:
        """They stay in their places, before anything of their keys becomes ready, for longer each time."""
        engine = self._engine
        now = engine.clock.now()
        engine.chains.hold_places(rows)
        news = 0
        for row in rows:
            identity = (row.seq, row.id)
            tries = self._tries.pop(identity, 0)
            news += not tries
            # Those that were tried last stand last: the others are forgotten first.
            self._tries[identity] = tries + 1
            if len(self._tries) > UNDONE_MAX:
                del self._tries[next(iter(self._tries))]
            delay_s = min(UNDONE_RETRY_S * 2 ** min(tries, 10), UNDONE_RETRY_S_MAX)
            self._undone.append((now + delay_s, row))
        engine.metrics.rows_deferred["locked"] += sum(row in failed for row in rows)
        if news:
            engine.log.warning("rows_locked", rows=news, seq=min(row.seq for row in rows), reason="not set aside yet")

    def _count(self, settlement: Settlement, settled: Settled) -> None:
        metrics = self._engine.metrics
        undone = {row.seq for row in settled.locked}
        undone.update(fault.seq for fault in settled.faults)
        sent = settlement.sent
        if undone or settled.lost:
            sent = [row for row in sent if row.shard not in settled.lost and row.seq not in undone]
        metrics.rows_sent += len(sent)
        metrics.publish_attempts.observe_many([row.attempts + 1 for row in sent])
        for fault in settled.faults:
            self._count_parked("unmarkable", fault)
        undone.update(row.seq for row in settled.changed)
        for setback in settlement.setbacks:
            row = setback.row
            if row.shard in settled.lost or row.seq in undone:
                continue
            if setback.aside is Aside.PARKED:
                fault = Fault(row.shard, row.seq, row.id, setback.attempts, setback.error)
                self._count_parked(setback.reason, fault)
            else:
                metrics.rows_deferred[setback.reason] += 1

    def _count_parked(self, reason: str, fault: Fault) -> None:
        """From now on an operator's: one line each."""
        engine = self._engine
        engine.metrics.rows_parked[reason] += 1
        engine.metrics.publish_attempts.observe(fault.attempts)
        engine.log.warning(
            "row_parked", seq=fault.seq, id=fault.id, reason=reason, attempts=fault.attempts, error=fault.error
        )
