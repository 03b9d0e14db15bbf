"""The consumer's table, `processed_messages`, in the consumer's own database.

Owns: the one step of `sql/inbox/`, sent or printed. It creates the table where there is none and accepts one
of the same columns and key, whoever made it. Imports nothing of the engine.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from relay.database import close, connect, fill, literal, perform_step, sql_file
from relay.values import quote_identifier

if TYPE_CHECKING:
    from relay.database import Connection
    from relay.urls import DatabaseTarget

PATIENCE_S = 60.0
"""How long it tries for its locks, 2 s at a time."""

_PRINTED_HEADER = """\
-- The consumer's table of outbox-relay, as `relay inbox migrate` applies it. With the rights of the
-- schema's owner:
--
--     psql -X -v ON_ERROR_STOP=1 -f FILE DATABASE
--
-- It may be run again.
"""


def printed(*, role: str | None = None) -> str:
    """What `relay inbox migrate --print` writes, for psql; `role` exists already. Needs no database."""
    return _PRINTED_HEADER + _step(role)


async def migrate(connection: Connection, *, role: str | None = None, patience_s: float = PATIENCE_S) -> None:
    """Create `processed_messages` where there is none, and grant `role` what a consumer needs.

    `connection` is in no transaction; its search_path says in which schema. Raises SchemaForeign (a table of
    that name with other columns or key), UsageError (role, schema), DatabaseRefused (rights),
    DatabaseUnavailable (no lock in `patience_s`), DatabaseLost.
    """
    assert not connection.is_in_transaction(), "a migration inside the caller's transaction"
    await perform_step(connection, _step(role), time.monotonic() + patience_s)


async def run(target: DatabaseTarget | str, *, role: str | None = None, patience_s: float = PATIENCE_S) -> None:
    """`relay inbox migrate`: `migrate` on a connection of its own, whose errors it raises too."""
    connection = await connect(target, application_name="outbox-relay inbox migrate")
    try:
        await migrate(connection, role=role, patience_s=patience_s)
    finally:
        await close(connection)


def _step(role: str | None) -> str:
    names = {"role": quote_identifier(role or "-"), "role_text": f"{literal(role)}::text"}
    grants = "" if role is None else fill(sql_file("inbox/role.sql"), names).strip().replace("\n", "\n    ")
    return fill(sql_file("inbox/0001_inbox.sql"), names | {"grants": grants})
