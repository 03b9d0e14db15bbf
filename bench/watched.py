"""A relay with stopwatches on an outbox, and a consumer at its queue: who wants latencies starts here."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Final

from bench import native
from bench.consumer import Arrivals, consuming
from bench.latency import commit_latencies
from bench.load import patience_s
from bench.process import Relay
from bench.rig import Rig
from bench.step import Run
from bench.stopwatch import Times, read_times
from bench.writing import Commit

LOOK_S: Final = 0.02


class Watched:
    """Made by `watching`. `times` is there when its block has ended; `consumed` is None without a C compiler."""

    def __init__(self, relay: Relay, consumed: Arrivals | None) -> None:
        self.relay, self.consumed = relay, consumed
        self.times = Times([], {})
        self._sent = 0

    def wait_until_settled(self, rows: int) -> None:
        """Until so many more rows are sent and settled. Raises BenchFailed."""
        self._sent += rows
        timeout_s = patience_s(rows)
        deadline = time.monotonic() + timeout_s
        while (self.relay.metrics() or {}).get("relay_rows_sent_total", 0) < self._sent:
            if time.monotonic() > deadline:
                raise self.relay.failed(f"{self._sent} rows were not settled within {timeout_s:.0f} s")
            time.sleep(LOOK_S)

    def latencies(self, commits: Sequence[Commit]) -> Run:
        """To the confirm at the top, `to_consumer` beside it where there was one. Raises BenchFailed."""
        figures: Run = commit_latencies(commits, self.times.confirmed)
        if self.consumed is not None:
            figures["to_consumer"] = commit_latencies(commits, self.consumed.first)
            figures["copies"] = self.consumed.copies
        return figures


@contextmanager
def watching(
    rig: Rig, database: str, settings: dict[str, str] | None = None, *, consumes: bool = True
) -> Iterator[Watched]:
    """A relay that is ready, in a `with` block; one at a time may have a consumer. Raises BenchFailed."""
    path: Path = rig.directory / f"{database}.stopwatch.json"
    program = ("-m", "bench.stopwatch", str(path))
    consumer = consuming(rig) if consumes and native.is_available() else nullcontext(None)
    with consumer as consumed:
        with Relay(rig, database, program=program, settings=settings) as relay:
            relay.wait_until_ready()
            watched = Watched(relay, consumed)
            yield watched
        watched.times = read_times(path)
