"""What the engine's parts share: the relay's memory, its signals, and the decisions on their way to the table.

The parts are `keeper` (leases), `reader`, `publisher` and `settler`; `runner` starts and stops them. Each owns its
own loop; what they tell each other goes through here, one way: reader -> chains -> publisher -> settler.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass
from random import Random

from relay.core.chains import Chains
from relay.core.failures import classify, judge
from relay.core.leases import Leases
from relay.core.ports.broker import Link, Rejection, Spans
from relay.core.ports.clock import Clock
from relay.core.ports.outbox import Claim, Outbox, OutboxInfo, Setback, Settlement
from relay.core.reading import Reading
from relay.core.settings import EngineSettings
from relay.http import Readiness
from relay.logs import Log
from relay.message import Key, Row, due_since
from relay.metrics import Metrics

INLINE_BYTES_MAX = 1 << 30
"""What a page carries of one row at most, however large RELAY_MAX_BYTES is: PostgreSQL has no larger value."""

BATCH_ROWS = 500
"""A settlement's usual size: beyond it a row's share of the transaction hardly shrinks."""


class Signal:
    """Wakes one waiting loop. Cleared *before* the loop looks at what there is, so no wake is lost."""

    __slots__ = ("_is_set", "_waiter")

    def __init__(self) -> None:
        self._is_set = False
        self._waiter: asyncio.Future[None] | None = None

    def set(self) -> None:
        self._is_set = True
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def wait(self, timeout_s: float | None) -> bool:
        """Until set, or for `timeout_s`; clears it. True when it was set."""
        if not self._is_set and (timeout_s is None or timeout_s > 0):
            loop = asyncio.get_running_loop()
            waiter = self._waiter = loop.create_future()
            timer = None if timeout_s is None else loop.call_later(timeout_s, _expire, waiter)
            try:
                await waiter
            finally:
                self._waiter = None
                if timer is not None:
                    timer.cancel()
        was_set, self._is_set = self._is_set, False
        return was_set


def _expire(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


class DatabaseTime:
    """The database's clock, as seen from here: it decides due times and ages (I7)."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._offset: float | None = None
        self._least_offset = 0.0

    def observe(self, database_time: float, sent_at: float) -> None:
        """An answer that carried the database's time; `sent_at` boot-time seconds."""
        now = self._clock.now()
        self._offset = database_time - (sent_at + now) / 2
        self._least_offset = database_time - now

    @property
    def is_known(self) -> bool:
        return self._offset is not None

    def now(self) -> float:
        """Epoch seconds by the database's clock."""
        assert self._offset is not None, "no answer of the database yet"
        return self._clock.now() + self._offset

    def at_least(self) -> float:
        """The same, but never ahead of that clock: for what must not happen too soon."""
        assert self._offset is not None, "no answer of the database yet"
        return self._clock.now() + self._least_offset


@dataclass(slots=True)
class Decisions(Settlement):
    """The settlement in the making, without its fences yet. `serial` is the number that it will carry."""

    serial: int = 0


