"""The outbox's schema: creating and upgrading it, and reading what is there.

Owns: the steps of `sql/migrations/` and the one text made of them, which is either sent to the server or
printed for an administrator: both are the same SQL. Each step is one transaction that takes the migrations'
advisory lock, looks what is there, refuses what it did not create, and does only what is missing; so it may
run twice, twice at once, behind a pooling proxy, and beside running relays. Migrations go forward only.

A schema has a version (its newest migration) and names the oldest relay that can still work with it
(`compatible_from`): a relay runs on any schema from its own `SCHEMA_VERSION` up to the next incompatible one.
"""

from __future__ import annotations

import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from relay.database import close, connect, fill, literal, mapped_errors, perform_step, sql_file, sql_files
from relay.errors import (
    SchemaForeign,
    SchemaIncompatible,
    SchemaMissing,
    UsageError,
)
from relay.message import PayloadType
from relay.rows import shard_sql
from relay.values import TableName, quote_identifier, table_name

if TYPE_CHECKING:
    from relay.database import Connection
    from relay.urls import DatabaseTarget

SCHEMA_VERSION = 1
"""The newest migration that this relay knows, and the oldest that it needs."""

PATIENCE_S = 60.0
"""How long a migration tries for its locks, 2 s at a time; in between those who wait behind it go on."""

READ_TIMEOUT_S = 10.0
"""For reading a few rows of the catalog."""

_SUFFIXES = {
    "table": "",
    "shard": "_shard",
    "relay": "_relay",
    "fault": "_fault",
    "meta": "_meta",
    "sequence": "_seq_seq",
    "pkey_index": "_pkey",
    "read_index": "_read",
    "aside_key_index": "_aside_key",
    "aside_due_index": "_aside_due",
    "aside_parked_index": "_aside_parked",
    "shard_pkey_index": "_shard_pkey",
    "relay_pkey_index": "_relay_pkey",
    "fault_pkey_index": "_fault_pkey",
    "meta_pkey_index": "_meta_pkey",
    "ring": "_ring",
    "bell_wait": "_bell_wait",
}
"""Every object of an outbox, by what its name adds to the table's."""

_PRINTED_HEADER = """\
-- The schema of outbox-relay, as `relay migrate` applies it. With the rights of the schema's owner:
--
--     psql -X -v ON_ERROR_STOP=1 -f FILE DATABASE
--
-- It may be run again: each transaction looks first what is there. Where a lock is not to be had within 2 s
-- it stops (lock_timeout), and that transaction has changed nothing: run it again.
"""


class Wanted(TypedDict, total=False):
    """The options of a migration, those of `relay migrate`; leaving one out and None are the same.

    `payload` is the payload column's type, json for a new table; naming another one than it has is an error.
    `doorbell` True or False hangs or removes the trigger; None leaves it as it is, and a new table has it
    unless `max_prepared_transactions` is above 0. `role` gets the least rights that a relay needs, `writer`
    INSERT on the writers' columns; both exist already.
    """

    payload: PayloadType | str | None
    doorbell: bool | None
    role: str | None
    writer: str | None


@dataclass(frozen=True, slots=True)
class Schema:
    """An outbox as it is in the database. `table.schema` is always set.

    `bell` and `sign` are the two numbers of an advisory lock each: the doorbell, and the sign that the
    relays' own writing transactions take shared. `bell_channel` is where the doorbell rings.
    """

    table: TableName
    table_oid: int
    database_oid: int
    version: int
    compatible_from: int
    payload_type: PayloadType
    bell: tuple[int, int]
    bell_channel: str
    has_doorbell: bool
    sign: tuple[int, int]
    is_paused: bool


@dataclass(frozen=True, slots=True)
class Migrated:
    """What a migration found (`version_before` is 0 where there was nothing) and what there is now."""

    version_before: int
    schema: Schema


