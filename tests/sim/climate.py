"""What a history is drawn from: its settings, shares of chance, and who acts in it."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from .world import WorldOptions


@dataclass(slots=True)
class Climate:
    """`writers`: transactions a second of each. `has_faults`: False for a history in which nothing fails."""

    options: WorldOptions
    seconds: float
    relays: int
    writers: list[float]
    has_faults: bool
    has_application: bool
    has_operator: bool
    has_poison: bool
    is_hot: bool
    """Most rows are of one key."""
    season: str = "calm"
    """What it has much of (`seasons.py`)."""
    is_set_back: bool = False
    """A restore, or an operator, sets the sequence back now and then (R5)."""
    has_lulls: bool = False
    """Writers pause so long that the relay arms the doorbell, or is about to; `False`: they come by chance."""
    keys: int = 8
    key_life_s: float | None = None
    """After so long a key has had its last row, and another one begins; none: keys go on for ever."""
    is_guarded: bool = True
    """Writers of a key in the lower half lock a row of it, as in the usual business case."""
    open_share: float = 0.05
    """Of the transactions: those that stay open for long."""
    trigger_share: float = 0.15
    """Of the inserts: those with a slow trigger, a seq and no xid yet."""
    flaky_share: float = 0.1
    """Of the rows: those whose route comes and goes."""
    grip_share: float = 0.0
    """Of the transactions: those of which an application locks a row at once, as it is committed."""
    application_rate: float = 2.0
    meddling: float = 0.0
    """The share of the application's acts that meet rows of keys that have rows aside."""
    balking: float = 0.15
    """The share of the application's acts that make a row refuse every change."""
    operator_rate: float = 0.7
    discard_share: float = 0.25
    """The share of the operator's acts on parked rows that discard them; the others redrive."""
    ponders_s: tuple[float, ...] = (0.0, 0.0, 0.01, 0.5)
    """One of these passes between the operator's look at parked rows and its commit."""
    sure_faults: list[str] = field(default_factory=list)
    """Kinds of faults that happen for certain."""
    other_faults_max: int = 6
    fault_rates: tuple[float, ...] = (0.3, 1.0, 3.0)
    """Faults a second, one of these."""


def source(seed: object, part: str) -> random.Random:
    """Every part of a history draws from a source of its own, so that leaving one out, as a shrinking history does,
    changes what the others do as little as it can."""
    return random.Random(f"{part} {seed}")
