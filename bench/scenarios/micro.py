"""Scenario `micro`: the micro-benchmarks of bench/micro, by pytest-benchmark, in microseconds a row."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Final

from bench.children import ROOT
from bench.errors import BenchFailed
from bench.rig import Rig, relay_environment
from bench.step import Form, Run, Step

TIMEOUT_S: Final = 120.0
ROWS: Final = 1_000
"""Every one of them works on so many rows."""


def steps(form: Form) -> Sequence[Step]:
    seconds = 0.3 if form.scale == 1.0 else 0.02
    return [Step("micro", "pytest", 8.0, lambda rig: _measure(rig, seconds), is_once=not form.is_long)]


def _measure(rig: Rig, seconds: float) -> Sequence[Run]:
    path = rig.directory / "micro.json"
    options = ("-q", "--benchmark-only", f"--benchmark-max-time={seconds}", f"--benchmark-json={path}")
    outcome = subprocess.run(
        [sys.executable, "-m", "pytest", "bench/micro", *options],
        check=False,
        env=relay_environment(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        stdin=subprocess.DEVNULL,
        cwd=ROOT,
    )
    if outcome.returncode != 0:
        raise BenchFailed(
            f"pytest bench/micro: exit {outcome.returncode}\n{outcome.stdout[-1500:]}{outcome.stderr[-500:]}"
        )
    return [
        {
            "variant": measured["name"].removeprefix("test_"),
            "us_per_row_best": round(measured["stats"]["min"] / ROWS * 1e6, 3),
            "us_per_row_median": round(measured["stats"]["median"] / ROWS * 1e6, 3),
            "rounds": measured["stats"]["rounds"],
        }
        for measured in json.loads(path.read_text())["benchmarks"]
    ]
