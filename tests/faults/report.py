"""One line of the table of faults: what a scenario saw, and how it reads in docs/guarantees.md."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Final

PROPERTY: Final = "fault"
"""Under this name a test leaves its finding in pytest's JUnit report."""

_HEAD: Final = (
    "| Fault | Relays | Rows | Lost | Out of order | Copies (at most) | Back after (at most) | Attempts used | "
    "Log lines | Reconnects |\n"
    "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |\n"
)


@dataclass(frozen=True, slots=True)
class Finding:
    """`back_s`: from the fault's end until everything committed before it was settled as sent. Bounds were asserted."""

    fault: str
    relays: int
    rows: int
    lost: int
    out_of_order: int
    copies: int
    copies_max: int
    back_s: float
    back_s_max: float
    attempts: int
    log_lines: int
    reconnects: int

    def text(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def read(text: str) -> Finding:
        return Finding(**json.loads(text))


def table(findings: Sequence[Finding]) -> str:
    """A Markdown table, in the order given."""
    lines = [
        f"| {found.fault} | {found.relays} | {found.rows:,} | {found.lost} | {found.out_of_order} "
        f"| {found.copies} ({found.copies_max}) | {found.back_s:.1f} s ({found.back_s_max:.0f} s) "
        f"| {found.attempts} | {found.log_lines} | {found.reconnects} |"
        for found in findings
    ]
    return _HEAD + "\n".join(lines) + "\n"
