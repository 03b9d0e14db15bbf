"""Reads ahead: checks, pages, bodies, due rows; and sleeps by the doorbell when there is nothing.

Owns the reader's session (R1-R4, H4, H6 of `docs/protocol.md`; the doorbell of `docs/design.md`). Reads while there
is room in memory, and never more than the bounds of rows and bytes (I6).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence

from relay.core.batch import Batch
from relay.core.failures import Failure
from relay.core.ladder import reconnect_backoff
from relay.core.ports.broker import Rejection
from relay.core.ports.outbox import DUE_INLINE_BYTES, Armed, Claim
from relay.engine import Engine
from relay.errors import DatabaseRefused, RowUnreadable, StatementTooSlow
from relay.housekeeping import BACKLOG_INTERVAL_S, Housekeeping
from relay.keeper import Keeper
from relay.message import Aside, Row, State

CHECK_INTERVAL_S = 0.05
"""Twenty checks a second under traffic cost eight busy writers nothing measurable."""

RECHECK_INTERVAL_S = 0.001
"""While a writer is listed that has no xid yet, pages stop at the last check (R3) and fresh rows wait for the next: that
comes so soon, and doubles to the usual interval while the writer stays as it is."""

WRITER_AGE_SHARE = 0.125
"""A writer that inserted before the doorbell was armed does not ring. It keeps the bell from being armed, and is looked at again after
such a part of the time for which it has been open: its rows wait for no more than that beside it."""

POLL_MIN_S = 0.001
POLL_MAX_S = 0.01
"""After a row the relay polls so often, backing off to the second, until it arms the doorbell; and not sooner again than
pages take, or polling would eat up what a busy machine has left. The quicker of two counts: a single slow one is chance."""

TIMER_STEP_S = 0.001
"""A loop's timers go by whole milliseconds. Less than half of one is no wait, but turns of the loop that find nothing."""

ARM_AFTER_S = 0.1
ARM_WAIT_S = 0.05
"""How long one try for the doorbell's lock may wait behind a writer that did not ring."""

ARM_RETRY_S = 0.5
"""After a try in vain: sooner than a long poll interval, for nothing rings meanwhile."""

LISTEN_S = 5.0
"""While another relay has the lock: whether it still has is looked at so often. One that is killed does not ring."""

LOAD_RETRY_S = 1.0
LOAD_REST = 20.0
"""After a body that took too long the next such one is tried so many times as long later: a twentieth of the time for all of them."""

DUE_ROWS = 500
"""A statement, whose look at what is in memory already costs the same for few."""

DUE_RETRY_S = 0.05
FOLLOWER_ROWS = 200
FOLLOWER_ROWS_EACH = 100
"""Held rows that are loaded behind due ones, in all and a key: enough for a key to go on while the next are asked for."""

POLICY_SPARED_MAX = 1000
"""With more rows that refuse it the shards are read all the same: the rest keeps the policy under which it was parked."""

POLICY_ROWS = 2000
"""Parked rows a statement."""

REFUSALS_MAX = 20
LOAD_ROWS = 100
"""A statement; after one that was refused an eighth of its rows, in the end the one at fault alone."""
_NEVER = float("-inf")


