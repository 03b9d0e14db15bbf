"""What no program may solve by itself: a broker that cannot, somebody else's queue, policy or rights. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from relay.text import shell_words
from relay.topology.changes import Action, Change, Found, by_name, difference, matches, table_differences
from relay.topology.expand import FEATURE_FLAG, PLUGINS, Expansion

_FOR_QUEUES: Final = ("queues", "all")
"""RabbitMQ's words for what a policy applies to, where every queue is among it; later than 3.10 also one for each type."""


def of_the_broker(wanted: Expansion, found: Found) -> Iterator[Change]:
    """It is too old, or lacks what keeps messages safe."""
    version = tuple(int(part) for part in re.findall(r"\d+", found.version)[:2])
    if version < wanted.version_min:
        needed = ".".join(map(str, wanted.version_min))
        reason = 'retry = "broker"' if wanted.version_min > (3, 10) else "TTL and at-least-once in quorum queues"
        mend = 'upgrade it, or describe a ladder: retry = ["5s", "30s", "5m"]'
        yield Change(Action.CONFLICT, "broker", found.version, f"{reason} needs RabbitMQ {needed}", mend)
    flags = found.feature_flags
    if wanted.needs_feature_flag and flags is not None and flags.get(FEATURE_FLAG, "enabled") != "enabled":
        detail = "is not enabled: at-least-once dead lettering would silently be at-most-once"
        mend = f"rabbitmqctl enable_feature_flag {FEATURE_FLAG}"
        yield Change(Action.CONFLICT, "feature flag", FEATURE_FLAG, detail, mend)


def of_objects(wanted: Expansion, found: Found) -> Iterator[Change]:
    """Exchanges, queues, policies and permissions that are there and other than wanted."""
    yield from _exchanges(wanted, found)
    yield from _queues(wanted, found)
    yield from _policies(wanted, found)
    yield from _permissions(wanted, found)


def _exchanges(wanted: Expansion, found: Found) -> Iterator[Change]:
    there = by_name(found.exchanges)
    for exchange in wanted.exchanges:
        if (document := there.get(exchange.name)) is None:
            if exchange.type not in found.exchange_types:
                plugin = PLUGINS.get(exchange.type)
                mend = f"rabbitmq-plugins enable {plugin}, on every node" if plugin else "use another type"
                yield Change(Action.CONFLICT, "exchange", exchange.name, f"no type {exchange.type} here", mend)
            continue
        differences = [
            *difference("type", exchange.type, document.get("type")),
            *difference("durable", True, document.get("durable", True)),
            *difference("auto_delete", False, document.get("auto_delete", False)),
            *difference("internal", False, document.get("internal", False)),
            *table_differences(exchange.arguments, document.get("arguments") or {}),
        ]
        if differences:
            yield _exists("exchange", exchange.name, differences)


def _queues(wanted: Expansion, found: Found) -> Iterator[Change]:
    there = by_name(found.queues)
    for queue in wanted.queues:
        if (document := there.get(queue.name)) is None:
            continue
        arguments = dict(document.get("arguments") or {})
        # Where a default queue type decided, the argument may be missing.
        arguments.setdefault("x-queue-type", document.get("type", "classic"))
        differences = [
            *difference("durable", True, document.get("durable", True)),
            *difference("auto_delete", False, document.get("auto_delete", False)),
            *difference("exclusive", False, document.get("exclusive", False)),
            *table_differences(queue.arguments, arguments),
        ]
        if differences:
            yield _exists("queue", queue.name, differences)
        elif not queue.is_consumed and (count := found.consumers.get(queue.name, 0)):
            detail = f"has {count} {'consumer' if count == 1 else 'consumers'}: messages do not wait there"
            yield Change(Action.CONFLICT, "queue", queue.name, detail, "stop consuming it: a retry queue has none")


def _exists(kind: str, name: str, differences: list[str]) -> Change:
    mend = f"give it another name, or drain and delete this {kind} yourself, then apply again"
    return Change(Action.CONFLICT, kind, name, f"exists otherwise: {', '.join(differences)}", mend)


def _policies(wanted: Expansion, found: Found) -> Iterator[Change]:
    """Of the policies that match a queue RabbitMQ applies the one of the highest priority; of two, either."""
    ours = {policy.name for policy in wanted.policies}
    others = [document for document in found.policies if document["name"] not in ours]
    reach = {queue.name: (*_FOR_QUEUES, f"{dict(queue.arguments)['x-queue-type']}_queues") for queue in wanted.queues}
    for policy in wanted.policies:
        for document in others:
            priority = int(document.get("priority", 0))
            if priority < policy.priority:
                continue
            near = [queue for queue in policy.queues if document.get("apply-to") in reach[queue]]
            taken = [queue for queue in near if matches(document.get("pattern", ""), queue)]
            if taken:
                detail = (
                    f"{document['name']} (priority {priority}) takes its place for {taken[0]}: "
                    "one policy applies to a queue, they do not merge"
                )
                mend = f"set policy_priority above {priority}, or narrow the pattern of {document['name']}"
                yield Change(Action.CONFLICT, "policy", policy.name, detail, mend)


def _permissions(wanted: Expansion, found: Found) -> Iterator[Change]:
    for permission in wanted.permissions:
        rights = (permission.configure, permission.write, permission.read)
        set_them = shell_words(["rabbitmqctl", "set_permissions", "-p", wanted.vhost, permission.user, *rights])
        if found.users is None:
            detail = "only a user with the tag `administrator` may look at permissions"
            yield Change(Action.CONFLICT, "permission", permission.user, detail, set_them)
        elif permission.user not in found.users:
            mend = f"{shell_words(['rabbitmqctl', 'add_user', permission.user])}, then apply again"
            yield Change(Action.CONFLICT, "permission", permission.user, "there is no such user", mend)
        elif (has := found.users[permission.user]) is not None:
            differences = [
                each
                for name in ("configure", "write", "read")
                for each in difference(name, getattr(permission, name), has.get(name))
            ]
            if differences:
                # Another topology, or a person, may have granted what is there.
                yield Change(Action.CONFLICT, "permission", permission.user, ", ".join(differences), set_them)
