"""A topology at a real broker, through its management API: what is there, and what is to be declared.

Blocking. Declares, replaces policies, grants to who has nothing; it has no call that deletes, purges or unbinds.
"""

from __future__ import annotations

from typing import Any, assert_never

from relay.management import ApiRefused, ManagementApi
from relay.topology.changes import Found
from relay.topology.expand import (
    AnyObject,
    BindingObject,
    ExchangeObject,
    Expansion,
    PermissionObject,
    PolicyObject,
    QueueObject,
)

QUEUE_COLUMNS = "name,type,durable,auto_delete,exclusive,arguments"


def look(api: ManagementApi, wanted: Expansion) -> Found | None:
    """What the vhost has; None where there is no such vhost. Raises ApiFailed."""
    vhost, overview = wanted.vhost, api.overview()
    # A policymaker may look into his vhost, and not at it.
    exchanges = api.get("exchanges", vhost)
    if exchanges is None:
        return None
    consumers: dict[str, int] = {}
    for consumer in api.get("consumers", vhost) or []:
        name = consumer["queue"]["name"]
        consumers[name] = consumers.get(name, 0) + 1
    return Found(
        version=str(overview["rabbitmq_version"]),
        exchange_types=frozenset(kind["name"] for kind in overview.get("exchange_types", [])),
        feature_flags=_feature_flags(api),
        exchanges=exchanges,
        queues=api.get("queues", vhost, columns=QUEUE_COLUMNS) or [],
        bindings=api.get("bindings", vhost) or [],
        policies=api.get("policies", vhost) or [],
        consumers=consumers,
        users=_users(api, vhost, {permission.user for permission in wanted.permissions}),
    )


def _feature_flags(api: ManagementApi) -> dict[str, str] | None:
    flags = _if_allowed(api, "feature-flags")
    return None if flags is None else {flag["name"]: flag["state"] for flag in flags}


def _users(api: ManagementApi, vhost: str, names: set[str]) -> dict[str, Any] | None:
    if not names:
        return {}
    listed = _if_allowed(api, "users")
    if listed is None:
        return None
    there = names & {user["name"] for user in listed}
    return {name: api.get("permissions", vhost, name) for name in sorted(there)}


def _if_allowed(api: ManagementApi, *path: str) -> Any:
    """The document, or None where this user may not see it. A wrong password is said by `overview` before."""
    try:
        return api.get(*path)
    except ApiRefused as refusal:
        if refusal.status in (401, 403):
            return None
        raise


def declare(api: ManagementApi, vhost: str, wanted: AnyObject) -> None:
    """Create the object, or make a policy what it should be. Raises ApiFailed, ApiRefused."""
    match wanted:
        case ExchangeObject():
            body = {"type": wanted.type, "durable": True, "auto_delete": False, "internal": False}
            api.put("exchanges", vhost, wanted.name, document={**body, "arguments": dict(wanted.arguments)})
        case QueueObject():
            body = {"durable": True, "auto_delete": False, "arguments": dict(wanted.arguments)}
            api.put("queues", vhost, wanted.name, document=body)
        case BindingObject():
            kind = "q" if wanted.to_queue else "e"
            body = {"routing_key": wanted.key, "arguments": dict(wanted.arguments)}
            api.post("bindings", vhost, "e", wanted.source, kind, wanted.destination, document=body)
        case PolicyObject():
            api.put("policies", vhost, wanted.name, document=policy_document(wanted))
        case PermissionObject():
            body = {"configure": wanted.configure, "write": wanted.write, "read": wanted.read}
            api.put("permissions", vhost, wanted.user, document=body)
        case _:
            assert_never(wanted)


def policy_document(policy: PolicyObject) -> dict[str, object]:
    """A policy as the API takes it."""
    return {
        "pattern": policy.pattern,
        "apply-to": "queues",
        "priority": policy.priority,
        "definition": dict(policy.definition),
    }
