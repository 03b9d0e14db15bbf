"""Scenario `micro`: the micro-benchmarks of bench/micro, by pytest-benchmark, in microseconds a row."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Final

from bench.children import run_command
from bench.rig import Rig
from bench.step import Form, Run, Step

TIMEOUT_S: Final = 120.0
ROWS: Final = 1_000
"""Every one of them works on so many rows."""


def steps(form: Form) -> Sequence[Step]:
    seconds = 0.3 if form.scale == 1.0 else 0.02
    return [Step("micro", "pytest", 8.0, lambda rig: _measure(rig, seconds), is_once=not form.is_long)]


def _measure(rig: Rig, seconds: float) -> Sequence[Run]:
    path = rig.directory / "micro.json"
    # pyproject.toml would put the sources first, before a compiled build.
    options = (
        "-o",
        "pythonpath=",
        "-q",
        "--benchmark-only",
        f"--benchmark-max-time={seconds}",
        f"--benchmark-json={path}",
    )
    run_command("pytest", "bench/micro", *options, timeout_s=TIMEOUT_S)
    return [
        {
            "variant": measured["name"].removeprefix("test_"),
            "us_per_row_best": round(measured["stats"]["min"] / ROWS * 1e6, 3),
            "us_per_row_median": round(measured["stats"]["median"] / ROWS * 1e6, 3),
            "rounds": measured["stats"]["rounds"],
        }
        for measured in json.loads(path.read_text())["benchmarks"]
    ]
