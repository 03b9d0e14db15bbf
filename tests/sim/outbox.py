"""`FakeOutbox`: the outbox port over the fake PostgreSQL, call by call.

A call is a generator that runs on the server's side: it acts at an instant and yields what it waits for.
It starts a latency after the call, its answer arrives a latency after its end. A session that dies in
between rolls back what is not committed; an answer that is on its way may still arrive, or be lost
(an unknown outcome). Statements that were sent before a client lost its connection may run on for a
while (`session_linger`). Tests stop a call before, between or after its stages with `stop`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from relay.core.ports import (
    Armed,
    Backlog,
    Check,
    Claim,
    Due,
    Held,
    OutboxInfo,
    Page,
    PageRequest,
    Renewal,
    Setback,
    Settled,
    Settlement,
    Writer,
)
from relay.errors import DatabaseLost, DatabaseRefused, DatabaseUnavailable, SchemaMissing
from relay.message import Aside, Key, PayloadType, Row

from .database import Database, DbRelay, DbRow, DbShard, Session
from .loop import OUTSIDE, Life, Process

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Wait:
    """What a running statement yields. `by_client`: the next stage needs a message from the client."""

    seconds: float
    by_client: bool = False


Statement = Generator[Wait, None, T]


def at_once(act: Callable[[], T]) -> Statement[T]:
    """A statement of one stage."""
    yield from ()
    return act()


def ids(rows: Sequence[Row]) -> list[str]:
    return [row.id for row in rows]


@dataclass(slots=True, eq=False)
class Stop:
    """A breakpoint of a test: `await reached()`, then `resume()`. Catches one call, then lets others pass."""

    name: str
    at: str
    instance: str | None
    when: Callable[[Call], bool] | None = None
    hit: asyncio.Event = field(default_factory=asyncio.Event)
    call: Call | None = None
    go_on: Callable[[], None] | None = None

    async def reached(self, timeout_s: float = 600.0) -> Call:
        async with asyncio.timeout(timeout_s):
            await self.hit.wait()
        assert self.call is not None
        return self.call

    def resume(self) -> None:
        assert self.go_on is not None, "not reached"
        self.go_on()


@dataclass(slots=True, eq=False)
class Call:
    """One call on its way. `argument` and `result` are for tests to look at."""

    name: str
    instance: str
    session: Session
    future: asyncio.Future[Any]
    statement: Statement[Any]
    argument: object = None
    stages: int = 0
    result: object = None
    is_applied: bool = False


class Network:
    """The calls of all relays to one database, and the tests' stops."""

    def __init__(self) -> None:
        self.stops: list[Stop] = []
        self.stalled_until = 0.0

    def stop(
        self,
        name: str,
        *,
        at: str = "before",
        relay: str | None = None,
        when: Callable[[Call], bool] | None = None,
    ) -> Stop:
        """Stop the next call of this name (of that relay): `before`, `between` its stages, or `after`."""
        assert at in ("before", "between", "after"), at
        stop = Stop(name, at, relay, when)
        self.stops.append(stop)
        return stop

    def caught(self, call: Call, at: str, go_on: Callable[[], None]) -> bool:
        for stop in self.stops:
            if (
                stop.name == call.name
                and stop.at == at
                and stop.instance in (None, call.instance)
                and (stop.when is None or stop.when(call))
            ):
                self.stops.remove(stop)
                stop.call, stop.go_on = call, go_on
                stop.hit.set()
                return True
        return False


