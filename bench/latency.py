"""Latencies of committed rows, in milliseconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.errors import BenchFailed
from bench.writing import Commit
from relay.benchmark.figures import percentiles_ms


def commit_latencies(commits: Sequence[Commit], arrived: Mapping[str, float]) -> dict[str, Any]:
    """From the commit's return, and from the moment the commit was due (nothing omitted), to each row's arrival.

    A row may arrive before its writer hears of the commit: that is zero. Raises BenchFailed where a row never arrived.
    """
    missing = [row_id for commit in commits for row_id in commit.ids if row_id not in arrived]
    if missing:
        raise BenchFailed(f"{len(missing)} committed rows never arrived, such as {missing[0]}")
    since_commit = [max(0.0, arrived[row_id] - commit.committed_at) for commit in commits for row_id in commit.ids]
    since_due = [max(0.0, arrived[row_id] - commit.due_at) for commit in commits for row_id in commit.ids]
    return {**percentiles_ms(since_commit), "from_due": percentiles_ms(since_due)}
