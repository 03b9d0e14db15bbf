"""What the reader does beside reading, each chore at its own interval and in small steps: the gauges of the table, the
purge of marked rows, the retention of parked ones, the search for rows that a floor has passed, the walk over the rows
aside for the keys that are held.

Runs on the reader's session. A chore that the server refuses (too slow, locked) stops no reading: it is put off, for
longer each time.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import Final

from relay.core.batch import Batch
from relay.core.holding import Walk
from relay.engine import Engine
from relay.errors import DatabaseRefused, StatementTooSlow

BACKLOG_INTERVAL_S: Final = 5.0
BACKLOG_BREATH: Final = 50.0
"""The gauges of a deep backlog take a tenth of a second: of each relay's session they get a fiftieth at most."""

PURGE_INTERVAL_S: Final = 10.0
PURGE_ROWS: Final = 1000

DISCARD_INTERVAL_S: Final = 10.0
DISCARD_ROWS: Final = 200
"""Parked rows a transaction, for which settlements of their shards wait: 10 to 30 ms."""

DISCARD_BREATH: Final = 4.0
"""Between two full batches the shards are left alone for so many times as long as the first one took."""

SPARED_MAX: Final = 1000
"""Rows, marked or parked, that the database refuses to delete are remembered so far; with more of them the retention rests."""

SEARCH_INTERVAL_S: Final = 10.0
"""In which all shards have their turn."""

SEARCH_SHARDS_MAX: Final = 8
"""A statement. It visits each row that was deleted since the shard's last turn, and nothing is read meanwhile: at 15,000 rows a
second 20 ms where the table is in memory, and ten times as much where it is not."""

SEARCH_SLOW_S: Final = 0.08
"""Longer than that: half as many shards the next time, down to one. A quarter of a second is all that it is given."""

SEARCH_ROWS: Final = 40
"""A position: with 64 shards about 250 rows a second."""

SEARCH_BREATH: Final = 20.0
"""Where it takes long (rows that an old snapshot keeps from being vacuumed), the next one waits for so many times as long."""

HELD_INTERVAL_S: Final = 30.0
"""Between two walks while shards hold more keys than are remembered."""

HELD_ROWS: Final = 1000
"""Rows aside that a page of the walk looks at: about 8 ms."""

HELD_REST: Final = 20.0
"""Where a walk takes long, the next one begins after so many times as long: pages can do without."""

HELD_BREATH: Final = 4.0
HELD_PAUSE_S_MIN: Final = 0.01
"""Between two pages reading goes on for so many times as long as the first one took, and at least so long."""

REFUSED_INTERVAL_S_MAX: Final = 600.0
_BOTTOM: Final = -(2**63)
_NEVER: Final = float("-inf")

Work = Callable[[], Awaitable[float | None]]


class _Chore:
    """`work` returns after how many seconds it wants its next turn; none: at its interval. `needs_shards`: it is for those
    that are ours."""

    def __init__(self, refused_event: str, interval_s: float, work: Work, *, needs_shards: bool = True) -> None:
        self.refused_event = refused_event
        self.interval_s = interval_s
        self.work = work
        self.needs_shards = needs_shards
        self.next_at = _NEVER
        self.refusals = 0

    def put_off(self, now: float) -> None:
        self.refusals += 1
        self.next_at = now + min(self.interval_s * 2 ** min(self.refusals - 1, 10), REFUSED_INTERVAL_S_MAX)