def script(table: TableName | str = "outbox", **wanted: Unpack[Wanted]) -> list[str]:
    """The steps as SQL, one text a transaction. Needs no database. Raises UsageError (payload type)."""
    values = _values(_table(table), wanted)
    guard = sql_file("migrations/guard.sql")
    texts = []
    for version, path in enumerate(sql_files("migrations"), start=1):
        assert path.startswith(f"migrations/{version:04d}_"), f"a gap in the migrations before {path}"
        texts.append(f"{guard}\nIF known_version = {version - 1} THEN\n{sql_file(path)}\nEND IF;")
    assert len(texts) == SCHEMA_VERSION, "SCHEMA_VERSION is not the newest migration"
    settings = [sql_file("migrations/doorbell.sql")]
    settings += [sql_file("migrations/role.sql")] if wanted.get("role") is not None else []
    settings += [sql_file("migrations/writer.sql")] if wanted.get("writer") is not None else []
    texts.append("\n".join([guard, *settings]))
    block = sql_file("migrations/block.sql")
    return [_block(block, fill(text, values), values) for text in texts]


def printed(table: TableName | str = "outbox", **wanted: Unpack[Wanted]) -> str:
    """What `relay migrate --print` writes: the whole of `script` for psql. Raises as `script`."""
    steps = script(table, **wanted)
    return "\n".join([_PRINTED_HEADER, *steps])


async def migrate(
    connection: Connection,
    table: TableName | str = "outbox",
    *,
    patience_s: float = PATIENCE_S,
    **wanted: Unpack[Wanted],
) -> Migrated:
    """Create or upgrade the outbox `table` and grant what was asked for; nothing where nothing is missing.

    `connection` is in no transaction; its search_path decides where an unqualified table lives. Raises
    SchemaForeign (objects of these names that no migration made), SchemaIncompatible (made by a newer relay),
    UsageError (payload type, role or schema), DatabaseRefused (rights), DatabaseUnavailable (no lock in
    `patience_s`), DatabaseLost.
    """
    assert not connection.is_in_transaction(), "a migration inside the caller's transaction"
    table = _table(table)
    steps = script(table, **wanted)
    deadline = time.monotonic() + patience_s
    before = await _version(connection, table)
    for step in steps:
        await perform_step(connection, step, deadline)
    return Migrated(before, await read_schema(connection, table))


async def run(
    target: DatabaseTarget | str,
    table: TableName | str = "outbox",
    *,
    patience_s: float = PATIENCE_S,
    **wanted: Unpack[Wanted],
) -> Migrated:
    """`relay migrate`: `migrate` on a connection of its own, whose errors it raises too."""
    connection = await connect(target, application_name="outbox-relay migrate")
    try:
        return await migrate(connection, table, patience_s=patience_s, **wanted)
    finally:
        await close(connection)


async def read_schema(connection: Connection, table: TableName | str = "outbox") -> Schema:
    """What is there, if this relay can work with it; opens a transaction, or a savepoint in the caller's.

    Raises SchemaMissing (wait for it), SchemaForeign, SchemaIncompatible, DatabaseRefused, DatabaseLost.
    """
    row, found, meta = await _find(connection, _table(table))
    version, compatible_from = meta["schema_version"], meta["compatible_from"]
    if version < SCHEMA_VERSION:
        raise SchemaIncompatible(
            f"the schema of {found} has version {version}, this relay needs {SCHEMA_VERSION}",
            hint="upgrade it: relay migrate",
        )
    if compatible_from > SCHEMA_VERSION:
        raise SchemaIncompatible(
            f"the schema of {found} has version {version} and needs relays that know {compatible_from};"
            f" this one knows {SCHEMA_VERSION}",
            hint="upgrade the relay",
        )
    return Schema(
        table=found,
        table_oid=row["oid"],
        database_oid=row["database_oid"],
        version=version,
        compatible_from=compatible_from,
        payload_type=PayloadType(meta["payload_type"]),
        bell=(meta["bell_classid"], meta["bell_objid"]),
        bell_channel=meta["bell_channel"],
        has_doorbell=meta["has_doorbell"],
        sign=(meta["sign_classid"], meta["sign_objid"]),
        is_paused=meta["paused_at"] is not None,
    )


