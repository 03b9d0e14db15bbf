"""What PostgreSQL refused, as its driver tells it: whose fault it is, in which words; and the refusal that it does not tell.

A trigger that returns NULL before an update or a deletion suppresses it, and PostgreSQL says nothing. A row that was locked in this
transaction, and that its statement then did not change, is refused in the same way as if the trigger had raised an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import asyncpg

from relay.core.refusals import Blame, blame

SUPPRESSED = "the change is suppressed without an error (by a trigger that returns NULL?)"


def blame_of(error: asyncpg.PostgresError) -> Blame:
    """Whose fault a refusal is, as the driver tells it."""
    return blame(
        error.sqlstate or "",
        is_in_function=bool(error.context),
        # What refuses a new version of a row: a policy (42501) or a view's check option (44000). A missing right has
        # the first one's code.
        is_row_policy=error.server_source_function == "ExecWithCheckOptions",
    )


def said(error: asyncpg.PostgresError) -> str:
    """What PostgreSQL said of a row; only the first line: details quote rows."""
    return f"{error.message or type(error).__name__} ({error.sqlstate})"


def changed(records: Iterable[Any]) -> list[tuple[int, str, str | None]]:
    """What became of rows, as `parked_discard` and `parked_redrive` tell: (seq, type and id of the key). Raises a refusal of those whose
    locks we had and that did not change."""
    records = list(records)
    demand_change([record for record in records if record["is_untouched"]])
    return [(seq, kind, key) for seq, kind, key, _ in records]


def demand_change(untouched: Sequence[object] | None) -> None:
    """Raises a refusal where there are any of these: rows, or their seqs, whose locks we have and that did not change."""
    if untouched:
        error = asyncpg.TriggeredDataChangeViolationError(SUPPRESSED)
        error.message = SUPPRESSED
        raise error
