"""A consumer with a handler: the library's front door. Its life is `relay.inbox.station`'s."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from datetime import timedelta

from prometheus_client.registry import Collector

from relay.database import sql_file
from relay.errors import ConfigError, RelayError
from relay.http import Readiness, TableCollector
from relay.inbox import retention
from relay.inbox.breaker import Breaker
from relay.inbox.hand import Shared
from relay.inbox.ledger import AsyncpgLedger, Handler, Ledger
from relay.inbox.metrics import METRICS, InboxMetrics
from relay.inbox.settings import ConsumerSettings, queue_problems
from relay.inbox.station import Station, Urls
from relay.inbox.worker import Worker
from relay.logs import Log, get_logger
from relay.urls import DatabaseTarget, amqp_urls, database_target

Target = Callable[[], DatabaseTarget | str]


class Consumer:
    """Consumes `queue` under the name `name`, which is what its inbox rows are recorded under: it never changes.

    `amqp_url` and `database_url` are texts, or functions that are asked at each connect (rotated credentials).
    Instead of `database_url` a `ledger` of one's own brings another driver. Raises ConfigError.
    """

    def __init__(
        self,
        *,
        name: str,
        queue: str,
        handler: Handler,
        amqp_url: str | Urls,
        database_url: str | Target | None = None,
        ledger: Ledger | None = None,
        settings: ConsumerSettings | None = None,
        log: Log | None = None,
    ) -> None:
        self._settings = settings or ConsumerSettings()
        self._target = None if database_url is None else _target(database_url)
        if (self._target is None) == (ledger is None):
            raise ConfigError(["database_url, ledger: exactly one of them is given"])
        if self._target is None and self._settings.retention_s is not None:
            raise ConfigError(["retention_s: needs database_url; with a ledger of your own the purge is yours too"])
        if problems := queue_problems(queue, self._settings):
            raise ConfigError(problems)
        self._name = name
        self._log = (log or get_logger()).bind(consumer=name, queue=queue)
        keeper: Ledger = ledger or self._own_ledger()
        shared = Shared(
            name,
            queue,
            self._settings,
            Breaker(),
            InboxMetrics(),
            Readiness(),
            # The system's own randomness: consumers that start together must not back off together.
            random.Random(random.SystemRandom().getrandbits(64)),
            self._log,
        )
        self._station = Station(
            shared,
            _urls(amqp_url),
            keeper,
            lambda life, lane: Worker(shared, life, lane, keeper, handler),
            [self._forget],
        )

    @property
    def metrics(self) -> InboxMetrics:
        """Its numbers."""
        return self._station.metrics

    @property
    def readiness(self) -> Readiness:
        """Why it is not ready."""
        return self._station.readiness

    def collector(self) -> Collector:
        """The metrics for a registry of prometheus-client."""
        return TableCollector(METRICS, self.metrics)

    def stop(self) -> None:
        """Take nothing new, finish what is in work; `run` returns then. May be called from a signal handler."""
        self._station.stop()

    async def run(self) -> None:
        """Consume until `stop`. Outages are waited for. Raises DrainIncomplete when the grace ran out, ConfigError for
        `BrokerRetry` on a broker before RabbitMQ 4.3.
        """
        await self._station.run()

    async def _forget(self) -> None:
        retention_s, target = self._settings.retention_s, self._target
        if retention_s is None or target is None:
            return
        while True:
            try:
                await retention.forget(
                    target(),
                    sql_file("inbox/forget.sql"),
                    (self._name, timedelta(seconds=retention_s)),
                    on_batch=self._count_forgotten,
                )
            except (
                RelayError,
                OSError,
                ValueError,
            ) as error:  # the user's `target` may read a file that is just being replaced
                self._log.warning("retention_failed", error=error)
            await asyncio.sleep(retention.INTERVAL_S)

    def _count_forgotten(self, count: int) -> None:
        self.metrics.forgotten += count

    def _own_ledger(self) -> Ledger:
        assert self._target is not None
        return AsyncpgLedger(self._target, order=self._settings.order, first_version=self._settings.first_version)


def _urls(given: str | Urls) -> Urls:
    if not isinstance(given, str):
        return given
    try:
        urls = amqp_urls(given)
    except ValueError as error:
        raise ConfigError([f"amqp_url: {error}"]) from None
    return lambda: urls


def _target(given: str | Target) -> Target:
    if not isinstance(given, str):
        return given
    try:
        target = database_target(given)
    except ValueError as error:
        raise ConfigError([f"database_url: {error}"]) from None
    return lambda: target
