"""The rows that need an operator, in PostgreSQL (O1, H7, R5): selecting them, and the one transaction that changes some.

Owns: how an operator's transaction begins and ends. A row is changed only if it is parked now, or recorded as
unmarkable, under its shard's row lock and the relays' sign, within bounds below the lease (L7); every transaction ends
with the promotion (H3) and rings. Decides nothing about what goes together, when, or what to do about a refusal.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import asyncpg

from relay.config import Config
from relay.core.refusals import Blame
from relay.database import Connection, close, connect, fill, literal, mapped_errors, sql_file
from relay.errors import NothingMatched
from relay.migrate import Schema, read_schema
from relay.outbox_sql import texts
from relay.parked_rows import Action, Filter, Listing, ParkedRow
from relay.refusal import blame_of, changed
from relay.rows import body_sql, shard_sql
from relay.sessions import Session, Sessions

STATEMENT_TIMEOUT_S: Final = 60
"""For reading: a list passes all rows aside."""

_READS: Final = ("parked_count", "parked_select", "parked_states", "parked_show", "parked_operator")
_WRITES: Final = (
    "parked_lock",
    "parked_unseat",
    "parked_discard",
    "parked_fault_end",
    "parked_fault_discard",
    "parked_fault_lower",
    "ring",
)
_CLEAR_EXPIRY: Final = (
    ", expires_at = CASE WHEN o.failure_class = 'expired' OR o.expires_at <= clock_timestamp() THEN NULL"
    " ELSE o.expires_at END"
)
"""Only where it is asked for: the writers' column is otherwise no business of a relay's role."""


class ParkedTable:
    """One operator's session, for one command. `began` is the database's time from which on a row that parks is no longer
    meant, `role` who acts."""

    def __init__(
        self, config: Config, connection: Connection, schema: Schema, until: datetime | None, *, ignore_expiry: bool
    ) -> None:
        table = schema.table
        names = {part: table.derived(f"_{part}") for part in ("shard", "fault", "meta")}
        names |= {"table": table.quoted, "body": body_sql(schema.payload_type), "shard_of_o": shard_sql()}
        # The promotion is the relays' own statement (H3).
        promote = texts(schema, "")["promote"]
        names["parked"] = fill(sql_file("parts/parked.sql"), names).rstrip()
        names["expiry"] = _CLEAR_EXPIRY if ignore_expiry else ""
        self._texts = {name: _text(name, schema, names) for name in (*_READS, *_WRITES, "parked_redrive")}
        self._texts["promote"] = promote
        self._connection = connection
        bounds = Sessions(config.lease_s, settle_commit=True)
        bounds.server_version = connection.get_server_version().major * 10_000
        # As behind a proxy: every setting lasts for one transaction, and nothing is kept prepared.
        bounds.is_direct = False
        self._bound_s = bounds.bound_s
        self._begin = bounds.begin_write(sign=schema.sign)
        self._session = Session(connection, 0, False, "")
        self._session.know(self._texts)
        self._until = until
        self.schema = schema
        self.role = ""
        self.began = datetime.min.replace(tzinfo=UTC)

    async def open(self) -> None:
        (record,) = await self.read("parked_operator")
        self.role = record["role"]
        self.began = record["now"] if self._until is None else min(record["now"], self._until)

    # ------------------------------------------------------------ reading

    async def read(self, name: str, *arguments: object) -> list[Any]:
        """A reading statement in a transaction of its own."""
        with mapped_errors():
            async with self._connection.transaction(readonly=True):
                # A table of millions of sent rows has few rows aside, whatever its statistics say.
                await self._connection.execute(
                    f"SET LOCAL statement_timeout = '{STATEMENT_TIMEOUT_S}s'; SET LOCAL enable_seqscan = off; SET LOCAL jit = off"
                )
                records: list[Any] = await self._connection.fetch(self._texts[name], *arguments)
                return records

    def arguments(self, chosen: Filter) -> tuple[object, ...]:
        """The filter as sql/parts/parked.sql takes it."""
        since = chosen.since_at
        if chosen.since_s is not None:
            since = self.began - timedelta(seconds=chosen.since_s)
        lists = (chosen.types, chosen.keys, chosen.errors, chosen.ids)
        return (*(list(values) or None for values in lists), since, self.began)

    async def look(self, chosen: Filter, rows: int = 0, *, with_expired: bool = True) -> Listing:
        """How many rows a filter selects, and the first of them."""
        counts = await self.read("parked_count", *self.arguments(chosen))
        return Listing(
            table=str(self.schema.table),
            role=self.role,
            observed_at=self.began,
            matched=sum(record["rows"] for record in counts),
            by_class={record["failure_class"]: record["rows"] for record in counts},
            expired=sum(record["expired"] for record in counts),
            rows=await self.select(chosen, -(2**63), rows, with_expired=with_expired) if rows else [],
        )

    async def select(self, chosen: Filter, above: int, rows: int, *, with_expired: bool = True) -> list[ParkedRow]:
        """The next so many rows above a seq, or those among them whose deadline has not passed."""
        arguments = (*self.arguments(chosen), above, rows, with_expired)
        return [_row(record) for record in await self.read("parked_select", *arguments)]

    async def states(self, ids: Sequence[str]) -> dict[str, str]:
        return {record["id"]: record["state"] for record in await self.read("parked_states", list(ids))}

    async def refuse_unparked(self, chosen: Filter) -> None:
        """Ids that were named must be parked, all of them, before anything is done."""
        if not chosen.ids:
            return
        states = await self.states(chosen.ids)
        wrong = [(id_, state) for id_, state in states.items() if state not in ("parked", "unmarkable")]
        if wrong:
            said = "; ".join(f"{id_} is not parked: {_explained(state)}" for id_, state in wrong[:10])
            more = f"; and {len(wrong) - 10} more" if len(wrong) > 10 else ""
            raise NothingMatched(said + more)

    # ------------------------------------------------------------ changing

    async def change(self, action: Action, rows: Sequence[ParkedRow]) -> set[int]:
        """Redrive or discard these rows in one transaction, or one fault; the seqs that were changed. Raises
        DatabaseRefused, DatabaseLost."""
        session = self._session
        session.set_deadline(self._bound_s)
        with mapped_errors():
            async with session.transaction(self._begin):
                shards = sorted({row.shard for row in rows if row.shard is not None})
                if shards:
                    await session.fetch("parked_lock", shards)
                if rows[0].is_fault:
                    assert len(rows) == 1, "a fault is ended by itself"
                    records = await self._end_fault(action, rows[0])
                else:
                    name = "parked_redrive" if action is Action.REDRIVE else "parked_discard"
                    records = changed(await session.fetch(name, [row.id for row in rows], [row.seq for row in rows]))
                keys = sorted({(kind, key) for _, kind, key in records if key is not None})
                if keys:
                    await self._promote(keys)
                await session.fetch("ring")
        return {seq for seq, _, _ in records}

    async def _promote(self, keys: Sequence[tuple[str, str]]) -> None:
        """H3. A row that an application keeps locked, or that the database lets nobody change, stands in no operator's
        way: the shard's next owner finds the key and sees to it."""
        session = self._session
        await session.execute("SAVEPOINT promotion")
        try:
            records = await session.fetch("promote", [kind for kind, _ in keys], [key for _, key in keys])
            owed = [(kind, key) for _, kind, key, is_promoted, *_ in records if not is_promoted]
        except asyncpg.PostgresError as error:
            if blame_of(error) is Blame.SERVER:
                raise
            await session.execute("ROLLBACK TO SAVEPOINT promotion")
            owed = list(keys)
        if owed:
            await session.fetch("parked_unseat", [kind for kind, _ in owed], [key for _, key in owed])

    async def _end_fault(self, action: Action, row: ParkedRow) -> Sequence[tuple[int, str, str | None]]:
        """(seq, type, id of the key) of the fault, nothing where somebody else has ended it."""
        session = self._session
        if not await session.fetch("parked_fault_end", row.id, row.seq):
            return []
        name = "parked_fault_lower" if action is Action.REDRIVE else "parked_fault_discard"
        return changed(await session.fetch(name, row.id, row.seq)) or [(row.seq, "", None)]


