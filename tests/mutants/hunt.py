"""Which random history finds which mutant."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from tests.sim.shrink import failure

from . import aside, leases, reading, settling
from .patch import Mutant, planted

MUTANTS: tuple[Mutant, ...] = (*reading.MUTANTS, *aside.MUTANTS, *leases.MUTANTS, *settling.MUTANTS)


@dataclass(frozen=True, slots=True)
class Found:
    """`seed`: the first that finds it, `None` where none did; `kind`: by which rule; `first`: what the oracle said."""

    name: str
    seed: int | None
    kind: str = ""
    first: str = ""


def hunt(mutant: Mutant, seeds_max: int | None = None) -> Found:
    """Play histories from seed 0 on until one fails."""
    with planted(mutant):
        for seed in range(seeds_max or mutant.seeds_max):
            found = failure(seed)
            if found is not None:
                lines = found.text.splitlines()
                return Found(mutant.name, seed, found.kind, lines[min(1, len(lines) - 1)].strip())
    return Found(mutant.name, None)


def _hunt_named(name: str, seeds_max: int | None) -> Found:
    (mutant,) = (each for each in MUTANTS if each.name == name)
    return hunt(mutant, seeds_max)


def hunt_all(names: Sequence[str], processes: int, seeds_max: int | None = None) -> Iterator[Found]:
    """In the order of the names; each in a process of its own kind, for planting changes the code."""
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(_hunt_named, names, [seeds_max] * len(names))
