"""Many histories, spread over processes; each process plays some seeds at a time and says what came of them."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field

from .seeds import play
from .shrink import Failure, failure

CHUNK = 20


@dataclass(slots=True)
class Tally:
    """What some histories came to."""

    played: int = 0
    committed: int = 0
    delivered: int = 0
    duplicates: int = 0
    steps: int = 0
    failures: list[Failure] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        self.played += other.played
        self.committed += other.committed
        self.delivered += other.delivered
        self.duplicates += other.duplicates
        self.steps += other.steps
        self.failures += other.failures


def play_some(seeds: range) -> Tally:
    tally = Tally()
    for seed in seeds:
        tally.played += 1
        try:
            result = play(seed)
        except Exception:  # noqa: BLE001 - whatever a history raises is its finding
            found = failure(seed)
            assert found is not None, f"seed {seed} failed once and then did not"
            tally.failures.append(found)
            continue
        tally.committed += result.committed
        tally.delivered += result.delivered
        tally.duplicates += result.duplicates
        tally.steps += result.steps
    return tally


def play_all(seeds: range, processes: int) -> Iterator[Tally]:
    """A tally for each so many seeds, in their order."""
    chunks = [seeds[at : at + CHUNK] for at in range(0, len(seeds), CHUNK)]
    if processes == 1:
        yield from map(play_some, chunks)
        return
    # Not by fork: a process that was forked in the middle of a test session has that session's servers and loops.
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(play_some, chunks)
