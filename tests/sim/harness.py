"""The real runner, wired to the fakes: the only module of the simulation that knows how it is built."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Mapping

from relay.core.settings import EngineSettings
from relay.http import Readiness
from relay.logs import Log
from relay.metrics import Metrics
from relay.runner import Runner

from .link import FakeBroker
from .oracle import History
from .outbox import FakeOutbox


class LoopClock:
    """The boot-time clock of a simulated machine: it goes on while a process is frozen."""

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class HistoryLog(Log):
    """The relay's log lines become steps of the history."""

    def __init__(self, history: History, name: str) -> None:
        super().__init__(logging.getLogger("sim"))
        self._history = history
        self._name = name

    def _write(self, level: int, event: str, fields: Mapping[str, object]) -> None:
        self._history.note(self._name, "log", f"{event} {dict(fields)}")


class Program:
    """What a relay's process runs."""

    def __init__(
        self,
        name: str,
        outbox: FakeOutbox,
        broker: FakeBroker,
        settings: EngineSettings,
        rng: random.Random,
        history: History,
    ) -> None:
        clock = LoopClock()
        self.metrics = Metrics(clock.now)
        self.readiness = Readiness()
        self.runner = Runner(
            settings, outbox, broker, clock, rng, self.metrics, self.readiness, HistoryLog(history, name)
        )

    async def run(self) -> None:
        await self.runner.run()

    def stop(self) -> None:
        """SIGTERM's handler."""
        self.runner.stop()

    def state(self) -> str:
        """For a history that does not end: what the relay holds."""
        engine = self.runner.engine
        rows = [f"{row.id}:{row.state.name}" for row in engine.chains.rows()]
        return (
            f"rows {rows[:20]} ready {engine.chains.ready} bytes {engine.chains.bytes} "
            f"large {engine.chains.large_bytes} inline {engine.inline_bytes} link {engine.link is not None} "
            f"shards {list(engine.leases.shards)[:70]} cursors {dict(list(engine.reading.cursors.items())[:20])} "
            f"S {engine.reading.last_seq} paused {engine.is_paused} blocked {engine.is_blocked} "
            f"reasons {self.readiness.reasons}"
        )
