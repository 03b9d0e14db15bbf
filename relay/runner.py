"""The relay's life: sessions and link come and go, the parts run while they are there, a stop drains.

Owns the tasks. It is given its outbox, broker, clock and randomness and makes none of them, so the same code runs
against real servers and in the simulation. `run` returns when a stop has drained; it raises only what no waiting
mends (an incompatible schema).
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from random import Random
from typing import Any

from relay.core.ladder import reconnect_backoff
from relay.core.ports.broker import Broker, Spans
from relay.core.ports.clock import Clock
from relay.core.ports.outbox import Outbox
from relay.core.settings import EngineSettings
from relay.engine import DatabaseTime, Engine, Signal
from relay.errors import (
    DatabaseError,
    DatabaseLost,
    RelayError,
    SchemaForeign,
    SchemaIncompatible,
    SchemaMissing,
)
from relay.http import Readiness
from relay.keeper import Keeper
from relay.logs import Log
from relay.metrics import Metrics
from relay.publisher import Publisher
from relay.reader import Reader
from relay.settler import Settler

SCHEMA_RETRY_S = 2.0
WATCH_INTERVAL_S = 1.0


class Runner:
    """One relay. `run` once; `stop` from a signal handler."""

    def __init__(
        self,
        settings: EngineSettings,
        outbox: Outbox,
        broker: Broker,
        clock: Clock,
        random: Random,
        metrics: Metrics,
        readiness: Readiness,
        log: Log,
        database_time: DatabaseTime | None = None,
        spans: Spans | None = None,
    ) -> None:
        self._engine = Engine(
            settings, outbox, clock, random, metrics, readiness, log, database_time or DatabaseTime(clock), spans
        )
        self._publisher = Publisher(self._engine, broker)
        self._settler = Settler(self._engine)
        self._keeper: Keeper | None = None
        self._reader: Reader | None = None
        self._stop = Signal()
        self._session_end = Signal()
        self._parts: list[asyncio.Task[Any]] = []
        self._lost_why = ""
        self._has_been_up = False
        readiness.add("database", "connecting")
        readiness.add("broker", "waits for the database")

    # ------------------------------------------------------------ for the daemon and tests

    @property
    def engine(self) -> Engine:
        return self._engine

    @property
    def unsettled(self) -> int:
        """Rows in flight or decided and not yet written."""
        return sum(1 for row in self._engine.chains.rows() if row.state.is_committed)

    def stop(self) -> None:
        """Begin to drain: read and publish nothing more, settle what is in flight, give the shards back."""
        self._stop.set()

    async def run(self) -> None:
        """Until stopped and drained. Raises SchemaIncompatible or SchemaForeign."""
        tasks = [
            _task(self._keep_sessions()),
            _task(self._publisher.run_link()),
            _task(self._publisher.run()),
            _task(self._watch()),
        ]
        stopping = _task(self._stop.wait(None))
        try:
            done, _ = await asyncio.wait([*tasks, stopping], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if task is not stopping:
                    task.result()
                    raise AssertionError("a part of the relay ended by itself")
            self._engine.log.info("draining", unsettled=self.unsettled)
            tasks.append(_task(self._drain()))
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            self._engine.log.info("stopped")
        finally:
            await _cancel([*tasks, stopping])
            link = self._engine.link
            if link is not None:
                await link.close()
            await self._engine.outbox.close()

    # ------------------------------------------------------------ the database

    async def _keep_sessions(self) -> None:
        """Open the sessions, run the parts on them, and again when they are lost (R5); for ever."""
        engine = self._engine
        failures = 0
        while True:
            self._session_end = Signal()
            try:
                info = await engine.outbox.open(self._on_ring, self._on_lost)
            except (SchemaIncompatible, SchemaForeign):
                raise
            except SchemaMissing as error:
                self._note_down("schema", error)
                await engine.clock.sleep(SCHEMA_RETRY_S)
                continue
            except DatabaseError as error:
                failures += 1
                self._note_down("database", error)
                await engine.outbox.close()
                await engine.clock.sleep(reconnect_backoff(failures, engine.random.random()))
                continue
            engine.info = info
            self._note_up()
            opened_at = engine.clock.now()
            ended_by = await self._live()
            engine.info = None
            engine.lose_sessions()
            await engine.outbox.close()
            failures = 0 if engine.clock.now() - opened_at > 10.0 else failures + 1
            self._note_down("database", ended_by)
            await engine.clock.sleep(reconnect_backoff(failures, engine.random.random()))

    async def _live(self) -> RelayError:
        """Run keeper, reader and settler until one loses its session; what ended them."""
        engine = self._engine
        self._keeper = Keeper(engine)
        self._reader = Reader(engine, self._keeper)
        parts = [_task(self._keeper.run()), _task(self._reader.run()), _task(self._settler.run())]
        self._parts = parts
        end = _task(self._session_end.wait(None))
        try:
            await asyncio.wait([*parts, end], return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _cancel([*parts, end])
            self._parts = []
            self._reader = None
            self._keeper = None
        for part in parts:
            if part.done() and not part.cancelled():
                error = part.exception()
                if isinstance(error, DatabaseError):
                    return error
                if error is not None:
                    raise error
        return DatabaseLost(self._lost_why or "a session ended")

    def _on_ring(self) -> None:
        if self._reader is not None:
            self._reader.on_ring()

    def _on_lost(self, why: str) -> None:
        self._lost_why = why
        # At once, not when the parts have noticed: nothing is written until a renewal succeeded (L3).
        self._engine.leases.suspend()
        for part in self._parts:
            # An answer that has come and is not taken yet is void (R5): the part never sees it.
            part.cancel()
        self._session_end.set()

    def _note_up(self) -> None:
        engine = self._engine
        engine.metrics.connected["database"] = True
        if self._has_been_up:
            engine.metrics.reconnects["database"] += 1
        else:
            self._has_been_up = True
            # Only from now on is it tried, and only now does its absence count (L6).
            engine.broker_lost_at = engine.clock.now()
            engine.readiness.add("broker", "connecting")
        engine.metrics.backpressure.set("database_down", False, engine.clock.now())
        engine.readiness.remove("database")
        engine.readiness.remove("schema")
        engine.log.info("database_connected")

    def _note_down(self, reason: str, error: RelayError) -> None:
        engine = self._engine
        metrics = engine.metrics
        metrics.connected["database"] = False
        metrics.backpressure.set("database_down", True, engine.clock.now())
        # Nobody reads, so nobody waits for room.
        metrics.backpressure.set("bytes", False, engine.clock.now())
        # What cannot be read is absent, not frozen as if fresh (I8).
        metrics.forget_database()
        is_news = (reason, error.message) not in engine.readiness.reasons
        engine.readiness.remove("schema" if reason == "database" else "database")
        engine.readiness.add(reason, error.message)
        if is_news and not engine.is_stopping:
            engine.log.warning(
                "schema_unavailable" if reason == "schema" else "database_unavailable",
                error=error.message,
                hint=error.hint,
            )

    # ------------------------------------------------------------ watching

    async def _watch(self) -> None:
        """Once a second: gauges, and a broker that says nothing."""
        engine = self._engine
        while True:
            self._publisher.watch()
            link = engine.link
            engine.metrics.in_flight_messages = 0 if link is None else link.in_flight
            engine.metrics.in_flight_bytes = engine.chains.in_flight_bytes()
            engine.metrics.shards_owned = engine.leases.standing(engine.clock.now())
            await engine.clock.sleep(WATCH_INTERVAL_S)

    # ------------------------------------------------------------ stopping

    async def _drain(self) -> None:
        """Settle what is in flight, give everything back (L5). Ends when nothing is left to do."""
        engine = self._engine
        engine.is_stopping = True
        keeper = self._keeper
        if keeper is not None:
            keeper.give(engine.leases.shards)
        engine.chains.drop_unpublished()
        engine.to_settle.set()
        engine.to_publish.set()
        while self.unsettled:
            await engine.changed.wait(0.1)
        if self._keeper is not None:
            try:
                await self._keeper.leave()
            except DatabaseError as error:
                # The leases run out by themselves; nothing is unsettled.
                engine.log.warning("leases_not_released", error=error)


def _task(work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    return asyncio.get_running_loop().create_task(work)


async def _cancel(tasks: list[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
