"""What a scenario hands back, and how it is written down: a JSON file that says by itself what was measured, on what."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("asyncpg", "aio-pika", "aiormq", "uvloop", "orjson", "prometheus-client")
ROOT = Path(__file__).parent.parent


@dataclass(frozen=True, slots=True)
class Report:
    """One scenario's outcome: `runs` as measured, `summary` drawn from them alone, `text` for people."""

    scenario: str
    settings: Mapping[str, Any]
    versions: Mapping[str, str]
    runs: Sequence[Mapping[str, Any]]
    summary: Mapping[str, Any]
    skipped: Sequence[str] = field(default_factory=tuple)
    text: str = ""

    def document(self) -> dict[str, Any]:
        """The result file's content; stable keys."""
        return {
            "scenario": self.scenario,
            "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": _machine(),
            "versions": {**_versions(), **self.versions},
            "settings": dict(self.settings),
            "summary": dict(self.summary),
            "skipped": list(self.skipped),
            "runs": [dict(run) for run in self.runs],
        }


def _median(values: Sequence[float]) -> float:
    return round(statistics.median(values), 2)


def summarise(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Per variant the medians and the best; the ceiling is the C variant with the highest median.

    `ratio` is a variant's median through the ceiling, `ratio_of_bests` its best through the best of any C run,
    `ratio_library` its median through the highest median of librabbitmq's own publish call.
    """
    variants: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(f"{run['publisher']} {run['variant']}" for run in runs):
        mine = [run for run in runs if f"{run['publisher']} {run['variant']}" == name]
        rates = [run["msgs_per_s"] for run in mine]
        variants[name] = {
            "msgs_per_s_median": _median(rates),
            "msgs_per_s_best": max(rates),
            "cpu_us_per_msg": {
                who: _median([r["cpu_us_per_msg"][who] for r in mine]) for who in mine[0]["cpu_us_per_msg"]
            },
        }
        if "peak_rss_mb" in mine[0]:
            variants[name]["peak_rss_mb"] = max(run["peak_rss_mb"] for run in mine)
        if "copies" in mine[0]:
            variants[name]["copies"] = sum(run["copies"] for run in mine)
    ceilings = {name: v for name, v in variants.items() if name.startswith("c ")}
    summary: dict[str, Any] = {"variants": variants}
    if ceilings:
        best = max(ceilings, key=lambda name: ceilings[name]["msgs_per_s_median"])
        summary["ceiling"] = {"variant": best, "msgs_per_s": ceilings[best]["msgs_per_s_median"]}
        for name, variant in variants.items():
            if name not in ceilings:
                variant["ratio"] = round(variant["msgs_per_s_median"] / ceilings[best]["msgs_per_s_median"], 3)
                fastest = max(v["msgs_per_s_best"] for v in ceilings.values())
                variant["ratio_of_bests"] = round(variant["msgs_per_s_best"] / fastest, 3)
                calls = [v["msgs_per_s_median"] for name, v in ceilings.items() if name.startswith("c library")]
                if calls:
                    variant["ratio_library"] = round(variant["msgs_per_s_median"] / max(calls), 3)
    return summary


def summary_table(summary: Mapping[str, Any]) -> str:
    """What `summarise` found, for a terminal."""
    heads = (
        "publisher",
        "msg/s",
        "best",
        "ratio",
        "of library",
        "µs publisher",
        "µs postgres",
        "µs rabbitmq",
        "peak MB",
    )
    lines = []
    for name, v in summary["variants"].items():
        cpu = v["cpu_us_per_msg"]
        lines.append(
            (
                name,
                f"{v['msgs_per_s_median']:,.0f}",
                f"{v['msgs_per_s_best']:,.0f}",
                f"{v['ratio']:.2f}" if "ratio" in v else "",
                f"{v['ratio_library']:.2f}" if "ratio_library" in v else "",
                f"{cpu['publisher']:.1f}",
                f"{cpu['postgres']:.1f}" if "postgres" in cpu else "",
                f"{cpu['rabbitmq']:.1f}",
                f"{v['peak_rss_mb']:.0f}" if "peak_rss_mb" in v else "",
            )
        )
    return _table(heads, lines)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns aligned, the first to the left, figures to the right."""
    widths = [max(len(line[i]) for line in (heads, *rows)) for i in range(len(heads))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in (heads, *rows)
    )


def _machine() -> dict[str, Any]:
    """Enough to judge the figures by; no host name."""
    cpuinfo = Path("/proc/cpuinfo").read_text()
    model = next((line.split(":", 1)[1].strip() for line in cpuinfo.splitlines() if line.startswith("model name")), "")
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": model or platform.machine(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "kernel": platform.release(),
        "load_1m_at_end": os.getloadavg()[0],
    }


def _versions() -> dict[str, str]:
    return {
        "relay": _commit(),
        "python": platform.python_version(),
        **{package: metadata.version(package) for package in PACKAGES},
    }


def _commit() -> str:
    """The commit measured, with a `+` when the tree differed from it; `unknown` outside a repository."""
    try:
        commit = _git("rev-parse", "--short=12", "HEAD")
        return commit + ("+" if _git("status", "--porcelain", "--", "relay", "sql", "bench/*.py", "bench/*.c") else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10.0).stdout.strip()
