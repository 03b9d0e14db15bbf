"""The life of `relay run`: what it is built of, its signals and its end. Readable from top to bottom.

Owns: the event loop, the HTTP server, the grace. The runner is given its outbox, broker, clock, randomness and log,
and does the work; nothing here decides about a row.

The first SIGTERM or SIGINT drains, within RELAY_SHUTDOWN_GRACE; a second one ends the process at once. Whatever hangs
meanwhile (a half-open socket, a wedged loop), the process is gone soon after its grace: a thread sees to that.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import random
import secrets
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Final, assert_never

import uvloop

from relay import __version__, logs
from relay.config import Config
from relay.core.ports import Broker
from relay.core.settings import EngineSettings, Ordering, Unroutable
from relay.engine import DatabaseTime
from relay.errors import DrainIncomplete, RelayError
from relay.http import Heartbeat, HttpServer, Readiness
from relay.metrics import Metrics, boot_time
from relay.outbox import PostgresOutbox
from relay.route import Router
from relay.runner import Runner
from relay.settings import OnParked, SentRows, Sink

BEAT_INTERVAL_S: Final = 1.0

GC_OBJECTS_MIN: Final = 10_000
GC_OBJECTS_PER_ROW: Final = 8
"""Containers that the collector tracks: a row, its key, address and chain, and its record while a page is decoded."""

WEDGED_AFTER_GRACE_S: Final = 1.0
"""So long after the grace a process that is still there is ended from outside its event loop."""


class BootClock:
    """`ports.Clock` over CLOCK_BOOTTIME: goes on while the machine sleeps, never jumps."""

    def now(self) -> float:
        """Seconds since the machine started."""
        return boot_time()

    async def sleep(self, seconds: float) -> None:
        """Sleep on the event loop."""
        await asyncio.sleep(seconds)


def run(config: Config, warnings: Sequence[str] = ()) -> int:
    """Relay until a signal says stop; returns the exit code: 0, 2 (port taken), 3 (schema incompatible) or 4.

    Everything that is to be said goes into the log, the configuration's `warnings` too. What is not a RelayError is a
    fault of ours: logged, and raised.
    """
    logs.setup(config.log_format, config.log_level, config.redactor)
    log = logs.get_logger().bind(relay=config.name)
    for warning in warnings:
        log.warning("configuration_warning", text=warning)
    try:
        _calm_collector(config.max_read_ahead)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
            loop.run(_Daemon(config, log).live())
    except RelayError as error:
        log.error("exited", error=error, hint=error.hint, exit_code=error.exit_code)
        return error.exit_code
    except BaseException as error:
        log.error("exited", error=error, exit_code=1)
        raise
    log.info("exited", exit_code=0)
    return 0


def _calm_collector(read_ahead_max: int) -> None:
    """Rows are bounded in number and leave no cycles behind, but Python's collector would go through them page after
    page, a tenth of the relay's CPU. It comes when there is more than a full memory of rows explains."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_OBJECTS_MIN + GC_OBJECTS_PER_ROW * read_ahead_max)


