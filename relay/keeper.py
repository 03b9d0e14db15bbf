"""Leases: claims, renewals, fair share, hand-over (L1-L7 of `docs/protocol.md`).

Owns the keeper's session with the reader's checks: a renewal never waits behind a read or a settlement.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from relay.core.ports.outbox import Check, Claim, Held, Renewal
from relay.engine import Engine
from relay.errors import DatabaseRefused

SKIPPED_RETRY_S = 0.1
"""A shard row that somebody had locked is renewed again after this (L2)."""

LEAVING_TRIES = 5
"""So often a relay that stops tries to give back a shard whose row somebody has locked; then its session's end frees it (L3)."""

RENEWALS_PER_LEASE = 5
RENEWAL_INTERVAL_S_MAX = 1.0
"""Also with a long lease: by renewals a relay hears of a pause, of shards that are free, and that it was unseated."""

WITHOUT_BROKER_LEASES = 3
"""Without a broker for so many leases' time a relay gives its shards away (L6)."""


class Keeper:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._session = asyncio.Lock()
        self._is_first = True
        self._floors_at_give: dict[int, int | None] = {}

    async def run(self) -> None:
        """For one life of the sessions; raises DatabaseLost."""
        self._is_first = True
        refusals = 0
        while True:
            try:
                delay_s = await self._renew()
                refusals = 0
            except DatabaseRefused as error:
                # A lock or statement timeout: the leases still run for a while. Beyond that it is a fault of the
                # session, and the runner opens new ones.
                refusals += 1
                if refusals == 1:
                    self._engine.log.warning("renewal_refused", error=error)
                if refusals >= RENEWALS_PER_LEASE:
                    raise
                delay_s = SKIPPED_RETRY_S
            await self._engine.to_renew.wait(delay_s)

    async def check(self) -> Check:
        """R1, on the keeper's session."""
        engine = self._engine
        async with self._session:
            sent_at = engine.clock.now()
            check = await engine.outbox.check()
        engine.database_time.observe(check.database_time, sent_at)
        return check

    # ------------------------------------------------------------ renewal

    async def _renew(self) -> float:
        engine = self._engine
        self._note_availability()
        async with self._session:
            sent_at = engine.clock.now()
            renewal = await engine.outbox.renew(self._held(), available=engine.is_available)
            engine.database_time.observe(renewal.database_time, sent_at)
            self._take(renewal, sent_at)
            if strays := engine.leases.strays(renewal):
                await engine.outbox.release(strays)
            if engine.is_available and not engine.is_stopping:
                wanted = engine.leases.claims_wanted(renewal)
                if wanted:
                    sent_at = engine.clock.now()
                    claims = await engine.outbox.claim(wanted)
                    # Run out, and its row was locked when it was to be renewed. What was decided under the old epoch is
                    # fenced off (S1), and would wait for ever: the shard begins anew.
                    engine.lose_leases([each.shard for each in claims if each.shard in engine.leases], seen="claim")
                    engine.leases.on_claimed(claims, sent_at)
                    self._take_up(claims)
            self._hand_over(renewal)
            await self._release_idle()
        engine.metrics.shards_owned = engine.leases.standing(engine.clock.now())
        if engine.leases.was_skipped(renewal):
            return SKIPPED_RETRY_S
        if engine.leases.giving():
            return SKIPPED_RETRY_S
        return min(engine.settings.lease_s / RENEWALS_PER_LEASE, RENEWAL_INTERVAL_S_MAX)

    def _held(self) -> dict[int, Held]:
        engine = self._engine
        lowest = engine.chains.lowest_unsettled()
        return {
            lease.shard: Held(lease.epoch, engine.reading.floor(lease.shard, lowest.get(lease.shard)))
            for lease in engine.leases.all()
        }

    def _take(self, renewal: Renewal, sent_at: float) -> None:
        engine = self._engine
        engine.lose_leases(engine.leases.on_renewal(renewal, sent_at), seen="renewal")
        if self._is_first:
            # New sessions: everything of ours is read again from the floors as stored (R5).
            self._is_first = False
            kept = [lease for lease in engine.leases.all() if lease.giving_since is None]
            self._take_up([lease.claim() for lease in kept])
        if renewal.is_paused != engine.is_paused:
            engine.is_paused = renewal.is_paused
            engine.log.info("paused" if renewal.is_paused else "resumed")
            if renewal.is_paused:
                engine.readiness.add("paused", "relay resume lifts it")
            else:
                engine.readiness.remove("paused")
            engine.to_read.set()
        engine.metrics.paused = renewal.is_paused
        engine.note_due(renewal.next_due_in_s)
        # A lease that had run out stands again.
        engine.chains.offer_again()
        engine.to_publish.set()

    def _take_up(self, claims: Sequence[Claim]) -> None:
        engine = self._engine
        if not claims:
            return
        void = [claim.shard for claim in claims if claim.floor_was_void]
        if void:
            engine.log.warning("floors_void", shards=len(void), reason="the table or its sequence is another one")
        engine.claimed.extend(claims)
        engine.to_read.set()

    # ------------------------------------------------------------ giving away

    def _note_availability(self) -> None:
        engine = self._engine
        lost_at = engine.broker_lost_at
        patience_s = WITHOUT_BROKER_LEASES * engine.settings.lease_s
        is_available = lost_at is None or engine.clock.now() - lost_at < patience_s
        if is_available != engine.is_available:
            engine.is_available = is_available
            engine.log.info("fair_share_joined" if is_available else "fair_share_left", reason="broker")
        if not is_available:
            self.give(engine.leases.shards)

    def _hand_over(self, renewal: Renewal) -> None:
        engine = self._engine
        now = engine.clock.now()
        for lease in engine.leases.giving():
            since = lease.giving_since
            assert since is not None
            is_forced = engine.is_stopping or not engine.is_available
            if not is_forced and now - since > engine.settings.lease_s and not engine.chains.is_idle(lease.shard):
                # Taking too long (a mute broker): keep it and try later, rather than cause copies (L5).
                engine.leases.keep(lease.shard, now)
                self._take_up([lease.claim()])
        if engine.is_available and not engine.is_stopping:
            self.give(engine.leases.surplus(renewal, now))

    def give(self, shards: Sequence[int]) -> None:
        """Stop reading and publishing these shards; they go when nothing of them is unsettled (L5)."""
        engine = self._engine
        fresh = [shard for shard in shards if engine.leases.is_kept(shard)]
        if not fresh:
            return
        lowest = engine.chains.lowest_unsettled()
        for shard in fresh:
            # The floor as of now: what is dropped from memory below lies above it.
            self._floors_at_give[shard] = engine.reading.floor(shard, lowest.get(shard))
            engine.leases.give(shard, engine.clock.now())
            engine.reading.drop_shard(shard)
        gone = set(fresh)
        engine.claimed = [claim for claim in engine.claimed if claim.shard not in gone]
        engine.chains.drop_unpublished(fresh)
        engine.note_room()

    async def _release_idle(self) -> bool:
        """Give back what is idle, but for shards whose row somebody has locked; whether there were such (L2)."""
        engine = self._engine
        giving = [lease.shard for lease in engine.leases.giving()]
        if giving:
            # What was in flight and came back unsent (nacked, its link closed) goes with the shard, unpublished.
            engine.chains.drop_unpublished(giving)
            engine.note_room()
        idle = [lease for lease in engine.leases.giving() if engine.chains.is_idle(lease.shard)]
        if not idle:
            return False
        held = {lease.shard: Held(lease.epoch, self._floors_at_give.get(lease.shard)) for lease in idle}
        locked = await engine.outbox.release(held)
        for shard in held.keys() - locked:
            engine.lose_shard(shard)
            self._floors_at_give.pop(shard, None)
        return bool(locked)

    async def leave(self) -> None:
        """The last act of a clean stop: all shards back, the membership row gone."""
        engine = self._engine
        async with self._session:
            self.give(engine.leases.shards)
            for _ in range(LEAVING_TRIES):
                if not await self._release_idle():
                    break
                await engine.clock.sleep(SKIPPED_RETRY_S)
            await engine.outbox.leave()
