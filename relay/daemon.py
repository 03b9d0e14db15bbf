"""The life of `relay run`: what it is built of, its signals and its end. Readable from top to bottom.

The runner is given its outbox, broker, clock, randomness and log, and does the work; signals, grace and HTTP server are
`relay.lifecycle`'s; nothing here decides about a row.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import Final, assert_never

from relay import __version__, lifecycle, logs
from relay.build import BUILD
from relay.choices import OnParked, SentRows, Sink
from relay.config import Config
from relay.core.ports.broker import Broker, Spans
from relay.core.ports.clock import Clock
from relay.core.settings import EngineSettings, Ordering, Unroutable
from relay.engine import DatabaseTime
from relay.http import Heartbeat, Readiness
from relay.lifecycle import Lifecycle, serving
from relay.metrics import Metrics, boot_time
from relay.outbox import PostgresOutbox
from relay.route import Router
from relay.runner import Runner

GC_OBJECTS_MIN: Final = 10_000
GC_OBJECTS_PER_ROW: Final = 8
"""Containers that the collector tracks: a row, its key, address and chain, and its record while a page is decoded."""


class BootClock:
    """`ports.Clock` over CLOCK_BOOTTIME: goes on while the machine sleeps, never jumps."""

    def now(self) -> float:
        """Seconds since the machine started."""
        return boot_time()

    async def sleep(self, seconds: float) -> None:
        """Sleep on the event loop."""
        await asyncio.sleep(seconds)


def run(config: Config, warnings: Sequence[str] = (), *, is_traced: bool = False) -> int:
    """Relay until a signal says stop; returns the exit code: 0, 2 (port taken), 3 (schema incompatible) or 4.

    Everything that is to be said goes into the log, the configuration's `warnings` too. What is not a RelayError is a
    fault of ours: logged, and raised.
    """
    logs.setup(config.log_format, config.log_level, config.redactor)
    log = logs.get_logger().bind(relay=config.name)
    for warning in warnings:
        log.warning("configuration_warning", text=warning)
    _calm_collector(config.max_read_ahead)
    return lifecycle.run(log, lambda: _live(config, log, is_traced=is_traced))


def _calm_collector(read_ahead_max: int) -> None:
    """Rows are bounded in number and leave no cycles behind, but Python's collector would go through them page after
    page, a tenth of the relay's CPU. It comes when there is more than a full memory of rows explains."""
    gc.freeze()
    gc.set_threshold(GC_OBJECTS_MIN + GC_OBJECTS_PER_ROW * read_ahead_max)


async def _live(config: Config, log: logs.Log, *, is_traced: bool) -> None:
    """From the first byte to the last. Raises what the runner raises, ListenFailed, DrainIncomplete."""
    metrics, readiness, heartbeat = Metrics(), Readiness(), Heartbeat()
    clock = BootClock()
    database_time = DatabaseTime(clock)
    with _spans(config, database_time, log, is_traced=is_traced) as spans:
        # Before anybody can ask: it is the runner that says not ready.
        runner = _runner(config, clock, database_time, metrics, readiness, log, spans)
        with serving(config.listen, metrics, readiness, heartbeat, config.redactor.redact) as port:
            log.info("started", version=__version__, build=BUILD, table=config.table, http_port=port)
            await Lifecycle(runner, log, heartbeat, config.shutdown_grace_s).live()


# ---------------------------------------------------------------- wiring


@contextlib.contextmanager
def _spans(config: Config, database_time: DatabaseTime, log: logs.Log, *, is_traced: bool) -> Iterator[Spans | None]:
    """Spans while the relay lives; None, and nothing imported, where nobody wants them."""
    if not is_traced:
        yield None
        return
    from relay import tracing

    system = "rabbitmq" if config.sink is Sink.AMQP else config.sink.value
    router = Router(config.exchange, config.routing_key)
    spans = tracing.start(config.name, system, router, database_time.now, log)
    try:
        yield spans
    finally:
        if spans is not None:
            spans.close()


def _runner(
    config: Config,
    clock: Clock,
    database_time: DatabaseTime,
    metrics: Metrics,
    readiness: Readiness,
    log: logs.Log,
    spans: Spans | None,
) -> Runner:
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
    return Runner(
        _engine_settings(config), outbox, broker, clock, seeded, metrics, readiness, log, database_time, spans
    )


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
                source=str(config.table),
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
                source=str(config.table),
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
