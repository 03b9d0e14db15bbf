"""What `relay run` is made of, without a server."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from random import Random
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from relay import daemon
from relay.broker import amqp, file
from relay.config import load
from relay.core.settings import EngineSettings
from relay.engine import DatabaseTime
from relay.http import Readiness
from relay.logs import Log
from relay.metrics import Metrics
from relay.settings import SETTINGS


class Asked(Exception):
    """The moment from which anybody can ask."""


async def test_not_ready_from_the_first_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe that comes before the relay has looked at anything must not hear that all is well."""
    reasons: list[str] = []

    def serving(listen: object, metrics: object, readiness: Readiness, *rest: object) -> NoReturn:
        reasons.extend(reason for reason, _ in readiness.reasons)
        raise Asked

    monkeypatch.setattr(daemon, "serving", serving)
    config, _ = load({"RELAY_DATABASE_URL": "postgresql://db/x", "RELAY_AMQP_URL": "amqp://mq/"})
    with pytest.raises(Asked):
        await daemon._live(config, Log(logging.getLogger("tests.daemon")), is_traced=False)
    assert reasons == ["database", "broker"]


# ---------------------------------------------------------------- wiring

BASE = {"RELAY_DATABASE_URL": "postgresql://db/x", "RELAY_AMQP_URL": "amqp://mq/", "RELAY_NAME": "relay-1"}

WIRED: dict[str, tuple[str, dict[str, object]]] = {
    "RELAY_TABLE": ("events_out", {"outbox.table": "events_out", "broker.source": "events_out"}),
    "RELAY_NAME": ("orders", {"outbox.name": "orders", "broker.connection_name": "outbox-relay orders"}),
    "RELAY_EXCHANGE": ("shop", {"broker.router.exchange": "shop"}),
    "RELAY_ROUTING_KEY": ("{aggregate_type}", {"broker.router.routing_key": "{aggregate_type}"}),
    "RELAY_ENVELOPE": ("cloudevents", {"broker.envelope_name": "cloudevents"}),
    "RELAY_ORDERING": ("none", {"outbox.is_ordered": False, "engine.ordering": "none"}),
    "RELAY_SENT_ROWS": ("delete", {"outbox.marks_sent": False, "engine.marks_sent": False}),
    "RELAY_SETTLE_COMMIT": ("off", {"outbox.settle_commit": False}),
    "RELAY_RETENTION": ("3h", {"engine.retention_s": 10800.0}),
    "RELAY_MAX_READ_AHEAD": ("123", {"engine.read_ahead_max": 123}),
    "RELAY_MAX_IN_FLIGHT": ("12", {"engine.in_flight_max": 12}),
    "RELAY_MAX_BYTES": ("17825792", {"engine.bytes_max": 17825792}),
    "RELAY_LEASE": ("9s", {"outbox.lease_s": 9.0, "engine.lease_s": 9.0}),
    "RELAY_MAX_RATE": ("7", {"engine.rate_max": 7.0}),
    "RELAY_RETRY_DELAYS": ("1s,2s", {"engine.retry_delays_s": (1.0, 2.0)}),
    "RELAY_MAX_AGE": ("5m", {"engine.age_max_s": 300.0}),
    "RELAY_UNROUTABLE": ("drop", {"broker.is_mandatory": False, "engine.on_unroutable": "drop"}),
    "RELAY_ON_PARKED": ("continue", {"outbox.holds_when_parked": False, "engine.holds_when_parked": False}),
    "RELAY_PARKED_RETENTION": ("4h", {"engine.parked_retention_s": 14400.0}),
    "RELAY_CONFIRM_TIMEOUT": ("11s", {"engine.confirm_timeout_s": 11.0}),
    "RELAY_POLL_INTERVAL": ("3s", {"outbox.poll_interval_s": 3.0, "engine.poll_interval_s": 3.0}),
}
"""A value of each setting that is not its default, and where it must arrive."""

