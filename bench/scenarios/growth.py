"""Scenario `growth`: what a read of due rows costs beside sent rows, rows aside, and transactions left open.

The relay of a probe has stopwatches; a probe is 100 commits a second of ten rows each, and its figure the median time of the reads
that brought rows. Each step probes without and with, minutes never lie between the two.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import asyncpg

from bench.errors import BenchFailed
from bench.latency import commit_latencies
from bench.load import EVENT_TYPE
from bench.proof import expect_no_complaints
from bench.rig import Rig
from bench.step import Form, Run, Step
from bench.watched import Watched, watching
from bench.writing import Commit, write_at

COMMITS_PER_S, ROWS_PER_COMMIT = 100, 10
OPEN_WRITER_S: Final = 15
SQL_TIMEOUT_S: Final = 300.0
INSERT: Final = """insert into outbox (event_type, aggregate_type, aggregate_id, payload)
                   select $1, 'customer', 'g-' || i % 5000, '{"n": 1}' from generate_series(1, $2::int) i"""
ASIDE: Final = """
    insert into outbox (event_type, aggregate_type, aggregate_id, payload, aside, holds, due_at, attempts, parked_at,
                        failure_class, failure_error)
    select '{event_type}', 'customer', k.key, '{{"n": 1}}', '{aside}', true, {due_at}, 1, {parked_at}, 'unroutable', 'NO_ROUTE'
    from generate_series(1, {rows}) i, lateral (select {key}) k(key)"""


@dataclass(frozen=True, slots=True)
class Probe:
    """One stretch of arrivals, in Unix times."""

    began: float
    ended: float
    commits: list[Commit]


def steps(form: Form) -> Sequence[Step]:
    rows, seconds = form.rows(100_000, 1_000_000), form.seconds(2, 10)
    open_s = form.seconds(OPEN_WRITER_S, 120)
    is_once = not form.is_long
    return [
        Step("growth", "sent", 11.0 + 2 * seconds, lambda rig: _sent(rig, rows, seconds), is_once),
        Step("growth", "aside", 18.0 + 2 * seconds, lambda rig: _aside(rig, rows, seconds), is_once),
        Step("growth", "old snapshot", 11.0 + 2 * seconds, lambda rig: _old_snapshot(rig, rows, seconds), is_once),
        Step("growth", "open writer", 6.0 + open_s + seconds, lambda rig: open_writer(rig, open_s, seconds), is_once),
    ]


def _sent(rig: Rig, rows: int, seconds: int) -> Sequence[Run]:
    """Rows that the same relay has sent and marked."""
    with rig.fresh_database() as database, rig.fresh_queue():
        rig.wait_until_quiet()
        with watching(rig, database) as watched:
            without = _probe(rig, database, watched, "a", seconds)
            asyncio.run(_insert(rig.postgres.url(database), rows))
            watched.wait_until_settled(rows)
            having = _probe(rig, database, watched, "b", seconds)
    return _compared(rig, "sent", rows, watched, without, watched, having)


def _aside(rig: Rig, rows: int, seconds: int) -> Sequence[Run]:
    """As many parked, deferred, and held rows, there before the relay starts."""
    with rig.fresh_queue():
        with rig.fresh_database() as database:
            rig.wait_until_quiet()
            with watching(rig, database) as empty:
                without = _probe(rig, database, empty, "a", seconds)
        with rig.fresh_database() as database:
            day, now = "now() + interval '1 day'", "now()"
            for aside, key, due_at, parked_at in (
                ("parked", "'p-' || i", "null", now),
                ("held", "'p-' || i", "null", "null"),
                ("deferred", "'d-' || i", day, "null"),
            ):
                values = {"aside": aside, "key": key, "due_at": due_at, "parked_at": parked_at}
                rig.sql(ASIDE.format(event_type=EVENT_TYPE, rows=rows, **values), database)
            rig.sql("vacuum analyze outbox", database)
            rig.sql("checkpoint", database)
            rig.wait_until_quiet()
            with watching(rig, database) as full:
                having = _probe(rig, database, full, "b", seconds)
    return _compared(rig, "aside", rows, empty, without, full, having)


def _old_snapshot(rig: Rig, rows: int, seconds: int) -> Sequence[Run]:
    """A reading transaction is open from before the rows were inserted: none of the deleted ones can be cleared away."""
    with rig.fresh_database() as database, rig.fresh_queue():
        url = rig.postgres.url(database)
        rig.wait_until_quiet()
        with watching(rig, database, {"RELAY_SENT_ROWS": "delete"}) as watched:
            without = _probe(rig, database, watched, "a", seconds)
            with _open_transaction(url, "repeatable_read", "select count(*) from outbox"):
                asyncio.run(_insert(url, rows))
                watched.wait_until_settled(rows)
                having = _probe(rig, database, watched, "b", seconds)
    return _compared(rig, "old snapshot", rows, watched, without, watched, having)


def open_writer(rig: Rig, open_s: int, seconds: int) -> Sequence[Run]:
    """A transaction that has inserted a row stays open while traffic goes on; the last seconds of it are probed."""
    with rig.fresh_database() as database, rig.fresh_queue():
        url = rig.postgres.url(database)
        rig.wait_until_quiet()
        with watching(rig, database) as watched:
            without = _probe(rig, database, watched, "a", seconds)
            with _open_transaction(
                url, "read_committed", f"insert into outbox (event_type, payload) values ('{EVENT_TYPE}', '1')"
            ):
                _probe(rig, database, watched, "w", max(1, open_s - seconds))
                having = _probe(rig, database, watched, "b", seconds)
    return _compared(rig, "open writer", 0, watched, without, watched, having)


def _probe(rig: Rig, database: str, watched: Watched, prefix: str, seconds: int) -> Probe:
    began = time.time()
    commits = write_at(rig, database, prefix, COMMITS_PER_S, seconds, ROWS_PER_COMMIT)
    watched.wait_until_settled(len(commits) * ROWS_PER_COMMIT)
    return Probe(began, time.time(), commits)


def _compared(
    rig: Rig, variant: str, rows: int, before: Watched, without: Probe, after: Watched, having: Probe
) -> Sequence[Run]:
    expect_no_complaints(rig)
    plain, loaded = _reads(before, without), _reads(after, having)
    return [
        {
            "variant": variant,
            "rows": rows,
            "reads": [len(plain), len(loaded)],
            "read_ms_without": round(statistics.median(plain) * 1e3, 3),
            "read_ms": round(statistics.median(loaded) * 1e3, 3),
            "growth": round(statistics.median(loaded) / statistics.median(plain), 3),
            "latency_without": commit_latencies(without.commits, before.times.confirmed),
            "latency": commit_latencies(having.commits, after.times.confirmed),
        }
    ]


def _reads(watched: Watched, probe: Probe) -> list[float]:
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


@contextmanager
def _open_transaction(url: str, isolation: str, statement: str) -> Iterator[None]:
    """A transaction that has run this statement is open during the block, and rolled back after it."""
    loop = asyncio.new_event_loop()
    try:
        connection = loop.run_until_complete(asyncpg.connect(url, timeout=10.0, command_timeout=SQL_TIMEOUT_S))
        transaction = connection.transaction(isolation=isolation)
        loop.run_until_complete(transaction.start())
        loop.run_until_complete(connection.execute(statement))
        yield
        loop.run_until_complete(transaction.rollback())
        loop.run_until_complete(connection.close(timeout=5.0))
    finally:
        loop.close()
