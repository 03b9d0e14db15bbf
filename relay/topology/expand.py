"""A topology into the objects that a broker keeps: exchanges, queues, bindings, policies, permissions.

Pure; no server is asked. What can be a policy is one, since a policy can be changed and a queue's argument cannot; a queue
has one policy that says everything, because RabbitMQ applies one and merges none.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from relay.topology.contradictions import retry_queues, work_queues
from relay.topology.description import BrokerRetry, Hash, Parking, Queue, QueueType, Shards, Strategy, Topology
from relay.topology.names import BROKER_RETRY_VERSION_MIN, DEFAULT_EXCHANGE, delay_ms, shard_exchange

Arguments = tuple[tuple[str, str | int | bool], ...]
"""An AMQP table, sorted by name."""

UNLIMITED: Final = 2**31 - 1
"""A delivery limit that nothing reaches. RabbitMQ 4 gives 20 to whoever names none, and an operator's looks into a parking
queue would drop its messages; its -1 for none is refused by 3.x."""

VERSION_MIN: Final = (3, 10)
"""Of RabbitMQ: TTL and at-least-once dead lettering in quorum queues."""

FEATURE_FLAG: Final = "stream_queue"
"""Without it at-least-once dead lettering silently is at-most-once (RabbitMQ's page on quorum queues)."""

PLUGINS: Final = {
    "x-consistent-hash": "rabbitmq_consistent_hash_exchange",
    # A part of the broker itself from 4.3 on.
    "x-modulus-hash": "rabbitmq_sharding",
}

_HASH_PROPERTIES: Final = ("message_id", "correlation_id")
_EMPTY: Final = "^$"


@dataclass(frozen=True, slots=True)
class ExchangeObject:
    """Durable, not internal, never deleted by itself."""

    name: str
    type: str
    arguments: Arguments = ()


@dataclass(frozen=True, slots=True)
class QueueObject:
    """Durable. `is_consumed` is False for retry queues: a consumer there would end the waiting."""

    name: str
    arguments: Arguments
    is_consumed: bool = True


@dataclass(frozen=True, slots=True)
class BindingObject:
    """`to_queue` says whether `destination` is a queue or an exchange."""

    source: str
    destination: str
    to_queue: bool
    key: str
    arguments: Arguments = ()


@dataclass(frozen=True, slots=True)
class PolicyObject:
    """Applies to queues. `queues` are those that it is meant for; `wide` is the pattern while what they were before, shards
    or none, is still there."""

    name: str
    pattern: str
    wide: str
    priority: int
    definition: Arguments
    queues: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PermissionObject:
    """Of an existing user; the patterns are RabbitMQ's."""

    user: str
    configure: str
    write: str
    read: str


AnyObject = ExchangeObject | QueueObject | BindingObject | PolicyObject | PermissionObject


@dataclass(frozen=True, slots=True)
class Expansion:
    """Everything, in the order in which it can be declared. `names` are those of the file's queues, sharded or not."""

    vhost: str
    names: frozenset[str]
    exchanges: tuple[ExchangeObject, ...]
    policies: tuple[PolicyObject, ...]
    queues: tuple[QueueObject, ...]
    bindings: tuple[BindingObject, ...]
    permissions: tuple[PermissionObject, ...]
    version_min: tuple[int, int]
    needs_feature_flag: bool


def expand(topology: Topology) -> Expansion:
    """The objects of a checked topology."""
    exchanges = {exchange.name: ExchangeObject(exchange.name, exchange.type.value) for exchange in topology.exchanges}
    queues: dict[str, QueueObject] = {}
    policies: dict[str, PolicyObject] = {}
    bindings: dict[BindingObject, None] = {}
    for queue in topology.queues:
        for exchange in _exchanges(queue):
            exchanges.setdefault(exchange.name, exchange)
        queues.update((wanted.name, wanted) for wanted in _queues(queue))
        policies.update((wanted.name, wanted) for wanted in _policies(queue, topology.policy_priority))
        bindings.update((wanted, None) for wanted in _bindings(queue))
    has_ladder = any(retry_queues(queue) for queue in topology.queues)
    return Expansion(
        vhost=topology.vhost,
        names=frozenset(queue.name for queue in topology.queues),
        exchanges=tuple(exchanges.values()),
        policies=tuple(policies.values()),
        queues=tuple(queues.values()),
        bindings=tuple(bindings),
        permissions=tuple(_permissions(topology)),
        version_min=(
            BROKER_RETRY_VERSION_MIN
            if any(isinstance(queue.retry, BrokerRetry) for queue in topology.queues)
            else VERSION_MIN
        ),
        needs_feature_flag=has_ladder or any(queue.strategy is Strategy.AT_LEAST_ONCE for queue in topology.queues),
    )


# ---------------------------------------------------------------- one queue


def _exchanges(queue: Queue) -> list[ExchangeObject]:
    """Those that the file need not declare."""
    found = []
    if queue.dead_letter is not None:
        found.append(ExchangeObject(queue.dead_letter, "direct"))
    if queue.shards is not None:
        found.append(ExchangeObject(shard_exchange(queue.name), *_hash(queue.shards)))
    return found


def _hash(shards: Shards) -> tuple[str, Arguments]:
    if shards.hash is Hash.MODULUS:
        return "x-modulus-hash", ()
    if shards.by == "routing_key":
        return "x-consistent-hash", ()
    kind = "hash-property" if shards.by in _HASH_PROPERTIES else "hash-header"
    return "x-consistent-hash", ((kind, shards.by),)


def _queues(queue: Queue) -> list[QueueObject]:
    quorum = _sorted({"x-queue-type": QueueType.QUORUM.value})
    # Only an argument can say it: there is no policy for it.
    single = {"x-single-active-consumer": True} if queue.single_active_consumer else {}
    work = _sorted({"x-queue-type": queue.type.value, **single})
    found = [QueueObject(name, work) for name in work_queues(queue)]
    found += [QueueObject(name, quorum, is_consumed=False) for name, _, _ in retry_queues(queue)]
    if queue.parking is not None:
        found.append(QueueObject(queue.parking.name, quorum))
    return found


def _bindings(queue: Queue) -> list[BindingObject]:
    is_sharded = queue.shards is not None
    target = shard_exchange(queue.name) if is_sharded else queue.name
    found = [
        BindingObject(binding.exchange, target, not is_sharded, binding.key, binding.arguments)
        for binding in queue.bindings
    ]
    if is_sharded:
        # The consistent hash takes the key for a weight: all shards alike. The modulus hash does not look at it.
        found += [BindingObject(target, shard, True, "1") for shard in work_queues(queue)]
    if queue.parking is not None and queue.dead_letter is not None:
        found.append(BindingObject(queue.dead_letter, queue.parking.name, True, queue.parking.name))
    return found


# ---------------------------------------------------------------- policies


def _policies(queue: Queue, priority: int) -> list[PolicyObject]:
    name, shard = re.escape(queue.name), r"\.[0-9]+"
    pattern, wide = f"^{name}{'' if queue.shards is None else shard}$", f"^{name}({shard})?$"
    found = [PolicyObject(policy_name(queue.name), pattern, wide, priority, _work(queue), work_queues(queue))]
    for retry, back_to, delay_s in retry_queues(queue):
        definition = _sorted(
            {
                "message-ttl": delay_ms(delay_s),
                "dead-letter-exchange": DEFAULT_EXCHANGE,
                "dead-letter-routing-key": back_to,
                "dead-letter-strategy": Strategy.AT_LEAST_ONCE.value,
                "overflow": "reject-publish",
            }
        )
        found.append(_policy_of_one(retry, priority, definition))
    if queue.parking is not None:
        found.append(_policy_of_one(queue.parking.name, priority, _parked(queue.parking)))
    return found


def _policy_of_one(queue: str, priority: int, definition: Arguments) -> PolicyObject:
    pattern = f"^{re.escape(queue)}$"
    return PolicyObject(policy_name(queue), pattern, pattern, priority, definition, (queue,))


def policy_name(queue: str) -> str:
    """Not the queue's own name: who has made a policy for it by hand may have called it so."""
    return f"topology.{queue}"


def _work(queue: Queue) -> Arguments:
    definition: dict[str, str | int | bool] = {
        "overflow": queue.overflow.value,
        **_limits(queue.max_length, queue.max_bytes),
    }
    if queue.dead_letter is not None and queue.parking is not None:
        definition["dead-letter-exchange"] = queue.dead_letter
        definition["dead-letter-routing-key"] = queue.parking.name
        if queue.type is QueueType.QUORUM:
            definition["dead-letter-strategy"] = queue.strategy.value
    if queue.delivery_limit is not None:
        definition["delivery-limit"] = queue.delivery_limit
    if isinstance(queue.retry, BrokerRetry):
        # `all`: a consumer that says nack instead of reject must not spin either, though nack does not count.
        definition["delayed-retry-type"] = "all"
        definition["delayed-retry-min"] = delay_ms(queue.retry.minimum_s)
        definition["delayed-retry-max"] = delay_ms(queue.retry.maximum_s)
    return _sorted(definition)


def _parked(parking: Parking) -> Arguments:
    """A full parking queue refuses: whoever parks then keeps the message."""
    definition: dict[str, str | int | bool] = {
        "overflow": "reject-publish",
        "delivery-limit": UNLIMITED,
        **_limits(parking.max_length, parking.max_bytes),
    }
    if parking.retention_s is not None:
        definition["message-ttl"] = delay_ms(parking.retention_s)
    return _sorted(definition)


def _limits(max_length: int | None, max_bytes: int | None) -> dict[str, str | int | bool]:
    given = {"max-length": max_length, "max-length-bytes": max_bytes}
    return {key: value for key, value in given.items() if value is not None}


# ---------------------------------------------------------------- permissions


def _permissions(topology: Topology) -> list[PermissionObject]:
    """Who looks after parking reads those queues, and writes to the exchanges that redriven messages go back to."""
    reads: dict[str, set[str]] = {}
    writes: dict[str, set[str]] = {}
    for queue in topology.queues:
        if queue.parking is not None and (user := queue.parking.user) is not None:
            reads.setdefault(user, set()).add(queue.parking.name)
            writes.setdefault(user, set()).update(binding.exchange for binding in queue.bindings)
    return [PermissionObject(user, _EMPTY, _any_of(writes[user]), _any_of(reads[user])) for user in sorted(reads)]


def _any_of(names: set[str]) -> str:
    if not names:
        return _EMPTY
    patterns = [re.escape(name) for name in sorted(names)]
    return f"^{patterns[0]}$" if len(patterns) == 1 else f"^({'|'.join(patterns)})$"


def _sorted(table: dict[str, str | int | bool]) -> Arguments:
    return tuple(sorted(table.items()))