class Housekeeping:
    """One life of the sessions: made anew with them."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._held = _Chore("held_keys_refused", HELD_INTERVAL_S, self._look_at_held)
        self._chores = [
            self._held,
            _Chore("backlog_unreadable", BACKLOG_INTERVAL_S, self._observe_backlog, needs_shards=False),
            _Chore("search_refused", SEARCH_INTERVAL_S, self._search),
            _Chore("purge_refused", PURGE_INTERVAL_S, self._purge),
        ]
        if engine.settings.parked_retention_s is not None:
            self._chores.append(_Chore("retention_refused", DISCARD_INTERVAL_S, self._discard_parked))
        self._searched: dict[int, int] = {}
        """Per shard, up to where the rows below the floor have been looked at in this round."""
        self._search_shards = SEARCH_SHARDS_MAX
        """So many have the next turn."""
        self._search_after = -1
        """The shard that was searched last; the next turn is that of those above."""
        self._rows_below = 0
        """Rows that were seen below floors since the lowest shard had its turn."""
        self._has_marked = engine.settings.marks_sent
        """Whether there may be marked rows to purge."""
        self._purge_batch = Batch(PURGE_ROWS)
        self._kept: set[int] = set()
        """Seqs of marked rows that the database refuses to delete."""
        self._spared: set[int] = set()
        """The same of parked ones."""
        self._walk: Walk | None = None
        self._walk_began = _NEVER
        self._is_walk_told = False
        """Whether the log has what was found since shards were taken up last."""

    def begin_walk(self) -> None:
        """Shards were taken up: look at all that is held, from the beginning, now."""
        self._walk = None
        self._is_walk_told = False
        self._held.next_at = _NEVER

    @property
    def walks_at(self) -> float:
        """When the next page of the walk is due, boot-time seconds; infinity: none is under way."""
        return math.inf if self._walk is None else self._held.next_at

    async def turn(self) -> None:
        """Whatever is due; raises DatabaseLost."""
        engine = self._engine
        if not engine.database_time.is_known:
            return  # The keeper's first renewal is on its way.
        for chore in self._chores:
            now = engine.clock.now()
            if now < chore.next_at or (chore.needs_shards and not engine.reading.cursors):
                continue
            chore.next_at = now + chore.interval_s
            try:
                again_s = await chore.work()
            except DatabaseRefused as error:
                if not chore.refusals:
                    engine.log.warning(chore.refused_event, error=error)
                chore.put_off(engine.clock.now())
                continue
            chore.refusals = 0
            if again_s is not None:
                chore.next_at = engine.clock.now() + again_s

    async def _look_at_held(self) -> float | None:
        """A page of the walk that is under way, or of a new one where a shard is not known completely (H2, H3)."""
        engine = self._engine
        began = engine.clock.now()
        if self._walk is None:
            shards = [shard for shard in engine.chains.holding.incomplete if shard in engine.reading.cursors]
            if not shards:
                return None
            self._walk = Walk(shards, engine.applied_serial, engine.settings.held_keys_max)
            self._walk_began = began
        walk = self._walk
        engine.promote(walk.take(await engine.outbox.held_keys(walk.shards, walk.after, HELD_ROWS)))
        if walk.is_over:
            self._walk = None
            engine.chains.holding.end(walk)
            took_s = engine.clock.now() - self._walk_began
            if walk.keys and not self._is_walk_told:
                # Until now pages asked about each row; where a shard holds too many keys they go on.
                self._is_walk_told = True
                asked = len(engine.chains.holding.incomplete)
                engine.log.info("held_keys_known", keys=walk.keys, shards_asked=asked, seconds=round(took_s, 1))
            return max(HELD_INTERVAL_S, HELD_REST * took_s)
        return max(HELD_PAUSE_S_MIN, HELD_BREATH * (engine.clock.now() - began))

    async def _observe_backlog(self) -> float:
        engine = self._engine
        metrics = engine.metrics
        began = engine.clock.now()
        try:
            backlog = await engine.outbox.backlog(self._starts())
        except DatabaseRefused:
            metrics.forget_backlog()
            raise
        metrics.backlog_rows = backlog.backlog_rows
        metrics.backlog_estimated = backlog.is_estimated
        age_s = backlog.oldest_pending_age_s
        # Nothing waits: 0. Something waits whose time is no time (infinity): nobody knows. A time to come is no age.
        no_age_s = None if backlog.backlog_rows else 0.0
        metrics.oldest_pending_age_seconds = no_age_s if age_s is None else max(0.0, age_s)
        metrics.deferred_rows = backlog.deferred_rows
        metrics.parked_rows = backlog.parked_rows
        metrics.held_keys = backlog.held_keys
        metrics.newest_seq = backlog.newest_seq
        metrics.backlog_observed_timestamp_seconds = engine.database_time.now()
        return max(BACKLOG_INTERVAL_S, BACKLOG_BREATH * (engine.clock.now() - began))

    def _starts(self) -> dict[int, int]:
        """Up to where nothing of our shards waits. A listed writer keeps a floor below, but its rows are not there yet; the
        moment between its commit and our reading of it does not matter to a gauge."""
        lowest = self._engine.chains.lowest_unsettled()
        return {
            shard: cursor if shard not in lowest else min(cursor, lowest[shard] - 1)
            for shard, cursor in self._engine.reading.cursors.items()
        }

    async def _purge(self) -> float | None:
        """Marked rows; under `delete` those that a former configuration left."""
        engine = self._engine
        if not self._has_marked or len(self._kept) >= SPARED_MAX:
            return None
        began, limit = engine.clock.now(), self._purge_batch.rows
        try:
            purged = await engine.outbox.purge(engine.settings.retention_s, limit, list(self._kept))
        except StatementTooSlow:
            self._purge_batch.too_slow(limit)
            raise
        self._purge_batch.took(engine.clock.now() - began)
        for each in purged.refused:
            self._kept.add(each.seq)
            engine.log.warning("purge_spared", seq=each.seq, id=each.id, error=each.error)
        if purged.rows:
            engine.log.debug("purged", rows=purged.rows)
        return 0.0 if purged.rows >= limit or purged.refused else None

    async def _search(self) -> float:
        """R5: a few shards a turn; each from the oldest row on, and on from where the last look ended, round and round below the
        floors."""
        engine = self._engine
        began = engine.clock.now()
        mine = sorted(engine.reading.cursors)
        left = [shard for shard in mine if shard > self._search_after] or mine
        shards = left[: self._search_shards]
        is_last = len(shards) == len(left)
        # For where it is refused: fewer the next time, and the others do not wait for those that cannot be searched.
        self._search_shards = max(1, len(shards) // 2)
        self._search_after = -1 if is_last else shards[-1]
        positions = [(shard, _BOTTOM) for shard in shards]
        positions += [(shard, self._searched[shard]) for shard in shards if shard in self._searched]
        searched = await engine.outbox.search(positions, SEARCH_ROWS)
        for (shard, _), reached in zip(positions, searched.reached, strict=True):
            if reached is None:
                self._searched.pop(shard, None)
            else:
                self._searched[shard] = reached
        self._rows_below += searched.rows
        if self._rows_below or is_last:
            self._has_marked = engine.settings.marks_sent or self._rows_below > 0
        if is_last:
            self._rows_below = 0
        if searched.lowered:
            engine.log.warning(
                "floors_lowered",
                shards=len(searched.lowered),
                lowest_seq=min(searched.lowered.values()) + 1,
                reason="rows that were never sent lay below: a setval, or rows put back",
            )
        took_s = engine.clock.now() - began
        if took_s < SEARCH_SLOW_S:
            is_quick = 2 * took_s < SEARCH_SLOW_S
            self._search_shards = min(SEARCH_SHARDS_MAX, 2 * len(shards)) if is_quick else len(shards)
        return max(SEARCH_INTERVAL_S * len(shards) / len(mine), SEARCH_BREATH * took_s)

    async def _discard_parked(self) -> float | None:
        """O2."""
        engine = self._engine
        older_than_s = engine.settings.parked_retention_s
        assert older_than_s is not None, "no retention, no chore"
        if len(self._spared) >= SPARED_MAX:
            return None
        began = engine.clock.now()
        discarded = await engine.outbox.discard_parked(older_than_s, DISCARD_ROWS, list(self._spared))
        for each in discarded.refused:
            self._spared.add(each.seq)
            engine.log.warning("discard_refused", seq=each.seq, id=each.id, error=each.error)
        if discarded.rows:
            engine.metrics.rows_discarded += discarded.rows
            engine.log.info("parked_discarded", rows=discarded.rows, reason="retention")
            # Rows that were held behind them are due by now.
            engine.note_due(0.0)
        engine.promote(discarded.unpromoted)
        if not discarded.is_full:
            return None
        return max(0.1, DISCARD_BREATH * (engine.clock.now() - began))
