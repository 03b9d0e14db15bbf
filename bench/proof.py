"""What makes a run count: nothing missing, nothing overtaken, the same messages, no server in trouble."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bench.errors import BenchFailed
from bench.load import Backlog
from bench.rig import Rig


def check_queue(backlog: Backlog, delivered: Sequence[str], rows: int | None = None, *, is_ordered: bool = True) -> int:
    """The first `rows` rows (all: None) arrived, each key's first copies in the order of seq; returns the further copies.

    `delivered` are message ids in the queue's order. Raises BenchFailed.
    """
    first_copies = list(dict.fromkeys(delivered))
    missing = set(backlog.ids[:rows]) - set(first_copies)
    if missing:
        raise BenchFailed(f"{len(missing)} rows are sent and not in the queue, such as {min(missing)}")
    place = {row_id: i for i, row_id in enumerate(backlog.ids)}
    strange = [row_id for row_id in first_copies if row_id not in place]
    if strange:
        raise BenchFailed(f"{len(strange)} messages belong to no row, such as {strange[0]}")
    newest: dict[str, int] = {}
    overtaken: Counter[str] = Counter()
    for row_id in first_copies:
        key = backlog.keys[place[row_id]]
        if place[row_id] < newest.get(key, -1):
            overtaken[key] += 1
        newest[key] = max(place[row_id], newest.get(key, -1))
    if overtaken and is_ordered:
        raise BenchFailed(f"{overtaken.total()} messages of {len(overtaken)} keys were overtaken")
    return len(delivered) - len(first_copies)


def compare_shapes(runs: Iterable[Mapping[str, Any]]) -> None:
    """Publishers that are compared must have sent the same message, or their ratio means nothing. Raises BenchFailed."""
    shapes: dict[int, Any] = {}
    for run in runs:
        if (shape := run.get("shape")) is None:
            continue
        first = shapes.setdefault(shape["body_bytes"], shape)
        if shape != first:
            raise BenchFailed(f"the publishers sent different messages: {first} and {shape}")


def expect_no_complaints(rig: Rig) -> None:
    if complaints := rig.complaints():
        raise BenchFailed("a server logged errors:\n" + "\n".join(complaints[:10]))
