"""The words of `relay parked`: options into a filter, selections and outcomes into documents and lines.

Owns: what a rate, a time and a key look like on the command line, the stable keys of the JSON documents, the tables for
people. Bodies and headers show only where they were asked for. Knows no database.
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, Final

from relay.errors import UsageError
from relay.parked_rows import Action, Filter, Listing, Outcome, ParkedRow
from relay.text import columns, cut, many
from relay.values import duration

RATES: Final = "a number and a unit: 50/s 600/m 1000/h"
TIMES: Final = (
    "a duration before now (250ms 5s 2m 1h 7d, at most a hundred years) or an ISO time (2026-01-31, 2026-01-31T08:00:00+01:00; UTC \
where it names no offset)"
)
LIMITS: Final = "a whole number, 1 or more"
ERROR_CHARACTERS_MAX: Final = 100
NUMBER_DIGITS_MAX: Final = 1000
"""Longer numbers in headers are shown as text: Python reads no integer of more than 4,300 digits."""

_RATE = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,6})?)/(s|m|h)")
_RATE_UNITS_S: Final = {"s": 1.0, "m": 60.0, "h": 3600.0}


# ---------------------------------------------------------------- options


def read_filter(
    types: Sequence[str], keys: Sequence[str], errors: Sequence[str], ids: Sequence[str], since: str | None
) -> Filter:
    """The filter that the options name. Raises UsageError."""
    for option, values in (("--type", types), ("--key", keys), ("--error", errors), ("--id", ids)):
        if not all(values):
            raise UsageError(f"{option}: an empty text; allowed: any other, or leave the option out")
    since_s, since_at = (None, None) if since is None else _since(since)
    return Filter(tuple(types), tuple(keys), tuple(errors), tuple(ids), since_s, since_at)


def _since(text: str) -> tuple[float | None, datetime | None]:
    try:
        return duration(text), None
    except ValueError:
        pass
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise UsageError(f"--since {text}: not a time; allowed: {TIMES}") from None
    if moment.tzinfo is None:
        return None, moment.replace(tzinfo=UTC)
    try:
        return None, moment.astimezone(UTC)
    except OverflowError:
        raise UsageError(f"--since {text}: in UTC no time of the years 1 to 9999; allowed: {TIMES}") from None


def read_id(text: str) -> str:
    """A message id. Raises UsageError."""
    if not text:
        raise UsageError("ID: an empty text; allowed: a message id, as `relay parked list` shows it")
    return text


def read_rate(text: str | None) -> float | None:
    """`50/s 600/m 1000/h` as rows a second. Raises UsageError."""
    if text is None:
        return None
    match = _RATE.fullmatch(text)
    rate = float(match[1]) / _RATE_UNITS_S[match[2]] if match else 0.0
    if rate <= 0:
        raise UsageError(f"--rate {text}: not a rate; allowed: {RATES}")
    return rate


def read_limit(text: str | None) -> int | None:
    """A number of rows. Raises UsageError."""
    if text is None:
        return None
    if re.fullmatch(r"[0-9]{1,18}", text) is None or int(text) < 1:
        raise UsageError(f"--limit {text}: not a number of rows; allowed: {LIMITS}")
    return int(text)


# ---------------------------------------------------------------- list


def listing_document(found: Listing) -> dict[str, object]:
    """The JSON document of `list`, and of a dry run; its keys are stable."""
    return {
        "table": found.table,
        "observed_at": found.observed_at.isoformat(),
        "matched": found.matched,
        "matched_by_class": found.by_class,
        "expired": found.expired,
        "rows": [_row_document(row) for row in found.rows],
    }


def _row_document(row: ParkedRow) -> dict[str, object]:
    return {
        "id": row.id,
        "seq": row.seq,
        "state": row.state,
        "event_type": row.event_type,
        "aggregate_type": row.aggregate_type,
        "aggregate_id": row.aggregate_id,
        "failure_class": row.failure_class,
        "error": row.error,
        "attempts": row.attempts,
        "parked_at": None if row.parked_at is None else row.parked_at.isoformat(),
        "is_expired": row.is_expired,
    }


def listing_lines(found: Listing) -> list[str]:
    """A table for people, and the count."""
    if not found.rows:
        return []
    classes = ", ".join(f"{name} {count:,}" for name, count in found.by_class.items())
    more = "" if len(found.rows) >= found.matched else f"; the first {len(found.rows):,}, --limit N shows more"
    return [*_table(found.rows), f"{rows(found.matched)}: {classes}{more}"]


def _table(found: Sequence[ParkedRow]) -> list[str]:
    """A head, a line for each row, and an empty line; nothing for none."""
    head = ("SEQ", "ID", "TYPE", "KEY", "CLASS", "TRIES", "PARKED AT", "ERROR")
    return [*columns([head, *(_row_cells(row) for row in found)]), ""] if found else []


def _row_cells(row: ParkedRow) -> tuple[str, ...]:
    return (
        str(row.seq),
        row.id,
        row.event_type or "(deleted)",
        _key(row.aggregate_type, row.aggregate_id),
        row.failure_class,
        str(row.attempts),
        "" if row.parked_at is None else row.parked_at.strftime("%Y-%m-%d %H:%M:%SZ"),
        cut(row.error or "", ERROR_CHARACTERS_MAX),
    )


def _key(kind: str | None, id_: str | None) -> str:
    if id_ is None:
        return "-"
    return f"{kind}/{id_}" if kind else id_


# ---------------------------------------------------------------- show


_SHOWN: Final = (
    "id",
    "seq",
    "shard",
    "event_type",
    "schema_version",
    "aggregate_type",
    "aggregate_id",
    "aggregate_version",
    "holds",
    "failure_class",
    "failure_error",
    "attempts",
    "first_failed_at",
    "last_failed_at",
    "parked_at",
    "failure_exchange",
    "failure_routing_key",
    "failure_relay",
    "failure_relay_version",
    "producer",
    "correlation_id",
    "causation_id",
    "traceparent",
    "tracestate",
    "exchange",
    "routing_key",
    "content_type",
    "content_encoding",
    "priority",
    "mandatory",
    "created_at",
    "occurred_at",
    "available_at",
    "expires_at",
)


def details_document(record: Mapping[str, Any], *, with_payload: bool) -> dict[str, object]:
    """The JSON document of `show`. `exchange` and `routing_key` are the row's own, `failure_exchange` and
    `failure_routing_key` the route as resolved at the last failure. A body that is not UTF-8 comes as base64."""
    document: dict[str, object] = {"state": "unmarkable" if record["is_fault"] else "parked"}
    document |= {name: _shown(name, record[name]) for name in _SHOWN}
    document["is_deleted"] = not record["is_there"]
    if with_payload:
        document["headers"] = None if record["headers"] is None else _parsed(record["headers"])
        document["payload"], document["payload_encoding"] = _body(record["body"])
    return document


def _shown(name: str, value: Any) -> object:
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, str) and name in ("created_at", "occurred_at", "available_at", "expires_at"):
        return f"{value}+00:00" if value[:1].isdigit() else value
    shown: object = value
    return shown


def _parsed(text: str) -> object:
    """Headers as a JSON value; a number that would not come out as it went in is shown as text."""
    parsed: object = json.loads(text, parse_float=_number, parse_int=_number)
    return parsed


def _number(text: str) -> int | float | str:
    if len(text) > NUMBER_DIGITS_MAX:
        return text
    if text.lstrip("-").isdigit():
        return int(text)
    number = float(text)
    return number if math.isfinite(number) and Decimal(repr(number)) == Decimal(text) else text


def _body(body: bytes | None) -> tuple[str | None, str | None]:
    if body is None:
        return None, None
    try:
        return body.decode(), "utf-8"
    except UnicodeDecodeError:
        return base64.b64encode(body).decode(), "base64"


def details_lines(document: Mapping[str, object]) -> list[str]:
    """Name and value, without what is unset."""
    return columns([(name, _value(value)) for name, value in document.items() if value is not None])


def _value(value: object) -> str:
    match value:
        case bool():
            return "yes" if value else "no"
        case dict() | list():
            return json.dumps(value, ensure_ascii=False)
        case _:
            return str(value)


# ---------------------------------------------------------------- redrive and discard


def outcome_document(outcome: Outcome) -> dict[str, object]:
    """The JSON document of `redrive` and `discard`; its keys are stable."""
    return {
        "action": outcome.action.value,
        "table": outcome.table,
        "role": outcome.role,
        "dry_run": False,
        "matched": outcome.matched,
        "done": outcome.done,
        "expired": outcome.expired,
        "changed": outcome.changed,
        "locked": outcome.locked,
        "refused": [{"id": id_, "error": error} for id_, error in outcome.refused],
        "republished": outcome.republished,
    }


def dry_document(outcome: Outcome, found: Listing) -> dict[str, object]:
    """The JSON document of a dry run: `done` is how many rows would be changed, `rows` are the first of them."""
    return outcome_document(outcome) | {"dry_run": True, "rows": listing_document(found)["rows"]}


def dry_lines(outcome: Outcome, found: Listing) -> list[str]:
    """The first of the rows that would be changed, how many there are, and what would be left."""
    lines = [*_table(found.rows), f"{rows(outcome.done)} of {outcome.matched:,} would be {done(outcome.action)}"]
    lines[-1] += "; nothing was changed"
    if outcome.expired:
        lines.append(_left_expired(outcome))
    if outcome.action is Action.REDRIVE and any(row.is_fault for row in found.rows):
        lines.append("unmarkable rows had been published: consumers get them a second time")
    return lines


def outcome_lines(outcome: Outcome) -> list[str]:
    """What was done, and what was not and why."""
    lines = [f"{rows(outcome.done)} of {outcome.matched:,} {done(outcome.action)}"]
    if outcome.expired:
        lines.append(_left_expired(outcome))
    if outcome.done and outcome.ignore_expiry:
        lines.append("passed deadlines (expires_at) of these rows were cleared")
    if outcome.changed:
        lines.append(f"{rows(outcome.changed)} not parked any more: somebody else was first")
    if outcome.locked:
        lines.append(f"{rows(outcome.locked)} locked by another transaction: run it again")
    if outcome.republished:
        lines.append(f"{rows(len(outcome.republished))} had been published: consumers get them a second time")
    lines.extend(f"refused by the database: {id_}: {error}" for id_, error in outcome.refused)
    return lines


def _left_expired(outcome: Outcome) -> str:
    return f"{rows(outcome.expired)} past their deadline left: --ignore-expiry redrives them"


def done(action: Action) -> str:
    """`redriven` or `discarded`."""
    return "redriven" if action is Action.REDRIVE else "discarded"


def rows(count: int) -> str:
    """`1 row`, `2,000 rows`."""
    return many(count, "row")
