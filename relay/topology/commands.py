"""A topology as the lines that an operator types where no management API is: `rabbitmqctl`, ready for a shell.

Pure. Exchanges, queues and bindings have no command of their own; they go in as definitions, which create what is missing
and leave alone what exists.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Final

from relay.text import printable_json, shell_words
from relay.topology.expand import (
    FEATURE_FLAG,
    AnyObject,
    BindingObject,
    ExchangeObject,
    Expansion,
    PermissionObject,
    PolicyObject,
    QueueObject,
)

DEFINITIONS_FILE: Final = "topology.json"


def all_of(wanted: Expansion) -> tuple[AnyObject, ...]:
    """Every object, in the order in which it can be declared."""
    return (*wanted.exchanges, *wanted.policies, *wanted.queues, *wanted.bindings, *wanted.permissions)


def commands(wanted: Expansion, objects: Iterable[AnyObject]) -> list[str]:
    """Shell lines that make these objects of `wanted`, in their order; safe to repeat."""
    objects = list(objects)
    lines: list[str] = []
    if wanted.needs_feature_flag and objects:
        lines.append(f"rabbitmqctl enable_feature_flag {FEATURE_FLAG}")
    # Policies first: no queue is there without its limits, not for a moment. But for those that need what is defined.
    defined = [at for at, each in enumerate(objects) if isinstance(each, QueueObject | BindingObject)]
    last = max(defined, default=len(objects))
    early, late = [
        [_policy(wanted.vhost, policy) for policy in part if isinstance(policy, PolicyObject)]
        for part in (objects[:last], objects[last:])
    ]
    lines += early
    if definitions := _definitions(wanted.vhost, objects):
        lines += [f"cat > {DEFINITIONS_FILE} <<'JSON'", *definitions, "JSON"]
        lines.append(f"rabbitmqctl import_definitions {DEFINITIONS_FILE}")
    lines += late
    lines += [_permission(wanted.vhost, granted) for granted in objects if isinstance(granted, PermissionObject)]
    return lines


def _policy(vhost: str, policy: PolicyObject) -> str:
    definition = printable_json(json.dumps(dict(policy.definition), ensure_ascii=False))
    options = ["--priority", str(policy.priority), "--apply-to", "queues"]
    return shell_words(["rabbitmqctl", "set_policy", "-p", vhost, *options, policy.name, policy.pattern, definition])


def _permission(vhost: str, granted: PermissionObject) -> str:
    rights = [granted.configure, granted.write, granted.read]
    return shell_words(["rabbitmqctl", "set_permissions", "-p", vhost, granted.user, *rights])


def _definitions(vhost: str, objects: list[AnyObject]) -> list[str]:
    """A JSON document, an object a line; nothing where there is nothing to define."""
    parts = {
        "exchanges": [_exchange(vhost, wanted) for wanted in objects if isinstance(wanted, ExchangeObject)],
        "queues": [_queue(vhost, wanted) for wanted in objects if isinstance(wanted, QueueObject)],
        "bindings": [_binding(vhost, wanted) for wanted in objects if isinstance(wanted, BindingObject)],
    }
    given = {name: documents for name, documents in parts.items() if documents}
    return list(_json(given)) if given else []


def _json(parts: dict[str, list[dict[str, object]]]) -> Iterator[str]:
    yield "{"
    for last_part, (name, documents) in zip(_is_last(len(parts)), parts.items(), strict=True):
        yield f'  "{name}": ['
        for last, document in zip(_is_last(len(documents)), documents, strict=True):
            yield f"    {printable_json(json.dumps(document, ensure_ascii=False))}{'' if last else ','}"
        yield f"  ]{'' if last_part else ','}"
    yield "}"


def _is_last(count: int) -> list[bool]:
    return [number == count - 1 for number in range(count)]


def _exchange(vhost: str, wanted: ExchangeObject) -> dict[str, object]:
    fixed = {"vhost": vhost, "durable": True, "auto_delete": False, "internal": False}
    return {"name": wanted.name, "type": wanted.type, **fixed, "arguments": dict(wanted.arguments)}


def _queue(vhost: str, wanted: QueueObject) -> dict[str, object]:
    fixed = {"vhost": vhost, "durable": True, "auto_delete": False}
    return {"name": wanted.name, **fixed, "arguments": dict(wanted.arguments)}


def _binding(vhost: str, wanted: BindingObject) -> dict[str, object]:
    return {
        "source": wanted.source,
        "vhost": vhost,
        "destination": wanted.destination,
        "destination_type": "queue" if wanted.to_queue else "exchange",
        "routing_key": wanted.key,
        "arguments": dict(wanted.arguments),
    }