class Reader:
    """One life of the sessions: made anew with them."""

    def __init__(self, engine: Engine, keeper: Keeper) -> None:
        self._engine = engine
        self._keeper = keeper
        self._last_news_at = engine.clock.now()
        self._last_check_at = _NEVER
        self._poll_s = POLL_MIN_S
        self._next_poll_at = _NEVER
        self._page_took_s = self._page_took_before_s = 0.0
        self._recheck_s = RECHECK_INTERVAL_S
        self._must_check = True
        self._has_rung = False
        self._is_armed = False
        self._is_listening = False
        """Inserts ring: the lock is ours, or another relay's."""
        self._next_arm_at = _NEVER
        self._listens_until = _NEVER
        self._housekeeping = Housekeeping(engine)
        self._turns = 0
        self._waits_for_room = False
        """Memory is full, of rows or of bodies: nobody looks for news."""
        self._has_load_room = True
        """Whether the last large body that was wanted fitted in."""
        self._load_rows_max = LOAD_ROWS
        self._policy_batch = Batch(POLICY_ROWS)
        self._policy_spared: set[int] = set()
        """Seqs of parked rows that the database does not let have our policy."""
        self._slow: dict[int, Row] = {}
        """Rows whose bodies took too long, by seq; the first of them is tried next, at `_slow_at`."""
        self._slow_at = _NEVER
        self._has_looked = False
        """A check or a page was answered in this turn."""

    def on_ring(self) -> None:
        """An insert rang, an operator's command, or another relay that woke."""
        self._has_rung = True
        self._engine.note_due(0.0)
        self._engine.to_read.set()

    async def run(self) -> None:
        """Until the sessions are lost; raises DatabaseLost."""
        engine = self._engine
        refusals = 0
        while True:
            self._has_looked = False
            try:
                wait_s = await self._turn()
                refusals = 0
                if self._has_looked:
                    self._note_read()
                await self._rest(wait_s)
            except DatabaseRefused as error:
                engine.reading.void_page()
                refusals += 1
                self._note_refused(error)
                if refusals >= REFUSALS_MAX:
                    raise
                await engine.clock.sleep(reconnect_backoff(refusals, engine.random.random()))

    def _note_refused(self, error: DatabaseRefused) -> None:
        """What is due is not known while nothing can be read: for longer than due rows may go without a confirm, and the relay is
        not ready (I8), through all the sessions that are opened meanwhile."""
        engine = self._engine
        if engine.reading_refused_at is None:
            engine.reading_refused_at = engine.clock.now()
            engine.log.warning("reading_refused", error=error)
        if engine.clock.now() - engine.reading_refused_at >= engine.settings.confirm_timeout_s:
            engine.readiness.add("reading", error.message)

    def _note_read(self) -> None:
        engine = self._engine
        if engine.reading_refused_at is not None:
            engine.reading_refused_at = None
            engine.readiness.remove("reading")
            engine.log.info("reading_resumed")

    async def _rest(self, wait_s: float) -> None:
        """Until something wakes it, or for so long. Over a long poll interval the chores go on, and the look at open
        writers: their gauges would stand there as if fresh (I8)."""
        engine = self._engine
        until = engine.clock.now() + wait_s
        while wait_s > BACKLOG_INTERVAL_S:
            if await engine.to_read.wait(BACKLOG_INTERVAL_S):
                return
            await self._housekeeping.turn()
            if engine.reading.cursors and not engine.is_paused:
                await self._check(engine.clock.now())
            wait_s = until - engine.clock.now()
        await engine.to_read.wait(max(0.0, wait_s))

    async def _turn(self) -> float:
        """One look at everything; returns how long to wait for a signal."""
        if self._has_rung:
            self._wake()
        wait_s = await self._look()
        if self._is_armed and (self._engine.is_stopping or not self._is_idle):
            # Awake, by a ring or a row: inserts need not ring any more. Reading comes first, for until then they do. Or on its
            # way out: the others hear of it.
            await self._disarm()
        return wait_s

    @property
    def _is_idle(self) -> bool:
        """Nothing was inserted for a while, as far as this relay's rows tell; a key's backlog may still be on its way."""
        return self._engine.clock.now() - self._last_news_at >= ARM_AFTER_S

    async def _look(self) -> float:
        engine = self._engine
        poll_interval_s = engine.settings.poll_interval_s
        if self._waits_for_room and not engine.is_full:
            self._last_news_at = engine.clock.now()
        self._waits_for_room = engine.is_full = False
        if engine.reread:
            await self._reread()
        if engine.is_stopping:
            return poll_interval_s
        if engine.claimed:
            await self._take_up()
        # Also of a relay without shards (nobody has any while the broker is away): its gauges tell what piles up.
        await self._housekeeping.turn()
        if not engine.reading.cursors or engine.is_paused:
            # Nobody looks for writers meanwhile.
            engine.metrics.late_commit_writers = engine.metrics.oldest_writer_age_seconds = None
            engine.metrics.backpressure.set("bytes", False, engine.clock.now())
            return poll_interval_s
        has_loaded = bool(engine.chains.wanted) and await self._load()
        now = engine.clock.now()
        has_news = False
        # A page that may read beyond S needs no check of now: rows come a round trip sooner.
        is_check_due = self._is_check_due(now) and not (engine.reading.must_go_on(self._readable()) and self._room())
        if is_check_due and (self._must_check or not self._polls()):
            await self._check(now)
            is_check_due = False
        room = self._room()
        readable = self._readable() if room else []
        shards, limit = self._shared(room, readable if self._polls() else engine.reading.behind(readable))
        has_read = bool(shards)
        if has_read:
            has_news = await self._read_page(shards, limit) > 0 and engine.reading.has_news
            # The publisher's turn: what was read goes out before the next statement does.
            await asyncio.sleep(0)
        if engine.next_due_at is not None and engine.next_due_at <= now:
            # After the page: an insert that rang waits for nothing else.
            await self._read_due()
        is_behind = has_read and bool(engine.reading.behind(self._readable()))
        if is_check_due:
            await self._check(now)
        self._waits_for_room = not readable or engine.is_short_of_bytes
        # What leaves memory wakes this loop, also where one shard alone is full.
        engine.is_full = self._waits_for_room or self._is_shard_full()
        if not readable:
            # Asked anew: what left memory during a statement has woken nobody.
            has_room = bool(self._room() and self._readable())
            return 0.0 if has_loaded or has_room else min(poll_interval_s, self._load_wait_s())
        if has_loaded or is_behind:
            # Not silence, however long ago the last row came.
            self._last_news_at = engine.clock.now()
        wait_s = await self._next_wait(has_news, has_read)
        return 0.0 if has_loaded or is_behind else wait_s

    def _polls(self) -> bool:
        """Whether a page may find what no check knows of, and it is time for one: not whenever something wakes us."""
        is_time = self._engine.clock.now() >= self._next_poll_at - TIMER_STEP_S / 2
        return is_time and not self._is_idle and self._engine.reading.may_read_beyond()

    def _is_check_due(self, now: float) -> bool:
        return self._must_check or now >= self._last_check_at + self._check_interval_s()

    def _check_interval_s(self) -> float:
        engine = self._engine
        interval_s = min(engine.settings.poll_interval_s, BACKLOG_INTERVAL_S)
        if not self._is_idle:
            interval_s = min(interval_s, CHECK_INTERVAL_S)
        elif not self._is_listening and (age_s := engine.reading.newest_writer_s) is not None:
            interval_s = min(interval_s, max(CHECK_INTERVAL_S, WRITER_AGE_SHARE * age_s))
        if not engine.reading.may_read_beyond():
            interval_s = min(interval_s, self._recheck_s)
        return interval_s

    async def _check(self, now: float) -> None:
        engine = self._engine
        reading = engine.reading
        reading.on_check(await self._keeper.check())
        self._has_looked = True
        is_free = reading.may_read_beyond()
        self._recheck_s = RECHECK_INTERVAL_S if is_free else min(2 * self._recheck_s, CHECK_INTERVAL_S)
        self._must_check = False
        self._last_check_at = now
        engine.metrics.late_commit_writers = reading.open_writers
        engine.metrics.oldest_writer_age_seconds = reading.oldest_writer_s
        engine.metrics.newest_seq = reading.last_seq

    async def _next_wait(self, has_news: bool, has_read: bool) -> float:
        engine = self._engine
        now = engine.clock.now()
        poll_interval_s = engine.settings.poll_interval_s
        if has_news:
            self._last_news_at = now
            self._poll_s = POLL_MIN_S
            # A row that came without a ring: whoever held the lock may be gone.
            self._is_listening = False
        if self._is_idle:
            wait_s = poll_interval_s
            if engine.reading.open_writers:
                wait_s = min(wait_s, max(0.0, self._last_check_at + self._check_interval_s() - now))
            # Who was rung, and was idle again before it had looked at all, is armed and must look once more.
            if self._can_arm and not (self._is_armed and self._is_listening):
                if now >= self._arms_at:
                    # Whoever inserted before the lock was granted did not ring: read once more. Or, where it was not granted, see who
                    # is in the way.
                    await self._arm()
                    return 0.0
                wait_s = min(wait_s, max(0.0, self._arms_at - engine.clock.now()))
        else:
            if has_read:
                page_took_s = min(self._page_took_s, self._page_took_before_s)
                self._next_poll_at = now + min(max(self._poll_s, page_took_s), POLL_MAX_S)
                self._poll_s = min(self._poll_s * 1.5, POLL_MAX_S)
            if engine.reading.may_read_beyond():
                wait_s = max(0.0, self._next_poll_at - now)
            else:
                # Nothing above S can be read before the next check.
                wait_s = max(0.0, self._last_check_at + self._recheck_s - now)
        # A walk has its own pace: a page a poll would take minutes over a hundred thousand rows aside.
        next_at = min(self._housekeeping.walks_at, math.inf if engine.next_due_at is None else engine.next_due_at)
        return min(wait_s, max(0.0, next_at - now), self._load_wait_s(), poll_interval_s)

    # ------------------------------------------------------------ the doorbell

    @property
    def _can_arm(self) -> bool:
        info = self._engine.info
        return info is not None and info.is_direct and info.has_doorbell

    @property
    def _arms_at(self) -> float:
        """When to try for the lock, or to look whether another one still has it."""
        return self._listens_until if self._is_listening else self._next_arm_at

    async def _arm(self) -> None:
        engine = self._engine
        armed = await engine.outbox.arm(min(ARM_WAIT_S, engine.settings.poll_interval_s))
        if armed is Armed.TIMED_OUT:
            # Only then: whoever was armed and woke arms again after the next silence, or a row every now and then would
            # wait for the retry each time.
            self._next_arm_at = engine.clock.now() + ARM_RETRY_S
        self._listens_until = engine.clock.now() + LISTEN_S
        self._is_armed = armed is Armed.GRANTED
        self._is_listening = armed is not Armed.TIMED_OUT
        self._must_check = True

    async def _disarm(self) -> None:
        self._is_armed = self._is_listening = False
        await self._engine.outbox.disarm()

    def _wake(self) -> None:
        # Cleared before anything is read, so that a ring during the read is not lost.
        self._has_rung = False
        self._last_check_at = _NEVER
        self._last_news_at = self._engine.clock.now()
        self._poll_s = POLL_MIN_S
        self._next_poll_at = _NEVER
        self._is_listening = False

    # ------------------------------------------------------------ reading

    async def _take_up(self) -> None:
        """New shards: first their parked rows get our policy, then they are read. What is held in them the walk tells,
        whose first page comes before that."""
        engine = self._engine
        self._add_shards([claim for claim in engine.claimed if not claim.has_other_policy])
        claims = list(engine.claimed)
        epochs = {claim.shard: claim.epoch for claim in claims}
        if epochs:
            if not await self._apply_policy(epochs):
                engine.to_read.set()
                return
            engine.leases.on_policy(epochs)
            self._add_shards(claims)

    async def _apply_policy(self, epochs: Mapping[int, int]) -> bool:
        """Some rows of it; whether that was all. As many as go through in time, and not those that refuse it."""
        engine = self._engine
        began, rows = engine.clock.now(), self._policy_batch.rows
        try:
            applied = await engine.outbox.apply_policy(epochs, rows, list(self._policy_spared))
        except StatementTooSlow:
            self._policy_batch.too_slow(rows)
            raise
        self._policy_batch.took(engine.clock.now() - began)
        for each in applied.refused:
            self._policy_spared.add(each.seq)
            engine.log.warning("policy_refused", seq=each.seq, id=each.id, error=each.error)
        return applied.is_done or len(self._policy_spared) > POLICY_SPARED_MAX

    def _add_shards(self, claims: Sequence[Claim]) -> None:
        engine = self._engine
        if not claims:
            return
        for claim in claims:
            if claim not in engine.claimed:
                continue  # Lost or given away meanwhile.
            engine.claimed.remove(claim)
            engine.chains.holding.take_up(claim.shard)
            engine.reading.add_shard(claim.shard, claim.floor)
        self._housekeeping.begin_walk()
        engine.note_due(0.0)
        self._must_check = True
        # Whoever had them may have had the doorbell's lock too.
        self._is_listening = self._is_armed

    def _room(self) -> int:
        """How many rows to read, within the bounds of rows and bytes."""
        engine = self._engine
        settings = engine.settings
        chains = engine.chains
        room = settings.read_ahead_max - len(chains)
        inline_room = settings.bytes_max // 2 - (chains.bytes - chains.large_bytes)
        waits_for_bytes = inline_room < engine.inline_bytes or (bool(chains.wanted) and not self._has_load_room)
        engine.is_short_of_bytes = waits_for_bytes
        engine.metrics.backpressure.set("bytes", waits_for_bytes, engine.clock.now())
        # Many at once: a page costs the same for few. Sooner where nothing is ready, for what is read may be.
        if room < settings.read_ahead_max // (4 if chains.ready else 8):
            return 0
        return max(0, min(room, inline_room // engine.inline_bytes, engine.reading.rows_max))

    def _shared(self, room: int, shards: list[int]) -> tuple[list[int], int]:
        """Those of the shards to read now, and how many rows of each."""
        if len(shards) > room:
            shards = self._engine.reading.behind(shards) or shards
        if len(shards) > room:
            self._turns += 1
            at = self._turns * room % len(shards)
            shards = (shards[at:] + shards[:at])[:room]
        if not shards:
            return [], 0
        return shards, min(room // len(shards), self._shard_rows_max())

    def _shard_rows_max(self) -> int:
        """One hot key's shard may not fill the memory: cold keys flow beside it."""
        return max(1, self._engine.settings.read_ahead_max // 4)

    def _readable(self) -> list[int]:
        """Shards with room for a quarter of what they may have: few rows at a time would be a page every few."""
        engine = self._engine
        rows_max = self._shard_rows_max()
        rows_max -= rows_max // 4
        return [shard for shard in engine.reading.cursors if engine.chains.count(shard) < rows_max]

    def _is_shard_full(self) -> bool:
        """Whether there is more to read in a shard that has no room for it."""
        engine = self._engine
        readable = self._readable()
        if len(readable) == len(engine.reading.cursors):
            return False
        return bool(engine.reading.behind(set(engine.reading.cursors).difference(readable)))

    async def _read_page(self, shards: list[int], limit: int) -> int:
        engine = self._engine
        known_until = engine.applied_serial
        request = engine.reading.request(shards, limit, engine.inline_bytes, engine.chains.unknown(shards))
        started = engine.clock.now()
        page = await engine.outbox.page(request)
        self._has_looked = True
        took_s = engine.clock.now() - started
        self._page_took_before_s, self._page_took_s = self._page_took_s, took_s
        engine.metrics.claim_seconds.observe(took_s)
        rows = engine.reading.on_page(request, page)
        engine.reading.on_page_took(took_s)
        engine.metrics.rows_read += len(rows)
        if not request.probed:
            return self._admit(rows)
        probed = [row for row in rows if row.shard in request.probed]
        brought = self._admit([row for row in rows if row.shard not in request.probed])
        brought += self._admit([row for row in probed if row.seq not in page.blocked], known_until)
        blocked = engine.chains.admit_blocked(self._put_off([row for row in probed if row.seq in page.blocked]))
        engine.test(blocked)
        return brought + len(blocked)

    def _admit(self, rows: list[Row], known_until: int | None = None) -> int:
        """Rows as read from the table: those whose time has come. `known_until`: for rows that their query found free, the
        last settlement that it saw."""
        timely = self._put_off(rows)
        return self._engine.admit(timely, known_until) + len(rows) - len(timely)

    def _put_off(self, rows: list[Row]) -> list[Row]:
        """Rows before their time go aside as scheduled, whatever holds their keys (H6): one that is held goes when its key
        is free. Returns the others."""
        engine = self._engine
        dated = [row for row in rows if row.rare is not None and "available_at" in row.rare]
        if not dated:
            return rows
        now = engine.database_time.at_least()
        early = {row for row in dated if row.rare is not None and row.rare["available_at"] > now}
        engine.decisions.scheduled.extend(row for row in dated if row in early and engine.chains.admit_scheduled(row))
        engine.to_settle.set()
        return [row for row in rows if row not in early]

    async def _read_due(self) -> None:
        """Of the rows that are due those that are not here yet; a little beyond the bound of rows, so that those which cannot
        go do not keep out those that could."""
        engine = self._engine
        chains = engine.chains
        engine.next_due_at = None
        here = [row.seq for row in chains.rows() if row.aside is not None]
        limit = self._due_room(DUE_ROWS, engine.settings.read_ahead_max + DUE_ROWS, len(here))
        if limit <= 0:
            engine.note_due(DUE_RETRY_S)
            return
        known_until = engine.applied_serial
        asked_at = engine.clock.now()
        engine.reading.expect_rows()
        try:
            due = await engine.outbox.due(dict(engine.reading.cursors), limit, here)
        except DatabaseRefused:
            engine.note_due(0.0)
            raise
        brought = engine.admit(engine.reading.fresh(due.released), known_until)
        blocked = chains.admit_blocked(engine.reading.fresh(due.blocked))
        engine.test(blocked)
        brought += len(blocked)
        if due.has_more:
            # None of these was news: not at once.
            engine.note_due(0.0 if brought else DUE_RETRY_S)
        elif due.next_due_in_s is not None:
            # Counted from when it was asked.
            engine.note_due(max(due.next_due_in_s - (engine.clock.now() - asked_at), POLL_MAX_S))
        await self._read_followers(due.released, len(here))

    def _due_room(self, rows: int, rows_max: int, here: int) -> int:
        """How many rows aside may come, of at most so many, into a memory of so many; `here` are there already. They leave half of
        the read-ahead to ordinary rows: those of a full queue are due again faster than they go, without an end (I5)."""
        engine = self._engine
        bytes_left = engine.settings.bytes_max - engine.chains.bytes
        half = max(1, engine.settings.read_ahead_max // 2)
        # Rounded up: one row that does not quite fit passes, where bounds are small it is the only one that can.
        return min(rows, half - here, rows_max - len(engine.chains), -(-bytes_left // DUE_INLINE_BYTES))

    async def _read_followers(self, released: Sequence[Row], here: int) -> None:
        """Behind rows that were released alone a few of those that they hold: a round trip each would be slow (H4)."""
        engine = self._engine
        heads = [row for row in released if row.aside is Aside.DEFERRED and engine.chains.has_no_followers(row)]
        room = self._due_room(FOLLOWER_ROWS, engine.settings.read_ahead_max, here + len(released))
        limit = min(FOLLOWER_ROWS_EACH, room // len(heads)) if heads else 0
        if limit <= 0:
            return
        known_until = engine.applied_serial
        engine.reading.expect_rows()
        followers = await engine.outbox.followers(heads, dict(engine.reading.cursors), limit)
        engine.admit(engine.reading.fresh(followers), known_until)

    async def _reread(self) -> None:
        """Rows that somebody else changed under a decision of ours: their present state counts."""
        engine = self._engine
        rows = list(engine.reread)
        fresh = await engine.outbox.reload(rows)
        del engine.reread[: len(rows)]
        kept = {row.seq for row in rows if row.state is not State.FORGOTTEN}
        for row in rows:
            if row.aside is not None and row.seq in kept:
                # It comes back when it is due; what was loaded behind it must not go before that.
                engine.chains.drop_followers(row)
                engine.note_due(POLL_MAX_S)
        engine.chains.finish(rows)
        # A shard that is being given away takes no row in any more: the next owner reads it.
        self._admit([row for row in fresh if row.seq in kept and row.shard in engine.reading.cursors])

    async def _load(self) -> bool:
        """Fetch bodies of the rows that are next; false when there is no room for one."""
        engine = self._engine
        chains = engine.chains
        room = engine.settings.bytes_max // 2 - chains.large_bytes
        batch: list[Row] = []
        wanted = [row for row in chains.wanted.values() if row.state is State.READY]
        if self._slow:
            self._slow = {seq: row for seq, row in self._slow.items() if chains.wanted.get(seq) is row}
            is_time = engine.clock.now() >= self._slow_at
            wanted = list(self._slow.values())[:1] if is_time else [row for row in wanted if row.seq not in self._slow]
        for row in sorted(wanted, key=lambda r: r.seq)[: self._load_rows_max]:
            # A body larger than all the room passes alone; so does one that all others wait for.
            if row.size > room and (batch or (chains.large_bytes and chains.has_large_to_go())):
                break
            batch.append(row)
            room -= row.size
        self._has_load_room = bool(batch) or not wanted
        if not batch:
            return False
        began, asked = engine.clock.now(), sum(row.size for row in batch)
        try:
            gone = await engine.outbox.load(batch)
        except (RowUnreadable, StatementTooSlow) as error:
            self._on_load_refused(batch, error, engine.clock.now() - began)
            return False
        if sum(row.size for row in batch) > asked:
            # Sizes are guesses where a page looked into none (`raw_blind.sql`).
            self._load_rows_max = max(1, len(batch) // 2)
        else:
            self._load_rows_max = min(2 * self._load_rows_max, LOAD_ROWS)
        chains.finish(gone)
        missing = set(gone)
        chains.on_loaded(row for row in batch if row not in missing)
        engine.to_publish.set()
        return True

    def _on_load_refused(self, batch: Sequence[Row], error: DatabaseRefused, took_s: float) -> None:
        """Of several rows the one at fault is looked for. One that cannot be read is parked; one that takes too long, on a slow
        line, is tried again after a while. Neither keeps others waiting for much of the time (I5)."""
        engine = self._engine
        engine.to_read.set()
        row = batch[0]
        if len(batch) > 1:
            self._load_rows_max = max(1, len(batch) // 8)
        elif row.state is not State.READY:
            # Set aside, or lost with its shard, while it was asked for.
            return
        elif isinstance(error, RowUnreadable):
            engine.fail(Rejection(row, Failure.INVALID, f"the row cannot be read: {error.message}"))
        else:
            if not self._slow:
                engine.log.warning("load_refused", seq=row.seq, bytes=row.size, error=error)
            self._slow.pop(row.seq, None)
            self._slow[row.seq] = row
            self._slow_at = engine.clock.now() + LOAD_RETRY_S + LOAD_REST * took_s

    def _load_wait_s(self) -> float:
        """How long until a row whose body took too long is tried again."""
        return max(0.0, self._slow_at - self._engine.clock.now()) if self._slow else math.inf
