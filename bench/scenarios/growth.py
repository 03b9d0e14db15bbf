"""Scenario `growth`: what a read of due rows costs beside sent rows, rows aside, and transactions left open.

Two relays with stopwatches, one on a table that is as said and one on an empty table, get 100 commits a second of ten rows each
in the same seconds: in turns, the machine's better and worse seconds showed (0.90 and 1.36 for the same code). The figure is
the median time of the reads that brought rows, with ÷ without.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Final

import asyncpg

from bench.errors import BenchFailed
from bench.latency import commit_latencies
from bench.load import EVENT_TYPE
from bench.proof import expect_no_complaints
from bench.rig import Rig
from bench.step import Form, Run, Step
from bench.transaction import open_transaction
from bench.watched import Watched, watching
from bench.writing import Commit, write_at

COMMITS_PER_S, ROWS_PER_COMMIT = 100, 10
OPEN_WRITER_S: Final = 15
SQL_TIMEOUT_S: Final = 300.0
WALK_TIMEOUT_S: Final = 600.0
INSERT: Final = """insert into outbox (event_type, aggregate_type, aggregate_id, payload)
                   select $1, 'customer', 'g-' || i % 5000, '{"n": 1}' from generate_series(1, $2::int) i"""
ASIDE: Final = """
    insert into outbox (event_type, aggregate_type, aggregate_id, payload, aside, holds, due_at, attempts, parked_at,
                        failure_class, failure_error)
    select '{event_type}', 'customer', k.key, '{{"n": 1}}', '{aside}', true, {due_at}, 1, {parked_at}, 'unroutable', 'NO_ROUTE'
    from generate_series(1, {rows}) i, lateral (select {key}) k(key)"""


Condition = Callable[[Rig, str, Watched], AbstractContextManager[None]]
"""Makes a table (its database's name) and its relay what is to be measured, for the time of a block."""


@dataclass(slots=True)
class Probe:
    """A stretch of arrivals at one relay, in Unix times."""

    began: float
    ended: float
    commits: Sequence[Commit]


def steps(form: Form) -> Sequence[Step]:
    rows, seconds = form.rows(100_000), form.seconds(4, 20)
    open_s = form.seconds(OPEN_WRITER_S, 120)
    is_once = not form.is_long
    probes_s = 3.0 + seconds
    steps = [
        Step("growth", "sent", 4.0 + probes_s, lambda rig: _sent(rig, "sent", rows, seconds), is_once),
        Step("growth", "two relays", 7.0 + probes_s, lambda rig: two_relays(rig, rows, seconds), is_once),
        Step("growth", "aside", 15.0 + probes_s, lambda rig: _aside(rig, rows, seconds), is_once),
        Step("growth", "old snapshot", 4.0 + probes_s, lambda rig: _old_snapshot(rig, rows, seconds), is_once),
        Step("growth", "open writer", open_s + probes_s, lambda rig: open_writer(rig, open_s, seconds), is_once),
    ]
    if form.is_long:
        many = form.rows(1_000_000)
        steps.append(Step("growth", "many sent", 40.0 + probes_s, lambda rig: _sent(rig, "many sent", many, seconds)))
    return steps


def _sent(rig: Rig, variant: str, rows: int, seconds: int) -> Sequence[Run]:
    """Rows that the same relay has sent and marked."""
    return _compared(rig, variant, rows, seconds, _sends(rows))


def two_relays(rig: Rig, rows: int, seconds: int) -> Sequence[Run]:
    """Rows that two relays have sent and marked, each those of its shards; against two on an empty table."""
    return _compared(rig, "two relays", rows, seconds, _sends(rows), relays=2)


def _sends(rows: int) -> Condition:
    """So many rows are inserted, sent and marked."""

    @contextmanager
    def condition(rig: Rig, database: str, watched: Watched) -> Iterator[None]:
        asyncio.run(_insert(rig.postgres.url(database), rows))
        watched.wait_until_settled(rows)
        yield

    return condition


def _aside(rig: Rig, rows: int, seconds: int) -> Sequence[Run]:
    """As many parked, deferred, and held rows, there before the relay starts."""

    def fill(database: str) -> None:
        for aside, key, due_at, parked_at in (
            ("parked", "'p-' || i", "null", "now()"),
            ("held", "'p-' || i", "null", "null"),
            ("deferred", "'d-' || i", "now() + interval '1 day'", "null"),
        ):
            values = {"aside": aside, "key": key, "due_at": due_at, "parked_at": parked_at}
            rig.sql(ASIDE.format(event_type=EVENT_TYPE, rows=rows, **values), database, rows)
        rig.sql("vacuum analyze outbox", database, rows)
        rig.sql("checkpoint", database, rows)

    return _compared(rig, "aside", rows, seconds, _walked, fill=fill)


def _old_snapshot(rig: Rig, rows: int, seconds: int) -> Sequence[Run]:
    """A reading transaction is open from before the rows were inserted: none of the deleted ones can be cleared away."""

    @contextmanager
    def condition(rig: Rig, database: str, watched: Watched) -> Iterator[None]:
        snapshot = open_transaction(
            rig.postgres.url(database), "select count(*) from outbox", isolation="repeatable_read"
        )
        with snapshot, _sends(rows)(rig, database, watched):
            yield

    return _compared(rig, "old snapshot", rows, seconds, condition, {"RELAY_SENT_ROWS": "delete"})


def open_writer(rig: Rig, open_s: int, seconds: int) -> Sequence[Run]:
    """A transaction that has inserted a row stays open while traffic goes on, before the probes and during them."""

    @contextmanager
    def condition(rig: Rig, database: str, watched: Watched) -> Iterator[None]:
        statement = f"insert into outbox (event_type, payload) values ('{EVENT_TYPE}', '1')"
        with open_transaction(rig.postgres.url(database), statement):
            _probe(rig, database, watched, "w", max(1, open_s - seconds))
            yield

    return _compared(rig, "open writer", 0, seconds, condition)


@contextmanager
def _walked(rig: Rig, database: str, watched: Watched) -> Iterator[None]:
    """The relay has found out which keys are held, as it does after it has taken the shards up."""
    watched.relays[0].wait_until_logged("held_keys_known", WALK_TIMEOUT_S)
    yield


def _compared(
    rig: Rig,
    variant: str,
    rows: int,
    seconds: int,
    condition: Condition,
    settings: dict[str, str] | None = None,
    *,
    fill: Callable[[str], None] | None = None,
    relays: int = 1,
) -> Sequence[Run]:
    with rig.fresh_database() as plain, rig.fresh_database() as loaded, rig.fresh_queue():
        if fill is not None:
            fill(loaded)
        rig.wait_until_quiet()
        with (
            watching(rig, plain, settings, consumes=False, relays=relays) as empty,
            watching(rig, loaded, settings, consumes=False, relays=relays) as full,
            condition(rig, loaded, full),
            ThreadPoolExecutor() as both,
        ):
            sides = ((plain, empty, "a"), (loaded, full, "b"))
            running = [both.submit(_probe, rig, *side, seconds) for side in sides]
            without, having = (each.result() for each in running)
    expect_no_complaints(rig)
    before, after = _reads(empty, without), _reads(full, having)
    return [
        {
            "variant": variant,
            "rows": rows,
            "relays": relays,
            "reads": [len(before), len(after)],
            "read_ms_without": round(statistics.median(before) * 1e3, 3),
            "read_ms": round(statistics.median(after) * 1e3, 3),
            "growth": round(statistics.median(after) / statistics.median(before), 3),
            "latency_without": commit_latencies(without.commits, empty.times.confirmed),
            "latency": commit_latencies(having.commits, full.times.confirmed),
        }
    ]


def _probe(rig: Rig, database: str, watched: Watched, prefix: str, seconds: int) -> Probe:
    began = time.time()
    commits = write_at(rig, database, prefix, COMMITS_PER_S, seconds, ROWS_PER_COMMIT)
    watched.wait_until_settled(len(commits) * ROWS_PER_COMMIT)
    return Probe(began, time.time(), commits)


def _reads(watched: Watched, probe: Probe) -> list[float]:
    """Seconds of each read that brought rows. Raises BenchFailed."""
    found = [seconds for at, seconds, rows in watched.times.reads if rows and probe.began <= at <= probe.ended]
    if not found:
        raise BenchFailed("no read brought a row")
    return found


async def _insert(url: str, rows: int) -> None:
    connection = await asyncpg.connect(url, timeout=10.0, command_timeout=SQL_TIMEOUT_S)
    try:
        for first in range(0, rows, 10_000):
            await connection.execute(INSERT, EVENT_TYPE, min(10_000, rows - first))
    finally:
        await connection.close(timeout=5.0)
