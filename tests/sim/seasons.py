"""What a history has much of: each season makes some features dense and leaves others out, drawn anew for each seed.

A rule is broken by a few things at once: a row that somebody locks, a failing head, a takeover. Where every history has
a little of everything they hardly ever meet; where one has much of a few, they do.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from relay.core.settings import Ordering, Unroutable

from .climate import Climate, source

BRIEF_S: Final = 1.5

PATIENCE_S: Final = 600.0
"""A poll interval with which a row arrives in time only if the doorbell works."""

Season = Callable[[Climate, random.Random], None]


def mix(drawn: Climate, rng: random.Random) -> None:
    """A bit of everything."""


def fray(drawn: Climate, rng: random.Random) -> None:
    """A database that crashes again and again and loses what it can."""
    database = drawn.options.database
    database.settle_synchronous = rng.random() < 0.3
    database.others_synchronous = False
    database.sequence_ahead_max = rng.choice([0, 0, 32])
    database.settle_refusals = rng.choice([0.0, 0.4])
    drawn.relays = rng.choice([1, 2, 3])
    drawn.other_faults_max = rng.choice([0, 0, 6])
    # Rows are read and wait in memory, or are in flight, while the database forgets them.
    drawn.sure_faults += ["crash", rng.choice(["block", "mute", "hush", "broker_down"])]


def contend(drawn: Climate, rng: random.Random) -> None:
    """Much that fails and waits aside, an application and an operator who interfere with it."""
    drawn.has_application = drawn.has_operator = True
    drawn.has_poison = rng.random() < 0.5
    drawn.application_rate, drawn.operator_rate = rng.choice([6.0, 20.0]), rng.choice([3.0, 10.0])
    drawn.meddling = rng.choice([0.0, 0.5, 0.9])
    drawn.flaky_share = rng.choice([0.15, 0.4, 0.7])
    drawn.is_hot = rng.random() < 0.5
    drawn.is_guarded = rng.random() < 0.5
    drawn.open_share = rng.choice([0.05, 0.4])
    drawn.grip_share = rng.choice([0.0, 0.3])
    drawn.options.broker.confirm = (0.0, rng.choice([0.001, 0.05, 0.3]))
    drawn.options.broker.returns = rng.choice([0.0, 0.5])
    drawn.options.settings = replace(
        drawn.options.settings,
        ordering=Ordering.STRICT,
        on_unroutable=rng.choice([Unroutable.RETRY, Unroutable.RETRY, Unroutable.PARK]),
        parked_retention_s=rng.choice([None, 0.5, 2.0, 5.0]),
        age_max_s=rng.choice([None, 1.0]),
    )
    drawn.sure_faults.append("unbind")
    drawn.sure_faults += rng.choice([[], ["ambush"] * 3, ["sever"] * 3, ["sever"] * 3, ["unseat"], ["kill"]])
    drawn.other_faults_max = rng.choice([0, 0, 4])
    # Routes are there most of the time: what failed goes then, and those that it held behind it.
    drawn.fault_rates = (0.3, 1.0, 2.0)


def tangle(drawn: Climate, rng: random.Random) -> None:
    """Few keys, whose writers overlap and whose heads fail now and then: rows come late, below those that are held."""
    drawn.has_application = drawn.has_operator = drawn.has_poison = False
    drawn.keys, drawn.key_life_s = rng.choice([2, 4]), rng.choice([None, 2.0])
    drawn.is_guarded = rng.random() < 0.2
    drawn.writers = [10.0 for _ in range(rng.choice([2, 4]))]
    drawn.seconds = rng.choice([5.0, 10.0])
    drawn.open_share = rng.choice([0.3, 0.6])
    drawn.grip_share = rng.choice([0.0, 0.3])
    drawn.flaky_share = rng.choice([0.2, 0.4])
    drawn.options.broker.nacks = 0.0
    drawn.options.broker.confirm = (0.0, rng.choice([0.02, 0.2]))
    drawn.options.settings = replace(
        drawn.options.settings,
        ordering=Ordering.STRICT,
        on_unroutable=Unroutable.RETRY,
        retry_delays_s=(0.1,) * 20,
        age_max_s=None,
        rate_max=None,
    )
    drawn.options.broker.returns = rng.choice([0.3, 0.6])
    drawn.sure_faults += rng.choice([["unbind"], ["unseat"], ["kill"], ["stop"]])
    drawn.fault_rates = (0.3, 1.0)
    drawn.other_faults_max = 0


def neglect(drawn: Climate, rng: random.Random) -> None:
    """Nobody looks after what is parked but its retention."""
    drawn.has_operator = False
    drawn.seconds = 25.0
    drawn.writers = [rng.choice([0.5, 1.5]) for _ in range(2)]
    drawn.key_life_s = rng.choice([1.0, 4.0])
    drawn.flaky_share = 0.4
    drawn.options.settings = replace(
        drawn.options.settings,
        ordering=Ordering.STRICT,
        on_unroutable=rng.choice([Unroutable.RETRY, Unroutable.PARK, Unroutable.PARK]),
        retry_delays_s=(0.5, 2.0),
        parked_retention_s=rng.choice([0.5, 2.0, 5.0]),
    )
    drawn.sure_faults.append("unbind")
    drawn.other_faults_max = rng.choice([0, 0, 2])


def tug(drawn: Climate, rng: random.Random) -> None:
    """Shards change hands while rows of theirs are in flight."""
    settings, database = drawn.options.settings, drawn.options.database
    drawn.options.settings = replace(settings, lease_s=2.0, ordering=Ordering.STRICT)
    # Where every statement answers in time a lease that runs out is somebody's fault (L2).
    database.slow_share = database.other_refusals = 0.0
    drawn.relays = rng.choice([1, 2, 3])
    drawn.seconds = rng.choice([5.0, 10.0])
    drawn.sure_faults += rng.sample(["unseat", "start", "stop", "lock_shard", "freeze"], rng.choice([1, 2]))
    drawn.sure_faults += rng.choice([[], ["hush"], ["mute"], ["block"]])
    drawn.other_faults_max = 0
    drawn.options.broker.confirm = (0.0, rng.choice([0.05, 0.5]))


def restore(drawn: Climate, rng: random.Random) -> None:
    """The sequence is set back, with rows in its train or without."""
    drawn.is_set_back = True
    drawn.writers = [rng.choice([0.5, 2.0]) for _ in range(rng.randint(1, 2))]
    drawn.sure_faults.append("set_back")
    drawn.other_faults_max = rng.choice([0, 2, 6])


def rush(drawn: Climate, rng: random.Random) -> None:
    """Many short transactions at once: what begins and ends between two checks."""
    drawn.seconds = BRIEF_S
    drawn.writers = [40.0 for _ in range(rng.choice([2, 3, 6]))]
    drawn.is_hot = rng.random() < 0.5
    drawn.trigger_share = rng.choice([0.15, 0.6])


def listen(drawn: Climate, rng: random.Random) -> None:
    """Nothing fails, rows are rare, and only the doorbell tells of them."""
    options = drawn.options
    options.has_doorbell = True
    options.settings = replace(options.settings, poll_interval_s=PATIENCE_S, rate_max=None)
    options.broker.nacks = 0.0
    options.database.page_refusals = options.database.settle_refusals = options.database.other_refusals = 0.0
    # A statement takes long enough that a row comes meanwhile.
    options.database.latency = (0.001, rng.choice([0.002, 0.02, 0.02]))
    drawn.has_application = drawn.has_operator = drawn.has_poison = False
    drawn.has_lulls = True
    drawn.writers = [1.0 for _ in range(rng.choice([1, 1, 2]))]
    drawn.seconds = 20.0


def calm(drawn: Climate, rng: random.Random) -> None:
    """Nothing fails."""


def doze(drawn: Climate, rng: random.Random) -> None:
    """Relays freeze and wake, while rows of theirs are read, in flight, or set aside."""
    _try(drawn, rng)
    drawn.relays = rng.choice([2, 3])
    drawn.seconds = 10.0
    drawn.sure_faults += ["freeze"] * 3
    drawn.sure_faults += rng.choice([[], ["unseat"], ["lock_shard"], ["hush"], ["kill"], ["unbind"]])
    drawn.fault_rates = (1.0, 3.0)


def stumble(drawn: Climate, rng: random.Random) -> None:
    """Statements are refused, late or cut off while keys are held; the next life reads its way up a few seqs at a time."""
    _try(drawn, rng)
    database = drawn.options.database
    database.page_refusals, database.settle_refusals = rng.choice([0.0, 0.1]), rng.choice([0.1, 0.3])
    database.latency = (0.001, rng.choice([0.004, 0.02]))
    drawn.options.broker.latency = drawn.options.broker.confirm = (0.0001, rng.choice([0.0005, 0.01]))
    drawn.options.settings = replace(drawn.options.settings, page_span=2)
    drawn.writers = [10.0 for _ in range(rng.choice([2, 3]))]
    drawn.has_application = True
    drawn.application_rate, drawn.meddling = rng.choice([6.0, 20.0]), 0.5
    drawn.grip_share = rng.choice([0.3, 0.5])
    drawn.sure_faults += rng.choice([["cut_database"], ["terminate"], ["sever"], ["unseat"], ["kill"]])
    drawn.sure_faults += rng.choice([[], ["terminate"], ["crash"]])
    drawn.fault_rates = (1.0, 3.0)


def balk(drawn: Climate, rng: random.Random) -> None:
    """Triggers refuse every change of rows that hold others, more than fit beside them; nothing else touches their keys."""
    _try(drawn, rng)
    drawn.keys, drawn.key_life_s = rng.choice([4, 8]), rng.choice([0.5, 2.0])
    drawn.has_application = True
    drawn.application_rate, drawn.meddling = rng.choice([6.0, 20.0]), 0.9
    drawn.balking = rng.choice([0.4, 0.8])
    drawn.has_operator = rng.random() < 0.5
    drawn.options.settings = replace(drawn.options.settings, read_ahead_max=rng.choice([10, 10, 40]))
    drawn.sure_faults += ["unbind", *rng.choice([[], [], ["cut_database"], ["unseat"], ["kill"]])]
    drawn.fault_rates = (0.3, 1.0)


def relent(drawn: Climate, rng: random.Random) -> None:
    """Keys go on past what is parked, an operator brings that back beneath them, and somebody touches what is next."""
    _try(drawn, rng)
    drawn.has_application = drawn.has_operator = True
    drawn.application_rate, drawn.operator_rate = 20.0, rng.choice([3.0, 10.0])
    drawn.meddling, drawn.grip_share = 0.9, rng.choice([0.0, 0.3])
    drawn.is_hot = True
    drawn.writers = [rng.choice([10.0, 20.0]) for _ in range(rng.choice([1, 2]))]
    drawn.flaky_share = rng.choice([0.4, 0.7])
    drawn.options.broker.confirm = (0.0, rng.choice([0.05, 0.3]))
    drawn.options.settings = replace(
        drawn.options.settings,
        on_unroutable=Unroutable.PARK,
        holds_when_parked=False,
        read_ahead_max=rng.choice([10, 40]),
        held_keys_max=rng.choice([1, 3]),
    )
    drawn.options.database.settle_synchronous = True
    drawn.sure_faults += rng.choice([["unbind"], ["unbind", "unseat"]])
    drawn.fault_rates = (0.3, 1.0, 2.0)


def ponder(drawn: Climate, rng: random.Random) -> None:
    """An operator takes its time over parked heads and discards them; meanwhile the last rows of their keys come."""
    _try(drawn, rng)
    drawn.relays = rng.choice([1, 2])
    drawn.has_operator, drawn.operator_rate = True, rng.choice([5.0, 10.0])
    drawn.discard_share, drawn.ponders_s = rng.choice([0.7, 0.95]), (0.0, 0.01, 0.2, 0.5)
    # Short lives: whatever comes later of a key frees it, and so does a shard's next owner (H3).
    drawn.keys, drawn.key_life_s = rng.choice([4, 8]), rng.choice([0.5, 1.0])
    drawn.flaky_share = rng.choice([0.4, 0.7])
    drawn.options.settings = replace(
        drawn.options.settings, on_unroutable=Unroutable.PARK, holds_when_parked=True, held_keys_max=500
    )
    drawn.sure_faults.append("unbind")
    drawn.fault_rates = (0.3, 1.0)


def usurp(drawn: Climate, rng: random.Random) -> None:
    """Relays are taken over and do not know yet, while heads of keys fail."""
    _try(drawn, rng)
    drawn.relays = rng.choice([2, 3])
    drawn.seconds = 10.0
    drawn.sure_faults += ["usurp", rng.choice(["usurp", "unbind", "unseat"])]
    drawn.fault_rates = (1.0, 3.0)


def _try(drawn: Climate, rng: random.Random) -> None:
    """Few keys in order, whose heads fail and are soon tried again."""
    drawn.has_faults = True
    drawn.has_operator = drawn.has_application = drawn.has_poison = False
    drawn.keys, drawn.key_life_s = rng.choice([2, 4]), rng.choice([None, 2.0])
    drawn.is_guarded = rng.random() < 0.5
    drawn.writers = [rng.choice([4.0, 10.0]) for _ in range(rng.choice([1, 2, 3]))]
    drawn.seconds = rng.choice([5.0, 10.0])
    drawn.flaky_share = rng.choice([0.2, 0.4])
    drawn.options.broker.nacks = 0.0
    drawn.options.broker.returns = rng.choice([0.3, 0.6])
    drawn.options.settings = replace(
        drawn.options.settings,
        ordering=Ordering.STRICT,
        on_unroutable=Unroutable.RETRY,
        retry_delays_s=(rng.choice([0.1, 0.5]),) * 20,
        age_max_s=None,
        rate_max=None,
    )
    drawn.other_faults_max = 0


STORMY: Final[dict[Season, int]] = {
    mix: 4,
    fray: 2,
    contend: 4,
    tangle: 2,
    neglect: 1,
    tug: 2,
    restore: 1,
    rush: 3,
}
QUIET: Final[dict[Season, int]] = {calm: 1, rush: 1, listen: 2}


RARE: Final[dict[Season, int]] = {doze: 1, stumble: 2, balk: 1, relent: 1}
RARE_SHARE: Final = 0.15
"""Of the seeds. These draw from a source of their own: the histories of the others are what they were without them."""

RARER: Final[dict[Season, int]] = {ponder: 1}
RARER_SHARE: Final = 0.03
"""The same, from the scale's other end: the histories of `RARE`, too, are what they were."""


RAREST: Final[dict[Season, int]] = {usurp: 1}
RAREST_SHARE: Final = 0.02
"""The same once more, beside `RARER`."""


def draw(drawn: Climate, rng: random.Random, seed: object) -> None:
    rare = source(seed, "out of season")
    at = rare.random()
    if at < RARE_SHARE:
        weights, rng = RARE, rare
    elif at >= 1.0 - RARER_SHARE:
        weights, rng = RARER, rare
    elif at >= 1.0 - RARER_SHARE - RAREST_SHARE:
        weights, rng = RAREST, rare
    else:
        weights = STORMY if drawn.has_faults else QUIET
    (season,) = rng.choices(list(weights), list(weights.values()))
    drawn.season = season.__name__
    season(drawn, rng)
