"""Writes the decisions behind everything else: one transaction a batch (S1-S3, H1-H3 of `docs/protocol.md`).

Owns the settler's session and the settlement that is under way. A settlement that was refused is tried again with
the same decisions; one whose outcome is unknown is void but for what was sent (the runner closes all sessions).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from relay.core.ladder import reconnect_backoff
from relay.core.ports import Settled, Settlement
from relay.engine import Decisions, Engine
from relay.errors import DatabaseLost, DatabaseRefused
from relay.message import Aside, Row, State

BATCH_ROWS = 500
"""A settlement's usual size: beyond it a row's share of the transaction hardly shrinks."""

BATCH_ROWS_MAX = 1000

LINGER_S = 0.003
"""How long a small batch waits for more, so that a trickle does not cost a transaction a row."""

LOCKED_RETRY_S = 0.1
"""A sent row that an application keeps locked is tried again after this (S2)."""

REFUSALS_MAX = 20
"""Refused so many times in a row, new sessions are opened: the schema may have changed."""


class Settler:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._locked: list[Row] = []
        self._locked_until = 0.0

    async def run(self) -> None:
        """For one life of the sessions; raises DatabaseLost."""
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
            if not len(settlement):
                continue
            started = engine.clock.now()
            engine.settling = len(settlement.sent) + len(self._locked)
            try:
                settled = await engine.outbox.settle(settlement)
            except DatabaseRefused as error:
                refusals += 1
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
                self._put_back(settlement)
                raise
            if refusals:
                engine.log.info("settlement_resumed")
                refusals = 0
            engine.metrics.settle_seconds.observe(engine.clock.now() - started)
            self._apply(settlement, settled, serial)
            if rest:
                engine.to_settle.set()

    async def _gather(self) -> None:
        """Until there is something; a little longer while it is not much."""
        engine = self._engine
        if not len(engine.decisions):
            timeout = None
            if self._locked:
                timeout = max(0.0, self._locked_until - engine.clock.now())
            await engine.to_settle.wait(timeout)
        if 0 < len(engine.decisions) < BATCH_ROWS and not engine.is_stopping:
            await engine.clock.sleep(LINGER_S)

    def _offer_locked(self) -> None:
        if self._locked and self._engine.clock.now() >= self._locked_until:
            self._engine.decisions.sent.extend(self._locked)
            self._locked = []

    # ------------------------------------------------------------ building

    def _build(self) -> tuple[Settlement, int, bool]:
        """The next settlement, its serial, and whether something was left for the one after."""
        engine = self._engine
        decisions = engine.decisions
        engine.decisions = Decisions(serial=decisions.serial + 1)
        sent = [row for row in decisions.sent if row.state is State.SETTLING]
        if len(sent) > BATCH_ROWS_MAX:
            engine.decisions.sent = sent[BATCH_ROWS_MAX:]
            del sent[BATCH_ROWS_MAX:]
        settlement = Settlement(
            sent=sent,
            setbacks=[s for s in decisions.setbacks if s.row.state is State.SETTLING],
            followers=[row for row in decisions.followers if row.state is State.SETTLING],
            tested=[row for row in decisions.tested if row.state is State.TESTING],
            scheduled=[row for row in decisions.scheduled if row.state is State.SETTLING],
        )
        leases = engine.leases
        fences = settlement.fences
        for rows in (
            settlement.sent,
            [setback.row for setback in settlement.setbacks],
            settlement.followers,
            settlement.tested,
            settlement.scheduled,
        ):
            for row in rows:
                if row.shard not in fences:
                    # A row here is never of a shard that we know lost: such rows are forgotten at once.
                    fences[row.shard] = leases.epoch(row.shard)
        return settlement, decisions.serial, bool(engine.decisions.sent)

    def _put_back(self, settlement: Settlement) -> None:
        """Refused: the decisions stand, before what was decided since."""
        self._engine.settling = len(self._locked)
        decisions = self._engine.decisions
        decisions.sent[:0] = settlement.sent
        decisions.setbacks[:0] = settlement.setbacks
        decisions.followers[:0] = settlement.followers
        decisions.tested[:0] = settlement.tested
        decisions.scheduled[:0] = settlement.scheduled
        for setback in settlement.setbacks:
            if setback.holds:
                self._engine.note_holding(setback.row, settlement.followers)
        self._engine.to_settle.set()

    # ------------------------------------------------------------ applying

    def _apply(self, settlement: Settlement, settled: Settled, serial: int) -> None:
        engine = self._engine
        engine.applied_serial = serial
        for shard in settled.lost:
            # Lost by then, and claimed again since, is another lease.
            if shard in engine.leases and engine.leases.epoch(shard) == settlement.fences[shard]:
                engine.lose_shard(shard)
                engine.metrics.lease_lost += 1
                engine.log.warning("lease_lost", shard=shard, seen="settlement")
        locked = [row for row in settled.locked if row.state is State.SETTLING]
        if locked:
            if not self._locked:
                # Counted from the first: rows locked one after the other would put each other off for ever.
                self._locked_until = engine.clock.now() + LOCKED_RETRY_S
            self._locked.extend(locked)
        engine.settling = len(self._locked)
        self._count(settlement, settled, locked)
        engine.reading.note_settled([row.seq for row in settled.done])
        if settlement.tested:
            done = set(settled.done)
            for row in settlement.tested:
                if row in done:
                    engine.chains.note_holding(row, serial)
        if settled.changed:
            # Before anything of their keys becomes ready.
            self._load_anew(settled.changed)
        engine.chains.finish(settled.done)
        for row in settled.unblocked:
            engine.chains.on_unblocked(row)
        if settled.promoted:
            engine.note_due(0.0)
        for setback in settlement.setbacks:
            if setback.aside is Aside.DEFERRED:
                engine.note_due(setback.delay_s)
        if settlement.scheduled:
            engine.note_due(0.0)
        engine.to_publish.set()
        engine.to_read.set()
        engine.changed.set()

    def _load_anew(self, changed: Sequence[Row]) -> None:
        """Somebody else changed these rows: what we decided is void, their present state counts."""
        engine = self._engine
        kept = [row for row in changed if row.state is not State.FORGOTTEN]
        engine.chains.hold_places(kept)
        engine.reread.extend(kept)
        engine.to_read.set()

    def _count(self, settlement: Settlement, settled: Settled, locked: Sequence[Row]) -> None:
        metrics = self._engine.metrics
        undone = {row.seq for row in locked} if locked else frozenset[int]()
        sent = [r for r in settlement.sent if r.shard not in settled.lost and r.seq not in undone]
        metrics.rows_sent += len(sent)
        metrics.publish_attempts.observe_many([row.attempts + 1 for row in sent])
        changed = {row.seq for row in settled.changed}
        for setback in settlement.setbacks:
            row = setback.row
            if row.shard in settled.lost or row.seq in changed:
                continue
            if setback.aside is Aside.PARKED:
                metrics.rows_parked[setback.reason] += 1
                metrics.publish_attempts.observe(setback.attempts)
                self._engine.log.warning(
                    "row_parked",
                    seq=row.seq,
                    id=row.id,
                    reason=setback.reason,
                    attempts=setback.attempts,
                    error=setback.error,
                )
            else:
                metrics.rows_deferred[setback.reason] += 1
