"""Scenario `recovery`: the broker restarts while rows keep arriving; how long until what has piled up is gone."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from bench import native
from bench.errors import BenchFailed
from bench.latency import commit_latencies
from bench.process import Relay
from bench.rig import QUEUE, Rig
from bench.step import Form, Run, Step
from bench.stopwatch import read_times
from bench.watched import Watched
from bench.writing import Commit, write_at

RATE: Final = 1_000
BEFORE_S: Final = 2.0
BEHIND_S: Final = 0.05
"""Recovered: no more rows wait than arrive in this time."""


def steps(form: Form) -> Sequence[Step]:
    seconds = max(14, form.seconds(14, 60))
    return [
        Step("recovery", "broker restart", seconds + 8.0, lambda rig: _measure(rig, seconds), is_once=not form.is_long)
    ]


def _measure(rig: Rig, seconds: int) -> Sequence[Run]:
    path = rig.directory / "stopwatch.json"
    with rig.fresh_database() as database, rig.fresh_queue(), ThreadPoolExecutor(1) as writers:
        rig.wait_until_quiet()
        with Relay(rig, database, program=("-m", "bench.stopwatch", str(path))) as relay:
            relay.wait_until_ready()
            writing = writers.submit(write_at, rig, database, "r", RATE, seconds)
            time.sleep(BEFORE_S)
            down_at = time.time()
            rig.rabbit.restart()
            up_at = time.time()
            commits = writing.result()
            Watched(relay, None).wait_until_settled(len(commits))
        confirmed = read_times(path).confirmed
        copies = _copies(rig, commits) if native.is_available() else None
    # A broker that is told to end says so in its log.
    rig.complaints()
    reconnected = min((at for at in confirmed.values() if at > up_at), default=None)
    if reconnected is None:
        raise BenchFailed("nothing was confirmed after the restart: it took longer than the writers wrote")
    recovered = _recovered(commits, confirmed, up_at)
    return [
        {
            "variant": "broker restart",
            "messages": len(commits),
            "down_s": round(up_at - down_at, 3),
            "reconnect_s": round(reconnected - up_at, 3),
            "drained_s": round(recovered - up_at, 3),
            "copies": copies,
            "latency": commit_latencies(commits, confirmed),
        }
    ]


def _recovered(commits: Sequence[Commit], confirmed: dict[str, float], since: float) -> float:
    """The first moment from `since` on at which no more rows wait than arrive in BEHIND_S."""
    events = [(commit.committed_at, 1) for commit in commits] + [(at, -1) for at in confirmed.values()]
    waiting = 0
    for at, change in sorted(events):
        waiting += change
        if at >= since and change < 0 and waiting <= RATE * BEHIND_S:
            return at
    raise BenchFailed("what had piled up was never gone")


def _copies(rig: Rig, commits: Sequence[Commit]) -> int:
    """Further copies in the queue. Raises BenchFailed where a row is missing."""
    delivered = list(native.collect(rig.amqp_url, QUEUE, len(commits)))
    missing = {row_id for commit in commits for row_id in commit.ids} - set(delivered)
    if missing:
        raise BenchFailed(f"{len(missing)} confirmed rows are not in the queue, such as {min(missing)}")
    return len(delivered) - len(set(delivered))
