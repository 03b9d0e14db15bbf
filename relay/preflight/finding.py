"""One finding of `relay check`: what was looked at, how it is, and what mends it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """How bad a finding is. Only an error makes the command fail."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"
    NOT_CHECKED = "not checked"


@dataclass(frozen=True, slots=True)
class Finding:
    """`check` is a stable name, `text` one line, `mend` what to do (None where nothing needs doing), `details` the
    numbers in the text, for scripts."""

    check: str
    level: Level
    text: str
    mend: str | None = None
    details: Mapping[str, object] | None = None


def ok(check: str, text: str) -> Finding:
    """As it should be."""
    return Finding(check, Level.OK, text)


def warning(check: str, text: str, mend: str | None = None) -> Finding:
    """Works, and may surprise."""
    return Finding(check, Level.WARNING, text, mend)


def error(check: str, text: str, mend: str | None = None, details: Mapping[str, object] | None = None) -> Finding:
    """Rows do not arrive, or must not, until this is mended."""
    return Finding(check, Level.ERROR, text, mend, details)


def not_checked(check: str, text: str, mend: str | None = None) -> Finding:
    """Nobody looked, and why."""
    return Finding(check, Level.NOT_CHECKED, text, mend)
