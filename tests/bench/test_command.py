"""`python -m bench`, as one types it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench.__main__ import main
from bench.document import KEYS

ROOT = Path(__file__).resolve().parent.parent.parent

PROMISED = [
    "ceiling_msgs_s",
    "ceiling_joined_msgs_s",
    "drain_msgs_s",
    "drain_ratio",
    "drain_ratio_mark",
    "drain_ratio_classic",
    "drain_ratio_50_keys",
    "naive_ratio",
    "gathered_ratio",
    "relay_cpu_us",
    "postgres_cpu_us_delete",
    "postgres_cpu_us_mark",
    "trickle_1000_p50_ms",
    "trickle_1000_p99_ms",
    "idle_wakeup_p50_ms",
    "claim_growth_1e5",
    "claim_growth_parked_1e5",
    "claim_growth_old_snapshot_1e5",
    "claim_growth_open_writer",
    "hot_key_ratio",
    "drain_ratio_50_keys_vs_c_window_50",
    "peak_rss_mb",
    "idle_rss_mb",
    "start_to_ready_s",
    "writers_ratio_single",
    "writers_ratio_batch100",
    "writers_ratio_busy",
]
"""Others read these."""


def bench(*arguments: str, timeout_s: float = 60.0, path: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = {"LC_ALL": "C.UTF-8", "PATH": "/usr/local/bin:/usr/bin:/bin" if path is None else path}
    return subprocess.run(
        [sys.executable, "-m", "bench", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def test_every_promised_key_is_computed_and_explained() -> None:
    assert set(PROMISED) <= {key.name for key in KEYS}
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    explained = set(re.findall(r"`([a-z0-9_]+)`", page))
    for key in KEYS:
        family = re.sub(r"^trickle_\d+_", "trickle_RATE_", key.name)
        assert key.name in explained or family.startswith("trickle_RATE_"), (
            f"docs/benchmarks.md does not explain {key.name}"
        )


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["nothing"], "there is no scenario nothing; there are drain, "),
        (["--scale", "2"], "--scale"),
        (["--repeats", "0"], "--repeats"),
        (["--short", "--long"], "not allowed with"),
    ],
)
def test_a_wrong_argument_is_named(arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert complaint in capsys.readouterr().err


def test_the_micro_benchmarks_still_fit_what_they_measure() -> None:
    """They call the hot path's own functions; nothing else runs them in passing."""
    command = [sys.executable, "-m", "pytest", "bench/micro", "-q", "-o", "addopts=", "--benchmark-disable"]
    outcome = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60.0, check=False)
    assert outcome.returncode == 0, outcome.stdout[-2000:]
    assert "skipped" not in outcome.stdout


@pytest.mark.long
def test_the_whole_suite_in_small(tmp_path: Path) -> None:
    """Every scenario runs, every promised key is there, and the pictures are drawn."""
    outcome = bench("--short", "--scale", "0.01", "--repeats", "1", "--json", str(tmp_path / "r.json"), timeout_s=550.0)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    result = json.loads((tmp_path / "r.json").read_text())
    assert [name for name in PROMISED if name not in result] == []
    assert result["failed"] == {}
    assert len(list(tmp_path.glob("*.png"))) == 4
