"""What one relay says of itself at `/metrics`: the numbers that no database knows, for `relay status --watch`."""

from __future__ import annotations

import http.client
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from prometheus_client.parser import text_string_to_metric_families

from relay.values import ListenAddress

TIMEOUT_S: Final = 1.0
BYTES_MAX: Final = 4 * 1024 * 1024
"""A relay's page has some 30 KiB; whatever else answers there is not read to its end."""

OPENER: Final = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""A relay stands beside its operator: no proxy of the environment's is asked for it."""

_ANYWHERE: Final = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}


@dataclass(frozen=True, slots=True)
class Scrape:
    """One look. `at` in monotonic seconds; counters are totals. `backpressure` is by reason: (holds now, seconds so far)."""

    at: float
    in_flight_messages: int
    in_flight_bytes: int
    backpressure: Mapping[str, tuple[bool, float]]
    outcomes: Mapping[str, float]
    confirms: float
    confirm_seconds: float


@dataclass(frozen=True, slots=True)
class Pace:
    """Between two looks. `waiting` is the share of the time by reason, `outcomes` messages a second, `confirm_s` the mean
    from publish to confirm, None without one."""

    waiting: Mapping[str, float]
    outcomes: Mapping[str, float]
    confirm_s: float | None


def metrics_url(listen: ListenAddress | None) -> str | None:
    """Where a relay of this RELAY_LISTEN is asked from its own machine; None where it listens nowhere."""
    if listen is None:
        return None
    host = _ANYWHERE.get(listen.host, listen.host)
    return f"http://{f'[{host}]' if ':' in host else host}:{listen.port}/metrics"


def scrape(url: str) -> Scrape | None:
    """Ask; blocks for a second at most a step. None where no relay answers."""
    try:
        with OPENER.open(url, timeout=TIMEOUT_S) as answer:
            text = answer.read(BYTES_MAX).decode(errors="replace")
        at = time.monotonic()
        samples = {
            (sample.name, next(iter(sample.labels.values()), "")): float(sample.value)
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if not sample.name.endswith("_bucket")
        }
    except (OSError, ValueError, http.client.HTTPException):
        return None
    if not any(name == "relay_build_info" for name, _ in samples):
        return None

    def value(name: str, label: str = "") -> float:
        return samples.get((f"relay_{name}", label), 0.0)

    reasons = [label for name, label in samples if name == "relay_backpressure_active"]
    outcomes = [label for name, label in samples if name == "relay_published_total"]
    return Scrape(
        at=at,
        in_flight_messages=int(value("in_flight_messages")),
        in_flight_bytes=int(value("in_flight_bytes")),
        backpressure={
            reason: (value("backpressure_active", reason) > 0, value("backpressure_seconds_total", reason))
            for reason in reasons
        },
        outcomes={outcome: value("published_total", outcome) for outcome in outcomes},
        confirms=value("confirm_seconds_count"),
        confirm_seconds=value("confirm_seconds_sum"),
    )


def pace(before: Scrape, now: Scrape) -> Pace | None:
    """None where the relay was started anew in between, or no time has passed."""
    seconds = now.at - before.at
    confirms = now.confirms - before.confirms
    if seconds <= 0 or confirms < 0:
        return None
    return Pace(
        waiting={
            reason: min(1.0, max(0.0, total - before.backpressure.get(reason, (False, 0.0))[1]) / seconds)
            for reason, (_, total) in now.backpressure.items()
        },
        outcomes={
            name: max(0.0, total - before.outcomes.get(name, 0.0)) / seconds for name, total in now.outcomes.items()
        },
        confirm_s=(now.confirm_seconds - before.confirm_seconds) / confirms if confirms else None,
    )
