"""What a consumer can be told, and what makes no sense together."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from aiormq import spec

from relay.errors import ConfigError
from relay.inbox.order import Order
from relay.inbox.outcome import BrokerRetry, RetryBudget, RetryPolicy
from relay.topology import names
from relay.values import DURATION_S_MAX, short_string, utf8


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerSettings:
    """Times in seconds. Raises ConfigError with every problem at once.

    `workers` each have a channel, a transaction and at most `prefetch` messages in hand: with the defaults 4
    transactions at a time, and 80 messages that nobody else can work on meanwhile. `time_limit_s` is one message's,
    from claim to COMMIT. `grace_s` is what a stop leaves to the messages in work. `schema_versions` are those that the
    handler knows (None: any); another one is parked at once. `first_version`: what an aggregate begins with under
    `Order.VERSION`, None for a consumer that joins later. `retention_s` None keeps `processed_messages` for ever;
    otherwise it is longer than `longest_replay_s`, the age of the oldest message that may still be redriven or
    replayed, which is never below the ladder. `parking_queue` None: the one that belongs to the queue.
    """

    workers: int = 4
    prefetch: int = 20
    order: Order = Order.NONE
    first_version: int | None = 1
    retry: RetryBudget = field(default_factory=RetryPolicy)
    time_limit_s: float = 30.0
    grace_s: float = 8.0
    schema_versions: Collection[int] | None = frozenset({1})
    version: str = ""
    parking_exchange: str = names.DEFAULT_EXCHANGE
    parking_queue: str | None = None
    retention_s: float | None = None
    longest_replay_s: float = 14 * 86400.0
    gauge_interval_s: float = 15.0

    def __post_init__(self) -> None:
        problems = list(_problems(self))
        if problems:
            raise ConfigError(problems)

    @property
    def returns_to_broker(self) -> bool:
        """Whether the queue itself delays what failed, rather than a retry queue."""
        return isinstance(self.retry, BrokerRetry)

    def parking_queue_of(self, queue: str) -> str:
        """Where messages of `queue` wait for an operator."""
        return self.parking_queue or names.parking_queue(queue)

    def queues_beside(self, queue: str) -> tuple[str, ...]:
        """The queues that a consumer of `queue` publishes to: retries, parking."""
        delays_s = () if self.returns_to_broker else self.retry.delays_s
        return (*(names.retry_queue(queue, delay_s) for delay_s in delays_s), self.parking_queue_of(queue))


def _problems(settings: ConsumerSettings) -> list[str]:
    checks = (
        (1 <= settings.workers <= 1000, f"workers={settings.workers}: allowed are 1 to 1000"),
        (1 <= settings.prefetch <= 65535, f"prefetch={settings.prefetch}: allowed are 1 to 65535"),
        (
            settings.order is not Order.SINGLE_ACTIVE or settings.workers == 1,
            f"workers={settings.workers}: order=single_active has one worker; more queues are more consumers",
        ),
        (settings.time_limit_s > 0, f"time_limit_s={settings.time_limit_s}: above zero"),
        (settings.grace_s >= 0, f"grace_s={settings.grace_s}: not below zero"),
        (settings.gauge_interval_s > 0, f"gauge_interval_s={settings.gauge_interval_s}: above zero"),
        (
            settings.retention_s is None or settings.retention_s > shortest_retention_s(settings),
            f"retention_s={settings.retention_s}: longer than the longest replay, {shortest_retention_s(settings):g} s "
            "(longest_replay_s and the retry ladder); what is forgotten earlier takes effect twice",
        ),
        (
            _is_published_to(settings.parking_exchange),
            f"parking_exchange={settings.parking_exchange!r}: allowed is what the driver publishes to, up to 127 of "
            "a-z A-Z 0-9 - _ . : @ # , / + and the space; the default exchange reaches a queue of any name",
        ),
    )
    return [problem for holds, problem in (*checks, *_retry_checks(settings)) if not holds]


def _is_published_to(exchange: str) -> bool:
    try:
        spec.Basic.Publish(exchange=exchange)
    except ValueError:
        return False
    return True


def queue_problems(queue: str, settings: ConsumerSettings) -> list[str]:
    """What of the queues that a consumer of `queue` needs, itself included, has an impossible name."""
    problems = []
    for name in (queue, *settings.queues_beside(queue)):
        try:
            short_string(utf8(name))
        except ValueError as error:
            problems.append(f"queue: {name!r}: {error}; allowed: UTF-8, up to 255 bytes with what is added to it")
    return problems


def _retry_checks(settings: ConsumerSettings) -> Sequence[tuple[bool, str]]:
    retry = settings.retry
    if isinstance(retry, RetryPolicy):
        return (
            (
                all(0 < delay_s <= DURATION_S_MAX for delay_s in retry.delays_s),
                f"retry.delays_s={retry.delays_s}: every delay is above zero, and no longer than a hundred years",
            ),
            (0 <= retry.jitter <= 1, f"retry.jitter={retry.jitter}: allowed is a share from 0 to 1"),
        )
    return (
        (retry.delay_min_s > 0, f"retry.delay_min_s={retry.delay_min_s}: above zero"),
        (
            retry.delay_max_s >= retry.delay_min_s,
            f"retry.delay_max_s={retry.delay_max_s}: not below delay_min_s, {retry.delay_min_s}",
        ),
        (0 <= retry.retries_max <= 1000, f"retry.retries_max={retry.retries_max}: allowed are 0 to 1000"),
        (
            settings.order is not Order.SINGLE_ACTIVE,
            "retry=BrokerRetry: order=single_active retries in place, and in a queue that delays by itself later messages "
            "pass those that a dead consumer had in hand; allowed: RetryPolicy, on a queue without delayed retry",
        ),
    )


def shortest_retention_s(settings: ConsumerSettings) -> float:
    """What the inbox has to remember at least: the longest replay, and a whole ladder after it."""
    return settings.longest_replay_s + sum(settings.retry.delays_s)
