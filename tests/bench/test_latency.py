"""Latencies of which none is left out."""

from __future__ import annotations

import pytest

from bench.errors import BenchFailed
from bench.latency import commit_latencies
from bench.writing import Commit


def test_latencies_run_from_the_commit_and_from_when_it_was_due() -> None:
    """A commit that had to wait for a free writer is late by what its arrival in time would have seen."""
    commits = [Commit(due_at=10.0, committed_at=12.0, ids=("a", "b"))]
    found = commit_latencies(commits, {"a": 12.5, "b": 11.9})
    assert found["max_ms"] == 500.0
    assert found["p50_ms"] == 0.0
    assert found["from_due"]["max_ms"] == 2500.0


def test_a_row_that_never_arrived_is_no_latency() -> None:
    with pytest.raises(BenchFailed, match="1 committed rows never arrived, such as b"):
        commit_latencies([Commit(1.0, 2.0, ("a", "b"))], {"a": 3.0})
