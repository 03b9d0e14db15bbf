"""README quotes the result file, and nothing by hand."""

from __future__ import annotations

import json

import pytest

from bench import readme
from bench.document import KEYS


def some_result() -> dict[str, object]:
    return {
        **{key.name: 0.5 for key in KEYS},
        "machine": {"cores": 2, "cpu": "a processor"},
        "versions": {"rabbitmq": "3.10.8", "postgresql": "15.18"},
    }


def test_readme_quotes_the_result_file() -> None:
    """`python -m bench.readme` after a measurement puts this right. Without a result file README quotes no figure."""
    text = readme.README.read_text()
    assert text.count(readme.BEGIN) == text.count(readme.END) == 1
    if readme.RESULT.exists():
        assert readme.quoting(text, json.loads(readme.RESULT.read_text())) == text
    else:
        between = text.partition(readme.BEGIN)[2].partition(readme.END)[0]
        assert "|" not in between


def test_figures_replace_what_was_there_and_nothing_else() -> None:
    text = f"before\n\n{readme.BEGIN}\nold\n{readme.END}\nafter\n"
    once = readme.quoting(text, some_result())
    assert "old" not in once
    assert once.startswith("before\n\n")
    assert once.endswith(f"{readme.END}\nafter\n")
    assert "| start to ready | 0.5 s |" in once
    assert readme.quoting(once, some_result()) == once


def test_a_readme_without_marks_is_not_guessed_at() -> None:
    with pytest.raises(ValueError, match="lacks its marks"):
        readme.quoting("nothing here", some_result())
