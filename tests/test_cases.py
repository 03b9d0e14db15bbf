"""docs/cases.md says where each case from the field is tried; this holds it against the tests."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
CASES = range(1, 44)


def listed() -> dict[int, set[str]]:
    """Per case the files that the page names."""
    page = (ROOT / "docs" / "cases.md").read_text()
    rows = re.findall(r"^\| (\d+) \| .* \| (.*) \|$", page, flags=re.MULTILINE)
    return {int(number): set(re.findall(r"`(tests/[\w/]+\.py)`", files)) for number, files in rows}


def written() -> dict[int, set[str]]:
    """Per case the files with a test of that number."""
    found: dict[int, set[str]] = {}
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        for number in re.findall(r"def test_case_(\d\d)_", file.read_text()):
            found.setdefault(int(number), set()).add(str(file.relative_to(ROOT)))
    return found


def test_every_case_has_a_test() -> None:
    assert sorted(written()) == list(CASES)


def test_the_page_names_files_that_have_it() -> None:
    found = written()
    assert sorted(listed()) == list(CASES)
    assert [number for number, files in listed().items() if not files or not files <= found[number]] == []
