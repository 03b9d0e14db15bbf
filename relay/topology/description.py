"""What a topology file says, checked: exchanges and work queues, before anything is derived from them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class ExchangeType(StrEnum):
    """The types of AMQP 0-9-1."""

    TOPIC = "topic"
    DIRECT = "direct"
    FANOUT = "fanout"
    HEADERS = "headers"


class QueueType(StrEnum):
    """How the broker keeps a queue."""

    QUORUM = "quorum"
    CLASSIC = "classic"


class Strategy(StrEnum):
    """How safely the broker moves a message on when it dies (quorum queues only have the choice)."""

    AT_LEAST_ONCE = "at-least-once"
    AT_MOST_ONCE = "at-most-once"


class Overflow(StrEnum):
    """What a full queue does."""

    REJECT_PUBLISH = "reject-publish"
    DROP_HEAD = "drop-head"


class Hash(StrEnum):
    """The exchange that deals messages out to shards."""

    CONSISTENT = "consistent"
    MODULUS = "modulus"


@dataclass(frozen=True, slots=True)
class Exchange:
    """Always durable."""

    name: str
    type: ExchangeType


@dataclass(frozen=True, slots=True)
class Binding:
    """From `exchange`, which the file declares or RabbitMQ has by itself (`amq.…`)."""

    exchange: str
    key: str
    arguments: tuple[tuple[str, str | int | bool], ...] = ()


@dataclass(frozen=True, slots=True)
class BrokerRetry:
    """RabbitMQ's own delayed retry (4.3 or later): `min(minimum * failures, maximum)`, in seconds."""

    minimum_s: float
    maximum_s: float


@dataclass(frozen=True, slots=True)
class Shards:
    """`by` is a header's name, or `routing_key`, `message_id`, `correlation_id`."""

    count: int
    hash: Hash
    by: str


@dataclass(frozen=True, slots=True)
class Parking:
    """Where messages wait for an operator. `retention_s` None: for ever. `user` may read it and send back to work."""

    name: str
    retention_s: float | None
    user: str | None
    max_length: int | None
    max_bytes: int | None


@dataclass(frozen=True, slots=True)
class Queue:
    """A work queue and what belongs to it; `retry` is the ladder in seconds, ascending, or the broker's own.

    `dead_letter` and `parking` are None together: what dies then is gone.
    """

    name: str
    type: QueueType
    bindings: tuple[Binding, ...]
    single_active_consumer: bool
    shards: Shards | None
    retry: tuple[float, ...] | BrokerRetry
    dead_letter: str | None
    parking: Parking | None
    strategy: Strategy
    overflow: Overflow
    delivery_limit: int | None
    max_length: int | None
    max_bytes: int | None


@dataclass(frozen=True, slots=True)
class Topology:
    """One vhost's. `policy_priority` is that of every policy; of several that match a queue only the highest applies."""

    vhost: str
    policy_priority: int
    exchanges: tuple[Exchange, ...]
    queues: tuple[Queue, ...]
