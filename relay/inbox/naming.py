"""What is named after the inbox table, and the part of its SQL that more than one statement has. No connection is needed."""

from __future__ import annotations

from relay.database import fill, sql_file
from relay.values import TableName


def channel_of(table: TableName) -> str:
    """Where the doorbell rings: the table's name as it is configured, without quotes."""
    return str(table)


def names_of(table: TableName) -> dict[str, str]:
    """What the SQL files leave open."""
    functions = {name: table.derived(f"_{name}") for name in ("claim", "done", "failed", "redrive", "discard")}
    names = {"table": table.quoted, "writer": table.derived("_writer"), **functions}
    return names | {"claimable": fill(sql_file("parts/claimable.sql"), names).rstrip()}
