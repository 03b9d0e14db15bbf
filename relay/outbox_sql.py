"""The texts of the outbox's statements, with its names in them, and what the relay refuses to work with.

Owns: which files of `sql/queries` the adapter sends and what their placeholders stand for. Sends nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from relay.core.ports.outbox import DUE_INLINE_BYTES
from relay.database import fill, literal, sql_file
from relay.errors import SchemaIncompatible
from relay.migrate import Schema
from relay.rows import BLIND, raw_sql, row_sql, shard_sql

_INLINE: Final = {
    "page": "$11::int",
    "load": str(2**63 - 1),
    "due": str(DUE_INLINE_BYTES),
    "followers": str(DUE_INLINE_BYTES),
    "reload": "0",
}
"""How many bytes of a row come along."""

IDENTIFICATION: Final = {name: sql_file(f"queries/{name}.sql") for name in ("may_identify", "identify")}
"""Statements that need no outbox."""

_PER_PAGE: Final = {"aside_key": 200, "aside_parked": 120, "aside_due": 120}
"""Entries a page of an index that grew in no order (28 bytes each, two thirds full), or at 64 places at once (36, half full)."""

_QUERIES: Final = (
    "backlog",
    "backlog_aside",
    "bell_elsewhere",
    "bell_release",
    "bell_wait",
    "check",
    "claim",
    "delete",
    "delete_by_id",
    "due",
    "due_later",
    "fault",
    "fence",
    "first_held",
    "followers",
    "held_keys",
    "hold",
    "inspect",
    "leave",
    "load",
    "lower_floors",
    "mark",
    "mark_by_id",
    "page",
    "park_policy",
    "park_policy_done",
    "park_policy_next",
    "parked_discard",
    "parked_fault_discard",
    "parked_fault_end",
    "promote",
    "purge",
    "purge_next",
    "release",
    "reload",
    "renew",
    "retention_faults",
    "retention_lock",
    "retention_rows",
    "schedule",
    "search",
    "set_back",
    "test",
    "unchanged",
    "unsent",
)

COLUMNS: Final = (
    "seq",
    "created_at",
    "occurred_at",
    "sent_at",
    "due_at",
    "available_at",
    "expires_at",
    "first_failed_at",
    "last_failed_at",
    "parked_at",
    "aggregate_version",
    "attempts",
    "schema_version",
    "priority",
    "holds",
    "mandatory",
    "id",
    "event_type",
    "aggregate_type",
    "aggregate_id",
    "payload",
    "headers",
    "aside",
    "content_type",
    "content_encoding",
    "exchange",
    "routing_key",
    "correlation_id",
    "causation_id",
    "producer",
    "traceparent",
    "tracestate",
    "failure_class",
    "failure_error",
    "failure_exchange",
    "failure_routing_key",
    "failure_relay",
    "failure_relay_version",
)
"""Those of the outbox that the relay reads or writes."""


def texts(schema: Schema, system_identifier: str) -> dict[str, str]:
    """The statements by name, for this outbox."""
    table = schema.table
    parts = ("shard", "relay", "fault", "meta", "bell_wait")
    sequence = table.derived("_seq_seq")
    values = {part: table.derived(f"_{part}") for part in parts} | {
        "table": table.quoted,
        "sequence": sequence,
        "sequence_text": literal(sequence),
        "database_oid": str(schema.database_oid),
        "table_oid": str(schema.table_oid),
        "sign_class": str(schema.sign[0]),
        "sign_object": str(schema.sign[1]),
        "bell_class": str(schema.bell[0]),
        "bell_object": str(schema.bell[1]),
        "bell_channel": literal(schema.bell_channel),
        "shard_of_o": shard_sql(),
        "fingerprint": fingerprint_sql(schema, system_identifier),
    }
    for part in ("backlog_estimate", "blocker", "is_due", "other_policy", "purgeable"):
        values[part] = fill(sql_file(f"parts/{part}.sql"), values).rstrip()
    for index, per_page in _PER_PAGE.items():
        named = {"index": literal(table.derived(f"_{index}")), "per_page": str(per_page)}
        values[f"{index}_entries"] = fill(sql_file("parts/index_entries.sql"), named).rstrip()
    raw = raw_sql(schema.payload_type)

    def text(name: str, others: dict[str, str], *, is_blind: bool = False) -> str:
        row = {}
        if (inline := _INLINE.get(name)) is not None:
            row = {"raw": BLIND if is_blind else raw, "row": row_sql(schema.payload_type, inline, is_blind=is_blind)}
        return fill(sql_file(f"queries/{name}.sql"), values | row | others)

    unasked = {"is_blocked": "", "x_is_blocked": ""}
    texts = {name: text(name, unasked) for name in _QUERIES}
    # Statements of their own, for usually nobody asks, and nothing is refused.
    is_asked = "f.shard = ANY ($14::smallint[]) AND o.aggregate_id IS NOT NULL"
    probed = {
        "is_blocked": f", CASE WHEN {is_asked} THEN {values['blocker']} END AS is_blocked",
        "x_is_blocked": ", x.is_blocked",
    }
    texts["page_probed"] = text("page", probed)
    texts["page_probed_blind"] = text("page", probed, is_blind=True)
    for name in ("page", "due", "followers", "reload"):
        texts[f"{name}_blind"] = text(name, unasked, is_blind=True)
    return texts


def fingerprint_sql(schema: Schema, system_identifier: str) -> str:
    """What a stored floor belongs to (R5): server, where the role may read it, database, table, and its sequence."""
    oids = f"{schema.table_oid}, pg_relation_filenode({schema.table_oid})"
    sequence = literal(schema.table.derived("_seq_seq"))
    return (
        f"concat_ws('/', {literal(system_identifier)}, {schema.database_oid}, {oids},"
        f" pg_relation_filenode(to_regclass({sequence})))"
    )


def refuse_unusable(schema: Schema, found: Mapping[str, object]) -> None:
    """What would lose rows silently (R1), each with what to do about it."""
    table, sequence = schema.table, schema.table.derived("_seq_seq")
    missing = found["missing_columns"]
    if missing:
        assert isinstance(missing, list)
        raise SchemaIncompatible(f"{table} lacks the columns {', '.join(missing)}", hint="run: relay migrate")
    if found["has_children"]:
        raise SchemaIncompatible(
            f"{table} has partitions or child tables: an insert into one takes no lock on {table}, so that"
            " rows could be missed",
            hint=f"detach them (ALTER TABLE … NO INHERIT {table.quoted}), or use another table (RELAY_TABLE)",
        )
    if found["cache"] != 1:
        raise SchemaIncompatible(
            f"the sequence of {table} has CACHE {found['cache']}: rows would be read in the wrong order or missed",
            hint=f"ALTER SEQUENCE {sequence} CACHE 1, and reconnect all writers",
        )
    max_seq, last_seq = found["max_seq"], found["last_seq"]
    assert max_seq is None or isinstance(max_seq, int)
    assert isinstance(last_seq, int)
    if max_seq is not None and max_seq > last_seq:
        raise SchemaIncompatible(
            f"{table} has a row with seq {max_seq}, but its sequence stands at {last_seq} (a restore without the"
            " sequence, or a subscriber)",
            hint=f"SELECT setval({literal(sequence)}, {max_seq})",
        )
