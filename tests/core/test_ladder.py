"""The ladder of a row at fault, and the backoffs that use no attempt."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.core.ladder import (
    JITTER,
    NACK_BACKOFF_MAX_S,
    NACK_BACKOFF_MIN_S,
    Step,
    jittered,
    nack_backoff,
    next_step,
    reconnect_backoff,
)

rolls = st.floats(0, 1, exclude_max=True)


def test_n_delays_are_n_plus_one_attempts() -> None:
    delays = (1.0, 5.0)
    steps = [next_step(attempts, delays, 0.5) for attempts in range(3)]
    assert steps == [Step(1, 1.0), Step(2, 5.0), Step(3, None)]
    assert next_step(7, delays, 0.5) == Step(8, None), "a row from the time of a longer ladder"
    assert next_step(0, (), 0.5) == Step(1, None)


@given(delay_s=st.floats(0.001, 1e6), roll=rolls)
def test_jitter_is_a_fifth_either_way(delay_s: float, roll: float) -> None:
    assert delay_s * 0.8 <= jittered(delay_s, roll) * (1 + 1e-9)
    assert jittered(delay_s, roll) <= delay_s * 1.2 * (1 + 1e-9)


def test_jitter_reaches_both_ends() -> None:
    """Rows that are set back together do not return together."""
    assert (jittered(10.0, 0.0), jittered(10.0, 0.5)) == (8.0, 10.0)
    assert jittered(10.0, 1.0 - 1e-9) == pytest.approx(12.0)
    assert next_step(0, (10.0,), 0.0) == Step(1, 8.0)
    assert nack_backoff(1, 0.0) == pytest.approx(0.08)
    assert reconnect_backoff(9, 0.0) == pytest.approx(0.5 * reconnect_backoff(9, 1.0))


def test_nacks_double_from_100_ms_to_30_s() -> None:
    waits = [nack_backoff(nacks, 0.5) for nacks in range(1, 12)]
    assert waits[:4] == pytest.approx([0.1, 0.2, 0.4, 0.8])
    assert waits[-1] == NACK_BACKOFF_MAX_S
    assert waits == sorted(waits)


@given(nacks=st.integers(1, 10**9), roll=rolls)
def test_a_nack_never_waits_too_long_or_not_at_all(nacks: int, roll: float) -> None:
    wait_s = nack_backoff(nacks, roll)
    assert NACK_BACKOFF_MIN_S * (1 - JITTER) <= wait_s <= NACK_BACKOFF_MAX_S * (1 + JITTER)


@given(failures=st.integers(0, 10**9), roll=rolls)
def test_reconnects_are_bounded_both_ways(failures: int, roll: float) -> None:
    """No storm, and no server that is back for long unnoticed."""
    assert 0.05 <= reconnect_backoff(failures, roll) <= 5.0
