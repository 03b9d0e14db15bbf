"""What makes a run count: nothing missing, nothing overtaken, the same messages, no server in trouble."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from bench.errors import BenchFailed
from bench.load import Backlog, row_id, row_number
from bench.rig import Rig


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
