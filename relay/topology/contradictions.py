"""What is allowed each by itself and impossible together, in a topology whose values were read.

Pure. Yields the path of the key to change and the words; `places` says where each queue and exchange stands in the file.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping

from relay.topology.description import (
    BrokerRetry,
    ExchangeType,
    Hash,
    Overflow,
    Parking,
    Queue,
    QueueType,
    Strategy,
    Topology,
)
from relay.topology.fields import name as checked_name
from relay.topology.lines import Path
from relay.topology.names import retry_queue, shard_exchange, shard_queue
from relay.values import SHORT_STRING_BYTES_MAX

Problem = tuple[Path, str]


def contradictions(topology: Topology, places: Mapping[str, Path]) -> Iterator[Problem]:
    """Every contradiction, queue by queue."""
    types = {exchange.name: exchange.type for exchange in topology.exchanges}
    for queue in topology.queues:
        path = places[f"queue {queue.name}"]
        yield from _quorum_only(queue, path)
        yield from _ladder(queue, path)
        yield from _dead_letters(queue, path, types)
        yield from _bindings(queue, path, types)
        yield from _shards(queue, path)
    yield from _names(topology, places)
    yield from _parking(topology, places)


def work_queues(queue: Queue) -> tuple[str, ...]:
    """The queues that have consumers: the shards, or the one."""
    if queue.shards is None:
        return (queue.name,)
    return tuple(shard_queue(queue.name, number) for number in range(queue.shards.count))


def retry_queues(queue: Queue) -> tuple[tuple[str, str, float], ...]:
    """(retry queue, work queue, delay in seconds) of each step of each ladder."""
    if isinstance(queue.retry, BrokerRetry):
        return ()
    return tuple((retry_queue(work, delay), work, delay) for work in work_queues(queue) for delay in queue.retry)


def _quorum_only(queue: Queue, path: Path) -> Iterator[Problem]:
    if queue.type is QueueType.QUORUM:
        return
    if queue.strategy is Strategy.AT_LEAST_ONCE:
        allowed = f'type = "{QueueType.QUORUM}", or strategy = "{Strategy.AT_MOST_ONCE}"'
        yield (*path, "strategy"), f"at-least-once dead lettering on a classic queue; allowed: {allowed}"
    if queue.delivery_limit is not None:
        yield (*path, "delivery_limit"), f'a classic queue has no delivery limit; allowed: type = "{QueueType.QUORUM}"'
    if isinstance(queue.retry, BrokerRetry):
        yield (
            (*path, "retry"),
            f'a classic queue cannot delay by itself; allowed: type = "{QueueType.QUORUM}", or a ladder',
        )


def _ladder(queue: Queue, path: Path) -> Iterator[Problem]:
    if isinstance(queue.retry, BrokerRetry):
        if queue.retry.minimum_s > queue.retry.maximum_s:
            yield (*path, "retry_max"), "retry_max is below retry_min; allowed: at least retry_min"
        if queue.single_active_consumer:
            words = "a queue that delays by itself lets later messages pass those that a dead consumer had in hand"
            yield (*path, "retry"), f"{words}; allowed: a ladder, or single_active_consumer = false"
    elif list(queue.retry) != sorted(set(queue.retry)):
        yield (*path, "retry"), "a retry ladder goes up, each delay once; allowed: ascending durations"


def _dead_letters(queue: Queue, path: Path, types: Mapping[str, ExchangeType]) -> Iterator[Problem]:
    if queue.dead_letter is None:
        if queue.retry:
            yield (*path, "retry"), "retries end in a parking queue; allowed: with dead_letter = an exchange's name"
        if queue.strategy is Strategy.AT_LEAST_ONCE:
            yield (*path, "strategy"), "at-least-once to nowhere; allowed: with dead_letter = an exchange's name"
        return
    try:
        checked_name(queue.dead_letter)
    except ValueError as error:
        words = f"the dead letter exchange would be {queue.dead_letter}: {error}"
        yield (*path, "bind"), f"{words}; allowed: with dead_letter = an exchange's name"
    kind = types.get(queue.dead_letter, ExchangeType.DIRECT)
    if kind not in (ExchangeType.DIRECT, ExchangeType.TOPIC):
        words = f"the {kind} exchange {queue.dead_letter} cannot tell parking queues apart; allowed: direct, topic"
        yield (*path, "dead_letter"), words
    if queue.strategy is Strategy.AT_LEAST_ONCE and queue.overflow is Overflow.DROP_HEAD:
        words = f'at-least-once dead lettering needs overflow = "{Overflow.REJECT_PUBLISH}"'
        yield (*path, "overflow"), f'{words}; allowed: that, or strategy = "{Strategy.AT_MOST_ONCE}"'


def _bindings(queue: Queue, path: Path, types: Mapping[str, ExchangeType]) -> Iterator[Problem]:
    for number, binding in enumerate(queue.bindings):
        here = (*path, "bind", number)
        if binding.exchange not in types and not binding.exchange.startswith("amq."):
            near = difflib.get_close_matches(binding.exchange, list(types), n=1, cutoff=0.6)
            nearest = f"; nearest: {near[0]}" if near else ""
            words = f"no [[exchange]] is named {binding.exchange!r}{nearest}; allowed: one of the file's, or amq.…"
            yield (*here, "exchange"), words
        kind = types.get(binding.exchange)
        if kind in (ExchangeType.TOPIC, ExchangeType.DIRECT) and not binding.key:
            yield (
                here,
                f"a binding of the {kind} exchange {binding.exchange} without a key; allowed: key = a routing key",
            )
        if kind is ExchangeType.HEADERS and not binding.arguments:
            words = f"a binding of the headers exchange {binding.exchange} without arguments"
            yield here, f'{words}; allowed: arguments = {{ x-match = "all", … }}'
        if len(set(queue.bindings[:number])) != len(set(queue.bindings[: number + 1])) - 1:
            yield here, "the same binding twice; allowed: once"


def _shards(queue: Queue, path: Path) -> Iterator[Problem]:
    shards = queue.shards
    if shards is None or shards.hash is Hash.CONSISTENT:
        return
    if shards.by != "routing_key":
        allowed = 'shard_by = "routing_key", or hash = "consistent"'
        yield (*path, "shard_by"), f"the modulus hash sees only the routing key; allowed: {allowed}"


def _names(topology: Topology, places: Mapping[str, Path]) -> Iterator[Problem]:
    """Names that are derived belong to what they are derived from, and must fit."""
    derived: dict[str, str] = {}
    parked: dict[str, str] = {}
    for queue in topology.queues:
        for retry, work, _ in retry_queues(queue):
            derived[retry] = f"is the retry queue of {work}: no consumer, no bindings of its own"
        if queue.shards is not None:
            for work in work_queues(queue):
                derived[work] = f"is a shard of {queue.name}"
        mine = [*work_queues(queue), *(retry for retry, _, _ in retry_queues(queue)), shard_exchange(queue.name)]
        if queue.parking is not None:
            parked.setdefault(queue.parking.name, f"is the parking queue of {queue.name}")
            mine.append(queue.parking.name)
        longest = max(mine, key=lambda name: len(name.encode()))
        if len(longest.encode()) > SHORT_STRING_BYTES_MAX:
            words = f"{longest!r}, which is named after it, is longer than {SHORT_STRING_BYTES_MAX} bytes"
            yield (*places[f"queue {queue.name}"], "name"), f"{words}; allowed: a shorter name"
    for queue in topology.queues:
        path = places[f"queue {queue.name}"]
        if (what := derived.get(queue.name) or parked.get(queue.name)) is not None:
            yield (*path, "name"), f"{queue.name} {what}; allowed: another name, or no [[queue]] of it"
        if queue.parking is not None and (what := derived.get(queue.parking.name)) is not None:
            yield (*path, "parking", "name"), f"the parking queue {queue.parking.name} {what}; allowed: another name"
    shard_exchanges = {shard_exchange(queue.name) for queue in topology.queues if queue.shards is not None}
    for exchange in topology.exchanges:
        if exchange.name in shard_exchanges:
            words = f"{exchange.name} is the hash exchange of a sharded queue; allowed: another name"
            yield (*places[f"exchange {exchange.name}"], "name"), words


def _parking(topology: Topology, places: Mapping[str, Path]) -> Iterator[Problem]:
    """Queues may share a parking queue; it has one retention, one user, one limit."""
    first: dict[str, tuple[Queue, Parking]] = {}
    for queue in topology.queues:
        if (parking := queue.parking) is None:
            continue
        other, agreed = first.setdefault(parking.name, (queue, parking))
        if agreed != parking:
            words = f"the parking queue {parking.name} is shared with {other.name} and described differently"
            yield (*places[f"queue {queue.name}"], "parking"), f"{words}; allowed: the same table in both"
