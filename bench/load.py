"""What a run starts from: so many rows, of so many keys, of such a size. Filled once into a template database."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

EVENT_TYPE: Final = "order.created"
ROWS_PER_TRANSACTION: Final = 1000
INCOMPRESSIBLE_FROM_BYTES: Final = 1024
"""From here on bodies are digits of hashes: PostgreSQL compresses a larger text of repeated words to almost nothing."""

PATIENCE_S: Final = 90.0
ROWS_PER_S_MIN: Final = 2_000

ROW_ID: Final = "left(md5({n}::text), 8) || '-0000-4000-8000-' || lpad(to_hex({n}), 12, '0')"
"""`row_id` in SQL."""


def patience_s(rows: int) -> float:
    """How long what goes through so many rows may take at most, on a slow machine."""
    return PATIENCE_S + rows / ROWS_PER_S_MIN


def row_id(number: int) -> str:
    """The id of a load's row `number`, counted from 1 in the order of seq: in the form of a UUID, and as scattered in an index."""
    scatter = hashlib.md5(str(number).encode(), usedforsecurity=False).hexdigest()[:8]
    return f"{scatter}-0000-4000-8000-{number:012x}"


def row_number(message_id: str) -> int | None:
    """Which row has this id; None where no load could have it."""
    try:
        number = int(message_id[-12:], 16)
    except ValueError:
        return None
    return number if message_id == row_id(number) else None


@dataclass(frozen=True, slots=True)
class Load:
    """`rows` waiting rows over `keys` ordering keys; with `hot_every` each n-th row belongs to one hot key instead."""

    rows: int
    keys: int = 5_000
    body_bytes: int = 250
    hot_every: int = 0

    def __post_init__(self) -> None:
        assert self.rows > 0 and self.keys > 0 and self.body_bytes >= 80 and self.hot_every >= 0

    @property
    def template(self) -> str:
        """The name of its template database."""
        return f"load_{self.rows}_{self.keys}_{self.body_bytes}_{self.hot_every}"

    def insert(self, first: str, last: str) -> str:
        """The statement that inserts the rows from number `first` to `last`, in SQL."""
        key = "'c-' || abs(hashint4(n)::bigint) % " + str(self.keys)
        if self.hot_every:
            key = f"case when n % {self.hot_every} = 0 then 'hot' else {key} end"
        filler = "repeat('lorem ipsum ', 100)"
        if self.body_bytes >= INCOMPRESSIBLE_FROM_BYTES:
            filler = (
                f"(select string_agg(md5(n::text || '/' || i), '') from generate_series(1, {self.body_bytes // 32}) i)"
            )
        return f"""insert into outbox (id, event_type, aggregate_type, aggregate_id, payload)
            select {ROW_ID.format(n="n")}, '{EVENT_TYPE}', 'customer', key,
                   (left(format('{{"order_id": "%s", "customer_id": "%s", "note": "', n, key) || {filler},
                         {self.body_bytes - 2}) || '"}}')::json
            from generate_series({first}, {last}) as n, lateral (select {key}) as k(key)"""

    def fill(self) -> str:
        """The statement that inserts the rows, a thousand a transaction."""
        return f"""do $$ declare first int := 1; begin
                while first <= {self.rows} loop
                    {self.insert("first", f"least(first + {ROWS_PER_TRANSACTION - 1}, {self.rows})")};
                    commit;
                    first := first + {ROWS_PER_TRANSACTION};
                end loop;
            end $$"""


@dataclass(frozen=True, slots=True)
class Backlog:
    """What a template holds: the ordering keys of its rows by seq, each text once in memory, and a payload (`body`).

    Ten million rows are 80 MB so: their ids follow from their numbers (`row_id`).
    """

    keys: list[str]
    body: Path
