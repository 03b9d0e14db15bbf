"""What an operator does about rows that need one: `relay parked list | show | redrive | discard` (O1, H7, R5).

Owns: selecting by a filter, one transaction a batch of changes, the pace. A row is changed only if it is parked now, or
recorded as unmarkable, under its shard's row lock; every transaction ends with the promotion (H3) and rings. Which
relay owns a row, and when a redriven row goes, is the relays' business: they find it deferred and due.

Invariants: ids, seqs and attempts stay. A selection is what was parked when the command began, by seq: a row that parks
again meanwhile is not redriven again, and rows of a key go back in their order. A refused row costs no other one.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from itertools import groupby
from typing import Any, Final

import asyncpg

from relay.config import Config
from relay.core.refusals import Blame
from relay.culprits import blame_of
from relay.database import Connection, close, connect, fill, literal, mapped_errors, sql_file
from relay.errors import DatabaseRefused, DatabaseUnavailable, NothingMatched
from relay.migrate import Schema, read_schema
from relay.outbox_sql import texts
from relay.rows import body_sql
from relay.sessions import Session, Sessions

BATCH_ROWS: Final = 500
"""Rows a transaction: 35 to 70 ms measured, which settlements of the same shards wait for."""

BREATH: Final = 1.0
"""After each transaction the shards are left alone for as long as it took. A renewal skips a locked shard and tries it
again every 100 ms (L2): without the pause a redrive of 100,000 rows let leases of 1 s run out, with it none."""

SELECTION_ROWS: Final = 50_000
"""Rows selected at a time: each look passes all rows aside, and what it found is kept in memory."""

SLICES_PER_S: Final = 4
"""A rate is kept in so many steps a second."""

PATIENCE_S: Final = 30.0
"""How long a batch is tried again while somebody keeps one of its shards locked."""

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

_BUSY: Final = (
    asyncpg.LockNotAvailableError,
    asyncpg.DeadlockDetectedError,
    asyncpg.QueryCanceledError,
)


class Action(StrEnum):
    """What becomes of the selected rows."""

    REDRIVE = "redrive"
    DISCARD = "discard"


@dataclass(frozen=True, slots=True)
class Filter:
    """Which rows: every given criterion must hold, one of its values is enough; none given: all rows.

    `types` are event types; `keys` an aggregate_id or `type/id`; `errors` a failure class or a part of the error's
    text, in any case; `since_s` seconds before now, or `since_at`, an aware time; `ids` message ids.
    """

    types: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()
    ids: tuple[str, ...] = ()
    since_s: float | None = None
    since_at: datetime | None = None

    def as_document(self) -> dict[str, object]:
        """What was asked for, without what was not."""
        since = None if self.since_at is None else self.since_at.isoformat()
        values = {
            "type": list(self.types),
            "key": list(self.keys),
            "error": list(self.errors),
            "id": list(self.ids),
            "since": f"{self.since_s:g}s" if self.since_s is not None else since,
        }
        return {name: value for name, value in values.items() if value}

    def is_empty(self) -> bool:
        """Whether every row is meant."""
        return not self.as_document()


@dataclass(frozen=True, slots=True)
class ParkedRow:
    """One selected row. `state` is `parked` or `unmarkable`; the latter may have lost its outbox row (`shard` None)."""

    seq: int
    id: str
    shard: int | None
    event_type: str | None
    aggregate_type: str | None
    aggregate_id: str | None
    state: str
    failure_class: str
    error: str | None
    attempts: int
    parked_at: datetime | None
    is_expired: bool

    @property
    def is_fault(self) -> bool:
        return self.state == "unmarkable"


@dataclass(frozen=True, slots=True)
class Listing:
    """The first rows that a filter selects, and how many there are: by class, and such as need `--ignore-expiry`."""

    table: str
    role: str
    observed_at: datetime
    matched: int
    by_class: dict[str, int]
    expired: int
    rows: Sequence[ParkedRow]


@dataclass(slots=True)
class Outcome:
    """What an action did. `done` rows were changed; the others were not: `expired` ones need `--ignore-expiry`,
    `changed` ones were no longer parked, `locked` ones are kept by another transaction, `refused` ones by a trigger or
    constraint (id, error). `republished` are ids of unmarkable rows that will arrive a second time."""

    action: Action
    table: str
    role: str
    ignore_expiry: bool = False
    matched: int = 0
    done: int = 0
    expired: int = 0
    changed: int = 0
    locked: int = 0
    refused: list[tuple[str, str]] = field(default_factory=list)
    republished: list[str] = field(default_factory=list)


Progress = Callable[[Outcome], None]


# ---------------------------------------------------------------- reading


async def listing(config: Config, chosen: Filter, limit: int) -> Listing:
    """At most `limit` rows by seq, and the count of all. Raises NothingMatched only for ids that are not parked;
    and what `relay status` raises of the schema and the database."""
    async with _operator(config) as operator:
        await operator.refuse_unparked(chosen)
        counts = await operator.read("parked_count", *operator.arguments(chosen))
        rows = await operator.select(chosen, 0, limit) if limit else []
        return Listing(
            table=str(operator.schema.table),
            role=operator.role,
            observed_at=operator.began,
            matched=sum(record["rows"] for record in counts),
            by_class={record["failure_class"]: record["rows"] for record in counts},
            expired=sum(record["expired"] for record in counts),
            rows=rows,
        )


async def details(config: Config, id_: str, *, with_payload: bool) -> dict[str, Any]:
    """The columns of `parked_show.sql` of one row; raises NothingMatched, naming its state, where it is not parked."""
    async with _operator(config) as operator:
        await operator.refuse_unparked(Filter(ids=(id_,)))
        (record,) = await operator.read("parked_show", id_, with_payload)
        return dict(record)


# ---------------------------------------------------------------- acting


async def act(
    config: Config,
    action: Action,
    chosen: Filter,
    *,
    until: datetime | None = None,
    limit: int | None = None,
    rate_per_s: float | None = None,
    ignore_expiry: bool = False,
    on_progress: Progress | None = None,
    on_end: Progress | None = None,
) -> Outcome:
    """Redrive or discard what `chosen` selects, the lowest seq first, at most `limit` rows, at most so many a second.

    Only rows that were parked `until` then (default: now). `on_progress` is told after each batch, `on_end` once,
    also when an error or an interruption ends it midway. Raises NothingMatched for ids that are not parked,
    DatabaseUnavailable (no lock), DatabaseRefused (rights), and what `relay status` raises.
    """
    async with _operator(config, until=until, ignore_expiry=ignore_expiry) as operator:
        await operator.refuse_unparked(chosen)
        outcome = Outcome(action, str(operator.schema.table), operator.role, ignore_expiry)
        try:
            await operator.act(outcome, chosen, limit, _Pace(rate_per_s), on_progress or (lambda _: None))
        finally:
            if on_end is not None and outcome.matched:
                on_end(outcome)
        return outcome


class _Pace:
    """When the next batch may go: at most so many rows a second, and never one right after the other."""

    def __init__(
        self,
        rate_per_s: float | None,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._rate_per_s = rate_per_s
        self._now = now
        self._sleep = sleep
        self._began = now()
        self._next_at = self._began
        self.batch_rows = BATCH_ROWS
        if rate_per_s is not None:
            self.batch_rows = max(1, min(BATCH_ROWS, int(rate_per_s / SLICES_PER_S)))

    async def begin(self, rows: int) -> None:
        """Wait until `rows` more may go."""
        wait_s = self._next_at - self._now()
        if wait_s > 0:
            await self._sleep(wait_s)
        self._began = self._now()
        self._next_at = self._began
        if self._rate_per_s is not None:
            self._next_at += rows / self._rate_per_s

    def end(self) -> None:
        """They have gone."""
        now = self._now()
        self._next_at = max(self._next_at, now + BREATH * (now - self._began))


class _Operator:
    """One operator's session, for one command."""

    def __init__(
        self, config: Config, connection: Connection, schema: Schema, until: datetime | None, *, ignore_expiry: bool
    ) -> None:
        table = schema.table
        names = {part: table.derived(f"_{part}") for part in ("shard", "fault", "meta")}
        names |= {"table": table.quoted, "body": body_sql(schema.payload_type)}
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
                    f"SET LOCAL statement_timeout = '{STATEMENT_TIMEOUT_S}s'; SET LOCAL enable_seqscan = off"
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

    async def select(self, chosen: Filter, above: int, rows: int) -> list[ParkedRow]:
        """The next so many rows above a seq."""
        return [_row(record) for record in await self.read("parked_select", *self.arguments(chosen), above, rows)]

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

    # ------------------------------------------------------------ acting

    async def act(
        self, outcome: Outcome, chosen: Filter, limit: int | None, pace: _Pace, on_progress: Progress
    ) -> None:
        above = -(2**63)
        while limit is None or outcome.matched < limit:
            room = SELECTION_ROWS if limit is None else min(SELECTION_ROWS, limit - outcome.matched)
            found = await self.select(chosen, above, room)
            outcome.matched += len(found)
            rows = found
            if outcome.action is Action.REDRIVE and not outcome.ignore_expiry:
                rows = [row for row in found if not row.is_expired]
                outcome.expired += len(found) - len(rows)
            for batch in _batches(rows, pace.batch_rows):
                await pace.begin(len(batch))
                await self._change(outcome, batch)
                pace.end()
                on_progress(outcome)
            if len(found) < room:
                break
            above = found[-1].seq

    async def _change(self, outcome: Outcome, rows: Sequence[ParkedRow]) -> None:
        """One transaction; where a row's trigger or constraint refuses, by halves, until only that row is left out."""
        try:
            changed = await self._with_patience(outcome.action, rows)
        except DatabaseRefused as error:
            if not _is_row_fault(error):
                if isinstance(error.__cause__, asyncpg.InsufficientPrivilegeError):
                    raise DatabaseRefused(
                        error.message, hint=f"grant what is missing: relay migrate --role {outcome.role}"
                    ) from error.__cause__
                raise
            if len(rows) == 1:
                outcome.refused.append((rows[0].id, error.message))
                return
            half = len(rows) // 2
            await self._change(outcome, rows[:half])
            await self._change(outcome, rows[half:])
            return
        outcome.done += len(changed)
        if outcome.action is Action.REDRIVE:
            outcome.republished.extend(row.id for row in rows if row.is_fault and row.seq in changed)
        missed = [row.id for row in rows if row.seq not in changed]
        if missed:
            states = await self.states(missed)
            locked = sum(state in ("parked", "unmarkable") for state in states.values())
            outcome.locked += locked
            outcome.changed += len(missed) - locked

    async def _with_patience(self, action: Action, rows: Sequence[ParkedRow]) -> set[int]:
        deadline = time.monotonic() + PATIENCE_S
        pause_s = 0.1
        while True:
            try:
                return await self._transact(action, rows)
            except DatabaseRefused as error:
                if not isinstance(error.__cause__, _BUSY):
                    raise
                if time.monotonic() + pause_s > deadline:
                    raise DatabaseUnavailable(
                        "no lock: another transaction keeps a row or a shard of this outbox",
                        hint="look for old transactions in pg_stat_activity, then run it again",
                    ) from error.__cause__
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, 1.0)

    async def _transact(self, action: Action, rows: Sequence[ParkedRow]) -> set[int]:
        """The seqs that were changed."""
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
                    records = await session.fetch(name, [row.id for row in rows], [row.seq for row in rows])
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
            owed = [(kind, key) for _, kind, key, is_promoted in records if not is_promoted]
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
        records: list[tuple[int, str, str | None]] = await session.fetch(name, row.id, row.seq)
        return records or [(row.seq, "", None)]


@contextlib.asynccontextmanager
async def _operator(
    config: Config, *, until: datetime | None = None, ignore_expiry: bool = False
) -> AsyncIterator[_Operator]:
    connection = await connect(config.database(), application_name="outbox-relay parked")
    try:
        schema = await read_schema(connection, config.table)
        operator = _Operator(config, connection, schema, until, ignore_expiry=ignore_expiry)
        await operator.open()
        yield operator
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


def _batches(rows: Iterable[ParkedRow], size: int) -> Iterable[list[ParkedRow]]:
    """In their order; a fault by itself, for the database may refuse to delete its row."""
    for is_fault, run in groupby(rows, key=lambda row: row.is_fault):
        members = list(run)
        step = 1 if is_fault else size
        for at in range(0, len(members), step):
            yield members[at : at + step]


def _is_row_fault(error: DatabaseRefused) -> bool:
    cause = error.__cause__
    return isinstance(cause, asyncpg.PostgresError) and blame_of(cause) is not Blame.SERVER


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
        case _:
            return "unknown id, never there, or deleted since"
