"""What is named after the inbox table, and the part of its SQL that more than one statement has. No connection is needed."""

from __future__ import annotations

from hashlib import sha256
from typing import Final

from relay.database import fill, sql_file
from relay.values import IDENTIFIER_BYTES_MAX, TableName

FREE_ROWS: Final = 32
"""A key's unfinished rows, from its oldest on, that are not held though they wait: a claim looks at each of them. They are as many as a
key's transactions that would have to end while one batch is written, before a row is held by nobody (until the sidecar looks)."""


def channel_of(table: TableName) -> str:
    """Where the doorbell rings: the table's name without quotes, or a digest of it where that would be no channel's
    (`pg_notify` refuses more than 63 bytes, which a schema's name and a table's have together).
    """
    name = str(table)
    if len(name.encode()) <= IDENTIFIER_BYTES_MAX:
        return name
    return f"inbox_{sha256(name.encode()).hexdigest()[:32]}"


def names_of(table: TableName) -> dict[str, str]:
    """What the SQL files leave open."""
    functions = {
        name: table.derived(f"_{name}") for name in ("claim", "done", "failed", "redrive", "discard", "release")
    }
    names = {"table": table.quoted, "writer": table.derived("_writer"), "free_rows": str(FREE_ROWS), **functions}
    return names | {"claimable": fill(sql_file("parts/claimable.sql"), names).rstrip()}
