"""What a broker still has of a topology that its file no longer describes: queues, hash exchanges, policies, bindings.

Pure. They are known by the names that the topology gives; a shard only under our policy, since NAME.7 may be somebody
else's. A binding that takes messages to what is left over, or out of a hash exchange, is a conflict. All else is told, and
waits for whoever removes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any

from relay.text import shell_words
from relay.topology.changes import Action, Change, Found, binding_of, by_name, matches
from relay.topology.expand import PLUGINS, BindingObject, Expansion, PolicyObject, policy_name
from relay.topology.names import shard_exchange
from relay.values import duration


@dataclass(frozen=True, slots=True)
class Left:
    """Names."""

    queues: Set[str]
    exchanges: Set[str]


def of(wanted: Expansion, found: Found) -> Left:
    """The queues and hash exchanges that are left over."""
    policies = by_name(found.policies)
    queues = by_name(found.queues).keys() - {queue.name for queue in wanted.queues}
    hashes = {document["name"] for document in found.exchanges if document.get("type") in PLUGINS}
    return Left(
        {name for name in queues if _is_retry(name, wanted.names) or _is_work(name, wanted.names, policies)},
        hashes & {shard_exchange(name) for name in wanted.names} - _hash_exchanges(wanted),
    )


def pattern(policy: PolicyObject, now: str, left: Left) -> str:
    """Of a policy whose pattern is `now` another one: what waits in a queue that was ours keeps its limits and its dead
    letter exchange.
    """
    lost = [queue for queue in left.queues if matches(now, queue) and not matches(policy.pattern, queue)]
    return policy.wide if any(matches(policy.wide, queue) for queue in lost) else policy.pattern


def still_bound(wanted: Expansion, found: Found, left: Left) -> Iterator[Change]:
    """Messages go where the file has no queue for them, so that nobody may consume them."""
    hashes = _hash_exchanges(wanted)
    for binding in _unwanted_bindings(wanted, found):
        is_left = binding.destination in (left.queues if binding.to_queue else left.exchanges)
        # Behind an exchange that is left over is only what comes into it.
        if binding.source in hashes or (is_left and binding.source not in left.exchanges):
            yield _binding(Action.CONFLICT, binding, ": messages still go there", "unbind it yourself")


def told(wanted: Expansion, found: Found, left: Left) -> Iterator[Change]:
    """Everything that does no harm."""
    for name in sorted(left.queues):
        detail = f"a queue of {_base(name, wanted.names)} that the file does not describe"
        yield Change(Action.LEFTOVER, "queue", name, detail, "let it run empty, then delete it yourself")
    for name in sorted(left.exchanges):
        detail = "a hash exchange that the file does not describe"
        yield Change(Action.LEFTOVER, "exchange", name, detail, "delete it yourself, once nothing is bound to it")
    for name in sorted(by_name(found.policies).keys() - {policy.name for policy in wanted.policies}):
        if name.startswith(policy_name("")) and _is_retry(name.removeprefix(policy_name("")), wanted.names):
            clear = shell_words(["rabbitmqctl", "clear_policy", "-p", wanted.vhost, name])
            mend = f"{clear}, once its queue is gone"
            yield Change(Action.LEFTOVER, "policy", name, "of such a queue", mend)
    queues, hashes = {queue.name for queue in wanted.queues}, _hash_exchanges(wanted)
    for binding in _unwanted_bindings(wanted, found):
        is_ours = binding.destination in (queues if binding.to_queue else hashes)
        if is_ours and binding.source not in hashes:
            yield _binding(Action.LEFTOVER, binding, "", "describe it, or unbind it yourself")


def _binding(action: Action, binding: BindingObject, effect: str, mend: str) -> Change:
    detail = f"{binding.key!r}, which the file does not have{effect}"
    return Change(action, "binding", f"{binding.source} -> {binding.destination}", detail, mend)


def _unwanted_bindings(wanted: Expansion, found: Found) -> Iterator[BindingObject]:
    """Those of the default exchange are every queue's own."""
    described = set(wanted.bindings)
    bindings = (binding_of(document) for document in found.bindings)
    return (binding for binding in bindings if binding.source and binding not in described)


def _hash_exchanges(wanted: Expansion) -> set[str]:
    return {exchange.name for exchange in wanted.exchanges if exchange.type in PLUGINS}


# ---------------------------------------------------------------- names


def _base(queue: str, names: Set[str]) -> str | None:
    """The file's queue that one of this name belongs to: as itself, a shard, or the retry queue of either."""
    work = queue.rpartition(".retry.")[0] or queue
    if work in names:
        return work
    base, _, number = work.rpartition(".")
    return base if base in names and number.isascii() and number.isdecimal() else None


def _is_retry(queue: str, names: Set[str]) -> bool:
    return _is_delay(queue.rpartition(".retry.")[2]) and ".retry." in queue and _base(queue, names) is not None


def _is_work(queue: str, names: Set[str], policies: Mapping[str, Mapping[str, Any]]) -> bool:
    """A shard, or the queue itself beside its shards."""
    if (base := _base(queue, names)) is None:
        return False
    return queue == base or matches(policies.get(policy_name(base), {}).get("pattern", "^$"), queue)


def _is_delay(text: str) -> bool:
    try:
        return duration(text) > 0
    except ValueError:
        return False
