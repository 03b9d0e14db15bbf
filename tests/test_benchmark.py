"""`relay bench` without servers: its flags, its figures, and what it reads from them."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from relay import benchmark
from relay.benchmark import load
from relay.benchmark.figures import (
    Drain,
    Limit,
    Outcome,
    Plan,
    Trickle,
    document,
    limit_of,
    lines,
    percentile,
    percentiles_ms,
)
from relay.benchmark.looks import LOOK_MIN_S, disturbance, pause_s, published
from relay.benchmark.plan import read_plan
from relay.errors import DatabaseUnavailable, UsageError
from relay.values import TableName

DRAIN = Drain(
    rows=10_000,
    seconds=1.0,
    cpu_s=0.2,
    read_s=0.2,
    read_calls=20,
    settle_s=0.3,
    settle_calls=20,
    confirm_s=500.0,
    rate_s=0.0,
    in_flight_max=2_000,
    database_rtt_s=0.0002,
    broker_rtt_s=0.0003,
    is_direct=True,
)


def options(**given: str) -> argparse.Namespace:
    names = dict.fromkeys(("rows", "keys", "payload_bytes", "rate", "seconds"))
    return argparse.Namespace(**{"queue": "quorum", **names, **given})


def test_flags_left_out_have_their_defaults() -> None:
    assert read_plan(options()) == Plan()
    assert read_plan(options(rows="500", rate="7")) == Plan(rows=500, rate_per_s=7)


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"rows": "many"}, "--rows 'many': .*; allowed: a whole number from 100 to"),
        ({"payload_bytes": "2"}, "--payload-bytes '2'"),
        ({"seconds": "0"}, "--seconds '0'"),
        ({"rows": "10000000", "payload_bytes": "1000"}, "more than 2 GiB"),
    ],
)
def test_a_flag_out_of_bounds_is_named(given: dict[str, str], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        read_plan(options(**given))


@pytest.mark.parametrize(
    ("changes", "limit", "reading"),
    [
        ({}, Limit.BROKER, "a confirm took 50.0 ms with up to 2,000 in flight, while the relay used 20% of a core"),
        ({"cpu_s": None}, Limit.BROKER, "a confirm took 50.0 ms with up to 2,000 in flight"),
        ({"cpu_s": 0.9}, Limit.RELAY, "busy for 90% of the time"),
        ({"rate_s": 0.5}, Limit.RELAY, "RELAY_MAX_RATE held publishing back for 50%"),
        ({"settle_s": 0.8}, Limit.DATABASE, "settling waited for PostgreSQL 80% of the time, 40.0 ms a transaction"),
        ({"read_s": 0.9}, Limit.DATABASE, "reading waited for PostgreSQL 90% of the time, 45.0 ms a transaction"),
        ({"read_s": 0.9, "database_rtt_s": 0.030}, Limit.NETWORK, "30.0 ms of the 45.0 ms a transaction takes"),
        # Four round trips are one settlement: BEGIN, fence, mark, COMMIT.
        ({"settle_s": 0.8, "database_rtt_s": 0.006}, Limit.NETWORK, "24.0 ms of the 40.0 ms a transaction takes"),
        ({"settle_s": 0.8, "database_rtt_s": 0.004}, Limit.DATABASE, "40.0 ms a transaction"),
        ({"settle_s": 0.8, "database_rtt_s": 0.004, "is_direct": False}, Limit.NETWORK, "24.0 ms of the 40.0 ms"),
        ({"read_s": 0.9, "database_rtt_s": 0.006, "is_direct": False}, Limit.NETWORK, "24.0 ms of the 45.0 ms"),
        ({"broker_rtt_s": 0.040}, Limit.NETWORK, "a confirm took 50.0 ms, of which 40.0 ms are the way to the broker"),
    ],
)
def test_what_limits_a_drain(changes: dict[str, float | None], limit: Limit, reading: str) -> None:
    drain = dataclasses.replace(DRAIN, **changes)  # type: ignore[arg-type]
    found, text = limit_of(drain)
    assert found is limit
    assert reading in text


def test_the_document_and_the_lines_say_the_same() -> None:
    trickle = Trickle(200, 10, [0.001 * n for n in range(1, 101)], [0.002 * n for n in range(1, 101)], 0.05)
    outcome = Outcome(Plan(rows=10_000), "1.0", DRAIN, trickle)
    result = document(outcome)
    assert result["drain"] == {
        "rows": 10_000,
        "seconds": 1.0,
        "messages_per_s": 10_000.0,
        "cpu_us_per_message": 20.0,
        "confirm_mean_ms": 50.0,
        "read_mean_ms": 10.0,
        "settle_mean_ms": 15.0,
    }
    assert isinstance(result["trickle"], dict)
    assert result["trickle"]["commit_to_consumer"] == {
        "p50_ms": 50.0,
        "p99_ms": 99.0,
        "max_ms": 100.0,
    }
    assert result["trickle"]["cpu_us_per_message"] == 500.0
    assert isinstance(result["limit"], dict)
    assert result["limit"]["by"] == "broker"
    shown = dict(lines(outcome))
    assert shown["drain"].startswith("10,000 messages/s (10,000 rows of 250 bytes, 5,000 keys, quorum queue")
    assert shown["commit to consumer"] == "p50 50.0 ms, p99 99.0 ms"
    assert shown["the limit"].startswith("broker: ")


GROUND: Any = SimpleNamespace(queue="relay_bench_1", table=TableName("public", "relay_bench_1"), sql=str)
CONFIG: Any = SimpleNamespace(database=dict)


async def test_a_writer_that_cannot_connect_is_an_ordinary_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its group of exceptions was shown as a fault of the relay's, with a traceback."""

    async def connect(*_: object, **__: object) -> None:
        raise DatabaseUnavailable("too many connections")

    monkeypatch.setattr(load, "connect", connect)
    with pytest.raises(DatabaseUnavailable, match="too many connections"):
        await load.trickle(GROUND, CONFIG, Plan())


