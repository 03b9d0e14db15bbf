"""Rows of the outbox as the database gives them, made into `Row`s.

Owns: the order of the columns in `sql/parts/row.sql`, how a body is fetched by the payload's type, what of a row
comes along and what stays behind, and the decoding, a positional loop, for it runs once a message. Knows no connection.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import nan
from typing import Any, Final

import orjson

from relay.database import fill, sql_file
from relay.message import TEXTS_MAX, Aside, PayloadType, Row, State

_RARE_MAX: Final = 1024
"""A longer `rare` stays behind with the body, a shorter one never does: rows tell their routes even where they are not read."""


@dataclass(frozen=True, slots=True)
class _Body:
    """How a body is read: as bytes exactly as stored, and how large it is. {of} is the row, with a dot.

    `taken` and `size` belong together: what is taken of the row once, and what it says of the size.
    """

    bytes: str
    taken: str
    size: str = "x.body_size"


_TEXT_AS_BYTES: Final = "convert_to({of}payload::text, 'UTF8')"

_BODIES: Final = {
    # There is no size of a json value that does not read it; but where it is not compressed, its stored size is it.
    PayloadType.JSON: _Body(
        _TEXT_AS_BYTES,
        "o.payload, CASE WHEN pg_column_compression(o.payload) IS NULL THEN pg_column_size(o.payload)"
        " ELSE octet_length(o.payload::text) END AS body_size",
    ),
    # Made into text once: a microsecond for 250 bytes.
    PayloadType.JSONB: _Body(_TEXT_AS_BYTES, "o.payload::text AS payload", "octet_length(x.payload)"),
    PayloadType.TEXT: _Body(_TEXT_AS_BYTES, "o.payload, octet_length(o.payload) AS body_size"),
    PayloadType.BYTEA: _Body("{of}payload", "o.payload, octet_length(o.payload) AS body_size"),
}

_TEXTS: Final = "(coalesce(octet_length(x.headers), 0) + coalesce(octet_length(x.rare), 0))"


def shard_sql(of: str = "o.") -> str:
    """The shard of a row: `o.` one by that alias, nothing the row that an index is made of."""
    return fill(sql_file("parts/shard.sql"), {"of": of}).rstrip()


def body_sql(payload_type: PayloadType, of: str = "o.") -> str:
    """The body of a row as bytes."""
    return fill(_BODIES[payload_type].bytes, {"of": of})


BLIND: Final = sql_file("parts/raw_blind.sql").rstrip()
"""In the place of `raw_sql`, for a `row_sql` of which all stays behind."""


def raw_sql(payload_type: PayloadType) -> str:
    """What `row_sql` takes of a row `o` of the outbox."""
    return fill(sql_file("parts/raw.sql"), {"payload": _BODIES[payload_type].taken}).rstrip()


def row_sql(payload_type: PayloadType, inline: str, *, is_blind: bool = False) -> str:
    """The columns of a row `x` that the functions below take apart; what has more than `inline` bytes stays behind, and all
    where `is_blind` (of `BLIND`)."""
    body_size = "x.body_size" if is_blind else _BODIES[payload_type].size
    size = f"(coalesce({body_size}, 0)::bigint + CASE WHEN {_TEXTS} > {TEXTS_MAX} THEN 0 ELSE {_TEXTS} END)"
    values = {
        "body": "NULL::bytea" if is_blind else body_sql(payload_type, "x."),
        "texts": _TEXTS,
        "size": size,
        # (The value is named, for PostgreSQL has to know its type.)
        "is_left": f"({inline} IS NOT NULL)"
        if is_blind
        else f"({body_size} > {inline} OR (x.headers IS NOT NULL OR x.rare IS NOT NULL) AND {size} > {inline})",
        "texts_max": str(TEXTS_MAX),
        "rare_max": str(_RARE_MAX),
    }
    return fill(sql_file("parts/row.sql"), values).rstrip()


def page_rows(records: Iterable[Sequence[Any]]) -> list[Row]:
    """Rows of `page.sql`: (ended, shard, a row's columns); a page without a row is one of nulls."""
    rows: list[Row] = []
    append = rows.append
    make = Row.__new__
    waiting = State.WAITING
    for (
        _,
        shard,
        ctid,
        seq,
        id_,
        event_type,
        aggregate_type,
        aggregate_id,
        body,
        size,
        occurred_at,
        created_at,
        rare,
        headers,
        attempts,
    ) in records:
        if seq is None:
            continue
        # Filled in by hand: a call with as many arguments costs as much as all the rest of this turn.
        row = make(Row)
        row.shard = shard
        row.seq = seq
        row.id = id_
        row.event_type = event_type
        row.ctid = ctid
        row.aggregate_type = aggregate_type
        row.aggregate_id = aggregate_id
        row.key = None if aggregate_id is None else (aggregate_type or "", aggregate_id)
        row.payload = body
        if size is None:
            held = 0 if body is None else len(body)
            if rare is not None:
                held += len(rare)
            if headers is not None:
                held += len(headers)
            row.size = held
            row.is_loaded = True
        else:
            row.size = size
            row.is_loaded = False
        row.occurred_at = nan if occurred_at is None else occurred_at
        row.created_at = nan if created_at is None else created_at
        row.rare = None if rare is None else _rare(rare)
        row.headers = headers
        row.aside = None
        row.attempts = attempts
        row.state = waiting
        row.chain = None
        row.nacks = 0
        row.published_at = 0.0
        append(row)
    return rows


def reloaded_rows(records: Iterable[Sequence[Any]]) -> list[Row]:
    """Rows of `load.sql` and `reload.sql`: (shard, a row's columns)."""
    return page_rows((None, *record) for record in records)


def due_rows(records: Iterable[Sequence[Any]]) -> tuple[list[Row], list[Row]]:
    """Rows of `due.sql`: (aside, is_blocked, shard, a row's columns), as (released, blocked)."""
    released: list[Row] = []
    blocked: list[Row] = []
    for aside, is_blocked, *record in records:
        for row in page_rows([(None, *record)]):
            row.aside = Aside(aside)
            (blocked if is_blocked else released).append(row)
    return released, blocked


def _rare(text: str) -> dict[str, Any]:
    rare: dict[str, Any] = orjson.loads(text)
    for name in ("expires_at", "available_at"):
        if name in rare:
            # A whole second comes as an integer, an infinite time as a string.
            rare[name] = float(rare[name])
    return rare
