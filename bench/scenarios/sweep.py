"""Scenario `sweep`: the drain over settings of `RELAY_MAX_READ_AHEAD` and `RELAY_MAX_IN_FLIGHT`; their defaults come from here.

In the long form only: `python -m bench --long sweep`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from bench.load import Load
from bench.relay_run import Drain, run_relay
from bench.rig import Rig
from bench.step import Form, Run, Step

SETTINGS: Final = (
    (1_000, 500),
    (2_000, 500),
    (2_000, 1_000),
    (4_000, 500),
    (4_000, 1_000),
    (4_000, 2_000),
    (8_000, 2_000),
    (8_000, 4_000),
)
"""(RELAY_MAX_READ_AHEAD, RELAY_MAX_IN_FLIGHT)."""


def steps(form: Form) -> Sequence[Step]:
    return [_step(Load(form.rows(60_000)), ahead, flying) for ahead, flying in SETTINGS] if form.is_long else []


def _step(load: Load, ahead: int, flying: int) -> Step:
    settings = (("RELAY_MAX_READ_AHEAD", str(ahead)), ("RELAY_MAX_IN_FLIGHT", str(flying)))
    drain = Drain(load, settings=settings)

    def measure(rig: Rig) -> Sequence[Run]:
        return [{"variant": f"{ahead} ahead, {flying} in flight", **run_relay(rig, drain)}]

    return Step("sweep", f"{ahead}/{flying}", 5.0, measure)
