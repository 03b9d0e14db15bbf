"""What a broker has against what a topology wants: changes to make, conflicts that nobody makes by himself, leftovers.

Pure. Owns the rule that nothing is ever deleted: a queue or exchange that exists with other arguments is a conflict, and
what the file does not describe is left over, told and left alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from relay.topology.expand import (
    FEATURE_FLAG,
    PLUGINS,
    AnyObject,
    Arguments,
    BindingObject,
    ExchangeObject,
    Expansion,
    PermissionObject,
    PolicyObject,
)
from relay.values import duration

# RabbitMQ's words for what a policy applies to, where queues are among it (3.10 knows the first two).
_FOR_QUEUES: Final = ("queues", "all", "quorum_queues", "classic_queues")


class Action(StrEnum):
    """What is to be done about one object."""

    CREATE = "create"
    UPDATE = "update"
    CONFLICT = "conflict"
    LEFTOVER = "leftover"


@dataclass(frozen=True, slots=True)
class Change:
    """`kind` and `name` say what of; `detail` how it differs; `mend` what an operator does about a conflict."""

    action: Action
    kind: str
    name: str
    detail: str
    mend: str | None = None
    wanted: AnyObject | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Found:
    """What a broker has, as the management API tells it; None: it may not be asked."""

    version: str
    exchange_types: frozenset[str]
    feature_flags: Mapping[str, str] | None
    exchanges: Sequence[Mapping[str, Any]]
    queues: Sequence[Mapping[str, Any]]
    bindings: Sequence[Mapping[str, Any]]
    policies: Sequence[Mapping[str, Any]]
    consumers: Mapping[str, int]
    users: Mapping[str, Mapping[str, str] | None] | None
    """Each wanted user that exists: its permissions in the vhost, None where it has none."""


def compare(wanted: Expansion, found: Found) -> list[Change]:
    """Conflicts first, then changes in the order in which they can be made, leftovers last; empty: the same."""
    if conflicts := list(_broker(wanted, found)):
        # Of what this broker cannot keep, half would be worse than nothing.
        return conflicts
    conflicts = [*_exchange_conflicts(wanted, found), *_queue_conflicts(wanted, found)]
    conflicts += [*_policy_conflicts(wanted, found), *_permission_conflicts(wanted, found)]
    impossible = {(conflict.kind, conflict.name) for conflict in conflicts}
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
    return [*conflicts, *changes, *_leftovers(wanted, found)]


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


# ---------------------------------------------------------------- the broker itself


def _broker(wanted: Expansion, found: Found) -> Iterator[Change]:
    version = tuple(int(part) for part in re.findall(r"\d+", found.version)[:2])
    if version < wanted.version_min:
        needed = ".".join(map(str, wanted.version_min))
        reason = 'retry = "broker"' if wanted.version_min > (3, 10) else "TTL and at-least-once in quorum queues"
        mend = 'upgrade it, or describe a ladder: retry = ["5s", "30s", "5m"]'
        yield Change(Action.CONFLICT, "broker", found.version, f"{reason} needs RabbitMQ {needed}", mend)
    flags = found.feature_flags
    if wanted.needs_feature_flag and flags is not None and flags.get(FEATURE_FLAG) == "disabled":
        detail = "is disabled: at-least-once dead lettering would silently be at-most-once"
        mend = f"rabbitmqctl enable_feature_flag {FEATURE_FLAG}"
        yield Change(Action.CONFLICT, "feature flag", FEATURE_FLAG, detail, mend)


# ---------------------------------------------------------------- exchanges, queues, bindings


def _by_name(documents: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    return {document["name"]: document for document in documents}


def _exchange_conflicts(wanted: Expansion, found: Found) -> Iterator[Change]:
    there = _by_name(found.exchanges)
    for exchange in wanted.exchanges:
        if (document := there.get(exchange.name)) is None:
            if exchange.type not in found.exchange_types:
                plugin = PLUGINS.get(exchange.type)
                mend = f"rabbitmq-plugins enable {plugin}, on every node" if plugin else "use another type"
                yield Change(Action.CONFLICT, "exchange", exchange.name, f"no type {exchange.type} here", mend)
            continue
        differences = [
            *_difference("type", exchange.type, document.get("type")),
            *_difference("durable", True, document.get("durable", True)),
            *_difference("auto_delete", False, document.get("auto_delete", False)),
            *_difference("internal", False, document.get("internal", False)),
            *_table_differences(exchange.arguments, document.get("arguments") or {}),
        ]
        if differences:
            yield _exists("exchange", exchange.name, differences)


def _queue_conflicts(wanted: Expansion, found: Found) -> Iterator[Change]:
    there = _by_name(found.queues)
    for queue in wanted.queues:
        if (document := there.get(queue.name)) is None:
            continue
        arguments = dict(document.get("arguments") or {})
        # Where a default queue type decided, the argument may be missing.
        arguments.setdefault("x-queue-type", document.get("type", "classic"))
        differences = [
            *_difference("durable", True, document.get("durable", True)),
            *_difference("auto_delete", False, document.get("auto_delete", False)),
            *_difference("exclusive", False, document.get("exclusive", False)),
            *_table_differences(queue.arguments, arguments),
        ]
        if differences:
            yield _exists("queue", queue.name, differences)
        elif not queue.is_consumed and (count := found.consumers.get(queue.name, 0)):
            detail = f"has {count} {'consumer' if count == 1 else 'consumers'}: messages do not wait there"
            yield Change(Action.CONFLICT, "queue", queue.name, detail, "stop consuming it: a retry queue has none")


def _exists(kind: str, name: str, differences: list[str]) -> Change:
    mend = f"give it another name, or drain and delete this {kind} yourself, then apply again"
    return Change(Action.CONFLICT, kind, name, f"exists otherwise: {', '.join(differences)}", mend)


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
            detail = ", ".join(f"{key.removeprefix('x-')} {_word(value)}" for key, value in queue.arguments)
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


# ---------------------------------------------------------------- policies


def _policies(wanted: Expansion, found: Found) -> Iterator[Change]:
    there = _by_name(found.policies)
    for policy in wanted.policies:
        document = there.get(policy.name)
        if document is None:
            detail = ", ".join(f"{key} {_word(value)}" for key, value in policy.definition)
            yield Change(Action.CREATE, "policy", policy.name, detail, wanted=policy)
            continue
        differences = [
            *_difference("pattern", policy.pattern, document.get("pattern")),
            *_difference("apply-to", "queues", document.get("apply-to")),
            *_difference("priority", policy.priority, document.get("priority")),
            *_table_differences(policy.definition, document.get("definition") or {}),
        ]
        if differences:
            yield Change(Action.UPDATE, "policy", policy.name, ", ".join(differences), wanted=policy)


def _policy_conflicts(wanted: Expansion, found: Found) -> Iterator[Change]:
    """Of the policies that match a queue RabbitMQ applies the one of the highest priority; of two, either."""
    ours = {policy.name for policy in wanted.policies}
    others = [document for document in found.policies if document["name"] not in ours]
    for policy in wanted.policies:
        for document in others:
            priority = int(document.get("priority", 0))
            if priority < policy.priority or document.get("apply-to") not in _FOR_QUEUES:
                continue
            taken = [queue for queue in policy.queues if _matches(document.get("pattern", ""), queue)]
            if taken:
                detail = (
                    f"{document['name']} (priority {priority}) takes its place for {taken[0]}: "
                    "one policy applies to a queue, they do not merge"
                )
                mend = f"set policy_priority above {priority}, or narrow the pattern of {document['name']}"
                yield Change(Action.CONFLICT, "policy", policy.name, detail, mend)


def _matches(pattern: str, queue: str) -> bool:
    try:
        return re.search(pattern, queue) is not None
    except re.error:
        # Only PCRE understands it: no verdict from here.
        return False


# ---------------------------------------------------------------- permissions


def _permissions(wanted: Expansion, found: Found) -> Iterator[Change]:
    for permission in wanted.permissions:
        if found.users is not None and permission.user in found.users and found.users[permission.user] is None:
            yield Change(Action.CREATE, "permission", permission.user, _rights(permission), wanted=permission)


def _permission_conflicts(wanted: Expansion, found: Found) -> Iterator[Change]:
    for permission in wanted.permissions:
        set_them = (
            f"rabbitmqctl set_permissions -p {wanted.vhost} {permission.user} "
            f"'{permission.configure}' '{permission.write}' '{permission.read}'"
        )
        if found.users is None:
            detail = "only a user with the tag `administrator` may look at permissions"
            yield Change(Action.CONFLICT, "permission", permission.user, detail, set_them)
        elif permission.user not in found.users:
            mend = f"rabbitmqctl add_user {permission.user}, then apply again"
            yield Change(Action.CONFLICT, "permission", permission.user, "there is no such user", mend)
        elif (has := found.users[permission.user]) is not None:
            differences = [
                difference
                for name in ("configure", "write", "read")
                for difference in _difference(name, getattr(permission, name), has.get(name))
            ]
            if differences:
                # Another topology, or a person, may have granted what is there.
                yield Change(Action.CONFLICT, "permission", permission.user, ", ".join(differences), set_them)


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


# ---------------------------------------------------------------- differences


def _difference(name: str, wanted: object, found: object) -> list[str]:
    return [] if wanted == found else [f"{name} {_word(found)} instead of {_word(wanted)}"]


def _table_differences(wanted: Arguments, found: Mapping[str, Any]) -> list[str]:
    expected = dict(wanted)
    return [
        difference
        for key in sorted({*expected, *found})
        for difference in _difference(key, expected.get(key), found.get(key))
    ]


def _word(value: object) -> str:
    match value:
        case None:
            return "none"
        case True | False:
            return str(value).lower()
        case "":
            return '""'
        case _:
            return str(value)
