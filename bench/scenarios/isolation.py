"""Scenario `isolation`: how much a good row of another key is delayed by rows that cannot go.

Rows at fault name an exchange that no queue is bound to: the broker returns them.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from typing import Final

import asyncpg

from bench.load import EVENT_TYPE
from bench.proof import expect_no_complaints
from bench.rig import NOWHERE, Rig
from bench.step import Form, Run, Step
from bench.watched import watching
from bench.writing import Commit, write_at
from relay.benchmark.figures import percentiles_ms

HELD_ROWS: Final = 10_000
POISON_BATCHES, BATCH_ROWS = 3, 500
GOOD_PER_S: Final = 100
SQL_TIMEOUT_S: Final = 60.0
RETURNED_TIMEOUT_S: Final = 60.0

POISON: Final = f"""insert into outbox (event_type, aggregate_id, exchange, payload)
                    select '{EVENT_TYPE}', $1 || i, '{NOWHERE}', '1' from generate_series(1, $2::int) i"""
FOLLOWERS: Final = f"""insert into outbox (event_type, aggregate_id, payload)
                       select '{EVENT_TYPE}', 'poison-1', '1' from generate_series(1, $1::int) i"""
GOOD: Final = f"insert into outbox (id, event_type, aggregate_id, payload) values ($1, '{EVENT_TYPE}', $1, '1')"


def steps(form: Form) -> Sequence[Step]:
    held, seconds = form.rows(HELD_ROWS, 100_000), form.seconds(2, 20)
    is_once = not form.is_long
    return [
        Step("isolation", "held", 8.0 + 2 * seconds, lambda rig: _held(rig, held, seconds), is_once),
        Step("isolation", "poison", 10.0, lambda rig: poison(rig, POISON_BATCHES * BATCH_ROWS), is_once),
    ]


def _held(rig: Rig, rows: int, seconds: int) -> Sequence[Run]:
    """One row at fault, then so many of its key: good rows arrive all the while."""
    with rig.fresh_database() as database, rig.fresh_queue():
        rig.wait_until_quiet()
        # The first retry comes when all is over: what is measured is waiting, not retrying.
        with watching(rig, database, {"RELAY_RETRY_DELAYS": "10m"}) as watched:
            without = write_at(rig, database, "a", GOOD_PER_S, seconds)
            watched.wait_until_settled(len(without))
            asyncio.run(_statements(rig.postgres.url(database), (POISON, "poison-", 1), (FOLLOWERS, rows)))
            having = write_at(rig, database, "b", GOOD_PER_S, seconds)
            watched.wait_until_settled(len(having))
    expect_no_complaints(rig)
    plain, delayed = watched.latencies(without), watched.latencies(having)
    return [
        {
            "variant": "held",
            "rows": rows,
            "without": plain,
            **delayed,
            "delay_p50_ms": round(delayed["p50_ms"] - plain["p50_ms"], 3),
            "delay_p99_ms": round(delayed["p99_ms"] - plain["p99_ms"], 3),
        }
    ]


def poison(rig: Rig, rows: int) -> Sequence[Run]:
    """So many rows at fault, of as many keys, and one good row right behind them; against a good row alone, three times."""
    alone: list[Commit] = []
    behind: list[Commit] = []
    with rig.fresh_database() as database, rig.fresh_queue():
        url = rig.postgres.url(database)
        rig.wait_until_quiet()
        with watching(rig, database, {"RELAY_RETRY_DELAYS": "10m"}) as watched:
            for turn in range(1, 4):
                alone.append(asyncio.run(_good_row(url, f"alone-{turn}")))
                watched.wait_until_settled(1)
                behind.append(asyncio.run(_good_row(url, f"behind-{turn}", (POISON, f"poison-{turn}-", rows))))
                watched.wait_until_settled(1)
                deadline = time.monotonic() + RETURNED_TIMEOUT_S
                while watched.total(_DEFERRED) < rows * turn:
                    if time.monotonic() > deadline:
                        raise watched.relays[0].failed(f"{rows * turn} rows at fault were not all set aside")
                    time.sleep(0.05)
    expect_no_complaints(rig)
    times = watched.times.confirmed
    found = {
        name: [max(0.0, times[commit.ids[0]] - commit.committed_at) for commit in commits]
        for name, commits in (("alone", alone), ("behind", behind))
    }
    return [
        {
            "variant": "poison",
            "rows": rows,
            "alone": percentiles_ms(found["alone"]),
            **percentiles_ms(found["behind"]),
            "delay_ms": round((statistics.median(found["behind"]) - statistics.median(found["alone"])) * 1e3, 3),
        }
    ]


_DEFERRED: Final = 'relay_rows_deferred_total{reason="unroutable"}'


async def _good_row(url: str, row_id: str, *before: tuple[object, ...]) -> Commit:
    """One row, in the commit of the statements `before` it."""
    due_at = time.time()
    return Commit(due_at, await _statements(url, *before, (GOOD, row_id)), (row_id,))


async def _statements(url: str, *statements: tuple[object, ...]) -> float:
    """In one transaction; each a text and its values. When the commit returned, in Unix time."""
    connection = await asyncpg.connect(url, timeout=10.0, command_timeout=SQL_TIMEOUT_S)
    async with connection.transaction():
        for text, *values in statements:
            await connection.execute(text, *values)
    committed_at = time.time()
    await connection.close(timeout=5.0)
    return committed_at
