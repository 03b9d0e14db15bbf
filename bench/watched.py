"""Relays with stopwatches on an outbox, and a consumer at its queue: who wants latencies starts here."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Final

from bench import native
from bench.consumer import Arrivals, consuming
from bench.latency import commit_latencies
from bench.load import patience_s
from bench.process import Relay, wait_until_shared
from bench.rig import Rig
from bench.step import Run
from bench.stopwatch import Times, read_times, together
from bench.writing import Commit

LOOK_S: Final = 0.02


class Watched:
    """Made by `watching`. `times` is there when its block has ended; `consumed` is None without a C compiler."""

    def __init__(self, relays: Sequence[Relay], consumed: Arrivals | None) -> None:
        self.relays, self.consumed = relays, consumed
        self.times = Times([], {})
        self._sent = 0

    def total(self, metric: str) -> float:
        """A counter, over the relays. Raises BenchFailed."""
        return sum((relay.metrics() or {}).get(metric, 0.0) for relay in self.relays)

    def wait_until_settled(self, rows: int) -> None:
        """Until so many more rows are sent and settled. Raises BenchFailed."""
        self._sent += rows
        timeout_s = patience_s(rows)
        deadline = time.monotonic() + timeout_s
        while self.total("relay_rows_sent_total") < self._sent:
            if time.monotonic() > deadline:
                raise self.relays[0].failed(f"{self._sent} rows were not settled within {timeout_s:.0f} s")
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
    rig: Rig, database: str, settings: dict[str, str] | None = None, *, consumes: bool = True, relays: int = 1
) -> Iterator[Watched]:
    """Relays that are ready and have their shards, in a `with` block; one such block at a time may have a consumer. Raises BenchFailed."""
    paths = [rig.directory / f"{database}.{number}.stopwatch.json" for number in range(relays)]
    consumer = consuming(rig) if consumes and native.is_available() else nullcontext(None)
    with consumer as consumed:
        with ExitStack() as stack:
            started = [
                stack.enter_context(
                    Relay(rig, database, program=("-m", "bench.stopwatch", str(path)), settings=settings)
                )
                for path in paths
            ]
            wait_until_shared(started)
            watched = Watched(started, consumed)
            yield watched
        watched.times = together(read_times(path) for path in paths)
