"""Whose fault it is that PostgreSQL refused to write the decisions about rows.

A trigger or a constraint can refuse the change of one row for ever; that row is set apart (`unmarkable`). A lock
that is not given, a server that is read only or full, a right that is missing refuse every row for a while: nothing
is recorded then, the settlement is tried again.

Does not know the driver: it is told the SQLSTATE and where the error arose.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final


class Blame(StrEnum):
    """Who has to change for the same statement to go well."""

    ROW = "row"
    """This row, or what was written to refuse it."""
    DOUBTFUL = "doubtful"
    """The row, if the same goes well for others at that moment; else the schema or the server."""
    SERVER = "server"
    """The session, the server or the schema: no row is at fault."""


CLASSES: Final = {
    "01": Blame.SERVER,  # warnings, no_data: never errors
    "02": Blame.SERVER,
    "03": Blame.SERVER,  # statement not yet complete
    "08": Blame.SERVER,  # connection
    "0A": Blame.DOUBTFUL,  # feature not supported: ours, or something that a trigger does
    "0B": Blame.SERVER,  # transaction initiation
    "25": Blame.SERVER,  # read only, failed or idle transaction
    "26": Blame.SERVER,  # a prepared statement is gone (a pooling proxy)
    "28": Blame.SERVER,  # authorization
    "2B": Blame.SERVER,  # dependent privileges
    "2D": Blame.SERVER,  # transaction termination
    "34": Blame.SERVER,  # cursor name
    "3B": Blame.SERVER,  # savepoint
    "3D": Blame.SERVER,  # no such database
    "3F": Blame.SERVER,  # no such schema
    "40": Blame.SERVER,  # serialization failure, deadlock: goes well next time
    "53": Blame.SERVER,  # disk full, out of memory, too many connections
    "55": Blame.SERVER,  # lock not available, object in use
    "57": Blame.SERVER,  # statement timeout, shutdown, cancelled
    "58": Blame.SERVER,  # the operating system
    "72": Blame.SERVER,  # snapshot too old
    "F0": Blame.SERVER,  # configuration file
    "HV": Blame.DOUBTFUL,  # a foreign table that a trigger writes to: its server may be away
    "XX": Blame.DOUBTFUL,  # internal error, a damaged page
}
"""By the SQLSTATE's class. All others accuse the row: what data and integrity errors say (09, 20-24, 27, 2F, 38, 39,
44, 54, P0xxx), and every code that PostgreSQL does not know, for somebody's function chose it."""


def blame(sqlstate: str, *, is_in_function: bool = False, is_row_policy: bool = False) -> Blame:
    """Whose fault a refusal is. `is_in_function`: it arose within a function (a trigger's, not our own statement);
    `is_row_policy`: a policy or a view's check option refused the new version of the row."""
    if is_row_policy:
        return Blame.ROW
    if sqlstate[:2] == "42":
        # A missing right or column of our own stops everything. The same within a trigger may be one branch of it,
        # or a trigger that fails for all rows.
        return Blame.DOUBTFUL if is_in_function else Blame.SERVER
    return CLASSES.get(sqlstate[:2], Blame.ROW)
