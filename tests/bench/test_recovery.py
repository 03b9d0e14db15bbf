"""Recovery is told from a drain: rows still arrive when what has piled up is gone."""

from __future__ import annotations

import pytest

from bench.errors import BenchFailed
from bench.scenarios.recovery import recovered_at
from bench.writing import Commit

COMMITS = [Commit(n / 100, n / 100, (str(n),)) for n in range(1_000)]
"""A hundred a second, for ten seconds."""


def test_it_has_recovered_when_few_rows_wait_while_more_arrive() -> None:
    confirmed = {str(n): 5.0 + n / 1_000 for n in range(600)} | {str(n): n / 100 + 0.01 for n in range(600, 1_000)}
    assert recovered_at(COMMITS, confirmed, since=5.0) == pytest.approx(5.506, abs=0.01)


def test_what_the_writers_left_behind_is_a_drain() -> None:
    """The broker took longer to restart than the writers wrote, and the drain after it was reported."""
    confirmed = {str(n): 11.0 + n / 1_000 for n in range(1_000)}
    with pytest.raises(BenchFailed, match="gone only after the writers were done"):
        recovered_at(COMMITS, confirmed, since=11.0)


def test_what_never_recovered_has_no_figure() -> None:
    with pytest.raises(BenchFailed, match="never gone"):
        recovered_at(COMMITS, {}, since=5.0)
