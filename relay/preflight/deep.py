"""`relay check --deep`: all through the table, in small steps, for rows that a floor has passed and nobody will ever read.

A shard's floor says that everything up to it is done (R5). A `setval`, or rows put back from a copy, put unsent rows
below it. Running relays look there too, round and round (`relay/housekeeping.py`); this looks at everything, now, and
changes nothing. A floor that the next owner would not trust hides nothing and is not looked below.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from relay.config import Config
from relay.database import close, connect, fill, mapped_errors, sql_file
from relay.errors import DatabaseRefused, RelayError, SchemaMissing
from relay.migrate import Schema, read_schema
from relay.outbox_sql import IDENTIFICATION, fingerprint_sql
from relay.preflight.finding import Finding, error, not_checked, ok
from relay.preflight.queries import is_too_slow
from relay.rows import shard_sql
from relay.sessions import PLANS

if TYPE_CHECKING:
    from relay.database import Connection

STEP_SEQS: Final = 20_000
"""A step's range of seqs: tens of milliseconds where the table is in memory."""

STEP_SEQS_MIN: Final = 100
STEP_TIMEOUT_S: Final = 5.0
"""A step that takes longer is cancelled and tried again with half as many."""

BREATH_S: Final = 0.01
"""Between two steps, so that the writers' reads of the disk come through."""

_LOWEST: Final = -(2**63)

Progress = Callable[[str], None]


@dataclass(slots=True)
class _Passed:
    """Rows of one shard that its floor has passed."""

    shard: int
    floor: int
    rows: int
    lowest_seq: int


async def check(config: Config, on_progress: Progress) -> list[Finding]:
    """One finding for each shard that hides rows, or one that says that none does. What cannot be reached or read
    is a finding, not an exception."""
    try:
        connection = await connect(config.database(), application_name="outbox-relay check --deep")
    except RelayError:
        return [not_checked("floors", "no database answers")]
    try:
        schema = await read_schema(connection, config.table)
        return await _Walk(connection, schema, on_progress).findings()
    except SchemaMissing:
        return [not_checked("floors", "there is no outbox yet")]
    except RelayError as failure:
        return [not_checked("floors", failure.message, failure.hint)]
    finally:
        await close(connection)


class _Walk:
    """From the lowest row to the highest floor, all shards side by side."""

    def __init__(self, connection: Connection, schema: Schema, on_progress: Progress) -> None:
        self._connection = connection
        self._schema = schema
        self._on_progress = on_progress
        self._passed: dict[int, _Passed] = {}

    async def findings(self) -> list[Finding]:
        floors = await self._floors()
        await self._walk([shard for shard, _ in floors], max((floor for _, floor in floors), default=0))
        if self._passed:
            return [self._finding(self._passed[shard]) for shard in sorted(self._passed)]
        return [ok("floors", "no unsent row lies at or below one")]

    async def _floors(self) -> list[tuple[int, int]]:
        """(shard, floor) of those that their next owner would trust."""
        identifier = ""
        with mapped_errors():
            if await self._connection.fetchval(IDENTIFICATION["may_identify"]):
                identifier = await self._connection.fetchval(IDENTIFICATION["identify"])
            records = await self._connection.fetch(self._text("deep_floors", identifier))
        return [
            (record["shard"], record["floor"])
            for record in records
            if record["floor"] > 0
            and record["is_below_sequence"]
            and _is_same(record["fingerprint"], record["fingerprint_now"])
        ]

    async def _walk(self, shards: Sequence[int], end: int) -> None:
        text = self._text("deep")
        step = STEP_SEQS
        # A first step without a row tells where the lowest one is.
        above, up_to = _LOWEST, _LOWEST
        while True:
            try:
                records = await self._step(text, above, up_to, shards)
            except DatabaseRefused as refused:
                if not is_too_slow(refused) or up_to - above <= STEP_SEQS_MIN:
                    raise
                step = max(STEP_SEQS_MIN, step // 2)
                up_to = above + step
                continue
            for record in records:
                if record["shard"] is not None:
                    self._note(record)
            next_seq = records[0]["next_seq"]
            if next_seq is None:
                return
            above, up_to = next_seq - 1, next_seq - 1 + step
            found = sum(each.rows for each in self._passed.values())
            self._on_progress(f"seq {next_seq:,} of {end:,}, {found:,} rows found")
            await asyncio.sleep(BREATH_S)

    async def _step(self, text: str, above: int, up_to: int, shards: Sequence[int]) -> list[Any]:
        with mapped_errors():
            async with self._connection.transaction(readonly=True):
                await self._connection.execute(
                    f"SET LOCAL statement_timeout = '{STEP_TIMEOUT_S}s'; {PLANS.format(local='LOCAL')}"
                )
                records: list[Any] = await self._connection.fetch(
                    text, above, up_to, shards, timeout=2 * STEP_TIMEOUT_S
                )
                return records

    def _note(self, record: Any) -> None:
        known = self._passed.get(record["shard"])
        if known is None:
            self._passed[record["shard"]] = _Passed(*(record[name] for name in ("shard", "floor", "rows", "lowest")))
        else:
            known.rows += record["rows"]

    def _finding(self, passed: _Passed) -> Finding:
        table = self._schema.table.derived("_shard")
        many = "a row was" if passed.rows == 1 else f"{passed.rows} rows were"
        return error(
            "floors",
            f"shard {passed.shard}: {many} never sent at or below its floor {passed.floor}, the lowest seq is"
            f" {passed.lowest_seq}: nobody reads there any more",
            f"UPDATE {table} SET floor = {passed.lowest_seq - 1}, epoch = epoch + 1"
            f" WHERE shard = {passed.shard}"
            f" AND floor >= {passed.lowest_seq}; running relays also find them by themselves, in time",
            {"shard": passed.shard, "floor": passed.floor, "rows": passed.rows, "lowest_seq": passed.lowest_seq},
        )

    def _text(self, name: str, identifier: str = "") -> str:
        table = self._schema.table
        names = {part: table.derived(f"_{part}") for part in ("shard", "fault")}
        names |= {"table": table.quoted, "sequence": table.derived("_seq_seq"), "shard_of_o": shard_sql()}
        names["fingerprint"] = fingerprint_sql(self._schema, identifier)
        return fill(sql_file(f"queries/{name}.sql"), names)


def _is_same(stored: str | None, now: str) -> bool:
    """Whether a floor belongs to this table. The server's identifier, which stands first, is only compared where both
    roles, the relay's and this one, may read it."""
    if stored is None:
        return False
    server, _, rest = stored.partition("/")
    server_now, _, rest_now = now.partition("/")
    return rest == rest_now and (server == server_now or not server or not server_now)