class Engine:
    """The shared state of one relay."""

    def __init__(
        self,
        settings: EngineSettings,
        outbox: Outbox,
        clock: Clock,
        random: Random,
        metrics: Metrics,
        readiness: Readiness,
        log: Log,
        database_time: DatabaseTime,
        spans: Spans | None = None,
    ) -> None:
        self.settings = settings
        self.outbox = outbox
        self.clock = clock
        self.random = random
        self.metrics = metrics
        self.readiness = readiness
        self.log = log
        self.database_time = database_time
        self.spans = spans
        """None where tracing is off."""

        # Half of the bytes for what a page carries along, half for what is fetched apart.
        self.inline_bytes = max(1, min(settings.bytes_max // 2 // settings.read_ahead_max, INLINE_BYTES_MAX))
        self.chains = Chains(settings.ordering, self.inline_bytes, settings.held_keys_max)
        self.reading = Reading(settings.page_span)
        self.batch_rows = max(1, min(BATCH_ROWS, settings.in_flight_max // 4, settings.read_ahead_max // 4))
        """So many confirmed rows are settled at once; fewer wait a little for more. A part of the bounds that they count
        against, or these would wait for the settlement."""
        self.leases = Leases(settings.lease_s)
        self.decisions = Decisions()

        self.info: OutboxInfo | None = None
        """Of the open sessions; `None` while there are none."""
        self.link: Link | None = None
        self.is_blocked = False
        self.is_paused = False
        self.is_stopping = False
        self.is_available = True
        """False while this relay has been without a broker for too long (L6)."""
        self.broker_lost_at: float | None = clock.now()
        self.reading_refused_at: float | None = None
        """Boot-time seconds since when PostgreSQL has refused each read."""
        self.claimed: list[Claim] = []
        """Shards that are ours and that the reader has not taken up yet."""
        self.next_due_at: float | None = None
        """Boot-time seconds at which to ask for due rows."""
        self.reread: list[Row] = []
        """Rows that somebody else changed, still in memory: the reader loads them anew by id."""
        self.settling = 0
        """Sent rows in the settlement that is under way, or locked by somebody and waiting for the next."""
        self.applied_serial = -1
        """The last settlement that was committed and taken in."""

        self.to_publish = Signal()
        self.to_settle = Signal()
        self.to_read = Signal()
        self.to_renew = Signal()
        self.is_full = False
        """The reader waits for rows to leave memory; who lets them go says so here, and wakes it."""
        self.is_short_of_bytes = False
        """It waits for bodies to leave it: a settlement, which lets them go, does not wait for more rows then."""
        self.changed = Signal()
        """Something settled or ended; a drain looks again."""

        self._background: set[asyncio.Task[None]] = set()

    # ------------------------------------------------------------ between the parts

    def start(self, work: Coroutine[None, None, None]) -> None:
        """Something short that nobody waits for; it is kept until it ends."""
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def note_due(self, in_s: float | None) -> None:
        """A row aside falls due in so many seconds."""
        if in_s is None:
            return
        at = self.clock.now() + max(0.0, in_s)
        if self.next_due_at is None or at < self.next_due_at:
            self.next_due_at = at
            self.to_read.set()

    def note_room(self) -> None:
        """Rows have left memory: a reader that waits for it reads on."""
        if self.is_full:
            self.is_full = False
            self.to_read.set()

    def test(self, rows: Sequence[Row]) -> None:
        """Rows whose key may be held: tested in the next settlement (H2)."""
        if rows:
            self.decisions.tested.extend(rows)
            self.to_settle.set()

    def promote(self, keys: Iterable[tuple[int, Key]]) -> None:
        """Keys, with their shards, that may be held by a held row: seen to in the next settlement (H3)."""
        self.decisions.promotions.extend(keys)
        if self.decisions.promotions:
            self.to_settle.set()

    def set_back(self, setback: Setback) -> None:
        """A failed row goes aside, and with it the followers that were read ahead (H1)."""
        followers = self.chains.set_back(setback.row, holds=setback.holds)
        if setback.holds:
            self.note_holding(setback.row, followers)
        self.decisions.setbacks.append(setback)
        self.decisions.followers.extend(followers)
        self.to_settle.set()

    def fail(self, failed: Rejection) -> None:
        """A row that cannot be sent as it is goes aside, as its failure wants it."""
        row = failed.row
        verdict = judge(
            row,
            classify(failed.reason),
            self.settings,
            is_final=failed.is_final,
            age_s=self.database_time.now() - due_since(row) if self.database_time.is_known else None,
            roll=self.random.random(),
        )
        self.set_back(
            Setback(
                row,
                verdict.aside,
                verdict.holds,
                verdict.delay_s,
                verdict.attempts,
                verdict.failure,
                failed.error,
                failed.exchange,
                failed.routing_key,
            )
        )

    def admit(self, rows: Sequence[Row], known_until: int | None = None) -> int:
        """Take rows into memory, those that may be held to the test; how many were news.

        `known_until`: for rows released from aside, the last settlement that their query could see.
        """
        before = len(self.chains)
        self.test(self.chains.admit(rows, known_until))
        self.to_publish.set()
        return len(self.chains) - before

    def note_holding(self, row: Row, followers: Sequence[Row]) -> None:
        """These hold their key from the next settlement on."""
        self.chains.note_holding(row, self.decisions.serial)
        for follower in followers:
            self.chains.note_holding(follower, self.decisions.serial)

    def lose_leases(self, shards: Sequence[int], *, seen: str) -> None:
        """These leases are gone, as a renewal, a claim or a settlement has shown. One line, not one a shard: they mostly go
        together."""
        for shard in shards:
            self.lose_shard(shard)
        if shards:
            self.metrics.lease_lost += len(shards)
            self.log.warning("leases_lost", shards=len(shards), seen=seen)

    def lose_shard(self, shard: int) -> None:
        """The lease is gone: forget the shard; what is in flight becomes orphans (P3)."""
        self.leases.drop(shard)
        self.reading.drop_shard(shard)
        self.chains.drop_shard(shard)
        self.note_room()
        self.claimed = [claim for claim in self.claimed if claim.shard != shard]

    def lose_sessions(self) -> None:
        """All sessions are closed: unread and unpublished is void, decisions of `sent` stay (R5, S3).

        Other decisions are dropped with their rows: whether they were written shows when the row is read again.
        """
        self.leases.suspend()
        self.reading.reset()
        self.claimed.clear()
        decisions = self.decisions
        undecided = [setback.row for setback in decisions.setbacks]
        undecided += decisions.followers + decisions.tested + decisions.scheduled + self.reread
        self.reread = []
        self.decisions = Decisions(serial=decisions.serial + 1, sent=decisions.sent)
        self.chains.finish(undecided)
        self.chains.drop_unpublished()
        for row in self.chains.rows():
            # The heap address may belong to another row after a crash; identity is seq and id.
            row.ctid = None
        self.next_due_at = None
