"""What an operator asks of the outbox: `relay status`. Reads only; one snapshot, no lock.

The states are those of the contract: `pending` rows wait for a relay, `deferred` ones for their next attempt or for
their own time (these are the `scheduled` ones of them), `parked` rows need an operator. The backlog counts the
pending, the held, and the deferred that are not scheduled; a scheduled row whose time has come is pending.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from relay.config import Config
from relay.database import close, connect, fill, mapped_errors, sql_file
from relay.migrate import Schema, read_schema
from relay.rows import shard_sql
from relay.text import many, seconds

if TYPE_CHECKING:
    from relay.database import Connection

RATE_SAMPLE_S: Final = 1.0
STATEMENT_TIMEOUT_S: Final = 60


@dataclass(frozen=True, slots=True)
class RelayState:
    """A relay as its membership row shows it; `shards` counts leases that have not run out."""

    instance: str
    name: str | None
    version: str | None
    started_at: str | None
    heartbeat_age_seconds: float | None
    is_available: bool
    shards: int


@dataclass(frozen=True, slots=True)
class Rates:
    """Rows a second between two looks, by the sequence and the backlog: rolled-back rows count in both."""

    inserted_per_second: float
    settled_per_second: float


@dataclass(frozen=True, slots=True)
class Status:
    """The document of `relay status --json`; the field names are its keys. Times are ISO 8601, UTC."""

    table: str
    schema_version: int
    payload_type: str
    observed_at: str
    is_paused: bool
    paused_at: str | None
    paused_by: str | None
    backlog_rows: int
    backlog_estimated: bool
    oldest_pending_age_seconds: float | None
    pending_rows: int
    deferred_rows: int
    next_due_in_seconds: float | None
    scheduled_rows: int
    held_rows: int
    held_keys: int
    parked_rows: int
    parked_by_class: Mapping[str, int]
    unmarkable_rows: int
    """Of the parked ones, those in the table of faults: published, and the database refuses their mark."""
    unknown_aside: Mapping[str, int]
    """Rows whose `aside`, written by somebody else, no relay knows: they wait unseen."""
    sent_rows_estimate: int | None
    newest_seq: int
    rates: Rates | None
    has_doorbell: bool
    is_doorbell_armed: bool
    shards_owned: int
    relays: Sequence[RelayState]


async def status(config: Config, *, since: Status | None = None) -> Status:
    """The outbox's state. Rates are measured against `since`, or else over a second of waiting.

    Raises SchemaMissing, SchemaForeign, SchemaIncompatible, DatabaseUnavailable, DatabaseRefused,
    DatabaseLost.
    """
    connection = await connect(config.database(), application_name="outbox-relay status")
    try:
        schema = await read_schema(connection, config.table)
        if since is None:
            since = await _observe(connection, schema)
            await asyncio.sleep(RATE_SAMPLE_S)
        now = await _observe(connection, schema)
    finally:
        await close(connection)
    return replace(now, rates=_rates(since, now))


async def _observe(connection: Connection, schema: Schema) -> Status:
    names = {part: schema.table.derived(f"_{part}") for part in ("shard", "relay", "fault", "meta")}
    names |= {"table": schema.table.quoted, "sequence": schema.table.derived("_seq_seq"), "shard_of_o": shard_sql()}
    names["backlog_estimate"] = fill(sql_file("parts/backlog_estimate.sql"), names).rstrip()

    def query(name: str) -> str:
        return fill(sql_file(f"queries/{name}.sql"), names)

    async with _snapshot(connection):
        backlog = await connection.fetchrow(query("status_backlog"), schema.table_oid)
        aside = await connection.fetch(query("status_aside"))
        relays = await connection.fetch(query("status_relays"))
        meta = await connection.fetchrow(query("status_meta"))
    assert backlog is not None
    assert meta is not None, "read_schema has seen the row"
    return _status(schema, backlog, aside, relays, meta)


@contextlib.asynccontextmanager
async def _snapshot(connection: Connection) -> AsyncIterator[None]:
    with mapped_errors():
        async with connection.transaction(isolation="repeatable_read", readonly=True):
            # What a look compiles, or a plan without statistics, would cost a hundred times as much as the look.
            await connection.execute(
                f"SET LOCAL statement_timeout = '{STATEMENT_TIMEOUT_S}s'; SET LOCAL jit = off; SET LOCAL enable_seqscan = off"
            )
            yield


def _status(
    schema: Schema,
    backlog: Mapping[str, Any],
    aside: Sequence[Any],
    relays: Sequence[Any],
    meta: Mapping[str, Any],
) -> Status:
    rows = {kind: sum(row["rows"] for row in aside if row["aside"] == kind) for kind in _ASIDE}
    waiting = [row for row in aside if row["aside"] in ("deferred", "held", "scheduled")]
    ages = [row["since_s"] for row in waiting if row["since_s"] is not None]
    if backlog["oldest_age_s"] is not None:
        ages.append(backlog["oldest_age_s"])
    due = [
        row["due_in_s"] for row in aside if row["aside"] in ("deferred", "scheduled") and row["due_in_s"] is not None
    ]
    overdue = sum(row["overdue"] for row in aside)
    scheduled = rows["scheduled"] - overdue + backlog["unread_scheduled_rows"]
    pending = max(backlog["pending_rows"], backlog["estimate"] or 0) + overdue
    unknown = {row["aside"]: row["rows"] for row in aside if row["aside"] not in _ASIDE}
    classes = {row["failure_class"] or "unknown": row["rows"] for row in aside if row["aside"] == "parked"}
    if meta["unmarkable_rows"]:
        # An operator's, as in the gauges and in `relay parked list`; the outbox itself cannot say so.
        classes["unmarkable"] = classes.get("unmarkable", 0) + meta["unmarkable_rows"]
    others = pending - overdue + sum(rows.values()) + sum(unknown.values()) + meta["unmarkable_rows"]
    return Status(
        table=str(schema.table),
        schema_version=schema.version,
        payload_type=schema.payload_type.value,
        observed_at=_time(backlog["observed_at"]) or "",
        is_paused=meta["paused_at"] is not None,
        paused_at=_time(meta["paused_at"]),
        paused_by=meta["paused_by"],
        backlog_rows=pending + rows["deferred"] + rows["held"],
        backlog_estimated=backlog["is_estimated"],
        oldest_pending_age_seconds=round(max(0.0, *ages, 0.0), 3) if ages else None,
        pending_rows=pending,
        deferred_rows=rows["deferred"] + scheduled,
        next_due_in_seconds=round(min(due), 3) if due else None,
        scheduled_rows=scheduled,
        held_rows=rows["held"],
        held_keys=sum(row["keys"] for row in aside),
        parked_rows=sum(classes.values()),
        parked_by_class=classes,
        unmarkable_rows=meta["unmarkable_rows"],
        unknown_aside=unknown,
        sent_rows_estimate=None if backlog["live_rows"] is None else max(0, backlog["live_rows"] - others),
        newest_seq=backlog["newest_seq"],
        rates=None,
        has_doorbell=meta["has_doorbell"],
        is_doorbell_armed=meta["is_armed"],
        shards_owned=sum(row["shards"] for row in relays),
        relays=[_relay(row) for row in relays],
    )


_ASIDE: Final = ("deferred", "scheduled", "held", "parked")


def _relay(row: Mapping[str, Any]) -> RelayState:
    age = row["heartbeat_age_s"]
    return RelayState(
        instance=row["instance"],
        name=row["name"],
        version=row["version"],
        started_at=_time(row["started_at"]),
        heartbeat_age_seconds=None if age is None else round(max(0.0, age), 3),
        is_available=row["is_available"],
        shards=row["shards"],
    )


def _rates(before: Status, now: Status) -> Rates | None:
    """None where a look was an estimate, or the sequence went back (a restore between the two)."""
    elapsed_s = (datetime.fromisoformat(now.observed_at) - datetime.fromisoformat(before.observed_at)).total_seconds()
    inserted = now.newest_seq - before.newest_seq
    if elapsed_s <= 0 or inserted < 0 or before.backlog_estimated or now.backlog_estimated:
        return None
    settled = inserted - (_unsettled(now) - _unsettled(before))
    return Rates(round(inserted / elapsed_s, 1), round(max(0, settled) / elapsed_s, 1))


def _unsettled(status: Status) -> int:
    return status.backlog_rows + status.scheduled_rows + status.parked_rows


def _time(moment: datetime | None) -> str | None:
    return None if moment is None else moment.isoformat()


# ---------------------------------------------------------------- showing


def as_document(status: Status) -> dict[str, object]:
    """The JSON document; its keys are stable."""
    return asdict(status)


def as_lines(status: Status) -> list[tuple[str, str]]:
    """(name, text) for people."""
    about = "about " if status.backlog_estimated else ""
    oldest = status.oldest_pending_age_seconds
    due = status.next_due_in_seconds
    classes = ", ".join(f"{name} {count:,}" for name, count in status.parked_by_class.items())
    lines = [
        ("outbox", f"{status.table}, schema version {status.schema_version}, payload {status.payload_type}"),
        (
            "state",
            f"paused since {status.paused_at} by {status.paused_by}" if status.is_paused else "not paused",
        ),
        (
            "backlog",
            f"{about}{_rows(status.backlog_rows)}" + (f", the oldest {seconds(oldest)} old" if oldest else ""),
        ),
        (
            "deferred",
            _rows(status.deferred_rows) + ("" if due is None else f", next due in {seconds(max(0.0, due))}"),
        ),
        ("scheduled", f"{_rows(status.scheduled_rows)} of these"),
        ("held", f"{_rows(status.held_rows)} of {many(status.held_keys, 'key')}"),
        ("parked", _rows(status.parked_rows) + (f": {classes}" if classes else "")),
    ]
    if status.unmarkable_rows:
        lines.append(("unmarkable", f"{_rows(status.unmarkable_rows)} of these"))
    for aside, count in status.unknown_aside.items():
        text = f"{_rows(count)} whose aside is {aside!r}, which no relay writes or reads; null there has them published"
        lines.append(("unseen", text))
    if status.sent_rows_estimate is not None:
        lines.append(("sent", f"about {_rows(status.sent_rows_estimate)} marked and still in the table"))
    if status.rates is not None:
        rates = status.rates
        lines.append(
            (
                "rates",
                f"{rates.inserted_per_second:,.1f} rows/s in, {rates.settled_per_second:,.1f} rows/s out",
            )
        )
    armed = "armed: the next insert wakes an idle relay" if status.is_doorbell_armed else "not armed: nobody sleeps"
    lines.append(("doorbell", armed if status.has_doorbell else "none: relays poll"))
    lines.append(("relays", f"{len(status.relays)}, {status.shards_owned} of 64 shards owned"))
    lines.extend(("", _relay_line(relay)) for relay in status.relays)
    return lines


def _relay_line(relay: RelayState) -> str:
    parts = [
        relay.name or relay.instance,
        f"version {relay.version or 'unknown'}",
        many(relay.shards, "shard"),
    ]
    if relay.heartbeat_age_seconds is not None:
        parts.append(f"heard {relay.heartbeat_age_seconds:.1f} s ago")
    if not relay.is_available:
        parts.append("without a broker")
    return ", ".join(parts)


def _rows(count: int) -> str:
    return many(count, "row")