class FakeOutbox:
    """One relay's sessions. `parked_holds` is the relay's RELAY_ON_PARKED."""

    def __init__(
        self,
        database: Database,
        network: Network,
        instance: str,
        process: Process,
        *,
        parked_holds: bool = True,
        has_doorbell: bool = True,
    ) -> None:
        self.database = database
        self.network = network
        self.instance = instance
        self.process = process
        self.parked_holds = parked_holds
        self.has_doorbell = has_doorbell
        self.is_cut = False
        self._sessions: dict[str, Session] = {}
        self._calls: dict[str, Call] = {}
        self._on_ring: Callable[[], None] = lambda: None
        self._on_lost: Callable[[str], None] = lambda why: None

    # -------------------------------------------------------- sessions

    async def open(self, on_ring: Callable[[], None], on_lost: Callable[[str], None]) -> OutboxInfo:
        database = self.database
        await asyncio.sleep(database.latency())
        if not database.is_up or self.process.is_dead:
            raise DatabaseUnavailable("connection refused")
        if self.network.stalled_until > database.loop.time():
            await asyncio.sleep(database.options.statement_timeout_s)
            raise DatabaseUnavailable("no answer")
        if not database.has_schema:
            raise SchemaMissing("no such table", hint="relay migrate")
        assert not self._sessions, "open twice"
        self.is_cut = False
        self._on_ring, self._on_lost = on_ring, on_lost
        for group in ("keeper", "reader", "settler"):
            self._sessions[group] = database.connect(self.instance, self._hear_of_loss)
        if self.has_doorbell:
            database.listeners[self._sessions["keeper"]] = self._ring
        database.history.note(self.instance, "opens", f"pid {self._sessions['keeper'].pid}")
        await asyncio.sleep(database.latency())
        if not self._sessions:
            raise DatabaseUnavailable("lost while connecting")
        return OutboxInfo(PayloadType.JSON, is_direct=True, has_doorbell=self.has_doorbell)

    async def close(self) -> None:
        self._drop(linger=False)
        await asyncio.sleep(0)

    def _drop(self, *, linger: bool) -> None:
        database = self.database
        for session in self._sessions.values():
            after = database.draw(database.options.session_linger) if linger else 0.0
            if after:
                database.loop.call_later(after, database.end_session, session, context=OUTSIDE)
            else:
                database.end_session(session)
        self._sessions = {}
        for group, call in list(self._calls.items()):
            del self._calls[group]
            if not call.future.done():
                if call.is_applied and not self.is_cut and database.random.random() < database.options.late_answers:
                    call.future.set_result(call.result)
                else:
                    call.future.set_exception(DatabaseLost("the session was closed"))

    def vanish(self, after_s: float) -> None:
        """The process was killed: its sessions end when the server notices."""
        for session in self._sessions.values():
            self.database.loop.call_later(after_s, self.database.end_session, session, context=OUTSIDE)
        self._sessions = {}

    def cut(self, detect_s: float) -> None:
        """The network between this relay and the server is gone; the relay notices after `detect_s`."""
        if self._sessions and not self.is_cut:
            self.is_cut = True
            self.database.history.note(self.instance, "db cut", f"noticed in {detect_s:.3f} s")
            self.database.loop.call_later(detect_s, self.lose, "connection reset", context=OUTSIDE)

    def _hear_of_loss(self, why: str) -> None:
        sessions = self._sessions
        if sessions:
            self.database.loop.call_later(
                self.database.latency(),
                lambda: self.lose(why) if self._sessions is sessions else None,
                context=OUTSIDE,
            )

    def lose(self, why: str) -> None:
        """The client notices the loss of a session: all are closed, `on_lost` is told (R5)."""
        if not self._sessions:
            return
        self.database.history.note(self.instance, "db lost", why)
        first = self.database.random.random() < 0.5
        if first:
            self._tell(self._on_lost, why)
        self._drop(linger=True)
        if not first:
            self._tell(self._on_lost, why)

    def _ring(self) -> None:
        if self._sessions and not self.is_cut:
            self._tell(self._on_ring)

    def _tell(self, callback: Callable[..., None], *arguments: object) -> None:
        self.database.loop.call_soon(callback, *arguments, context=self.process.context)

    # -------------------------------------------------------- calls

    async def _call(self, name: str, group: str, statement: Statement[T], argument: object = None) -> T:
        database = self.database
        if self.process.is_dead or not self._sessions:
            statement.close()
            raise DatabaseLost("no session")
        if group in self._calls:
            database.oracle.blame(f"{self.instance}: {name} while {self._calls[group].name} is under way")
        future: asyncio.Future[T] = database.loop.create_future()
        call = Call(name, self.instance, self._sessions[group], future, statement, argument)
        self._calls[group] = call
        database.loop.call_later(database.latency(), self._advance, call, context=OUTSIDE)
        try:
            return await future
        finally:
            if self._calls.get(group) is call:
                del self._calls[group]

    def _advance(self, call: Call) -> None:
        """The server takes the call's next stage."""
        database = self.database
        loop = database.loop
        if not call.session.is_alive or (self.is_cut and call.stages == 0):
            call.statement.close()
            return
        if self.network.stalled_until > loop.time():
            if self.network.stalled_until > loop.time() + database.options.statement_timeout_s:
                loop.call_later(database.options.statement_timeout_s, self._miss_deadline, call, context=OUTSIDE)
            loop.call_at(self.network.stalled_until, self._advance, call, context=OUTSIDE)
            return
        at = "between" if call.stages else "before"
        if call.stages < 2 and self.network.caught(call, at, lambda: self._enter(call)):
            return
        self._enter(call)

    def _miss_deadline(self, call: Call) -> None:
        if not call.future.done():
            self.lose("no answer in time")

    def _enter(self, call: Call) -> None:
        database = self.database
        if not call.session.is_alive:
            call.statement.close()
            return
        call.stages += 1
        try:
            wait = next(call.statement)
        except StopIteration as end:
            call.result = end.value
            call.is_applied = True
            if not self.network.caught(call, "after", lambda: self._answer(call)):
                self._answer(call)
            return
        except DatabaseRefused as refused:
            database.loop.call_later(database.latency(), self._fail, call, refused, context=OUTSIDE)
            return
        if wait.by_client:
            database.loop.call_later(wait.seconds, self._await_client, call, 0.0, context=OUTSIDE)
        else:
            database.loop.call_later(wait.seconds, self._advance, call, context=OUTSIDE)

    def _await_client(self, call: Call, waited_s: float) -> None:
        """Inside a transaction: the next statement comes from the client, if it still runs (L7)."""
        if self.process.is_dead or self.is_cut or call.future.done():
            call.statement.close()
        elif self.process.life is Life.FROZEN:
            if waited_s >= self.database.options.statement_timeout_s:
                call.statement.close()
                self.database.terminate(call.session, "idle in transaction")
            else:
                self.database.loop.call_later(0.2, self._await_client, call, waited_s + 0.2, context=OUTSIDE)
        else:
            self._advance(call)

    def _answer(self, call: Call) -> None:
        self.database.loop.call_later(self.database.latency(), self._arrive, call, context=OUTSIDE)

    def _arrive(self, call: Call) -> None:
        if not call.future.done() and not self.is_cut:
            call.future.set_result(call.result)

    def _fail(self, call: Call, refused: DatabaseRefused) -> None:
        if not call.future.done() and not self.is_cut:
            call.future.set_exception(refused)

    def _maybe_refuse(self, share: float) -> None:
        if share and self.database.random.random() < share:
            raise DatabaseRefused("canceling statement due to lock timeout")

    def _commit(self, undone: Callable[[], None] | None = None) -> None:
        self.database.commit(synchronous=self.database.options.others_synchronous, undone=undone)

    def _note(self, what: str, detail: object = "") -> None:
        self.database.history.note(self.instance, what, detail)

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
            is_void = shard.floor > database.last_seq()
            until = database.now() + database.options.lease_s
            database.put_shard(
                number,
                DbShard(shard.epoch + 1, self.instance, pid, until, 0 if is_void else shard.floor),
            )
            self._grant(number, until)
            claims.append(Claim(number, shard.epoch + 1, 0 if is_void else shard.floor, is_void))
            self._apply_policy(number)
        self._commit()
        if claims:
            self._note(
                "claims",
                [f"{each.shard}@{each.epoch}>{each.floor}" for each in claims if database.by_shard[each.shard]],
            )
        return claims

    def _keeper_pid(self) -> int:
        """The backend that renews (L3)."""
        session = self._sessions.get("keeper")
        return -1 if session is None else session.pid

    def _grant(self, shard: int, until: float) -> None:
        granted = self.database.oracle.granted
        granted[self.instance, shard] = max(until, granted.get((self.instance, shard), 0.0))

    def _apply_policy(self, shard: int) -> None:
        """A parked row stores whether it holds; an owner of another policy rewrites that, then H3."""
        database = self.database
        touched = []
        for row in list(database.by_shard[shard].values()):
            if row.aside is Aside.PARKED and row.failure_class not in ("expired", "unmarkable"):
                holds = self.parked_holds and row.key is not None
                if row.holds != holds:
                    database.updated(row, holds=holds)
                    touched.append((shard, row.key))
        database.promote(touched)

    async def renew(self, held: Mapping[int, Held], *, available: bool) -> Renewal:
        pid = self._keeper_pid()
        return await self._call("renew", "keeper", at_once(lambda: self._renew(dict(held), available, pid)), held)

    def _renew(self, held: dict[int, Held], available: bool, pid: int) -> Renewal:
        database = self.database
        now = database.now()
        renewed = set()
        until = now + database.options.lease_s
        for number, mine in sorted(held.items()):
            shard = database.shards[number]
            if shard.owner != self.instance or shard.epoch != mine.epoch or number in database.exclusive:
                continue
            floor = shard.floor if mine.floor is None else mine.floor
            if mine.floor is not None:
                self._judge_floor(number, floor)
            database.put_shard(
                number,
                replace(shard, leased_until=until, floor=floor, owner_pid=pid),
            )
            self._grant(number, until)
            renewed.add(number)
        database.put_relay(self.instance, DbRelay(now, available))
        self._commit()
        mine_now = {
            number: (shard.epoch, shard.floor)
            for number, shard in database.shards.items()
            if shard.owner == self.instance
        }
        live = [each for each in database.relays.values() if each.heartbeat > now - database.options.lease_s]
        due = [
            row.due_at
            for number in mine_now
            for row in database.by_shard[number].values()
            if row.aside in (Aside.DEFERRED, Aside.SCHEDULED) and row.due_at is not None
        ]
        return Renewal(
            renewed=frozenset(renewed),
            mine=mine_now,
            claimable=sum(1 for each in database.shards.values() if self._is_claimable(each)),
            relays=sum(1 for each in live if each.is_available),
            is_paused=bool(database.meta["paused"]),
            database_time=now,
            next_due_in_s=min(due) - now if due else None,
        )

    def _judge_floor(self, shard: int, floor: int) -> None:
        """R5: nothing that is yet to be read, committed or not, may lie at or below a stored floor."""
        database = self.database
        if database.was_set_back:
            return
        for row in database.by_shard[shard].values():
            if row.seq <= floor and row.aside is None and row.sent_at is None:
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

    async def release(self, held: Mapping[int, Held]) -> None:
        return await self._call("release", "keeper", self._release(dict(held)), held)

    def _release(self, held: dict[int, Held]) -> Statement[None]:
        database = self.database
        yield from self._await_unlocked(held)
        given = []
        for number, mine in sorted(held.items()):
            shard = database.shards[number]
            if shard.owner == self.instance and shard.epoch == mine.epoch:
                if mine.floor is not None:
                    self._judge_floor(number, mine.floor)
                floor = shard.floor if mine.floor is None else mine.floor
                database.put_shard(number, replace(shard, owner=None, owner_pid=None, leased_until=0.0, floor=floor))
                given.append(number)
        self._commit()
        self._note("releases", [each for each in given if database.by_shard[each]])

    def _await_unlocked(self, shards: Mapping[int, object]) -> Statement[None]:
        waited = 0.0
        while any(number in self.database.exclusive for number in shards):
            if waited >= self.database.options.statement_timeout_s:
                raise DatabaseRefused("canceling statement due to lock timeout")
            yield Wait(0.01)
            waited += 0.01

    async def leave(self) -> None:
        return await self._call("leave", "keeper", at_once(self._leave))

    def _leave(self) -> None:
        self.database.put_relay(self.instance, None)
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
        is_loaded = len(row.payload) <= inline_bytes
        return Row(
            row.shard,
            row.seq,
            row.id,
            row.event_type,
            ctid=row.ctid,
            aggregate_type=row.key[0] if row.key is not None else None,
            aggregate_id=row.key[1] if row.key is not None else None,
            payload=row.payload if is_loaded else None,
            size=len(row.payload),
            is_loaded=is_loaded,
            occurred_at=row.created_at,
            created_at=row.created_at,
            rare=None if row.available_at is None else {"available_at": row.available_at},
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
        for shard, cursor in zip(request.shards, request.cursors, strict=True):
            above = cursor if low is None else min(cursor, low)
            found = sorted(
                (
                    row
                    for row in database.by_shard[shard].values()
                    if row.seq > above
                    and row.aside is None
                    and row.sent_at is None
                    and (request.beyond or row.seq <= request.last_seq)
                ),
                key=lambda row: row.seq,
            )
            rows.extend(self._row(row, request.inline_bytes) for row in found[: request.limit])
        if rows or ended:
            self._note("reads", f"{[row.id for row in rows]} S={request.last_seq} ended={ended}")
        return Page(ended, rows)

    async def load(self, rows: Sequence[Row]) -> Sequence[Row]:
        bodies = await self._call("load", "reader", at_once(lambda: self._load(rows)), rows)
        gone = []
        for row, body in zip(rows, bodies, strict=True):
            if body is None:
                gone.append(row)
            else:
                row.payload, row.is_loaded = body, True
        return gone

    def _load(self, rows: Sequence[Row]) -> list[bytes | None]:
        found = [self.database.rows.get((row.seq, row.id)) for row in rows]
        return [row.payload if row is not None and row.sent_at is None else None for row in found]

    async def reload(self, rows: Sequence[Row]) -> Sequence[Row]:
        return await self._call("reload", "reader", at_once(lambda: self._reload(rows)), rows)

    def _reload(self, rows: Sequence[Row]) -> Sequence[Row]:
        found = [self.database.rows.get((row.seq, row.id)) for row in rows]
        return [self._row(row, -1) for row in found if row and row.aside is None and row.sent_at is None]

    async def due(self, cursors: Mapping[int, int], limit: int) -> Due:
        return await self._call("due", "reader", at_once(lambda: self._due(dict(cursors), limit)), cursors)

    def _due(self, cursors: dict[int, int], limit: int) -> Due:
        database = self.database
        now = database.now()
        waiting = [
            row
            for shard in cursors
            for row in database.by_shard[shard].values()
            if row.aside in (Aside.DEFERRED, Aside.SCHEDULED) and row.due_at is not None
        ]
        due = [row for row in waiting if (row.due_at or 0.0) <= now and row.seq <= cursors[row.shard]]
        due.sort(key=lambda row: (row.due_at or 0.0, row.seq))
        later = [row.due_at or 0.0 for row in waiting if (row.due_at or 0.0) > now]
        released: list[Row] = []
        blocked: list[Row] = []
        for row in due[:limit]:
            target = blocked if database.has_blocker(row) else released
            target.append(self._row(row, database.options.due_inline_bytes))
        if due:
            self._note("due", f"{[row.id for row in released]} blocked {[row.id for row in blocked]}")
        return Due(released, blocked, min(later) - now if later else None)

    async def holding_keys(self, shards: Sequence[int], limit: int) -> Mapping[int, Sequence[Row]]:
        return await self._call("holding_keys", "reader", at_once(lambda: self._holding_keys(shards, limit)), shards)

    def _holding_keys(self, shards: Sequence[int], limit: int) -> Mapping[int, Sequence[Row]]:
        found: dict[int, list[Row]] = {}
        for shard in shards:
            highest: dict[Key, DbRow] = {}
            for row in sorted(self.database.by_shard[shard].values(), key=lambda each: each.seq):
                if row.aside and row.holds and row.key is not None:
                    highest[row.key] = row
            if highest:
                found[shard] = [self._row(row, -1) for row in list(highest.values())[:limit]]
        return found

    async def arm(self, wait_s: float) -> Armed:
        return await self._call("arm", "reader", self._arm(wait_s, self._sessions.get("reader")), wait_s)

    def _arm(self, wait_s: float, session: Session | None) -> Statement[Armed]:
        database = self.database
        if (database.bell_owner or database.bell_waiter or session) is not session:
            return Armed.ELSEWHERE
        if database.bell_owner is session:
            return Armed.GRANTED
        database.bell_waiter = session
        try:
            for _ in range(11):
                if not database.is_bell_held_by_writers():
                    database.bell_owner = session
                    return Armed.GRANTED
                yield Wait(wait_s / 10)
            return Armed.TIMED_OUT
        finally:
            if database.bell_waiter is session:
                database.bell_waiter = None

    async def disarm(self) -> None:
        return await self._call("disarm", "reader", at_once(self._disarm))

    def _disarm(self) -> None:
        database = self.database
        if database.bell_owner is not None and database.bell_owner.instance == self.instance:
            database.bell_owner = None
            database.ring()

    async def purge(self, older_than_s: float, limit: int) -> int:
        return await self._call("purge", "reader", at_once(lambda: self._purge(older_than_s, limit)))

    def _purge(self, older_than_s: float, limit: int) -> int:
        """R5: the purge walks the oldest rows; one unsent below its floor lowers it and unseats the owner."""
        database = self.database
        before = database.now() - older_than_s
        old = [row for row in database.rows.values() if row.sent_at is not None and row.sent_at < before]
        for row in old[:limit]:
            database.delete_row(row)
        if database.was_set_back:
            for row in sorted(database.rows.values(), key=lambda each: -each.seq):
                shard = database.shards[row.shard]
                if row.seq <= shard.floor and row.aside is None and row.sent_at is None:
                    self._note("lowers", f"floor of shard {row.shard} to {row.seq - 1} for {row.id}")
                    database.put_shard(row.shard, DbShard(shard.epoch + 1, floor=row.seq - 1))
                    if shard.owner is not None:
                        database.oracle.taken(row.shard, shard.owner)
        self._commit()
        return min(limit, len(old))

    async def backlog(self) -> Backlog:
        return await self._call("backlog", "reader", at_once(self._backlog))

    def _backlog(self) -> Backlog:
        database = self.database
        rows = [row for row in database.rows.values() if row.sent_at is None]
        pending = [row for row in rows if row.aside not in (Aside.PARKED, Aside.SCHEDULED)]
        asides = [row.aside for row in rows]
        held = [row for row in rows if row.aside is Aside.HELD]
        return Backlog(
            backlog_rows=len(pending),
            is_estimated=False,
            oldest_pending_age_s=max((database.now() - row.created_at for row in pending), default=None),
            deferred_rows=asides.count(Aside.DEFERRED),
            parked_rows=asides.count(Aside.PARKED),
            held_rows=len(held),
            held_keys=len({row.key for row in held}),
            scheduled_rows=asides.count(Aside.SCHEDULED),
            newest_seq=database.last_seq(),
        )

    # -------------------------------------------------------- the settler's

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
        touched: list[tuple[int, Key | None]] = []
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
            if stored is not None and stored.ctid == row.ctid and not database.has_blocker(stored):
                settled.unblocked.append(row)
            else:
                self._move(row, settled, touched, aside=Aside.HELD, holds=True, due_at=None)
        for row in settlement.scheduled:
            if row.shard not in lost:
                due_at = (row.rare or {})["available_at"]
                self._move(row, settled, touched, aside=Aside.SCHEDULED, holds=False, due_at=due_at)
        settled.promoted = database.promote(touched)
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
            f"changed {ids(settled.changed)} unblocked {ids(settled.unblocked)}",
        )
        return settled

    def _mark(self, row: Row, settled: Settled, touched: list[tuple[int, Key | None]], unsent: list[str]) -> None:
        """S2: by ctid, then by id; a locked row is kept, a missing one is done."""
        database = self.database
        stored = database.rows.get((row.seq, row.id))
        if stored is not None and stored.sent_at is None:
            if stored.id in database.row_locks:
                settled.locked.append(row)
                return
            if stored.aside is not None:
                touched.append((stored.shard, stored.key))
            database.oracle.sent(self.instance, row.id, row.seq)
            unsent.append(row.id)
            if database.options.delete_sent:
                database.delete_row(stored)
            else:
                database.updated(stored, sent_at=database.now(), aside=None, holds=False, due_at=None)
        settled.done.append(row)

    def _set_back(self, setback: Setback, settled: Settled, touched: list[tuple[int, Key | None]]) -> None:
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
        ):
            database.oracle.setback(self.instance, setback.row.id, setback.aside, setback.attempts)

    def _move(self, row: Row, settled: Settled, touched: list[tuple[int, Key | None]], **changes: object) -> bool:
        """By ctid and seq only: a miss means that somebody changed the row."""
        stored = self.database.rows.get((row.seq, row.id))
        if (
            stored is None
            or stored.ctid != row.ctid
            or stored.sent_at is not None
            or stored.id in self.database.row_locks
        ):
            settled.changed.append(row)
            return False
        self.database.updated(stored, **changes)
        touched.append((stored.shard, stored.key))
        settled.done.append(row)
        return True


def suppress_lost() -> contextlib.suppress:
    """For tests and actors that do not care whether a session was lost."""
    return contextlib.suppress(DatabaseLost, DatabaseRefused, DatabaseUnavailable)
