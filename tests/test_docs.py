"""The pages cannot drift from the tables they are printed from."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from relay import config, metrics
from relay.preflight import encryption, management, proxy

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
RELAY = ROOT / "relay"
SEVERITIES = ("error", "warning", "info", "debug")
CONTRACT = "commands, options, exit codes, settings, columns, message properties and headers, metrics, keys of `--json` documents, log events"


def calls(package: Path) -> Iterator[tuple[Path, ast.Call, str]]:
    """Every call in the package that has an argument, with the last part of the name that it calls."""
    for path in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and node.args:
                called = node.func
                yield path, node, called.attr if isinstance(called, ast.Attribute) else ast.unparse(called)


def first_cells(page: Path, heading: str) -> list[str]:
    """What stands in backquotes in the first cells of the page's table that begins with this heading."""
    rows = page.read_text().partition(f"\n| {heading} |")[2].partition("\n\n")[0].splitlines()[2:]
    assert rows, f"no table {heading} in {page.name}"
    return [name for row in rows for name in re.findall("`([^`]+)`", row.split("|")[1])]


@pytest.mark.parametrize(
    ("file", "page", "module"),
    [("configuration.md", config.page, "relay.config"), ("metrics.md", metrics.page, "relay.metrics")],
)
def test_a_printed_page_is_up_to_date(file: str, page: object, module: str) -> None:
    assert callable(page)
    assert (DOCS / file).read_text() == page(), f"print it again: python -m {module} > docs/{file}"


def test_every_setting_is_documented() -> None:
    text = (DOCS / "configuration.md").read_text()
    for setting in config.SETTINGS:
        assert f"| `{setting.variable}` |" in text
        assert setting.meaning in text
        if setting.is_secret:
            assert f"`{setting.variable}_FILE`" in text


def test_every_metric_is_documented() -> None:
    text = (DOCS / "metrics.md").read_text()
    for metric in metrics.METRICS:
        assert f"| `{metric.name}` |" in text
        assert metric.help in text


def test_every_finding_of_relay_check_is_in_the_table() -> None:
    """The names are literals, but for these modules' own constants."""
    named = {encryption.CHECK, proxy.CHECK, *management.CHECKS}
    named |= {
        str(call.args[0].value)
        for _, call, called in calls(RELAY / "preflight")
        if called in {"ok", "warning", "error", "not_checked"} and isinstance(call.args[0], ast.Constant)
    }
    assert sorted(first_cells(DOCS / "operations.md", "finding")) == sorted(named)


def logged(argument: ast.expr) -> Iterator[str]:
    """The names of events that are written out there."""
    if isinstance(argument, ast.IfExp):
        yield from logged(argument.body)
        yield from logged(argument.orelse)
    elif isinstance(argument, ast.Constant):
        yield str(argument.value)
    else:
        assert ast.unparse(argument) == "chore.refused_event", "the name of an event is a literal"


def test_every_log_event_is_in_the_table() -> None:
    """With its levels. The relay's own logger is called `log` wherever it is."""
    written: dict[str, set[str]] = {}
    for _, call, called in calls(RELAY):
        is_ours = called in SEVERITIES and ast.unparse(call.func).endswith((f"log.{called}", f"get_logger().{called}"))
        # A chore of the housekeeping names the warning of its refusal.
        if is_ours or called == "_Chore":
            for event in logged(call.args[0]):
                written.setdefault(event, set()).add(called if is_ours else "warning")
    rows = re.findall(r"^\| `(\w+)` \| ([a-z, ]+) \| .+ \| .+ \|$", (DOCS / "logs.md").read_text(), re.MULTILINE)
    assert sorted(event for event, _ in rows) == sorted(written)
    assert {event: set(levels.split(", ")) for event, levels in rows} == written


def test_the_contract_is_the_same_on_both_pages() -> None:
    for page in (ROOT / "CHANGELOG.md", DOCS / "upgrading.md"):
        assert CONTRACT in " ".join(page.read_text().split()), page.name


@pytest.mark.parametrize("file", ["docs/deployment.md", "docs/guarantees.md", "deploy/kubernetes/sidecar.yaml"])
def test_the_memory_limit_is_one_formula(file: str) -> None:
    """The one that test_case_33_large_rows_in_little_memory holds."""
    assert "RELAY_MAX_BYTES and about 120 MiB" in (ROOT / file).read_text().replace("`", "")
