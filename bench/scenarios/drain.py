"""Scenario `drain`: how fast the relay empties a backlog, against what a C publisher reaches on the same broker.

The C publisher runs in the same turn as what is compared with it: with librabbitmq's own publish call at three windows
(the ceiling), with joined writes, on a classic queue, with windows of 50 and 1 for few keys and for one, and where the broker has
cores of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from bench.ceiling import Ceiling, run_ceiling
from bench.load import Load
from bench.relay_run import Drain, run_relay
from bench.rig import Rig
from bench.step import Form, Run, Step

WINDOWS: Final = (200, 1_000, 5_000)
RELAY_STEP_S, C_STEP_S = 1.8, 0.8
"""What a step costs beside its messages: copying the database, starting and stopping the relay, waiting for quiet."""


def steps(form: Form) -> Sequence[Step]:
    main = Load(form.rows(60_000))
    few = Load(form.rows(20_000), keys=50)
    one = Load(form.rows(4_000), keys=1)
    classic = Load(form.rows(20_000, 60_000))
    found = [_c(f"library {window}", Ceiling(main, window)) for window in WINDOWS]
    found += [_c("buffer 1000", Ceiling(main, 1_000, "buffer"))]
    found += [_relay("delete", Drain(main)), _relay("mark", Drain(main, "mark"))]
    found += [_c(f"classic library {window}", Ceiling(classic, window, queue="classic")) for window in WINDOWS]
    found += [_relay("classic", Drain(classic, queue="classic"))]
    found += [_c("window 50", Ceiling(few, 50)), _relay("50 keys", Drain(few))]
    found += [_c("window 1", Ceiling(one, 1, messages=form.rows(2_000))), _relay("hot key", Drain(one))]
    return [*found, *_once(form, main)]


def _once(form: Form, main: Load) -> list[Step]:
    """Measured for scale, not for a target: once in the short form."""
    load = Load(form.rows(30_000))
    beside = Load(form.rows(22_000), hot_every=11)
    is_once = not form.is_long
    found = [
        _relay(ordering, Drain(load, settings=(("RELAY_ORDERING", ordering),), is_ordered=ordering != "none"), is_once)
        for ordering in ("pipelined", "none")
    ]
    found += [_apart(_c("apart library 1000", Ceiling(main, 1_000), is_once))]
    found += [_apart(_relay("apart", Drain(main), is_once))]
    found.append(_relay("hot key beside cold", Drain(beside), is_once))
    found.append(_relay("two relays", Drain(load, relays=2), is_once))
    sizes = {100: form.rows(20_000), 1_024: form.rows(20_000), 16_384: form.rows(2_000, 10_000)}
    for body_bytes, rows in sizes.items():
        sized = Load(rows, body_bytes=body_bytes)
        found.append(_c(f"{body_bytes} B library 1000", Ceiling(sized, 1_000), is_once))
        found.append(_relay(f"{body_bytes} B", Drain(sized), is_once))
    backlogs = [10_000, 100_000, *((1_000_000, 10_000_000) if form.is_long else ())]
    found += [_relay(f"backlog {rows}", Drain(Load(form.rows(rows))), True) for rows in backlogs]
    return found


def _c(variant: str, ceiling: Ceiling, is_once: bool = False) -> Step:
    slow = {1: 1_200, 50: 10_000}.get(ceiling.window, 12_000 if ceiling.queue == "classic" else 30_000)
    seconds = C_STEP_S + (ceiling.messages or ceiling.load.rows) / slow
    return Step("ceiling", variant, seconds, _one(variant, lambda rig: run_ceiling(rig, ceiling)), is_once)


def _relay(variant: str, drain: Drain, is_once: bool = False) -> Step:
    slow = {1: 1_000, 50: 8_000}.get(drain.load.keys, 10_000 if drain.queue == "classic" else 25_000)
    seconds = RELAY_STEP_S + drain.load.rows / slow
    return Step("drain", variant, seconds, _one(variant, lambda rig: run_relay(rig, drain)), is_once)


def _apart(step: Step) -> Step:
    """The same where the broker shares no core with anybody."""

    def measure(rig: Rig) -> Sequence[Run]:
        with rig.apart():
            return step.measure(rig)

    return replace(step, measure=measure)


def _one(variant: str, measure: Callable[[Rig], Run]) -> Callable[[Rig], Sequence[Run]]:
    return lambda rig: [{"variant": variant, **measure(rig)}]
