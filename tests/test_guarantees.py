"""What docs/ claims can be looked up: every test that it names exists, every rule that the code cites is written down.

Guards against a page that goes on naming a test after it was renamed, and a comment that cites a rule nobody can read.
"""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))

_TEST = re.compile(r"(tests/[\w/]+\.py)(?:::(\w+(?:::\w+)?))?")
_LINK = re.compile(r"\]\((?!https?://|#)([^)#\s]+)(?:#[^)]*)?\)")
_PATH = re.compile(r"`((?:relay|sql|tests|bench|docs)/[\w/.-]+\.\w+)`")
_RULE = re.compile(r"\b([LRHPSO]\d|I[1-8])\b")
_RULES_MADE_UP = {"S9", "O9"}
"""What the pattern must not find: a guard that it does not match everything."""


@functools.cache
def functions_of(file: Path) -> frozenset[str]:
    """The test functions of a file, methods as `Class::name`."""
    found: set[str] = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            found |= {
                f"{node.name}::{inner.name}"
                for inner in node.body
                if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef)
            }
    return frozenset(name for name in found if name.rpartition("::")[2].startswith("test_"))


def named_tests(page: Path) -> list[tuple[str, str]]:
    """(file, test or nothing) of every test that the page names."""
    return _TEST.findall(page.read_text())


def rules_of(text: str) -> set[str]:
    return set(_RULE.findall(text))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_every_test_that_a_page_names_exists(page: Path) -> None:
    missing = [
        f"{file}::{name}" if name else file
        for file, name in named_tests(page)
        if not (ROOT / file).is_file() or (name and name not in functions_of(ROOT / file))
    ]
    assert not missing, f"{page.name} names tests that do not exist"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_every_file_that_a_page_names_exists(page: Path) -> None:
    text = page.read_text()
    missing = [path for path in _PATH.findall(text) if not (ROOT / path).exists()]
    missing += [link for link in _LINK.findall(text) if not (page.parent / link).exists()]
    assert not missing, f"{page.name} leads nowhere"


def test_guarantees_name_tests() -> None:
    """Each numbered guarantee says how, how far and what it needs, and names a test that holds it."""
    sections = re.split(r"^## ", (DOCS / "guarantees.md").read_text(), flags=re.MULTILINE)[1:]
    promises = [section for section in sections if re.match(r"G\d+ ", section)]
    numbers = [int(section[1 : section.index(" ")]) for section in promises]
    assert numbers == list(range(1, len(numbers) + 1))
    for section in promises:
        assert _TEST.search(section), section.splitlines()[0]
        parts = ("Promise", "Mechanism", "Bound", "Needs", "Tests")
        assert [part for part in parts if f"**{part}.**" not in section] == [], section.splitlines()[0]


def test_every_history_has_a_test_or_says_so() -> None:
    """The table of histories in docs/protocol.md: its last column is a test, or a dash."""
    section = (DOCS / "protocol.md").read_text().partition("## The history that breaks each rule's absence")[2]
    rows = [line for line in section.splitlines() if line.startswith("| ")][2:]
    assert len(rows) >= 25
    for row in rows:
        last = row.rstrip("| ").rpartition("|")[2].strip()
        assert _TEST.search(last) or last == "–", row


def test_every_rule_that_the_code_cites_is_written_down() -> None:
    defined = set(re.findall(r"^- \*\*([LRHPSO]\d) ", (DOCS / "protocol.md").read_text(), flags=re.MULTILINE))
    defined |= set(re.findall(r"^- \*\*(I\d) ", (DOCS / "design.md").read_text(), flags=re.MULTILINE))
    files = [*(ROOT / "relay").rglob("*.py"), *(ROOT / "sql").rglob("*.sql")]
    cited = {rule: file.name for file in files for rule in rules_of(file.read_text())}
    assert {"L1", "R2", "H4", "P3", "S2", "I1"} <= set(cited), "the pattern finds what is there"
    assert not set(cited) & _RULES_MADE_UP
    assert set(cited) <= defined, {rule: file for rule, file in cited.items() if rule not in defined}


def test_every_module_stands_in_the_map() -> None:
    text = (DOCS / "design.md").read_text()
    package = ROOT / "relay"
    modules = [*package.glob("*.py"), *(package / "core").glob("*.py")]
    names = [str(file.relative_to(ROOT)) for file in modules if not file.name.startswith("__")]
    names += [f"relay/{inner.parent.name}/" for inner in package.glob("*/__init__.py")]
    assert not [name for name in names if f"`{name}`" not in text], "docs/design.md does not say what they own"


def test_the_pages_are_whole() -> None:
    assert {"design.md", "protocol.md", "guarantees.md"} <= {page.name for page in PAGES}
    assert named_tests(DOCS / "guarantees.md")
    numbers = [page.name[:4] for page in DOCS.glob("decisions/[0-9][0-9][0-9][0-9]-*.md")]
    assert numbers
    assert len(set(numbers)) == len(numbers), "two decisions of one number"
