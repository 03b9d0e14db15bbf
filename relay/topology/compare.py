"""What a broker has against what a topology wants: changes to make, conflicts that nobody makes by himself, leftovers.

Pure. Owns the rule that nothing is ever deleted: a queue or exchange that exists with other arguments is a conflict, and
what the file does not describe is left over, told and left alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from relay.topology import conflicts
from relay.topology.changes import Action, Change, Found, by_name, difference, table_differences, word
from relay.topology.expand import (
    BindingObject,
    ExchangeObject,
    Expansion,
    PermissionObject,
    PolicyObject,
)
from relay.values import duration


def compare(wanted: Expansion, found: Found) -> list[Change]:
    """Conflicts first, then changes in the order in which they can be made, leftovers last; empty: the same."""
    if hopeless := list(conflicts.of_the_broker(wanted, found)):
        # Of what this broker cannot keep, half would be worse than nothing.
        return hopeless
    unsolved = list(conflicts.of_objects(wanted, found))
    impossible = {(conflict.kind, conflict.name) for conflict in unsolved}
    changes = [
        change
        for change in (
            *_missing_exchanges(wanted, found),
            *_policies(wanted, found),
            *_missing_queues(wanted, found),
            *_missing_bindings(wanted, found),
            *_permissions(wanted, found),
        )
        if not _waits(change, impossible)
    ]
    return [*unsolved, *changes, *_leftovers(wanted, found)]


def _waits(change: Change, impossible: set[tuple[str, str]]) -> bool:
    """Whether a change concerns an object that is in conflict: a policy would act on somebody else's queue."""
    match change.wanted:
        case PolicyObject(queues=queues):
            return any(("queue", queue) in impossible for queue in queues)
        case BindingObject(source=source, destination=destination, to_queue=to_queue):
            target = ("queue" if to_queue else "exchange", destination)
            return target in impossible or ("exchange", source) in impossible
        case ExchangeObject(name=name):
            return ("exchange", name) in impossible
        case _:
            return False


def _missing_exchanges(wanted: Expansion, found: Found) -> Iterator[Change]:
    there = {document["name"] for document in found.exchanges}
    for exchange in wanted.exchanges:
        if exchange.name not in there:
            detail = " ".join([exchange.type, *(f"{key}={value}" for key, value in exchange.arguments)])
            yield Change(Action.CREATE, "exchange", exchange.name, detail, wanted=exchange)


def _missing_queues(wanted: Expansion, found: Found) -> Iterator[Change]:
    there = {document["name"] for document in found.queues}
    for queue in wanted.queues:
        if queue.name not in there:
            detail = ", ".join(f"{key.removeprefix('x-')} {word(value)}" for key, value in queue.arguments)
            yield Change(Action.CREATE, "queue", queue.name, detail, wanted=queue)


def _binding_key(document: Mapping[str, Any]) -> tuple[object, ...]:
    arguments = tuple(sorted((document.get("arguments") or {}).items()))
    is_queue = document["destination_type"] == "queue"
    return document["source"], document["destination"], is_queue, document["routing_key"], arguments


def _missing_bindings(wanted: Expansion, found: Found) -> Iterator[Change]:
    there = {_binding_key(document) for document in found.bindings}
    for binding in wanted.bindings:
        key = (binding.source, binding.destination, binding.to_queue, binding.key, binding.arguments)
        if key not in there:
            detail = " ".join([repr(binding.key), *(f"{name}={value}" for name, value in binding.arguments)])
            yield Change(Action.CREATE, "binding", f"{binding.source} -> {binding.destination}", detail, wanted=binding)


def _policies(wanted: Expansion, found: Found) -> Iterator[Change]:
    there = by_name(found.policies)
    for policy in wanted.policies:
        document = there.get(policy.name)
        if document is None:
            detail = ", ".join(f"{key} {word(value)}" for key, value in policy.definition)
            yield Change(Action.CREATE, "policy", policy.name, detail, wanted=policy)
            continue
        differences = [
            *difference("pattern", policy.pattern, document.get("pattern")),
            *difference("apply-to", "queues", document.get("apply-to")),
            *difference("priority", policy.priority, document.get("priority")),
            *table_differences(policy.definition, document.get("definition") or {}),
        ]
        if differences:
            yield Change(Action.UPDATE, "policy", policy.name, ", ".join(differences), wanted=policy)


def _permissions(wanted: Expansion, found: Found) -> Iterator[Change]:
    for permission in wanted.permissions:
        if found.users is not None and permission.user in found.users and found.users[permission.user] is None:
            yield Change(Action.CREATE, "permission", permission.user, _rights(permission), wanted=permission)


def _rights(permission: PermissionObject) -> str:
    return f"configure {permission.configure}, write {permission.write}, read {permission.read}"


# ---------------------------------------------------------------- leftovers


def _leftovers(wanted: Expansion, found: Found) -> Iterator[Change]:
    """What looks like a part of this topology and is not in the file (any longer)."""
    policies = {policy.name for policy in wanted.policies}
    queues = {queue.name: queue for queue in wanted.queues}
    for document in found.queues:
        name = document["name"]
        base, _, delay = name.rpartition(".retry.")
        if name not in queues and base in queues and _is_delay(delay):
            detail = f"a retry queue of {base} that the file does not describe"
            yield Change(Action.LEFTOVER, "queue", name, detail, "let it run empty, then delete it yourself")
    for document in found.policies:
        name = document["name"]
        base, _, delay = name.removeprefix("topology.").rpartition(".retry.")
        if name.startswith("topology.") and name not in policies and base in queues and _is_delay(delay):
            mend = f"rabbitmqctl clear_policy -p {wanted.vhost} {name}, once its queue is gone"
            yield Change(Action.LEFTOVER, "policy", name, "of such a queue", mend)
    bound = {
        (binding.source, binding.destination, binding.to_queue, binding.key, binding.arguments)
        for binding in wanted.bindings
    }
    for document in found.bindings:
        is_ours = document["destination_type"] == "queue" and document["destination"] in queues
        if is_ours and document["source"] and _binding_key(document) not in bound:
            name = f"{document['source']} -> {document['destination']}"
            mend = "describe it, or unbind it yourself"
            yield Change(
                Action.LEFTOVER, "binding", name, f"{document['routing_key']!r}, which the file does not have", mend
            )


def _is_delay(text: str) -> bool:
    try:
        return duration(text) > 0
    except ValueError:
        return False
