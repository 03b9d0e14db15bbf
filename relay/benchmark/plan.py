"""The command line's numbers, checked."""

from __future__ import annotations

from typing import Any, Final

from relay.benchmark.figures import Plan
from relay.errors import UsageError
from relay.values import integer_between

BYTES_MAX: Final = 2 * 1024**3
"""Of a whole backlog: the servers are somebody's."""

_BOUNDS: Final = {
    "rows": (100, 10_000_000),
    "keys": (1, 10_000_000),
    "payload_bytes": (10, 16 * 1024**2),
    "rate": (1, 5_000),
    "seconds": (1, 600),
}


def read_plan(options: Any) -> Plan:
    """What `relay bench` was asked for; `options` are its flags as text, None where one was left out. Raises UsageError."""
    given = {name: _number(name, text) for name in _BOUNDS if (text := getattr(options, name)) is not None}
    if "rate" in given:
        given["rate_per_s"] = given.pop("rate")
    plan = Plan(queue=options.queue, **given)
    if plan.rows * plan.payload_bytes > BYTES_MAX:
        raise UsageError(
            f"{plan.rows:,} rows of {plan.payload_bytes:,} bytes are more than 2 GiB",
            hint="fewer --rows or --payload-bytes",
        )
    return plan


def _number(name: str, text: str) -> int:
    low, high = _BOUNDS[name]
    flag = f"--{name.replace('_', '-')}"
    try:
        return integer_between(low, high)(text)
    except ValueError as error:
        raise UsageError(f"{flag} {text[:40]!r}: {error}; allowed: a whole number from {low:,} to {high:,}") from None
