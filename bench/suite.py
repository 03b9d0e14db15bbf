"""Runs the steps of a form, turn by turn, on one pair of private servers.

Every repeated step runs once a turn, in the same order, so that a slow minute of the machine hits all that is compared; what is
measured once follows the last turn. A step that fails reports no figure and is not tried again; the others go on, and the
suite ends as failed. A step whose program is missing is skipped with the words that say what to install.
"""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from aiormq.exceptions import AMQPError

from bench.errors import BenchFailed, Unavailable
from bench.proof import compare_shapes
from bench.rig import Rig
from bench.scenarios import SCENARIOS
from bench.step import Form, Run, Step
from relay.database import DRIVER_ERRORS
from relay.errors import RelayError

DISTURBED: Final = (
    BenchFailed,
    RelayError,
    subprocess.SubprocessError,
    AMQPError,
    *DRIVER_ERRORS,  # OSError among them: a server's port or process that is gone
)
"""What a step ends with when something else than the suite itself is at fault."""

SERVERS_S: Final = 12.0
"""Starting both servers, and ending them."""


@dataclass(slots=True)
class Outcome:
    """Everything that was measured. `failed` and `skipped`: why, by the step's name; `build`: of which the
    relay was, compiled or pure."""

    form: Form
    runs: list[Run] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    build: str = "pure"


def chosen_steps(form: Form, names: Sequence[str]) -> list[Step]:
    """The steps of these scenarios (none named: of all), in the order of a turn."""
    return [step for name, steps in SCENARIOS.items() if not names or name in names for step in steps(form)]


def estimate_s(form: Form, steps: Sequence[Step]) -> float:
    """How long the suite takes on two quiet cores."""
    return SERVERS_S + sum(step.estimate_s * (1 if step.is_once else form.repeats) for step in steps)


def run(form: Form, steps: Sequence[Step], say: Callable[[str], None]) -> Outcome:
    """Measure. Raises RelayError where the servers cannot be started."""
    outcome, began = Outcome(form), time.monotonic()
    order = [(turn, step) for turn in range(1, form.repeats + 1) for step in steps if not step.is_once]
    order += [(1, step) for step in steps if step.is_once]
    with Rig() as rig:
        outcome.versions = rig.versions()
        for number, (turn, step) in enumerate(order, 1):
            if _name(step) in outcome.failed or _name(step) in outcome.skipped:
                continue
            since = time.monotonic()
            runs = _measure(rig, step, outcome, say)
            for measured in runs:
                outcome.runs.append({"scenario": step.scenario, "turn": turn, **measured})
                say(
                    f"[{number}/{len(order)}] turn {turn} {line_of(outcome.runs[-1])}  ({time.monotonic() - since:.1f} s)"
                )
    try:
        compare_shapes(outcome.runs)
    except BenchFailed as failure:
        outcome.failed["shapes"] = str(failure)
    outcome.seconds = time.monotonic() - began
    return outcome


def _measure(rig: Rig, step: Step, outcome: Outcome, say: Callable[[str], None]) -> Sequence[Run]:
    try:
        with _deadline(step.deadline_s):
            return step.measure(rig)
    except Unavailable as missing:
        outcome.skipped[_name(step)] = str(missing)
        say(f"skipped: {_name(step)}: {missing}")
    except DISTURBED as failure:
        outcome.failed[_name(step)] = why = str(failure) or type(failure).__name__
        say(f"FAILED: {_name(step)}: {why}")
        # What one step provoked must not fail the next.
        rig.complaints()
    return []


@contextmanager
def _deadline(seconds: float) -> Iterator[None]:
    """Raises BenchFailed out of whatever the block waits for."""

    def on_alarm(*_: object) -> None:
        raise BenchFailed(f"not done within {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, on_alarm)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def _name(step: Step) -> str:
    return f"{step.scenario} {step.name}"


def line_of(run: Run) -> str:
    """A run in a few words, for the terminal."""
    words: list[str] = [f"{run['scenario']} {run['variant']}:"]
    for figure, shown in _SHOWN.items():
        if figure in run:
            words.append(shown.format(run[figure]))
    return " ".join(words)


_SHOWN: Final[dict[str, Any]] = {
    "msgs_per_s": "{:,.0f} msg/s",
    "p50_ms": "p50 {:.2f} ms",
    "p99_ms": "p99 {:.2f} ms",
    "start_to_ready_s": "ready in {:.2f} s",
    "idle_rss_mb": "{:.0f} MB idle",
    "growth": "a read takes {:.2f} times as long",
    "ratio": "{:.2f} of the plain outbox",
    "commits_per_s": "{:,.0f} commits/s",
    "delay_p50_ms": "{:+.2f} ms in the middle",
    "delay_ms": "{:+.2f} ms",
    "drained_s": "drained {:.1f} s after the broker was back",
    "us_per_row_best": "{:.2f} µs a row",
}
