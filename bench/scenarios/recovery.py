"""Scenario `recovery`: the broker restarts while rows keep arriving; how long until what has piled up is gone."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Final

from bench import native
from bench.errors import BenchFailed
from bench.latency import commit_latencies
from bench.process import Relay
from bench.proof import expect_no_complaints
from bench.rig import QUEUE, Rig
from bench.step import Form, Run, Step
from bench.stopwatch import read_times
from bench.watched import Watched
from bench.writing import Commit, write_at

RATE: Final = 1_000
BEFORE_S: Final = 2.0
SLICE_S: Final = 2
"""The writers are started anew so often, for nobody knows how long the broker takes to come back."""

BEHIND_S: Final = 0.05
"""Recovered: no more rows wait than arrive in this time."""

NEARLY_S: Final = 0.2
"""The same by the table, where a row waits for its settlement too: from here on the writers write one slice more."""


def steps(form: Form) -> Sequence[Step]:
    return [Step("recovery", "broker restart", 20.0, _measure, is_once=not form.is_long)]


def _measure(rig: Rig) -> Sequence[Run]:
    path = rig.directory / "stopwatch.json"
    with rig.fresh_database() as database, rig.fresh_queue(), ThreadPoolExecutor(1) as writers:
        rig.wait_until_quiet()
        with Relay(rig, database, program=("-m", "bench.stopwatch", str(path))) as relay:
            relay.wait_until_ready()
            is_nearly_over = Event()
            writing = writers.submit(_write_until, rig, database, is_nearly_over)
            try:
                time.sleep(BEFORE_S)
                down_at = time.time()
                rig.rabbit.restart()
                up_at = time.time()
                rig.wait_until_sent(database, round(RATE * NEARLY_S))
            finally:
                is_nearly_over.set()
            commits = writing.result()
            Watched([relay], None).wait_until_settled(len(commits))
        confirmed = read_times(path).confirmed
        copies = _copies(rig, commits) if native.is_available() else None
    # A broker that is told to end says so in its log.
    expect_no_complaints(rig, of_broker=False)
    reconnected = min(at for at in confirmed.values() if at > up_at)
    recovered = recovered_at(commits, confirmed, up_at)
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


def _write_until(rig: Rig, database: str, is_nearly_over: Event) -> list[Commit]:
    """Slice by slice, and a whole one after that."""
    commits: list[Commit] = []
    for number in itertools.count(1):
        is_last = is_nearly_over.is_set()
        commits += write_at(rig, database, f"r{number}", RATE, SLICE_S)
        if is_last:
            break
    return commits


def recovered_at(commits: Sequence[Commit], confirmed: Mapping[str, float], since: float) -> float:
    """The first moment from `since` on at which no more rows wait than arrive in BEHIND_S. Raises BenchFailed where it did not
    come, or none arrived any more by then: that would be a drain.
    """
    events = [(commit.committed_at, 1) for commit in commits] + [(at, -1) for at in confirmed.values()]
    waiting = 0
    for at, change in sorted(events):
        waiting += change
        if at >= since and change < 0 and waiting <= RATE * BEHIND_S:
            if at > max(commit.committed_at for commit in commits):
                raise BenchFailed("what had piled up was gone only after the writers were done")
            return at
    raise BenchFailed("what had piled up was never gone")


def _copies(rig: Rig, commits: Sequence[Commit]) -> int:
    """Further copies in the queue. Raises BenchFailed where a row is missing."""
    delivered = list(native.collect(rig.amqp_url, QUEUE, len(commits)))
    missing = {row_id for commit in commits for row_id in commit.ids} - set(delivered)
    if missing:
        raise BenchFailed(f"{len(missing)} confirmed rows are not in the queue, such as {min(missing)}")
    return len(delivered) - len(set(delivered))
