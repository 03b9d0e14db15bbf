"""`python -m tests.faults`: run the matrix and print its table; `--table` puts it into docs/guarantees.md.

Each scenario leaves its finding in pytest's JUnit report. One that fails has no line in the table but is named below
it, and the command ends with 1.
"""

from __future__ import annotations

import argparse
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Final
from xml.etree import ElementTree

from relay.servers import find_postgres
from tests.faults.report import PROPERTY, Finding, table

ROOT: Final = Path(__file__).parent.parent.parent
PAGE: Final = ROOT / "docs" / "guarantees.md"
BEGIN: Final = "<!-- faults: begin, written by make faults -->\n"
END: Final = "<!-- faults: end -->\n"
# The cases as written wait for minutes each; `make test-long` runs them.
LONG: Final = ("-m", "long or not long", "-k", "not as-written")
SHORT: Final = ("-m", "not long")


@dataclass(slots=True)
class Outcome:
    """Of one file of scenarios: what passed, and the names of those that did not."""

    findings: list[Finding] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--table", action="store_true", help="write the table into docs/guarantees.md")
    parser.add_argument("--short", action="store_true", help="only the scenarios of make test")
    parser.add_argument("--jobs", type=int, default=1, help="files at a time, each with servers of its own")
    arguments = parser.parse_args()
    files = sorted(Path(__file__).parent.glob("test_*.py"))
    with ThreadPoolExecutor(arguments.jobs) as pool:
        outcomes = list(pool.map(lambda file: run(file, SHORT if arguments.short else LONG), files))
    findings = [finding for outcome in outcomes for finding in outcome.findings]
    failed = [name for outcome in outcomes for name in outcome.failed]
    text = f"{heading('short' if arguments.short else 'long')}\n\n{table(findings)}"
    if failed:
        text += "\nFailed in this run: " + ", ".join(f"`{name}`" for name in failed) + ".\n"
    print(text)
    if arguments.table:
        PAGE.write_text(replaced(PAGE.read_text(), text))
    return 1 if failed else 0


def run(file: Path, form: Sequence[str]) -> Outcome:
    with tempfile.TemporaryDirectory(prefix="relay-faults-") as directory:
        report = Path(directory) / "report.xml"
        # xunit1: the family of reports that has properties.
        report_as = ["-o", "junit_family=xunit1", f"--junitxml={report}", f"--basetemp={directory}/pytest"]
        command = [sys.executable, "-m", "pytest", "-q", "--tb=short", str(file.relative_to(ROOT)), *form, *report_as]
        subprocess.run(command, cwd=ROOT, check=False, stdout=sys.stderr)
        return read(report) if report.exists() else Outcome(failed=[file.name])


def read(report: Path) -> Outcome:
    """A JUnit report's findings, in the order in which the scenarios ran."""
    outcome = Outcome()
    for case in ElementTree.parse(report).iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            outcome.failed.append(case.attrib["name"])
            continue
        outcome.findings += [
            Finding.read(found.attrib["value"]) for found in case.iter("property") if found.attrib["name"] == PROPERTY
        ]
    return outcome


def replaced(page: str, text: str) -> str:
    """The page with `text` between the markers."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin and end, f"docs/guarantees.md has lost its markers {BEGIN!r} and {END!r}"
    return f"{before}{begin}\n{text}\n{end}{after}"


def heading(form: str) -> str:
    postgres = _version([str(find_postgres() / "postgres"), "--version"])
    rabbit = _version(["dpkg-query", "-W", "-f", "${Version}", "rabbitmq-server"])
    today = datetime.now(UTC).date().isoformat()
    return f"The {form} form, run on {today}: PostgreSQL {postgres}, RabbitMQ {rabbit}, Python {platform.python_version()}."


def _version(command: list[str]) -> str:
    """The first thing that looks like a version in what a command prints."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except FileNotFoundError:
        return "of unknown version"
    found = re.search(r"\d+\.[\d.]+", done.stdout)
    return found[0] if found else "of unknown version"


if __name__ == "__main__":
    raise SystemExit(main())