ELSEWHERE = {
    *("RELAY_DATABASE_URL", "RELAY_AMQP_URL", "RELAY_MANAGEMENT_URL", "RELAY_SINK", "RELAY_SINK_PATH"),
    *("RELAY_SHUTDOWN_GRACE", "RELAY_LISTEN", "RELAY_LOG_FORMAT", "RELAY_LOG_LEVEL"),
}


class StillClock:
    def now(self) -> float:
        return 1000.0

    async def sleep(self, seconds: float) -> None:
        raise AssertionError("nothing runs here")


def built(monkeypatch: pytest.MonkeyPatch, **settings: str) -> dict[str, Any]:
    """What the parts of a relay are made with, as `part.parameter`."""
    found: dict[str, Any] = {}

    def note(part: str, *names: str) -> Callable[..., SimpleNamespace]:
        def make(*values: Any, **named: Any) -> SimpleNamespace:
            parameters = dict(zip(names, values, strict=False)) | named
            found.update({f"{part}.{name}": value for name, value in parameters.items()})
            return SimpleNamespace()

        return make

    def run_by(settings: EngineSettings, *parts: Any) -> None:
        found.update({f"engine.{field.name}": getattr(settings, field.name) for field in dataclasses.fields(settings)})
        found["random"] = next(part for part in parts if isinstance(part, Random))

    monkeypatch.setattr(daemon, "PostgresOutbox", note("outbox", "database", "table"))
    monkeypatch.setattr(daemon, "Router", lambda exchange, key: SimpleNamespace(exchange=exchange, routing_key=key))
    monkeypatch.setattr(amqp, "AmqpBroker", note("broker", "urls", "router"))
    monkeypatch.setattr(file, "FileBroker", note("broker", "path", "router"))
    monkeypatch.setattr(daemon, "Runner", run_by)
    config, warnings = load(BASE | settings)
    # (A read-ahead below the window is told of.)
    assert not warnings or settings.keys() == {"RELAY_MAX_READ_AHEAD"}
    clock = StillClock()
    database_time = DatabaseTime(clock)
    log = Log(logging.getLogger("tests.daemon"))
    daemon._runner(config, clock, database_time, Metrics(), Readiness(), log, None)
    database_time.observe(1.7e9, 1000.0)
    found["broker.database_now"] = found["broker.database_now"]()
    router = found.pop("broker.router")
    return found | {"broker.router.exchange": router.exchange, "broker.router.routing_key": router.routing_key}


@pytest.mark.parametrize("name", WIRED)
def test_each_setting_arrives_where_it_is_used(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    value, expected = WIRED[name]
    usual, changed = built(monkeypatch), built(monkeypatch, **{name: value})
    assert {where: _plain(changed[where]) for where in expected} == expected
    others = {where for where in usual if usual[where] != changed[where]} - expected.keys()
    assert others <= {"outbox.instance", "outbox.database", "broker.urls", "random"}, "and nowhere else"
    assert all(_plain(usual[where]) != value for where, value in expected.items()), "a value that is not the default"


def _plain(value: Any) -> Any:
    return value if isinstance(value, bool | int | float | tuple | str) or value is None else str(value)


def test_every_setting_of_a_relay_is_looked_at() -> None:
    used = {setting.variable for setting in SETTINGS if not setting.variable.startswith("RELAY_INBOX_")}
    assert used == WIRED.keys() | ELSEWHERE


@pytest.mark.parametrize("sink", [{}, {"RELAY_SINK": "file", "RELAY_SINK_PATH": "-"}], ids=["amqp", "file"])
def test_what_expires_is_judged_by_the_databases_clock(monkeypatch: pytest.MonkeyPatch, sink: dict[str, str]) -> None:
    """I7: a host's clock may be an hour wrong."""
    assert built(monkeypatch, **sink)["broker.database_now"] == 1.7e9
