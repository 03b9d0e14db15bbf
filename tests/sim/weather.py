"""What one history is like: settings, latencies, shares of chance, who acts in it. Drawn from its seed."""

from __future__ import annotations

import random
from collections.abc import Callable

from relay.core.settings import EngineSettings, Ordering, Unroutable

from . import seasons
from .broker import BrokerOptions
from .climate import Climate, source
from .tables import DatabaseOptions
from .world import WorldOptions


def climate(seed: object) -> Climate:
    rng = source(seed, "weather")
    drawn = Climate(
        WorldOptions(_database(rng), _broker(rng), _settings(rng), has_doorbell=rng.random() < 0.7),
        seconds=rng.choice([2.0, 5.0, 10.0]),
        relays=rng.choice([1, 2, 2, 3]),
        writers=[rng.choice([1.0, 4.0, 10.0]) for _ in range(rng.randint(1, 4))],
        has_faults=rng.random() < 0.85,
        has_application=rng.random() < 0.5,
        has_operator=rng.random() < 0.7,
        has_poison=rng.random() < 0.4,
        is_hot=rng.random() < 0.2,
        keys=rng.choice([2, 4, 8, 8]),
        key_life_s=rng.choice([None, 0.5, 2.0]),
        is_guarded=rng.random() < 0.8,
    )
    seasons.draw(drawn, rng, seed)
    drawn.options.broker.unverified = source(seed, "exchanges").choice([0.0, 0.0, 0.1, 0.5])
    return drawn


def _settings(rng: random.Random) -> EngineSettings:
    return EngineSettings(
        ordering=rng.choices([Ordering.STRICT, Ordering.PIPELINED, Ordering.NONE], [8, 1, 1])[0],
        on_unroutable=rng.choices(list(Unroutable), [8, 1, 1])[0],
        holds_when_parked=rng.random() < 0.6,
        read_ahead_max=rng.choice([10, 40, 1000]),
        page_span=rng.choice([2, 20, 100_000]),
        held_keys_max=rng.choice([1, 3, 500]),
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
