"""What one history is like: settings, latencies, shares of chance, who acts in it. Drawn from its seed.

Every part of a history draws from a source of its own (`source`), so that leaving one out, as a shrinking history
does, changes what the others do as little as it can.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from relay.core.settings import EngineSettings, Ordering, Unroutable

from .broker import BrokerOptions
from .database import DatabaseOptions
from .world import WorldOptions

BRIEF_S = 1.5

PATIENCE_S = 600.0
"""A poll interval with which a row arrives in time only if the doorbell works."""


@dataclass(slots=True)
class Climate:
    """`writers`: transactions a second of each. `faults_share`: 0 for a history in which nothing fails."""

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
    is_set_back: bool
    """A restore, or an operator, sets the sequence back now and then (R5)."""
    trigger_share: float = 0.15
    """Of the inserts: those with a slow trigger, a seq and no xid yet."""
    flaky_share: float = 0.1
    """Of the rows: those whose route comes and goes."""
    application_rate: float = 2.0
    operator_rate: float = 0.7
    sure_faults: list[str] = field(default_factory=list)
    """Kinds of faults that happen for certain."""


def source(seed: object, part: str) -> random.Random:
    return random.Random(f"{part} {seed}")


def climate(seed: object) -> Climate:
    rng = source(seed, "weather")
    options = WorldOptions(_database(rng), _broker(rng), _settings(rng), has_doorbell=rng.random() < 0.7)
    has_faults = rng.random() < 0.85
    if options.has_doorbell and not has_faults and rng.random() < 0.5:
        options.settings = replace(options.settings, poll_interval_s=PATIENCE_S)
    seconds = rng.choice([2.0, 5.0, 10.0])
    writers = [rng.choice([1.0, 4.0, 10.0]) for _ in range(rng.randint(1, 5))]
    if rng.random() < 0.25:
        # Many short transactions at once: what begins and ends between two checks.
        seconds = BRIEF_S
        writers = [40.0 for _ in range(rng.randint(3, 6))]
    drawn = Climate(
        options,
        seconds,
        relays=rng.choice([1, 2, 2, 3]),
        writers=writers,
        has_faults=has_faults,
        has_application=rng.random() < 0.5,
        has_operator=rng.random() < 0.7,
        has_poison=rng.random() < 0.4,
        is_hot=rng.random() < (0.5 if seconds == BRIEF_S else 0.2),
        is_set_back=rng.random() < 0.05,
    )
    if seconds == BRIEF_S and rng.random() < 0.4:
        drawn.trigger_share = 0.6
    if drawn.is_set_back:
        drawn.sure_faults.append("set_back")
    if has_faults:
        rng.choices([_mix, _fray, _contend], [6, 1, 2])[0](drawn, rng)
    return drawn


def _mix(drawn: Climate, rng: random.Random) -> None:
    """A bit of everything."""


def _fray(drawn: Climate, rng: random.Random) -> None:
    """A database that crashes again and again and loses what it can."""
    database = drawn.options.database
    database.settle_synchronous = rng.random() < 0.3
    database.others_synchronous = False
    database.sequence_ahead_max = rng.choice([0, 0, 32])
    database.settle_refusals = rng.choice([0.0, 0.4])
    drawn.relays = rng.choice([1, 2, 3])
    # Rows are read and wait in memory, or are in flight, while the database forgets them.
    drawn.sure_faults += ["crash", rng.choice(["block", "mute", "hush", "broker_down"])]


def _contend(drawn: Climate, rng: random.Random) -> None:
    """Much that fails and waits aside, an application and an operator who interfere with it."""
    drawn.has_application = drawn.has_operator = drawn.has_poison = True
    drawn.application_rate, drawn.operator_rate = 6.0, 3.0
    drawn.flaky_share = 0.4
    drawn.is_hot = rng.random() < 0.5
    drawn.options.settings = replace(
        drawn.options.settings, on_unroutable=rng.choice([Unroutable.RETRY, Unroutable.PARK])
    )
    drawn.sure_faults.append("unbind")


def _settings(rng: random.Random) -> EngineSettings:
    return EngineSettings(
        ordering=rng.choices([Ordering.STRICT, Ordering.PIPELINED, Ordering.NONE], [8, 1, 1])[0],
        on_unroutable=rng.choices(list(Unroutable), [8, 1, 1])[0],
        holds_when_parked=rng.random() < 0.6,
        read_ahead_max=rng.choice([10, 40, 1000]),
        # Drawn beside, without a step of the dice that all the rest is drawn with.
        page_span=random.Random(rng.getstate()[1][0]).choice([2, 20, 100_000]),
        held_keys_max=random.Random(rng.getstate()[1][1]).choice([1, 3, 500]),
        in_flight_max=rng.choice([1, 4, 20, 500]),
        bytes_max=rng.choice([10_000, 1_000_000]),
        lease_s=rng.choice([2.0, 5.0]),
        rate_max=rng.choice([None, None, None, 200.0]),
        retry_delays_s=rng.choice([(0.1, 0.3), (0.5,), (0.2, 0.5, 1.0)]),
        age_max_s=rng.choice([None, None, 1.0]),
        marks_sent=rng.random() < 0.5,
        retention_s=rng.choice([1.0, 604_800.0]),
        parked_retention_s=rng.choice([None, None, 2.0]),
        confirm_timeout_s=rng.choice([0.5, 30.0]),
        poll_interval_s=rng.choice([0.1, 0.5]),
    )


def _database(rng: random.Random) -> DatabaseOptions:
    fast = rng.choice([0.0002, 0.001, 0.004])
    return DatabaseOptions(
        latency=(fast / 4, fast),
        slow_share=rng.choice([0.0, 0.01, 0.05]),
        slow=(0.01, rng.choice([0.05, 0.5])),
        check_gap=(0.0, rng.choice([0.0, 0.002, 0.02])),
        lock_lag=(0.0, rng.choice([0.0, 0.002, 0.05])),
        xid_goes_first=rng.choice([0.0, 0.5]),
        session_linger=(0.0, rng.choice([0.0, 0.02, 0.5])),
        settle_synchronous=rng.random() < 0.8,
        others_synchronous=rng.random() < 0.5,
        shards_used=rng.choice([1, 4, 16]),
        due_inline_bytes=rng.choice([100, 16_384]),
        page_refusals=rng.choice([0.0, 0.0, 0.03]),
        settle_refusals=rng.choice([0.0, 0.0, 0.05]),
        held_page_rows=rng.choice([1, 3, 2000]),
        policy_rows=rng.choice([2, 2000]),
        other_refusals=rng.choice([0.0, 0.0, 0.0, 0.03]),
    )


def _broker(rng: random.Random) -> BrokerOptions:
    fast = rng.choice([0.0002, 0.001, 0.01])
    return BrokerOptions(
        latency=(fast / 4, fast),
        confirm=(fast / 2, rng.choice([fast, 0.05])),
        nacks=rng.choice([0.0, 0.0, 0.0, 0.05, 0.7]),
        multiple=rng.choice([0.0, 0.5, 1.0]),
        pipe_rows=rng.choice([2, 20, 100_000]),
        cut_noticed=(0.0, rng.choice([0.0, 0.5])),
    )


def _no_slowness(climate: Climate) -> None:
    climate.options.database.slow_share = 0.0
    climate.options.broker.confirm = climate.options.broker.latency


def _no_refusals(climate: Climate) -> None:
    database = climate.options.database
    database.page_refusals = database.settle_refusals = database.other_refusals = 0.0


def _no_nacks(climate: Climate) -> None:
    climate.options.broker.nacks = 0.0


def _no_lag(climate: Climate) -> None:
    database = climate.options.database
    database.check_gap = database.lock_lag = database.session_linger = (0.0, 0.0)
    database.xid_goes_first = 0.0


def _no_poison(climate: Climate) -> None:
    climate.has_poison = False


def _no_application(climate: Climate) -> None:
    climate.has_application = False


def _no_operator(climate: Climate) -> None:
    climate.has_operator = False


def _no_others(climate: Climate) -> None:
    climate.relays = 1


def _no_faults(climate: Climate) -> None:
    climate.has_faults = False


CALMS: dict[str, Callable[[Climate], None]] = {
    "faults": _no_faults,
    "operator": _no_operator,
    "application": _no_application,
    "poison": _no_poison,
    "refusals": _no_refusals,
    "nacks": _no_nacks,
    "others": _no_others,
    "slowness": _no_slowness,
    "lag": _no_lag,
}
"""What a history can do without: `--without`."""
