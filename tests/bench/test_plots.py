"""Pictures are drawn of what is there, and of nothing that is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench import plots

CPU = {"publisher": 10.0, "postgres": 9.0, "rabbitmq": 30.0}
PERCENTILES = {"p50_ms": 1.0, "p99_ms": 4.0, "p99_9_ms": 9.0}


def run(scenario: str, variant: str, **figures: Any) -> dict[str, Any]:
    return {"scenario": scenario, "turn": 1, "variant": variant, **figures}


def test_every_picture_is_a_png(tmp_path: Path) -> None:
    runs = [
        run("ceiling", "library 200", msgs_per_s=100.0),
        run("drain", "delete", msgs_per_s=90.0, cpu_us_per_msg=CPU),
        run("peers", "one", msgs_per_s=5.0),
        run("trickle", "10 a second", p50_ms=1.0, p99_ms=4.0, to_consumer={"p50_ms": 1.0, "p99_ms": 4.0}),
        run("trickle", "1000 a second", **PERCENTILES, to_consumer=PERCENTILES),
        run("trickle", "5000 a second", rows_per_commit=10, **PERCENTILES, to_consumer=PERCENTILES),
        run("trickle", "wake-up", **PERCENTILES),
        run("writers", "8 writers, single rows", ratio=0.97),
        run("writers", "bare, 8 writers, single rows", commits_per_s=5.0),
    ]
    written = plots.draw({"runs": runs}, tmp_path / "short")
    assert [path.name for path in written] == [f"short-{name}.png" for name in plots.names()]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)


def test_what_was_not_measured_is_not_drawn(tmp_path: Path) -> None:
    assert plots.draw({"runs": [run("start", "idle")]}, tmp_path / "short") == []
    assert list(tmp_path.iterdir()) == []