@contextlib.asynccontextmanager
async def open_parked(
    config: Config, *, until: datetime | None = None, ignore_expiry: bool = False
) -> AsyncIterator[ParkedTable]:
    """The parked rows of the configured outbox; `until` as `ParkedTable.began`, default now. Raises as `relay status`."""
    connection = await connect(config.database(), application_name="outbox-relay parked")
    try:
        schema = await read_schema(connection, config.table)
        table = ParkedTable(config, connection, schema, until, ignore_expiry=ignore_expiry)
        await table.open()
        yield table
    finally:
        await close(connection)


def _text(name: str, schema: Schema, names: dict[str, str]) -> str:
    return fill(sql_file(f"queries/{name}.sql"), names | {"bell_channel": literal(schema.bell_channel)})


def _row(record: Any) -> ParkedRow:
    return ParkedRow(
        seq=record["seq"],
        id=record["id"],
        shard=record["shard"],
        event_type=record["event_type"],
        aggregate_type=record["aggregate_type"],
        aggregate_id=record["aggregate_id"],
        state="unmarkable" if record["is_fault"] else "parked",
        failure_class=record["failure_class"],
        error=record["failure_error"],
        attempts=record["attempts"],
        parked_at=record["parked_at"],
        is_expired=record["is_expired"],
    )


def _explained(state: str) -> str:
    match state:
        case "pending":
            return "pending, a relay publishes it as soon as it can"
        case "sent":
            return "sent, the broker has confirmed it"
        case "deferred":
            return "deferred, a relay tries it again by itself"
        case "held":
            return "held, it waits behind an earlier row of its key"
        case "scheduled":
            return "scheduled, its available_at has not come"
        case "unknown id":
            return "unknown id, never there, or deleted since"
        case _:
            return f"unseen: its aside is {state!r}, which no relay writes or reads; null there has it published"