async def _version(connection: Connection, table: TableName) -> int:
    """0 where there is nothing of ours: the first step looks closer, under the lock."""
    try:
        _, _, meta = await _find(connection, table)
    except (SchemaMissing, SchemaForeign, SchemaIncompatible):
        return 0
    return int(meta["schema_version"])


async def _find(connection: Connection, table: TableName) -> tuple[Mapping[str, Any], TableName, Mapping[str, Any]]:
    """The table's row of the catalogue, its full name, and its meta row, of whatever version. Raises as `read_schema`."""
    with mapped_errors():
        async with connection.transaction():  # so that a pooling proxy keeps both statements on one server
            row = await connection.fetchrow(
                sql_file("migrations/find.sql"),
                table.quoted,
                table.name + _SUFFIXES["meta"],
                timeout=READ_TIMEOUT_S,
            )
            if row is None:
                hidden = await connection.fetchval(
                    sql_file("migrations/hidden.sql"), table.name, timeout=READ_TIMEOUT_S
                )
                if hidden is not None and table.schema is None:
                    schema = quote_identifier(hidden)
                    raise SchemaMissing(
                        f"there is no outbox table {table} that this role may see: it has no USAGE on the schema {schema}",
                        hint=f"GRANT USAGE ON SCHEMA {schema}, as relay migrate --role does; where that is not its schema, create the "
                        "table: relay migrate",
                    )
                raise SchemaMissing(f"there is no outbox table {table}", hint="create it: relay migrate")
            found = TableName(row["nspname"], table.name)
            if not row["is_ours"]:
                raise SchemaForeign(
                    f"the table {found} was not created by relay migrate",
                    hint="choose another name in RELAY_TABLE, or rename what is there",
                )
            text = f"SELECT * FROM {found.derived(_SUFFIXES['meta'])}"
            meta = await connection.fetchrow(text, timeout=READ_TIMEOUT_S)
    if meta is None:
        raise SchemaIncompatible(f"{found}_meta has lost its row", hint="restore it from a backup")
    return row, found, meta


def _table(table: TableName | str) -> TableName:
    return table_name(table) if isinstance(table, str) else table


def _values(table: TableName, wanted: Wanted) -> dict[str, str]:
    """What the SQL files' placeholders stand for."""
    payload, doorbell = wanted.get("payload"), wanted.get("doorbell")
    role, writer = wanted.get("role"), wanted.get("writer")
    names = {key: table.name + suffix for key, suffix in _SUFFIXES.items()}
    values = {key: quote_identifier(name) for key, name in names.items()}
    values |= {f"{key}_name_text": literal(name) for key, name in names.items()}
    return values | {
        "schema_text": f"{literal(table.schema)}::text",
        "all_names_text": _array(sorted(set(names.values()))),
        "companions_text": _array([names[key] for key in ("shard", "relay", "fault", "meta")]),
        "function_names_text": _array([names[key] for key in ("ring", "bell_wait")]),
        "payload_type": _payload_type(payload or PayloadType.JSON),
        "payload_text": f"{literal(payload and _payload_type(payload))}::text",
        "wanted": "NULL::boolean" if doorbell is None else str(doorbell).lower(),
        "role": quote_identifier(role or "-"),
        "role_text": f"{literal(role)}::text",
        "writer": quote_identifier(writer or "-"),
        "writer_text": f"{literal(writer)}::text",
        "row_shard": shard_sql(of=""),
        "latest": str(SCHEMA_VERSION),
    }


def _array(names: Sequence[str]) -> str:
    return f"ARRAY[{', '.join(map(literal, names))}]"


def _payload_type(payload: PayloadType | str) -> str:
    try:
        return PayloadType(payload).value
    except ValueError:
        allowed = ", ".join(PayloadType)
        raise UsageError(f"there is no payload type {payload}", hint=f"one of {allowed}") from None


def _block(block: str, body: str, values: dict[str, str]) -> str:
    """`body` in the transaction that every step runs in."""
    values = values | {"body": textwrap.indent(body.strip(), "    ").strip()}
    tag = "$migration$"
    while any(tag in value for value in values.values()):  # a table may be called so
        tag = tag[:-1] + "_$"
    return fill(block, values | {"quote": tag})
