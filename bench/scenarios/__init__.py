"""The scenarios: each module has `steps(form)`; a new one is a module and a line in `SCENARIOS`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bench.scenarios import (
    consumer,
    drain,
    growth,
    inbox,
    isolation,
    micro,
    peers,
    recovery,
    sink,
    start,
    sweep,
    trickle,
    writers,
)
from bench.step import Form, Step

SCENARIOS: dict[str, Callable[[Form], Sequence[Step]]] = {
    "drain": drain.steps,
    "peers": peers.steps,
    "start": start.steps,
    "trickle": trickle.steps,
    "writers": writers.steps,
    "growth": growth.steps,
    "isolation": isolation.steps,
    "recovery": recovery.steps,
    "sink": sink.steps,
    "inbox": inbox.steps,
    "consumer": consumer.steps,
    "micro": micro.steps,
    "sweep": sweep.steps,
}
"""By name, in the order of a turn."""
