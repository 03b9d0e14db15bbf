"""What is named after the inbox table. Pure; without a driver, so that a migration is printed without one."""

from __future__ import annotations

from relay.values import TableName


def channel_of(table: TableName) -> str:
    """Where the doorbell rings: the table's name as it is configured, without quotes."""
    return str(table)


def names_of(table: TableName) -> dict[str, str]:
    """The names that the SQL files leave open."""
    functions = {name: table.derived(f"_{name}") for name in ("claim", "done", "failed", "redrive", "discard")}
    return {"table": table.quoted, "writer": table.derived("_writer"), **functions}
