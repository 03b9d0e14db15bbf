"""The words of `relay redrive`: options into an order, an outcome into lines and a document with stable keys. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from relay.errors import UsageError
from relay.redrive.choice import Order
from relay.redrive.run import NO_ROUTE, Outcome, Sample
from relay.text import columns, cut
from relay.values import short_string

CELL_CHARACTERS_MAX: Final = 60

RETURNS_WARNED: Final = 10
"""Half of the delivery limit that RabbitMQ 4 gives to a queue which names none."""


def read_order(
    queue: str,
    where: Sequence[str],
    exchange: str | None,
    routing_key: str | None,
    *,
    limit: int | None,
    rate_per_s: float | None,
    is_dry: bool,
) -> Order:
    """The order that the options name. Raises UsageError."""
    for option, text in (("QUEUE", queue), ("--to-exchange", exchange or ""), ("--routing-key", routing_key or "")):
        try:
            short_string(text)
        except ValueError as error:
            raise UsageError(f"{option}: {error}; allowed: a name of up to 255 bytes") from None
    if not queue:
        raise UsageError("QUEUE: allowed: a queue's name")
    return Order(queue, tuple(map(_condition, where)), exchange, routing_key, limit, rate_per_s, is_dry)


def _condition(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise UsageError(f"--where {text}: allowed: HEADER=VALUE, such as x-error-class=transient or type=order.paid")
    return name, value


def lines(outcome: Outcome) -> list[str]:
    """What a dry run found, or what was left, and the counts."""
    found = _table(outcome.samples)
    shown = len(outcome.samples)
    interesting = outcome.matched if outcome.is_dry else sum(outcome.failed.values())
    if shown < interesting:
        found.append(f"… the first {shown:,} of {interesting:,}")
    return [*found, *([""] if found else []), *_summary(outcome)]


def _summary(outcome: Outcome) -> list[str]:
    failed = ", ".join(f"{count:,} {reason.replace('_', ' ')}" for reason, count in sorted(outcome.failed.items()))
    left = f"; not sent, still there: {failed}" if failed else ""
    matched = f"{outcome.looked_at:,} looked at, {outcome.matched:,} matched"
    if outcome.is_dry:
        would = outcome.matched - sum(outcome.failed.values())
        told = [f"{outcome.queue}: {matched}, {would:,} would be redriven; nothing was changed{left}"]
    else:
        told = [f"{outcome.queue}: {matched}, {outcome.redriven:,} redriven{left}"]
    if outcome.stopped is not None:
        told.append(f"stopped: {outcome.stopped}")
    if outcome.failed.get(NO_ROUTE):
        told.append("messages without a route of their own need --to-exchange and --routing-key")
    if outcome.returned_max >= RETURNS_WARNED:
        told.append(
            f"a message here was given back {outcome.returned_max} times: RabbitMQ 4 drops it after 20 unless the queue's "
            "policy sets delivery-limit (relay topology does)"
        )
    return told


def _table(samples: Sequence[Sample]) -> list[str]:
    if not samples:
        return []
    return columns([("ID", "TYPE", "TO", "REASON", "ERROR"), *(_cells(sample) for sample in samples)])


def _cells(sample: Sample) -> tuple[str, ...]:
    route = "" if sample.route is None else str(sample.route)
    reason = "" if sample.reason is None else f"{sample.reason.replace('_', ' ')}: {sample.text}"
    cells = (sample.id or "(none)", sample.type, route, reason, sample.error)
    return tuple(cut(text, CELL_CHARACTERS_MAX) for text in cells)


def document(outcome: Outcome) -> dict[str, object]:
    """The JSON document; its keys are stable."""
    return {
        "queue": outcome.queue,
        "run": outcome.run,
        "dry_run": outcome.is_dry,
        "ready": outcome.ready,
        "looked_at": outcome.looked_at,
        "matched": outcome.matched,
        "redriven": outcome.redriven,
        "failed": dict(sorted(outcome.failed.items())),
        "stopped": outcome.stopped,
        "messages": [_sample_document(sample) for sample in outcome.samples],
    }


def _sample_document(sample: Sample) -> dict[str, object]:
    return {
        "id": sample.id,
        "type": sample.type,
        "exchange": None if sample.route is None else sample.route.exchange,
        "routing_key": None if sample.route is None else sample.route.routing_key,
        "error": sample.error,
        "reason": sample.reason,
        "text": sample.text,
    }
