"""What makes a run count: nothing missing, nothing overtaken, the same messages, no server in trouble."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from bench import native
from bench.errors import BenchFailed
from bench.load import Backlog, Load, row_id, row_number
from bench.rig import QUEUE, Rig
from bench.step import Run
from relay.benchmark.looks import disturbance


def check_queue(backlog: Backlog, delivered: Iterable[str], rows: int | None = None, *, is_ordered: bool = True) -> int:
    """The first `rows` rows (all: None) arrived, each key's first copies in the order of seq; returns the further copies.

    `delivered` are message ids in the queue's order. Raises BenchFailed.
    """
    keys = backlog.keys
    has_arrived = bytearray(len(keys))
    newest: dict[str, int] = {}
    overtaken: Counter[str] = Counter()
    strange: list[str] = []
    copies = 0
    for message_id in delivered:
        number = row_number(message_id)
        if number is None or not 0 < number <= len(keys):
            strange.append(message_id)
        elif has_arrived[number - 1]:
            copies += 1
        else:
            has_arrived[number - 1] = True
            key = keys[number - 1]
            overtaken[key] += number < newest.get(key, 0)
            newest[key] = max(number, newest.get(key, 0))
    if missing := has_arrived.count(False, 0, rows):
        raise BenchFailed(
            f"{missing} rows are sent and not in the queue, such as {row_id(has_arrived.index(False) + 1)}"
        )
    if strange:
        raise BenchFailed(f"{len(strange)} messages belong to no row, such as {strange[0]}")
    if is_ordered and (count := overtaken.total()):
        raise BenchFailed(f"{count} messages of {len(+overtaken)} keys were overtaken")
    return copies


def prove_queue(rig: Rig, load: Load, rows: int, *, is_ordered: bool = True) -> Run:
    """The queue holds the load's first `rows` rows, each once: no `copies`, and their `shape`, for the run.

    Without a C compiler they are only counted. Raises BenchFailed.
    """
    first = rig.take_first()
    copies = first.held - rows
    if native.is_available():
        delivered = itertools.chain([first.message_id], native.collect(rig.amqp_url, QUEUE, first.held))
        copies = check_queue(rig.backlog(load), delivered, rows, is_ordered=is_ordered)
    if copies:
        raise BenchFailed(f"{rows} rows are sent, the queue held {first.held} messages")
    return {"copies": copies, "shape": first.shape}


def check_outcomes(outcomes: Mapping[str, int], rows: int) -> None:
    """Raises BenchFailed where the relays published anything but each row once."""
    if found := disturbance(outcomes, rows):
        raise BenchFailed(found)


def compare_shapes(runs: Iterable[Mapping[str, Any]]) -> None:
    """Publishers that are compared must have sent the same message, or their ratio means nothing. Raises BenchFailed."""
    shapes: dict[int, Any] = {}
    for run in runs:
        if (shape := run.get("shape")) is None:
            continue
        first = shapes.setdefault(shape["body_bytes"], shape)
        if shape != first:
            raise BenchFailed(f"the publishers sent different messages: {first} and {shape}")


def expect_no_complaints(rig: Rig, *, of_broker: bool = True) -> None:
    """Raises BenchFailed."""
    if complaints := rig.complaints(of_broker=of_broker):
        raise BenchFailed("a server logged errors:\n" + "\n".join(complaints[:10]))
