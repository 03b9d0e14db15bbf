"""`relay run` with two stopwatches, in the process itself: how long each read took, and when each row was confirmed.

    python -m bench.stopwatch FILE

is `relay run` and writes FILE at its end. Nothing outside of a relay sees the moment of a confirm, and its histograms are too
coarse for a ratio of 1.1. It costs a tuple a row and a read. Drains are measured without it.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relay import cli
from relay.outbox import PostgresOutbox
from relay.publisher import Publisher


@dataclass(frozen=True, slots=True)
class Times:
    """`reads`: (Unix time of its end, seconds, rows) of each page. `confirmed`: Unix time by message id, the first one."""

    reads: list[tuple[float, float, int]]
    confirmed: dict[str, float]


def read_times(path: Path) -> Times:
    """What a relay with stopwatches has written."""
    document = json.loads(path.read_text())
    confirmed: dict[str, float] = {}
    for message_id, at in document["confirmed"]:
        confirmed.setdefault(message_id, at)
    return Times([(at, seconds, rows) for at, seconds, rows in document["reads"]], confirmed)


def together(times: Iterable[Times]) -> Times:
    """Of several relays of one outbox."""
    reads: list[tuple[float, float, int]] = []
    confirmed: dict[str, float] = {}
    for each in times:
        reads += each.reads
        for message_id, at in each.confirmed.items():
            confirmed[message_id] = min(at, confirmed.get(message_id, at))
    return Times(reads, confirmed)


def main(arguments: Sequence[str]) -> int:
    (path,) = arguments
    reads: list[tuple[float, float, int]] = []
    confirmed: list[tuple[str, float]] = []
    page, on_acked = PostgresOutbox.page, Publisher.on_acked

    async def timed_page(self: PostgresOutbox, request: Any) -> Any:
        began = time.perf_counter()
        found = await page(self, request)
        reads.append((time.time(), time.perf_counter() - began, len(found.rows)))
        return found

    def timed_on_acked(self: Publisher, rows: Sequence[Any]) -> None:
        now = time.time()
        confirmed.extend([(row.id, now) for row in rows])
        on_acked(self, rows)

    PostgresOutbox.page = timed_page  # type: ignore[method-assign]
    Publisher.on_acked = timed_on_acked  # type: ignore[method-assign]
    try:
        return cli.main(["run"])
    finally:
        Path(path).write_text(json.dumps({"reads": reads, "confirmed": confirmed}))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
