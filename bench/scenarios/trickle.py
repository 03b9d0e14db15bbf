"""Scenario `trickle`: how long a committed row is on its way while rows arrive at a steady mean rate, and from silence."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from typing import Final

import asyncpg

from bench.procfs import Cpu, us_per_message
from bench.proof import expect_no_complaints
from bench.rig import Rig
from bench.step import Form, Run, Step
from bench.watched import watching
from bench.writing import Commit, write_at

RATES: Final = ((10, 1, 4), (100, 1, 4), (1_000, 1, 5), (2_000, 1, 4), (5_000, 10, 4))
"""Rows a second, rows a commit, seconds in the short form."""

LONG_FACTOR: Final = 6
WAKE_UPS: Final = 20
SILENCE_S: Final = 2.0


def steps(form: Form) -> Sequence[Step]:
    plan = [(rate, rows, form.seconds(seconds, seconds * LONG_FACTOR)) for rate, rows, seconds in RATES]
    wake_ups = form.rows(WAKE_UPS) if form.scale == 1.0 else 3
    return [
        Step("trickle", "rates", 4.0 + sum(seconds + 0.5 for _, _, seconds in plan), lambda rig: trickle(rig, plan)),
        Step("trickle", "wake-up", 5.0 + wake_ups * SILENCE_S, lambda rig: _wake_up(rig, wake_ups), is_once=True),
    ]


def trickle(rig: Rig, plan: Sequence[tuple[int, int, int]]) -> Sequence[Run]:
    measured: list[tuple[int, int, list[Commit], Cpu, float]] = []
    with rig.fresh_database() as database, rig.fresh_queue():
        rig.wait_until_quiet()
        with watching(rig, database) as watched:
            for rate, rows, seconds in plan:
                before, since = rig.cpu(watched.relays[0].pid), time.monotonic()
                commits = write_at(rig, database, f"r{rate}", rate / rows, seconds, rows)
                watched.wait_until_settled(len(commits) * rows)
                measured.append(
                    (rate, rows, commits, rig.cpu(watched.relays[0].pid) - before, time.monotonic() - since)
                )
    expect_no_complaints(rig)
    runs = []
    for rate, rows, commits, used, took_s in measured:
        count = len(commits) * rows
        runs.append(
            {
                "variant": f"{rate} a second",
                "rows_per_commit": rows,
                "messages": count,
                "seconds": round(took_s, 3),
                **watched.latencies(commits),
                "cpu_us_per_msg": {
                    "relay": us_per_message(used.relay_s, count),
                    "postgres_with_writers": us_per_message(used.postgres_s, count),
                    "rabbitmq": us_per_message(used.rabbitmq_s, count),
                },
            }
        )
    return runs


def _wake_up(rig: Rig, count: int) -> Sequence[Run]:
    """Single rows, each after a silence in which the relay has gone to sleep."""
    with rig.fresh_database() as database, rig.fresh_queue():
        rig.wait_until_quiet()
        with watching(rig, database) as watched:
            commits = asyncio.run(_single_rows(rig.postgres.url(database), count))
            watched.wait_until_settled(count)
    expect_no_complaints(rig)
    # What waking costs the machine itself: the same statement takes a fraction of a millisecond under load.
    insert_ms = statistics.median(commit.committed_at - commit.due_at for commit in commits) * 1e3
    figures = {"insert_p50_ms": round(insert_ms, 3), **watched.latencies(commits)}
    return [{"variant": "wake-up", "messages": count, "silence_s": SILENCE_S, **figures}]


async def _single_rows(url: str, count: int) -> list[Commit]:
    commits = []
    connection = await asyncpg.connect(url, timeout=10.0, command_timeout=30.0)
    try:
        for number in range(count):
            await asyncio.sleep(SILENCE_S)
            due_at, row_id = time.time(), f"wake-{number}"
            await connection.execute("insert into outbox (id, event_type, payload) values ($1, 'woken', '{}')", row_id)
            commits.append(Commit(due_at, time.time(), (row_id,)))
    finally:
        await connection.close(timeout=5.0)
    return commits