class Writer:
    """In the place of a session; the time at which the last one was connected."""

    connected_at = 0.0

    @classmethod
    async def connect(cls, *_: object, **__: object) -> Writer:
        await asyncio.sleep(0)
        cls.connected_at = asyncio.get_running_loop().time()
        return cls()

    @contextlib.asynccontextmanager
    async def transaction(self) -> AsyncIterator[None]:
        yield

    async def nothing(self, *_: object, **__: object) -> None:
        pass

    execute = fetchval = close = nothing


async def test_no_row_is_due_before_all_writers_are_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The schedule began while they still connected, which counted as the first rows' latency."""
    monkeypatch.setattr(load, "connect", Writer.connect)
    written = await load.trickle(GROUND, CONFIG, Plan(rate_per_s=1_000, seconds=1))
    assert len(written) == 1_000
    assert min(row.due_at for row in written) >= Writer.connected_at > 0


def test_the_relay_finds_what_its_driver_looks_for_at_home() -> None:
    """A `.pgpass` was looked for in the home that the system knows, whatever HOME said."""
    given = {"HOME": "/srv/relay", "HOMEDRIVE": "C", "PGSSLMODE": "require", "RELAY_SINK_PATH": "-", "LANG": "C"}
    settings = benchmark._settings(given, GROUND)
    assert settings.items() >= {"HOME": "/srv/relay", "PGSSLMODE": "require", "RELAY_SINK": "amqp"}.items()
    assert not settings.keys() & {"HOMEDRIVE", "RELAY_SINK_PATH", "LANG"}


@pytest.mark.parametrize(
    ("rows", "rows_per_s"), [(300, 3_000), (2_000, 5_500), (60_000, 150_000), (60_000, 29_000), (1_000_000, 29_000)]
)
def test_the_end_of_a_drain_is_seen_when_it_comes(rows: int, rows_per_s: int) -> None:
    """By the mean rate so far, whatever took half a second was seen to end up to half a second later."""
    begin_s, settlement_s = 0.05, 0.02
    now = watched = sent = looks = 0.0
    pause = LOOK_MIN_S
    while sent < rows:
        now, looks = now + pause, looks + 1
        settled_s = max(0.0, now - begin_s) // settlement_s * settlement_s
        before, sent = sent, min(rows, settled_s * rows_per_s)
        pause = pause_s(int(rows - sent), int(sent - before), now - watched, now)
        watched = now
    end_s = begin_s + rows / rows_per_s
    assert now - end_s < settlement_s + 0.03
    assert looks < 20 + 3 * end_s


@pytest.mark.parametrize(
    ("outcomes", "found"),
    [
        ({"acked": 10, "nacked": 0}, None),
        ({"acked": 9}, None),  # the consumer has the last one before the relay has its confirm
        ({"acked": 11}, "more than 10 rows, each once: 11 acked"),
        ({"acked": 10, "nacked": 2, "lost": 0}, "10 acked, 2 nacked"),
    ],
)
def test_a_disturbed_run_is_told(outcomes: dict[str, int], found: str | None) -> None:
    """Messages that were nacked, lost and sent again were part of the figures."""
    series = {f'relay_published_total{{outcome="{name}"}}': float(count) for name, count in outcomes.items()}
    assert published(series | {"relay_rows_sent_total": 3.0}) == outcomes
    assert (disturbance(outcomes, 10) or "").endswith(found or "")
    assert (disturbance(outcomes, 10) is None) is (found is None)


@pytest.mark.parametrize(("values", "p99_9_ms"), [(999, None), (1_000, 999.0)])
def test_of_fewer_than_a_thousand_there_is_no_p99_9(values: int, p99_9_ms: float | None) -> None:
    """It was the largest of them under another name."""
    found = percentiles_ms([n / 1_000 for n in range(1, values + 1)])
    assert found.get("p99_9_ms") == p99_9_ms
    assert found["max_ms"] == values


@pytest.mark.parametrize(("share", "expected"), [(0.5, 50.0), (0.99, 99.0), (0.999, 100.0), (1.0, 100.0), (0.001, 1.0)])
def test_a_percentile_is_the_nearest_rank(share: float, expected: float) -> None:
    assert percentile([float(n) for n in range(100, 0, -1)], share) == expected
