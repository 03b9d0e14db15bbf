"""How a relay's calls reach the fake PostgreSQL and its answers come back, or do not.

A call is a generator that runs on the server's side: it acts at an instant and yields what it waits for.
It starts a latency after the call, its answer arrives a latency after its end. A session that dies in
between rolls back what is not committed; an answer that is on its way may still arrive, or be lost
(an unknown outcome). Statements that were sent before a client lost its connection may run on for a
while (`session_linger`). Tests stop a call before, between or after its stages (`Network.stop`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from relay.core.ports.outbox import OutboxInfo
from relay.errors import DatabaseLost, DatabaseRefused, DatabaseUnavailable, SchemaMissing
from relay.message import PayloadType, Row

from .database import Database
from .loop import OUTSIDE, Life, Process
from .tables import Session

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


class Wire:
    """One relay's sessions and the calls under way on them: one a session. `parked_holds`: RELAY_ON_PARKED."""

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
        database.oracle.ails(self.instance, database.loop.time())
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
            self.database.oracle.ails(self.instance)
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
        self.database.oracle.ails(self.instance)
        if first:
            self._tell(self._hear_of_end, self._on_lost, why)
        self._drop(linger=True)
        if not first:
            self._tell(self._hear_of_end, self._on_lost, why)

    def _hear_of_end(self, on_lost: Callable[[str], None], why: str) -> None:
        self.database.oracle.hears_of_loss(self.instance)
        on_lost(why)

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
            if call.stages == 1 and call.name not in ("page", "settle"):
                self._maybe_refuse(database.options.other_refusals)
            wait = next(call.statement)
        except StopIteration as end:
            call.result = end.value
            call.is_applied = True
            if not self.network.caught(call, "after", lambda: self._answer(call)):
                self._answer(call)
            return
        except DatabaseRefused as refused:
            call.statement.close()
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

    def _await_unlocked(self, shards: Mapping[int, object]) -> Statement[None]:
        waited = 0.0
        while any(number in self.database.exclusive for number in shards):
            if waited >= self.database.options.statement_timeout_s:
                raise DatabaseRefused("canceling statement due to lock timeout")
            yield Wait(0.01)
            waited += 0.01
