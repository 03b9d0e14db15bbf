"""The consumer's tables in the consumer's own database: `processed_messages` with `processed_versions` for the library,
the inbox table for the sidecar.

Owns: the steps of `sql/inbox/`, sent or printed. They create what is missing; a `processed_messages` of the same columns
and key is accepted, whoever made it. Imports nothing of the engine.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from relay.database import close, connect, fill, literal, perform_step, sql_file
from relay.inbox.naming import channel_of, names_of
from relay.values import TableName, quote_identifier

if TYPE_CHECKING:
    from relay.database import Connection
    from relay.urls import DatabaseTarget

PATIENCE_S = 60.0
"""How long it tries for its locks, 2 s at a time."""

_PRINTED_HEADER = """\
-- The consumer's tables of outbox-relay, as `relay inbox migrate` applies it. With the rights of the
-- schema's owner:
--
--     psql -X -v ON_ERROR_STOP=1 -f FILE DATABASE
--
-- It may be run again.
"""


DEFAULT_TABLE: Final = TableName(None, "inbox")

_MARK = "outbox-relay: messages for a service to work through (relay inbox run)"


def printed(*, table: TableName = DEFAULT_TABLE, role: str | None = None) -> str:
    """What `relay inbox migrate --print` writes, for psql; `role` exists already. Needs no database."""
    return "\n".join([_PRINTED_HEADER, *_steps(table, role)])


async def migrate(
    connection: Connection,
    *,
    table: TableName = DEFAULT_TABLE,
    role: str | None = None,
    patience_s: float = PATIENCE_S,
) -> None:
    """Create what is missing, and grant `role` what a consumer, a sidecar and its service need.

    `connection` is in no transaction; its search_path says in which schema. Raises SchemaForeign (a table of
    that name with other columns or key, or not ours), UsageError (role, schema), DatabaseRefused (rights),
    DatabaseUnavailable (no lock in `patience_s`), DatabaseLost.
    """
    assert not connection.is_in_transaction(), "a migration inside the caller's transaction"
    deadline = time.monotonic() + patience_s
    for step in _steps(table, role):
        await perform_step(connection, step, deadline)


async def run(
    target: DatabaseTarget | str,
    *,
    table: TableName = DEFAULT_TABLE,
    role: str | None = None,
    patience_s: float = PATIENCE_S,
) -> None:
    """`relay inbox migrate`: `migrate` on a connection of its own, whose errors it raises too."""
    connection = await connect(target, application_name="outbox-relay inbox migrate")
    try:
        await migrate(connection, table=table, role=role, patience_s=patience_s)
    finally:
        await close(connection)


def _steps(table: TableName, role: str | None) -> list[str]:
    names = {
        **names_of(table),
        "table_text": f"{literal(table.quoted)}::text",
        "writer_text": f"{literal(table.derived('_writer'))}::text",
        "channel_text": literal(channel_of(table)),
        "mark_text": literal(_MARK),
        "role": quote_identifier(role or "-"),
        "role_text": f"{literal(role)}::text",
    }
    grants = {"0001_inbox": "inbox/role.sql", "0002_mailbox": "inbox/mailbox_role.sql"}
    steps = []
    for step, rights in grants.items():
        granted = "" if role is None else fill(sql_file(rights), names).strip().replace("\n", "\n    ")
        steps.append(fill(sql_file(f"inbox/{step}.sql"), names | {"grants": granted}))
    return steps
