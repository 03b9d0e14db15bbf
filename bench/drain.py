"""Scenario `drain`: how fast the relay empties a backlog, against what a C publisher reaches on the same broker.

Measured in turns: every variant of the C publisher, the relay with `delete`, the relay with `mark`, and again. What the
figures mean stands in docs/benchmarks.md; change both together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from bench import native
from bench.ceiling import run_ceiling
from bench.proof import compare_shapes
from bench.relay_run import run_relay
from bench.report import Report, summarise, summary_table
from bench.rig import Rig

CEILINGS: Final = (
    (200, "buffer"),
    (1000, "buffer"),
    (5000, "buffer"),
    (200, "library"),
    (1000, "library"),
    (5000, "library"),
)
"""The C publisher's variants: window and how it writes (ceiling.c). The ceiling is the best of them."""

Progress = Callable[[str], None]


def run(*, rows: int, keys: int, repeats: int, say: Progress) -> Report:
    """Raises BenchFailed when a run lost a row, overtook one, or a server complained; then there is no report."""
    runs: list[dict[str, Any]] = []
    skipped: list[str] = []
    with Rig(rows, keys) as rig:
        for turn in range(1, repeats + 1):
            for window, writes in CEILINGS:
                if skipped:
                    break
                try:
                    runs.append({"turn": turn, **run_ceiling(rig, window, writes)})
                except native.NativeUnavailable as missing:
                    skipped.append(str(missing))
                    say(f"skipped: the C publisher. {missing}")
                else:
                    say(_line(runs[-1]))
            for sent_rows in ("delete", "mark"):
                runs.append({"turn": turn, **run_relay(rig, sent_rows, checks_ids=not skipped)})
                say(_line(runs[-1]))
        compare_shapes(runs)
        settings, versions = rig.settings() | {"repeats": repeats}, rig.versions()
    summary = summarise(runs)
    return Report("drain", settings, versions, runs, summary, skipped, text=summary_table(summary))


def _line(run: Mapping[str, Any]) -> str:
    return f"turn {run['turn']}: {run['publisher']} {run['variant']}: {run['msgs_per_s']:,.0f} msg/s"
