"""What makes a run count: nothing missing, nothing overtaken, the same messages, no server in trouble."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from bench.rig import BenchFailed, Rig


def check_queue(rig: Rig, delivered: Sequence[str], rows: int | None = None) -> int:
    """The first `rows` rows (all: None) arrived, each key's first copies in the order of seq; returns the further copies.

    `delivered` are message ids in the queue's order. Raises BenchFailed.
    """
    first_copies = list(dict.fromkeys(delivered))
    missing = set(rig.backlog.ids[:rows]) - set(first_copies)
    if missing:
        raise BenchFailed(f"{len(missing)} rows are sent and not in the queue, such as {min(missing)}")
    place = {row_id: i for i, row_id in enumerate(rig.backlog.ids)}
    strange = [row_id for row_id in first_copies if row_id not in place]
    if strange:
        raise BenchFailed(f"{len(strange)} messages belong to no row, such as {strange[0]}")
    newest: dict[str, int] = {}
    overtaken: Counter[str] = Counter()
    for row_id in first_copies:
        key = rig.backlog.keys[place[row_id]]
        if place[row_id] < newest.get(key, -1):
            overtaken[key] += 1
        newest[key] = max(place[row_id], newest.get(key, -1))
    if overtaken:
        raise BenchFailed(f"{overtaken.total()} messages of {len(overtaken)} keys were overtaken")
    return len(delivered) - len(first_copies)


def compare_shapes(runs: Sequence[Mapping[str, Any]]) -> None:
    """Both publishers must have sent the same message, or their ratio means nothing."""
    shapes = [run["shape"] for run in runs]
    for shape in shapes:
        if shape != shapes[0]:
            raise BenchFailed(f"the publishers sent different messages: {shapes[0]} and {shape}")


def expect_no_complaints(rig: Rig) -> None:
    if complaints := rig.complaints():
        raise BenchFailed("a server logged errors:\n" + "\n".join(complaints[:10]))
