"""The token bucket: never more than the rate and its burst, never less than the rate."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.core.rate import BURST_S, TokenBucket

rates = st.floats(0.01, 100_000)


@given(rates, st.lists(st.floats(0.0, 5.0), min_size=1, max_size=60))
def test_never_more_than_the_rate_over_any_time(rate: float, pauses: list[float]) -> None:
    """From any look to any later one."""
    now = 100.0
    bucket = TokenBucket(rate, now)
    sent = [(now, 0)]
    total = 0
    for pause in pauses:
        now += pause
        count = bucket.allowance(now)
        bucket.take(count)
        total += count
        sent.append((now, total))
    burst = max(1.0, rate * BURST_S)
    for at, before in sent:
        for later, after in sent:
            if later >= at:
                assert after - before <= rate * (later - at) + burst + 1e-6 * (1 + after)


@given(rates, st.integers(1, 200))
def test_who_waits_as_told_gets_the_whole_rate(rate: float, messages: int) -> None:
    """At half a message a second a wait that is too long would lose what does not fit into the bucket."""
    bucket = TokenBucket(rate, 0.0)
    now = 0.0
    sent = 0
    while sent < messages:
        count = min(bucket.allowance(now), messages - sent)
        bucket.take(count)
        sent += count
        if sent < messages:
            now += bucket.wait_s + 1e-9 / rate
    assert now <= (messages / rate) * 1.001 + 1e-6


def test_the_burst() -> None:
    assert TokenBucket(500.0, 0.0).allowance(1000.0) == 50
    assert TokenBucket(0.5, 0.0).allowance(1000.0) == 1


def test_what_was_not_allowed_is_paid_back() -> None:
    bucket = TokenBucket(10.0, 0.0)
    bucket.take(3)
    assert bucket.allowance(0.0) == 0
    assert bucket.wait_s == pytest.approx(0.3)
    assert bucket.allowance(0.31) == 1


def test_a_clock_that_goes_back_gives_nothing() -> None:
    bucket = TokenBucket(10.0, 5.0)
    bucket.take(1)
    assert bucket.allowance(1.0) == 0
    assert bucket.allowance(5.11) == 1
