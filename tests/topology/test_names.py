"""The names on which topology, consumers and redrive agree."""

from __future__ import annotations

import pytest

from relay.topology import names
from relay.values import duration


@pytest.mark.parametrize(
    ("delay", "text"),
    [("5s", "5s"), ("30s", "30s"), ("5m", "5m"), ("300s", "5m"), ("250ms", "250ms"), ("1.5s", "1500ms"), ("7d", "7d")],
)
def test_a_retry_queues_name_says_its_delay(delay: str, text: str) -> None:
    assert names.retry_queue("orders.inventory", duration(delay)) == f"orders.inventory.retry.{text}"


@pytest.mark.parametrize("milliseconds", [1, 999, 1000, 61_000, 3_600_000, 86_400_000, 86_400_001])
def test_a_delay_in_a_name_reads_back(milliseconds: int) -> None:
    assert round(duration(names.delay_text(milliseconds / 1000)) * 1000) == milliseconds


def test_the_brokers_own_headers() -> None:
    own = ("x-death", "x-first-death-queue", "x-last-death-reason", "x-delivery-count")
    assert all(names.is_brokers_own(header) for header in own)
    ours = (names.RETRY_ATTEMPT, names.ORIGINAL_EXCHANGE, names.REDRIVE_COUNT, "traceparent", "x-match")
    assert not any(names.is_brokers_own(header) for header in ours)
