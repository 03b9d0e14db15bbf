"""What a broker has against what a topology wants: changes to make, conflicts that nobody makes by himself, leftovers.

Pure. Owns the rule that nothing is ever deleted: a queue or exchange that exists with other arguments is a conflict, and
what the file does not describe is left over, told and left alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from relay.topology import conflicts, leftovers
from relay.topology.changes import (
    Action,
    Change,
    Found,
    binding_of,
    by_name,
    difference,
    table_differences,
    word,
)
from relay.topology.expand import (
    BindingObject,
    ExchangeObject,
    Expansion,
    PermissionObject,
    PolicyObject,
)


def compare(wanted: Expansion, found: Found) -> list[Change]:
    """Conflicts first, then changes in the order in which they can be made, leftovers last; empty: the same."""
    if hopeless := list(conflicts.of_the_broker(wanted, found)):
        # Of what this broker cannot keep, half would be worse than nothing.
        return hopeless
    left = leftovers.of(wanted, found)
    unsolved = [*conflicts.of_objects(wanted, found), *leftovers.still_bound(wanted, found, left)]
    impossible = {(conflict.kind, conflict.name) for conflict in unsolved}
    policies = list(_policies(wanted, found, left))
    late = {change.name for change in policies if _is_late(change, found)}
    changes = [
        change
        for change in (
            *_missing_exchanges(wanted, found),
            *(policy for policy in policies if policy.name not in late),
            *_missing_queues(wanted, found),
            *_missing_bindings(wanted, found),
            *(policy for policy in policies if policy.name in late),
            *_permissions(wanted, found),
        )
        if not _waits(change, impossible)
    ]
    return [*unsolved, *changes, *leftovers.told(wanted, found, left)]


def _is_late(change: Change, found: Found) -> bool:
    """A queue that is to be made has its policy before. One that is there already gets none that dead-letters before there is a queue
    behind: it may have messages to dead-letter at once."""
    there = {document["name"] for document in found.queues}
    match change.wanted:
        case PolicyObject(queues=queues, definition=definition):
            return bool(dict(definition).get("dead-letter-exchange")) and not there.isdisjoint(queues)
        case _:
            return False


def _waits(change: Change, impossible: set[tuple[str, str]]) -> bool:
    """Whether a change concerns an object that is in conflict: a policy would act on somebody else's queue."""
    match change.wanted:
        case PolicyObject(queues=queues, definition=definition):
            # Nor may it lead there what is dead-lettered: nobody has bound our parking queue to it.
            behind = dict(definition).get("dead-letter-exchange"), dict(definition).get("dead-letter-routing-key")
            return any(("queue", queue) in impossible for queue in queues) or (
                bool(behind[0]) and (("exchange", behind[0]) in impossible or ("queue", behind[1]) in impossible)
            )
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


def _missing_bindings(wanted: Expansion, found: Found) -> Iterator[Change]:
    there = {binding_of(document) for document in found.bindings}
    for binding in wanted.bindings:
        if binding not in there:
            detail = " ".join([repr(binding.key), *(f"{name}={value}" for name, value in binding.arguments)])
            yield Change(Action.CREATE, "binding", f"{binding.source} -> {binding.destination}", detail, wanted=binding)


def _policies(wanted: Expansion, found: Found, left: leftovers.Left) -> Iterator[Change]:
    there = by_name(found.policies)
    for described in wanted.policies:
        document = there.get(described.name)
        if document is None:
            detail = ", ".join(f"{key} {word(value)}" for key, value in described.definition)
            yield Change(Action.CREATE, "policy", described.name, detail, wanted=described)
            continue
        policy = replace(described, pattern=leftovers.pattern(described, document.get("pattern", ""), left))
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
