"""A soak's picture: memory, latency, descriptors and backlog over time, its faults as lines. Needs matplotlib (extra `bench`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")  # no display, whatever the environment says

from matplotlib import pyplot as plt


def draw(document: dict[str, Any], path: Path) -> None:
    samples = document["samples"]
    minutes = [each["s"] / 60 for each in samples]
    figure, (memory, latency, descriptors, backlog) = plt.subplots(
        4, 1, figsize=(9.0, 9.0), dpi=110, sharex=True, layout="constrained"
    )
    for number in range(len(samples[0]["relays"])):
        relays = [each["relays"][number] for each in samples]
        memory.plot(minutes, [each["rss_bytes"] / 2**20 for each in relays], label=f"relay {number + 1}")
        descriptors.plot(minutes, [each["descriptors"] for each in relays])
    for name in ("p50_ms", "p99_ms", "worst_ms"):
        latency.plot(minutes, [each[name] for each in samples], label=name.partition("_")[0])
    backlog.plot(minutes, [each["committed"] - each["arrived"] for each in samples])
    latency.set_yscale("log")
    backlog.set_yscale("symlog")
    for axes, title in (
        (memory, "resident MiB"),
        (latency, "commit to queue, ms"),
        (descriptors, "descriptors"),
        (backlog, "rows on their way"),
    ):
        axes.set_ylabel(title)
        for fault in document["faults"]:
            axes.axvline(fault["s"] / 60, color="#d98b3a", linewidth=0.4)
    memory.legend()
    latency.legend()
    backlog.set_xlabel(f"minutes; {document['rows_s']:.0f} rows a second, {len(document['faults'])} faults")
    figure.savefig(path, metadata={"Software": None})
    plt.close(figure)
