"""`FakeOutbox`: the outbox port over the fake PostgreSQL, statement by statement.

`wire.py` carries the calls, `settling.py` has the settler's; here stand the keeper's and the reader's.
"""

from __future__ import annotations

import json
import sys
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

from relay.core.ports.outbox import (
    Armed,
    Backlog,
    Check,
    Claim,
    Discarded,
    Due,
    Held,
    HeldKey,
    HeldPage,
    Page,
    PageRequest,
    Place,
    PolicyApplied,
    Purged,
    Renewal,
    Searched,
    Spared,
    Writer,
)
from relay.errors import DatabaseRefused
from relay.message import TEXTS_MAX, TEXTS_UNREAD, Aside, Key, Row

from .settling import Settling
from .tables import DbRelay, DbRow, DbShard, Session
from .wire import Statement, Wait, at_once


class FakeOutbox(Settling):
    """One relay's outbox."""

    # -------------------------------------------------------- the keeper's

    async def claim(self, shards_max: int) -> Sequence[Claim]:
        pid = self._keeper_pid()
        return await self._call("claim", "keeper", at_once(lambda: self._claim(shards_max, pid)), shards_max)

    def _is_claimable(self, shard: DbShard) -> bool:
        return (
            shard.owner is None
            or shard.leased_until < self.database.now()
            or not self.database.is_pid_alive(shard.owner_pid)
        )

    def _claim(self, shards_max: int, pid: int) -> Sequence[Claim]:
        database = self.database
        claims: list[Claim] = []
        for number, shard in database.shards.items():
            if len(claims) == shards_max:
                break
            if database.key_share[number] or number in database.exclusive or not self._is_claimable(shard):
                continue
            if shard.owner is not None:
                database.oracle.taken(number, shard.owner)
                if database.is_pid_alive(shard.owner_pid):
                    self._judge_run_out(number, shard.owner)
            last_seq = database.last_seq()
            is_void = shard.floor > 0 and last_seq < max(shard.floor, shard.last_seq)
            until = database.now() + database.options.lease_s
            is_same = shard.parked_hold == self.parked_holds
            floor, policy = 0 if is_void else shard.floor, self.parked_holds if is_same else None
            database.put_shard(number, DbShard(shard.epoch + 1, self.instance, pid, until, floor, last_seq, policy))
            self._grant(number)
            claims.append(Claim(number, shard.epoch + 1, floor, is_void, not is_same))
        self._commit()
        if claims:
            self._note(
                "claims",
                [f"{each.shard}@{each.epoch}>{each.floor}" for each in claims if self._has_rows(each.shard)],
            )
        return claims

    def _judge_run_out(self, shard: int, owner: str) -> None:
        """Where every statement answers in time."""
        options = self.database.options
        if options.slow_share == 0 and options.other_refusals == 0:
            self.database.oracle.run_out(shard, owner, self.database.loop.time(), options.lease_s)

    def _has_rows(self, shard: int) -> bool:
        return bool(self.database.pending[shard] or self.database.aside[shard])

    def _keeper_pid(self) -> int:
        """The backend that renews (L3)."""
        session = self._sessions.get("keeper")
        return -1 if session is None else session.pid

    def _grant(self, shard: int) -> None:
        database = self.database
        database.oracle.grant(self.instance, shard, database.loop.time() + database.options.lease_s)

    async def renew(self, held: Mapping[int, Held], *, available: bool) -> Renewal:
        pid = self._keeper_pid()
        return await self._call("renew", "keeper", at_once(lambda: self._renew(dict(held), available, pid)), held)

    def _renew(self, held: dict[int, Held], available: bool, pid: int) -> Renewal:
        database = self.database
        now = database.now()
        renewed = set()
        last_seq = database.last_seq()
        until = now + database.options.lease_s
        for number, mine in sorted(held.items()):
            shard = database.shards[number]
            if shard.owner != self.instance or shard.epoch != mine.epoch or number in database.exclusive:
                continue
            floor = self._floor(number, mine.floor)
            database.put_shard(
                number, DbShard(shard.epoch, shard.owner, pid, until, floor, last_seq, shard.parked_hold)
            )
            self._grant(number)
            renewed.add(number)
        database.put_relay(self.instance, DbRelay(now, available, pid))
        self._commit()
        mine_now = {
            number: (shard.epoch, shard.floor)
            for number, shard in database.shards.items()
            if shard.owner == self.instance
        }
        live = [
            each
            for each in database.relays.values()
            if each.heartbeat > now - database.options.lease_s and database.is_pid_alive(each.pid)
        ]
        due = [
            row.due_at
            for number in mine_now
            for row in database.aside[number].values()
            if row.aside in (Aside.DEFERRED, Aside.SCHEDULED) and row.due_at is not None and database.is_sound(row)
        ]
        return Renewal(
            renewed=frozenset(renewed),
            mine=mine_now,
            claimable=sum(
                1 for each in database.shards.values() if each.owner != self.instance and self._is_claimable(each)
            ),
            relays=sum(1 for each in live if each.is_available),
            is_paused=bool(database.meta["paused"]),
            database_time=now,
            next_due_in_s=min(due) - now if due else None,
        )

    def _floor(self, number: int, floor: int | None) -> int:
        """What the shard's floor becomes: it only rises, to S at most, and counts for nothing once S has fallen below it."""
        stored, last_seq = self.database.shards[number].floor, self.database.last_seq()
        if stored > last_seq:
            return 0
        if floor is None:
            return stored
        self._judge_floor(number, floor)
        return max(stored, min(floor, last_seq))

    def _judge_floor(self, shard: int, floor: int) -> None:
        """R5: nothing that is yet to be read, committed or not, may lie at or below a stored floor."""
        database = self.database
        if database.was_set_back:
            return
        for row in database.pending[shard].values():
            if row.seq <= floor and database.is_sound(row):
                database.oracle.blame(f"R5: {self.instance} stores floor {floor} of shard {shard} over {row.id}")
        for transaction in database.transactions.values():
            if not transaction.is_open:
                continue
            written = {row.seq for row in transaction.rows if row.shard != shard}
            over = [seq for seq in transaction.seqs if seq <= floor and seq not in written]
            if over:
                database.oracle.blame(
                    f"R5: {self.instance} stores floor {floor} of shard {shard} over open seqs {over}"
                )

    async def release(self, held: Mapping[int, Held]) -> frozenset[int]:
        return await self._call("release", "keeper", at_once(lambda: self._release(dict(held))), held)

    def _release(self, held: dict[int, Held]) -> frozenset[int]:
        database = self.database
        given, locked = [], []
        for number, mine in sorted(held.items()):
            shard = database.shards[number]
            if shard.owner == self.instance and shard.epoch == mine.epoch:
                if number in database.exclusive:
                    locked.append(number)
                    continue
                floor = self._floor(number, mine.floor)
                database.put_shard(
                    number, DbShard(shard.epoch, None, None, 0.0, floor, database.last_seq(), shard.parked_hold)
                )
                database.given_back(number)
                given.append(number)
        self._commit()
        self._note("releases", [each for each in given if self._has_rows(each)])
        return frozenset(locked)

    async def leave(self) -> None:
        return await self._call("leave", "keeper", at_once(self._leave))

    def _leave(self) -> None:
        database = self.database
        for number, shard in database.shards.items():
            if shard.owner == self.instance and number not in database.exclusive:
                given = DbShard(shard.epoch, None, None, 0.0, shard.floor, shard.last_seq, shard.parked_hold)
                database.put_shard(number, given)
                database.given_back(number)
        database.put_relay(self.instance, None)
        self._commit()

    async def check(self) -> Check:
        return await self._call("check", "keeper", self._check())

    def _check(self) -> Statement[Check]:
        database = self.database
        last_seq = database.last_seq()
        now = database.now()
        yield Wait(database.draw(database.options.check_gap))
        writers = [
            Writer(each.vxid, each.xid if each.is_xid_shown else None)
            for each in database.transactions.values()
            if each.is_locked
        ]
        return Check(last_seq, writers, now)

    # -------------------------------------------------------- the reader's

    def _row(self, row: DbRow, inline_bytes: int) -> Row:
        rare = None if row.available_at is None else {"available_at": row.available_at}
        headers, size = row.headers, len(row.payload)
        texts = len(headers or "") + (0 if rare is None else len(json.dumps(rare)))
        if texts > TEXTS_MAX:
            headers = f"{texts}{TEXTS_UNREAD}"
        else:
            size += texts
        is_loaded = size <= inline_bytes
        if is_loaded and texts > TEXTS_MAX:
            size += len(headers or "")
        return Row(
            row.shard,
            row.seq,
            row.id,
            row.event_type,
            ctid=row.ctid,
            aggregate_type=row.key[0] if row.key is not None else None,
            aggregate_id=row.key[1] if row.key is not None else None,
            payload=row.payload if is_loaded else None,
            size=size,
            is_loaded=is_loaded,
            occurred_at=row.created_at,
            created_at=row.created_at,
            rare=rare,
            headers=headers if is_loaded or texts > TEXTS_MAX else None,
            aside=row.aside,
            attempts=row.attempts,
        )

    async def page(self, request: PageRequest) -> Page:
        return await self._call("page", "reader", at_once(lambda: self._page(request)), request)

    def _page(self, request: PageRequest) -> Page:
        database = self.database
        self._maybe_refuse(database.options.page_refusals)
        ended = [
            number
            for number, xid, gone, asked in zip(request.numbers, request.xids, request.gone, request.asked, strict=True)
            if gone
            or (xid is None and asked)
            or (xid is not None and xid not in database.running and xid < database.meta["next_xid"])
        ]
        chosen = set(ended)
        low = min(
            (low for number, low in zip(request.numbers, request.lows, strict=True) if number in chosen),
            default=None,
        )
        rows: list[Row] = []
        blocked: set[int] = set()
        drawn = max(request.last_seq, database.last_seq())
        for shard, cursor in zip(request.shards, request.cursors, strict=True):
            above = cursor if low is None else min(cursor, low)
            pending = database.pending[shard]
            if not pending or not self._is_ours(shard) or not (above < drawn or request.beyond_drawn):
                continue
            found = sorted(
                (
                    row
                    for row in pending.values()
                    if above < row.seq <= above + request.span
                    and database.is_sound(row)
                    and (request.beyond or row.seq <= request.last_seq)
                ),
                key=lambda row: row.seq,
            )
            rows.extend(self._row(row, request.inline_bytes) for row in found[: request.limit])
            if shard in request.probed:
                blocked.update(row.seq for row in found[: request.limit] if database.has_blocker(row))
        if rows or ended:
            self._note("reads", f"{[row.id for row in rows]} S={request.last_seq} ended={ended}")
        return Page(ended, rows, blocked)

    def _is_ours(self, shard: int) -> bool:
        return self.database.shards[shard].owner == self.instance

    async def load(self, rows: Sequence[Row]) -> Sequence[Row]:
        found = await self._call("load", "reader", at_once(lambda: self._load(rows)), rows)
        gone = []
        for row, whole in zip(rows, found, strict=True):
            if whole is None:
                gone.append(row)
            else:
                row.payload, row.rare, row.headers = whole.payload, whole.rare, whole.headers
                row.size, row.is_loaded = whole.size, True
        return gone

    def _load(self, rows: Sequence[Row]) -> list[Row | None]:
        found = [self.database.rows.get((row.seq, row.id)) for row in rows]
        return [self._row(row, sys.maxsize) if row is not None and row.sent_at is None else None for row in found]

    async def reload(self, rows: Sequence[Row]) -> Sequence[Row]:
        return await self._call("reload", "reader", at_once(lambda: self._reload(rows)), rows)

    def _reload(self, rows: Sequence[Row]) -> Sequence[Row]:
        found = [self.database.rows.get((row.seq, row.id)) for row in rows]
        return [
            self._row(row, 0)
            for row in found
            if row and row.aside is None and row.sent_at is None and self.database.is_sound(row)
        ]

    async def due(self, cursors: Mapping[int, int], limit: int, here: Sequence[int] = ()) -> Due:
        return await self._call("due", "reader", at_once(lambda: self._due(dict(cursors), limit, set(here))), cursors)

    def _due(self, cursors: dict[int, int], limit: int, here: set[int]) -> Due:
        database = self.database
        now = database.now()
        waiting = [
            row
            for shard in cursors
            if self._is_ours(shard)
            for row in database.aside[shard].values()
            if row.aside in (Aside.DEFERRED, Aside.SCHEDULED) and row.due_at is not None and database.is_sound(row)
        ]
        due = [row for row in waiting if (row.due_at or 0.0) <= now and row.seq <= cursors[row.shard]]
        due = [row for row in due if row.seq not in here]
        due.sort(key=lambda row: (row.due_at or 0.0, row.seq))
        later = [row.due_at or 0.0 for row in waiting if (row.due_at or 0.0) > now]
        released: list[Row] = []
        blocked: list[Row] = []
        for row in due[:limit]:
            target = blocked if database.has_blocker(row) else released
            target.append(self._row(row, database.options.due_inline_bytes))
        if due:
            self._note("due", f"{[row.id for row in released]} blocked {[row.id for row in blocked]}")
        return Due(released, blocked, min(later) - now if later else None, has_more=len(due) >= limit)

    async def followers(self, heads: Sequence[Row], cursors: Mapping[int, int], limit: int) -> Sequence[Row]:
        statement = at_once(lambda: self._followers(heads, dict(cursors), limit))
        return await self._call("followers", "reader", statement, heads)

    def _followers(self, heads: Sequence[Row], cursors: dict[int, int], limit: int) -> Sequence[Row]:
        """H4: the next held rows, up to the first that is not held or lies above the cursor."""
        database = self.database
        found: list[Row] = []
        for head in heads:
            above = [row for row in database.holding_rows(head.key, head.shard) if row.seq > head.seq]
            for row in above[:limit]:
                if row.aside is not Aside.HELD or row.seq > cursors[row.shard]:
                    break
                found.append(self._row(row, database.options.due_inline_bytes))
        if found:
            self._note("follows", [row.id for row in found])
        return sorted(found, key=lambda row: row.seq)

    async def held_keys(self, shards: Sequence[int], after: Place | None, limit: int) -> HeldPage:
        statement = at_once(lambda: self._held_keys(shards, after, limit))
        return await self._call("held_keys", "reader", statement, (shards, after))

    def _held_keys(self, shards: Sequence[int], after: Place | None, limit: int) -> HeldPage:
        database = self.database
        limit = min(limit, database.options.held_page_rows)
        found = sorted(
            ((zlib.crc32(repr(row.key).encode()) % 4, row.seq), row)
            for aside in database.aside.values()
            for row in aside.values()
            if row.key is not None
        )
        looked_at = [(place, row) for place, row in found if after is None or place > after][:limit]
        keys: dict[tuple[int, int, Key], list[DbRow]] = {}
        for (hash_, _), row in looked_at:
            if row.holds and row.shard in shards and row.key is not None and database.is_sound(row):
                keys.setdefault((hash_, row.shard, row.key), []).append(row)
        page = [
            HeldKey(hash_, shard, key, rows[-1].seq, rows[0].aside is Aside.HELD)
            for (hash_, shard, key), rows in keys.items()
        ]
        if page:
            self._note("held", [(each.key[1], each.highest, each.is_lowest_held) for each in page])
        return HeldPage(page, looked_at[-1][0] if len(looked_at) >= limit else None)

    async def apply_policy(self, epochs: Mapping[int, int], limit: int, spared: Sequence[int] = ()) -> PolicyApplied:
        statement = at_once(lambda: self._apply_policy(dict(epochs), limit))
        return await self._call("apply_policy", "reader", statement, epochs)

    def _apply_policy(self, epochs: dict[int, int], limit: int) -> PolicyApplied:
        """A parked row stores whether it holds; an owner of another policy rewrites that. H3 follows the take-up."""
        database = self.database
        limit = min(limit, database.options.policy_rows)
        mine = [
            number
            for number, epoch in epochs.items()
            if (database.shards[number].owner, database.shards[number].epoch) == (self.instance, epoch)
        ]
        rows = [
            row
            for number in mine
            for row in database.aside[number].values()
            if row.aside is Aside.PARKED
            and row.failure_class not in ("expired", "unmarkable")
            and row.id not in database.row_locks
            and row.holds != (self.parked_holds and row.key is not None)
        ][:limit]
        for row in rows:
            database.updated(row, holds=self.parked_holds and row.key is not None)
        if len(rows) < limit:
            for number in mine:
                database.put_shard(number, replace(database.shards[number], parked_hold=self.parked_holds))
        self._commit()
        return PolicyApplied(len(rows) < limit)

    async def arm(self, wait_s: float) -> Armed:
        return await self._call("arm", "reader", self._arm(wait_s, self._sessions.get("reader")), wait_s)

    def _arm(self, wait_s: float, session: Session | None) -> Statement[Armed]:
        database = self.database
        if (database.bell_owner or session) is not session:
            return Armed.ELSEWHERE
        if session is None or database.bell_owner is session:
            return Armed.GRANTED
        database.bell_waiters.add(session)
        try:
            for _ in range(11):
                if database.bell_owner is None and not database.is_bell_held_by_writers():
                    database.bell_owner = session
                    return Armed.GRANTED
                yield Wait(wait_s / 10)
            return Armed.TIMED_OUT
        finally:
            database.bell_waiters.discard(session)

    async def disarm(self) -> None:
        return await self._call("disarm", "reader", at_once(self._disarm))

    def _disarm(self) -> None:
        database = self.database
        if database.bell_owner is not None and database.bell_owner.instance == self.instance:
            database.bell_owner = None
            database.ring(but=self.instance)

    async def purge(self, older_than_s: float, limit: int, spared: Sequence[int] = ()) -> Purged:
        return await self._call("purge", "reader", at_once(lambda: self._purge(older_than_s, limit)))

    def _purge(self, older_than_s: float, limit: int) -> Purged:
        database = self.database
        before = database.now() - older_than_s
        old = [
            row
            for row in database.rows.values()
            if row.sent_at is not None and row.sent_at < before and self._is_below_my_floor(row)
        ]
        for row in old[:limit]:
            database.delete_row(row)
        self._commit()
        return Purged(min(limit, len(old)), ())

    def _is_below_my_floor(self, row: DbRow) -> bool:
        shard = self.database.shards[row.shard]
        return shard.owner == self.instance and row.seq <= shard.floor

    async def search(self, positions: Sequence[tuple[int, int]], limit: int) -> Searched:
        return await self._call("search", "reader", at_once(lambda: self._search(positions, limit)), positions)

    def _search(self, positions: Sequence[tuple[int, int]], limit: int) -> Searched:
        """R5: an unsent row at or below its floor lowers it and unseats the owner."""
        database = self.database
        looked_at = 0
        reached: list[int | None] = []
        lowest: dict[int, int] = {}
        for number, above in positions:
            shard = database.shards[number]
            rows = sorted(
                (
                    row
                    for row in database.rows.values()
                    if row.shard == number and above < row.seq <= shard.floor and row.aside is None
                ),
                key=lambda row: row.seq,
            )
            rows = rows[:limit] if shard.owner == self.instance else []
            looked_at += len(rows)
            reached.append(rows[-1].seq if len(rows) >= limit else None)
            unsent = [row.seq for row in rows if row.sent_at is None and database.is_sound(row)]
            if unsent and database.is_shard_free(number):
                lowest[number] = min(unsent)
        for number, seq in lowest.items():
            if not database.was_set_back:
                database.oracle.blame(
                    f"R5: {self.instance} finds the unsent seq {seq} below the floor of shard {number}"
                )
            self._note("lowers", f"floor of shard {number} to {seq - 1}")
            database.unseat(number, seq - 1)
        self._commit()
        return Searched(reached, looked_at, {number: seq - 1 for number, seq in lowest.items()})

    async def discard_parked(self, older_than_s: float, limit: int, spared: Sequence[int]) -> Discarded:
        statement = self._discard_parked(older_than_s, limit, spared)
        return await self._call("discard_parked", "reader", statement, older_than_s)

    def _discard_parked(self, older_than_s: float, limit: int, spared: Sequence[int]) -> Statement[Discarded]:
        """O2: under the shards' locks, which exclude settlements and operators."""
        database = self.database
        before = database.now() - older_than_s

        def old() -> list[DbRow]:
            found = (
                row
                for row in database.rows.values()
                if row.aside is Aside.PARKED and row.parked_at is not None and row.parked_at < before
            )
            mine = [row for row in found if database.shards[row.shard].owner == self.instance]
            rows = [row for row in mine if row.seq not in spared and database.is_sound(row)]
            return sorted(rows, key=lambda row: (row.parked_at, row.seq))[:limit]

        shards = {row.shard for row in old()}
        yield from self._await_unlocked(dict.fromkeys(shards))
        waited = 0.0
        while any(database.key_share[shard] or shard in database.exclusive for shard in shards):
            if waited >= database.options.statement_timeout_s:
                raise DatabaseRefused("canceling statement due to lock timeout")
            yield Wait(0.001)
            waited += 0.001
        crashes = database.crashes
        database.exclusive |= shards
        try:
            yield Wait(database.latency(), by_client=True)
            rows = [row for row in old() if row.shard in shards]
            is_full = len(rows) >= limit
            refused = [Spared(row.seq, row.id, "refused") for row in rows if row.id in database.unmarkable]
            rows = [row for row in rows if row.id not in database.unmarkable and row.id not in database.row_locks]
            for row in rows:
                database.delete_row(row)
                database.oracle.retired(self.instance, row.id, database.now() - (row.parked_at or 0.0), older_than_s)
            promoted = database.promote((row.shard, row.key) for row in rows)
            self._commit()
        finally:
            if database.crashes == crashes:
                database.exclusive -= shards
        if rows:
            self._note("discards", [row.id for row in rows])
        return Discarded(len(rows), refused, promoted.unpromoted, is_full)

    async def backlog(self, starts: Mapping[int, int] | None = None) -> Backlog:
        return await self._call("backlog", "reader", at_once(self._backlog))

    def _backlog(self) -> Backlog:
        database = self.database
        rows = database.unsent()
        early = [row for row in rows if row.aside is Aside.SCHEDULED and (row.due_at or 0.0) > database.now()]
        pending = [row for row in rows if row.aside is not Aside.PARKED and row not in early]
        asides = [row.aside for row in rows]
        held = [row for row in rows if row.aside is Aside.HELD]
        return Backlog(
            backlog_rows=len(pending),
            is_estimated=False,
            oldest_pending_age_s=max((database.now() - row.created_at for row in pending), default=None),
            deferred_rows=asides.count(Aside.DEFERRED) + len(early),
            parked_rows=asides.count(Aside.PARKED),
            held_rows=len(held),
            held_keys=len({row.key for row in held}),
            scheduled_rows=len(early),
            newest_seq=database.last_seq(),
        )
