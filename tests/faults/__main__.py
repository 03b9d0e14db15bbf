"""`python -m tests.faults`: run the matrix and print its table; `--table` puts it into docs/guarantees.md.

Each scenario leaves its finding in pytest's JUnit report; a failing one ends the command with 1 and no table.
"""

from __future__ import annotations

import argparse
import platform
import re
import subprocess
import sys
import tempfile
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


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--table", action="store_true", help="write the table into docs/guarantees.md")
    parser.add_argument("--short", action="store_true", help="only the scenarios of make test")
    parser.add_argument("pytest", nargs="*", help="more arguments for pytest, after --")
    arguments = parser.parse_args()
    # The cases as written wait for minutes each; `make test-long` runs them.
    form = ["-m", "not long"] if arguments.short else ["-m", "long or not long", "-k", "not written"]
    with tempfile.TemporaryDirectory(prefix="relay-faults-") as directory:
        report = Path(directory) / "report.xml"
        # xunit1: the family of reports that has properties.
        report_as = ["-o", "junit_family=xunit1", f"--junitxml={report}"]
        command = [sys.executable, "-m", "pytest", "tests/faults", *form, *report_as]
        done = subprocess.run([*command, *arguments.pytest], cwd=ROOT, check=False)
        if not report.exists():
            return done.returncode
        findings = read(report)
    text = f"{heading('short' if arguments.short else 'long')}\n\n{table(findings)}"
    print(text)
    if done.returncode == 0 and arguments.table:
        PAGE.write_text(replaced(PAGE.read_text(), text))
    return 1 if done.returncode else 0


def read(report: Path) -> list[Finding]:
    """The findings of a JUnit report, in the order in which the scenarios ran."""
    return [
        Finding.read(found.attrib["value"])
        for found in ElementTree.parse(report).iter("property")
        if found.attrib["name"] == PROPERTY
    ]


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
