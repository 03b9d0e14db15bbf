"""README quotes the result file, and nothing by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import plots, readme
from bench.document import KEYS


def some_result() -> dict[str, Any]:
    return {
        **{key.name: 0.5 for key in KEYS},
        "spread": {key.name: {"min": 0.4, "max": 0.6, "turns": 3} for key in KEYS},
        "targets": {"drain_ratio": {"target": "at least 0.9", "is_reached": False}},
        "machine": {"cores": 2, "cpu": "a processor", "kernel": "6"},
        "build": "compiled",
        "versions": {"rabbitmq": "3.10.8", "postgresql": "15.18", "relay": "abc", "python": "3.11"},
        "settings": {"repeats": 3},
        "measured_at": "2026-01-02T03:04:05+00:00",
        "took_s": 500.0,
        "runs": [{"scenario": "peers", "variant": "gathered", "loop": "uvloop"}],
    }


@pytest.mark.parametrize("page", readme.PAGES)
def test_the_pages_quote_the_result_file(page: Path) -> None:
    """`python -m bench.readme` after a measurement puts this right. Without a result file README quotes no figure."""
    text = page.read_text()
    assert text.count(readme.BEGIN) == text.count(readme.END) == 1
    if readme.RESULT.exists():
        assert readme.quoting(text, readme.PAGES[page](json.loads(readme.RESULT.read_text()))) == text
    elif page == readme.README:
        between = text.partition(readme.BEGIN)[2].partition(readme.END)[0]
        assert "|" not in between


def test_figures_replace_what_was_there_and_nothing_else() -> None:
    text = f"before\n\n{readme.BEGIN}\nold\n{readme.END}\nafter\n"
    once = readme.quoting(text, readme.figures(some_result()))
    assert "old" not in once
    assert once.startswith("before\n\n")
    assert once.endswith(f"{readme.END}\nafter\n")
    assert "| start to ready | 0.5 s |" in once
    assert readme.quoting(once, readme.figures(some_result())) == once


def test_what_a_suite_without_a_compiler_lacks_is_not_measured() -> None:
    """It has no ceiling: `python -m bench.readme` ended in a KeyError, and the pages quoted a file that was overwritten."""
    result = some_result()
    for name in ("ceiling_msgs_s", "drain_ratio"):
        del result[name]
    assert "| … of what a C publisher reaches at the same broker | not measured |" in readme.figures(result)
    assert "| start to ready | 0.5 s |" in readme.figures(result)
    assert "| `drain_ratio` | not measured | | |" in readme.everything(result)


def test_the_page_has_every_key_and_says_what_was_missed() -> None:
    text = readme.everything(some_result())
    assert all(f"| `{key.name}` | 0.5 | 0.4 … 0.6 |" in text for key in KEYS)
    assert "| `drain_ratio` | 0.5 | 0.4 … 0.6 | at least 0.9: **missed** |" in text
    assert list(readme.PICTURES) == plots.names()


def test_what_is_no_median_of_the_turns_says_so() -> None:
    """The best turns of latency and CPU stood among medians as if they were some."""
    result = some_result()
    result["spread"]["idle_wakeup_p50_ms"]["turns"] = 1
    text = readme.figures(result)
    assert "medians of 3 turns unless said" in text
    assert "p50, p99 | 0.5 ms, 0.5 ms (best of 3 turns) |" in text
    assert "p50 | 0.5 ms (measured once) |" in text
    assert "0.5 µs, 0.5 µs (best of 3 turns) |" in text
    assert "| start to ready | 0.5 s |" in text


def test_peers_are_compared_with_what_they_do_on_the_loop_they_had() -> None:
    """They mark, and were set against the relay's delete alone; and had asyncio's loop, where the relay has uvloop's."""
    result = some_result() | {"drain_ratio": 1.0, "drain_ratio_mark": 1.5, "naive_ratio": 0.1}
    assert "| 2.0 × by `delete`, 3.0 × by `mark`; 10 ×, 15 × |" in readme.figures(result)
    result["runs"].append({"scenario": "peers", "variant": "one"})
    assert "15 × (they ran on asyncio's own event loop, without uvloop) |" in readme.figures(result)


def test_a_page_without_marks_is_not_guessed_at() -> None:
    with pytest.raises(ValueError, match="lacks its marks"):
        readme.quoting("nothing here", "x")