class _Daemon:
    def __init__(self, config: Config, log: logs.Log) -> None:
        self._config = config
        self._log = log
        self._metrics = Metrics()
        self._readiness = Readiness()
        self._heartbeat = Heartbeat()
        self._runner = _runner(config, self._metrics, self._readiness, log)
        self._is_stopping = False
        self._grace = asyncio.Event()

    async def live(self) -> None:
        """From the first byte to the last. Raises what the runner raises, ListenFailed, DrainIncomplete."""
        loop = asyncio.get_running_loop()
        with _serving(self._config, self._metrics, self._readiness, self._heartbeat) as port:
            self._log.info("started", version=__version__, table=self._config.table, http_port=port)
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self._on_signal, number)
            beating = asyncio.create_task(self._beat())
            try:
                await self._work()
            finally:
                beating.cancel()

    async def _work(self) -> None:
        """The runner until it ends, or until the grace does."""
        work = asyncio.create_task(self._runner.run())
        grace = asyncio.create_task(self._run_out_of_grace())
        try:
            await asyncio.wait((work, grace), return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                return work.result()
            unsettled = self._runner.unsettled
            if unsettled:
                raise DrainIncomplete(
                    f"the grace of {self._config.shutdown_grace_s:g} s ran out with {unsettled} rows unsettled",
                    hint="they are published again; a longer RELAY_SHUTDOWN_GRACE drains more",
                )
        finally:
            grace.cancel()
            work.cancel()
            # Bounded by the thread of `_on_signal`, should a session refuse to end.
            with contextlib.suppress(asyncio.CancelledError, RelayError):
                await work

    async def _run_out_of_grace(self) -> None:
        await self._grace.wait()
        await asyncio.sleep(self._config.shutdown_grace_s)

    def _on_signal(self, number: signal.Signals) -> None:
        unsettled = self._runner.unsettled
        if self._is_stopping:
            self._log.warning("second_signal", signal=number.name, unsettled=unsettled)
            os._exit(DrainIncomplete.exit_code if unsettled else 0)
        self._is_stopping = True
        self._log.info("stopping", signal=number.name, grace_s=self._config.shutdown_grace_s, unsettled=unsettled)
        last_moment = threading.Timer(
            self._config.shutdown_grace_s + WEDGED_AFTER_GRACE_S, os._exit, (DrainIncomplete.exit_code,)
        )
        last_moment.daemon = True
        last_moment.start()
        self._grace.set()
        self._runner.stop()

    async def _beat(self) -> None:
        while True:
            self._heartbeat.beat()
            await asyncio.sleep(BEAT_INTERVAL_S)


# ---------------------------------------------------------------- wiring


def _runner(config: Config, metrics: Metrics, readiness: Readiness, log: logs.Log) -> Runner:
    clock = BootClock()
    database_time = DatabaseTime(clock)
    outbox = PostgresOutbox(
        config.database,
        config.table,
        # Two relays of one name are still two.
        instance=f"{config.name}/{secrets.token_hex(8)}",
        name=config.name,
        version=__version__,
        lease_s=config.lease_s,
        marks_sent=config.sent_rows is SentRows.MARK,
        holds_when_parked=config.on_parked is OnParked.HOLD,
        is_ordered=config.ordering is not Ordering.NONE,
        settle_commit=config.settle_commit,
        poll_interval_s=config.poll_interval_s,
    )
    broker = _broker(config, database_time.now)
    # The system's own randomness: relays that start together must not back off together.
    seeded = random.Random(random.SystemRandom().getrandbits(64))
    return Runner(_engine_settings(config), outbox, broker, clock, seeded, metrics, readiness, log, database_time)


def _broker(config: Config, database_now: Callable[[], float]) -> Broker:
    """The sink; only the one in use is imported, with what it brings."""
    router = Router(config.exchange, config.routing_key)
    match config.sink:
        case Sink.AMQP:
            from relay.broker.amqp import AmqpBroker

            return AmqpBroker(
                config.amqp_urls,
                router,
                database_now=database_now,
                envelope_name=config.envelope.value,
                source=config.name,
                is_mandatory=config.unroutable is not Unroutable.DROP,
                connection_name=f"outbox-relay {config.name}",
            )
        case Sink.FILE:
            from relay.broker.file import FileBroker

            assert config.sink_path is not None, "the configuration was checked"
            return FileBroker(
                config.sink_path,
                router,
                database_now=database_now,
                envelope_name=config.envelope.value,
                source=config.name,
            )
        case _:
            assert_never(config.sink)


def _engine_settings(config: Config) -> EngineSettings:
    return EngineSettings(
        ordering=config.ordering,
        on_unroutable=config.unroutable,
        holds_when_parked=config.on_parked is OnParked.HOLD,
        read_ahead_max=config.max_read_ahead,
        in_flight_max=config.max_in_flight,
        bytes_max=config.max_bytes,
        lease_s=config.lease_s,
        rate_max=config.max_rate,
        retry_delays_s=config.retry_delays_s,
        age_max_s=config.max_age_s,
        retention_s=config.retention_s,
        marks_sent=config.sent_rows is SentRows.MARK,
        parked_retention_s=config.parked_retention_s,
        confirm_timeout_s=config.confirm_timeout_s,
        poll_interval_s=config.poll_interval_s,
    )


@contextlib.contextmanager
def _serving(config: Config, metrics: Metrics, readiness: Readiness, heartbeat: Heartbeat) -> Iterator[int | None]:
    """The HTTP server while the relay lives; its port, None where RELAY_LISTEN is empty. Raises ListenFailed."""
    if config.listen is None:
        yield None
        return
    server = HttpServer(config.listen, metrics, readiness, heartbeat, redact=config.redactor.redact)
    server.start()
    try:
        yield server.port
    finally:
        server.close()
