"""Pictures of a document, as PNG beside it. Imports matplotlib, which only this module needs (extra `bench`)."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl

mpl.use("Agg")  # no display, whatever the environment says

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

SIZE_INCHES: Final = (8.0, 4.5)
DPI: Final = 110
COLOURS: Final = {"c": "#8a8f98", "relay": "#1f77b4", "peer": "#d98b3a"}

Result = Mapping[str, Any]


def draw(result: Result, stem: Path) -> list[Path]:
    """`STEM-throughput.png` and so on, of what the document holds; returns the files written."""
    written = []
    for name, plot in _PLOTS.items():
        figure, axes = plt.subplots(figsize=SIZE_INCHES, dpi=DPI, layout="constrained")
        try:
            if plot(axes, result):
                path = stem.with_name(f"{stem.name}-{name}.png")
                figure.savefig(path, metadata={"Software": None})
                written.append(path)
        finally:
            plt.close(figure)
    return written


def _runs(result: Result, scenario: str) -> dict[str, list[dict[str, Any]]]:
    """By variant, in the order of their first measurement."""
    found: dict[str, list[dict[str, Any]]] = {}
    for run in result["runs"]:
        if run["scenario"] == scenario:
            found.setdefault(run["variant"], []).append(run)
    return found


def _throughput(axes: Axes, result: Result) -> bool:
    """Each variant's runs as points, their median as a bar."""
    bars = [
        (f"{prefix}{variant}", colour, [run["msgs_per_s"] for run in runs])
        for scenario, prefix, colour in (
            ("ceiling", "C, ", "c"),
            ("drain", "relay, ", "relay"),
            ("peers", "naive, ", "peer"),
        )
        for variant, runs in _runs(result, scenario).items()
    ]
    if not bars:
        return False
    axes.figure.set_size_inches(SIZE_INCHES[0], 0.28 * len(bars) + 1.2)  # type: ignore[union-attr]
    for place, (_, colour, rates) in enumerate(bars):
        axes.barh(place, statistics.median(rates), color=COLOURS[colour])
        axes.plot(rates, [place] * len(rates), "|", color="black", markersize=9)
    axes.set_yticks(range(len(bars)), [name for name, _, _ in bars], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("messages a second (bar: median, marks: each run)")
    axes.set_title("Draining a backlog, beside a C publisher and two naive relays")
    return True


def _latency(axes: Axes, result: Result) -> bool:
    """Percentiles over the arrival rate, each rate's of the turn with the lowest p50, as the document's. Single rows are one line;
    several rows a commit are another load, and stand apart.
    """
    best = {
        int(variant.split()[0]): min(runs, key=lambda run: run["p50_ms"])
        for variant, runs in _runs(result, "trickle").items()
        if variant.endswith("a second")
    }
    if not best:
        return False
    apart = {rate: run["rows_per_commit"] for rate, run in best.items() if run.get("rows_per_commit", 1) > 1}
    percentiles = (("p50_ms", "p50", "-", "o"), ("p99_ms", "p99", "--", "s"), ("p99_9_ms", "p99.9", ":", "^"))
    for name, label, line, marker in percentiles:
        for who, colour in (("confirm", COLOURS["relay"]), ("consumer", COLOURS["peer"])):
            found = {rate: run if who == "confirm" else run.get("to_consumer", {}) for rate, run in best.items()}
            heights = {rate: run[name] for rate, run in found.items() if name in run}
            single = [rate for rate in heights if rate not in apart]
            axes.plot(
                single, [heights[rate] for rate in single], line, marker=marker, color=colour, label=f"{who} {label}"
            )
            others = [rate for rate in heights if rate in apart]
            axes.plot(others, [heights[rate] for rate in others], marker, color=colour, fillstyle="none")
    for rate, rows in apart.items():
        axes.axvline(rate, color=COLOURS["c"], linewidth=0.5)
        axes.annotate(
            f"{rows} rows a commit",
            (rate, 0.02),
            xycoords=("data", "axes fraction"),
            rotation=90,
            va="bottom",
            ha="right",
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("rows a second, open loop")
    axes.set_ylabel("milliseconds since commit")
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.legend(ncols=2, fontsize=8)
    axes.set_title("From commit to confirm and to consumer")
    return True


def _cpu(axes: Axes, result: Result) -> bool:
    """Who spends how much a message, the best turn of each drain."""
    drains = {
        variant: min(runs, key=lambda run: run["cpu_us_per_msg"]["publisher"])["cpu_us_per_msg"]
        for variant, runs in _runs(result, "drain").items()
    }
    if not drains:
        return False
    left = [0.0] * len(drains)
    for who, colour in (("publisher", COLOURS["relay"]), ("postgres", "#5a9367"), ("rabbitmq", COLOURS["peer"])):
        widths = [cpu[who] for cpu in drains.values()]
        axes.barh(range(len(drains)), widths, left=left, color=colour, label="relay" if who == "publisher" else who)
        left = [before + width for before, width in zip(left, widths, strict=True)]
    axes.set_yticks(range(len(drains)), list(drains), fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("CPU microseconds a message")
    axes.legend(fontsize=8)
    axes.set_title("What a drained message costs")
    return True


def _writers(axes: Axes, result: Result) -> bool:
    """Our table's commit rate through the plain outbox's, every run."""
    ratios = {
        variant: [run["ratio"] for run in runs]
        for variant, runs in _runs(result, "writers").items()
        if all("ratio" in run for run in runs)
    }
    if not ratios:
        return False
    for place, values in enumerate(ratios.values()):
        axes.barh(place, statistics.median(values), color=COLOURS["relay"])
        axes.plot(values, [place] * len(values), "|", color="black", markersize=9)
    axes.axvline(1.0, color=COLOURS["c"], linewidth=1)
    axes.set_yticks(range(len(ratios)), list(ratios), fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("commit rate ÷ that of a plain outbox")
    axes.set_title("What the table costs its writers")
    return True


_PLOTS: Final[Mapping[str, Callable[[Axes, Result], bool]]] = {
    "throughput": _throughput,
    "latency": _latency,
    "cpu": _cpu,
    "writers": _writers,
}


def names() -> Sequence[str]:
    """What is drawn."""
    return list(_PLOTS)
