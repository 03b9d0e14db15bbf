"""`relay inbox run`: a queue into the inbox table, for a service in any language that works through it by SQL.

What it is built of, and what goes on beside the writing: gauges, purge. The writing is `scribe`'s and `mailbox`'s.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Final

from relay import __version__, lifecycle, logs
from relay.config import Config
from relay.database import fill, sql_file
from relay.errors import DatabaseError, RelayError
from relay.http import Heartbeat, Readiness, TableCollector
from relay.inbox import retention
from relay.inbox.breaker import Breaker
from relay.inbox.hand import Shared
from relay.inbox.mailbox import Mailbox
from relay.inbox.metrics import METRICS, InboxMetrics
from relay.inbox.naming import names_of
from relay.inbox.outcome import RetryPolicy
from relay.inbox.scribe import Scribe
from relay.inbox.settings import ConsumerSettings
from relay.inbox.station import Standby, Station
from relay.lifecycle import Lifecycle, serving

GAUGE_INTERVAL_S: Final = 2.0

RELEASE_BREATH: Final = 20.0
"""The look for rows that are held by nobody goes through all keys of which any is: the next comes so many times as long later."""


def run(config: Config, warnings: Sequence[str] = ()) -> int:
    """Until a signal says stop; returns the exit code, as `relay run`."""
    logs.setup(config.log_format, config.log_level, config.redactor)
    # Every failure that the driver logs, some with a traceback, is raised as well.
    logging.getLogger("aiormq").setLevel(logging.CRITICAL)
    log = logs.get_logger().bind(relay=config.name)
    for warning in warnings:
        log.warning("configuration_warning", text=warning)
    return lifecycle.run(log, lambda: _live(config, log))


async def _live(config: Config, log: logs.Log) -> None:
    metrics, readiness, heartbeat = InboxMetrics(), Readiness(), Heartbeat()
    station = assembled(config, metrics, readiness, log)
    collector = TableCollector(METRICS, metrics)
    redact, variable = config.redactor.redact, "RELAY_INBOX_LISTEN"
    with serving(config.inbox_listen, collector, readiness, heartbeat, redact, variable) as port:
        table, queue = config.inbox_table, config.inbox_queue
        log.info("started", version=__version__, table=table, queue=queue, http_port=port)
        await Lifecycle(station, log, heartbeat, config.shutdown_grace_s).live()


def assembled(config: Config, metrics: InboxMetrics, readiness: Readiness, log: logs.Log) -> Station:
    """The parts of one sidecar."""
    queue = config.inbox_queue or ""
    mailbox = Mailbox(config.inbox_database, config.inbox_table, queue)
    shared = Shared(
        str(config.inbox_table),
        queue,
        ConsumerSettings(
            # One hand: the order of the queue is the order of the table.
            workers=1,
            prefetch=config.inbox_prefetch,
            retry=RetryPolicy(delays_s=()),
            grace_s=config.shutdown_grace_s,
            schema_versions=None,
            version=__version__,
        ),
        Breaker(),
        metrics,
        readiness,
        random.Random(random.SystemRandom().getrandbits(64)),
        log,
    )
    errands = [lambda: _watch(mailbox, shared, station.leave), lambda: _purge(config, mailbox, metrics, log)]
    station: Station = Station(
        shared,
        config.inbox_amqp_urls,
        mailbox,
        lambda life, lane: Scribe(shared, life, lane, mailbox),
        errands,
        mailbox.resign,
    )
    return station


async def _watch(mailbox: Mailbox, shared: Shared, leave: Callable[[str], None]) -> None:
    """The table's gauges, absent while they cannot be read, and what is held there by nobody. Without messages nobody else would notice a database that is
    away, or that another sidecar has the right to write: it is told here too, and the session opened again or the link left.
    """
    metrics, is_away = shared.metrics, False
    next_release_at = 0.0
    while True:
        try:
            found = await mailbox.gauges()
            if (began := time.monotonic()) >= next_release_at:
                await mailbox.release()
                next_release_at = began + RELEASE_BREATH * (time.monotonic() - began)
        except Standby as error:
            metrics.forget_rows()
            leave(error.message)
        except DatabaseError:
            metrics.forget_rows()
            is_away = await _reopen(mailbox, shared) or is_away
        else:
            metrics.pending_rows, metrics.parked_rows = found.pending, found.parked
            metrics.oldest_pending_age_seconds = found.oldest_age_s
            metrics.oldest_due_age_seconds = found.due_age_s
            if is_away:
                shared.tell_database()
            is_away = False
        await asyncio.sleep(GAUGE_INTERVAL_S)


async def _reopen(mailbox: Mailbox, shared: Shared) -> bool:
    """Whether the database is away; that another one writes is the station's to tell."""
    try:
        await mailbox.reopen()
    except Standby:
        return False
    except RelayError as error:
        shared.tell_away("database", error)
        return True
    return False


async def _purge(config: Config, mailbox: Mailbox, metrics: InboxMetrics, log: logs.Log) -> None:
    statement = fill(sql_file("inbox/mailbox_purge.sql"), names_of(config.inbox_table))

    def count(rows: int) -> None:
        metrics.forgotten += rows

    while True:
        try:
            await mailbox.reopen()
        except RelayError:
            # No table, no database, no right to write: `_watch` and the station say so.
            await asyncio.sleep(GAUGE_INTERVAL_S)
            continue
        try:
            age = timedelta(seconds=config.inbox_retention_s)
            await retention.forget(config.inbox_database(), statement, (age,), on_batch=count)
        except DatabaseError as error:
            log.warning("retention_failed", error=error)
        await asyncio.sleep(retention.INTERVAL_S)
