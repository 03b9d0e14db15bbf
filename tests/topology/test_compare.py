"""What differs, what is in conflict and what is left over, from documents as the API gives them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from relay.topology.changes import Action, Change, Found
from relay.topology.commands import all_of
from relay.topology.compare import compare
from relay.topology.expand import (
    BindingObject,
    ExchangeObject,
    Expansion,
    PermissionObject,
    PolicyObject,
    QueueObject,
    expand,
)
from relay.topology.file import read

WANTED = expand(
    read(
        """\
[[exchange]]
name = "orders"

[[queue]]
name = "inv"
bind = [{ exchange = "orders", key = "order.*" }]
retry = ["5s"]

[queue.parking]
user = "support"
""",
        "t.toml",
    )
)

EMPTY = Found(
    "3.10.8", frozenset({"topic", "direct"}), {"stream_queue": "enabled"}, [], [], [], [], {}, {"support": None}
)


def after(wanted: Expansion, found: Found = EMPTY) -> Found:
    """What a broker has once everything was declared."""
    exchanges, queues, bindings, policies = (
        list(found.exchanges),
        list(found.queues),
        list(found.bindings),
        list(found.policies),
    )
    users = dict(found.users or {})
    for one in all_of(wanted):
        match one:
            case ExchangeObject():
                exchanges.append(
                    {"name": one.name, "type": one.type, "durable": True, "arguments": dict(one.arguments)}
                )
            case QueueObject():
                queues.append({"name": one.name, "durable": True, "arguments": dict(one.arguments)})
            case PolicyObject():
                body = {"pattern": one.pattern, "apply-to": "queues", "priority": one.priority}
                policies.append({"name": one.name, **body, "definition": dict(one.definition)})
            case BindingObject():
                kind = "queue" if one.to_queue else "exchange"
                body = {"destination": one.destination, "destination_type": kind, "routing_key": one.key}
                bindings.append({"source": one.source, **body, "arguments": dict(one.arguments)})
            case PermissionObject():
                users[one.user] = {"configure": one.configure, "write": one.write, "read": one.read}
    return replace(found, exchanges=exchanges, queues=queues, bindings=bindings, policies=policies, users=users)


DONE = after(WANTED)


def changed(documents: Sequence[Mapping[str, Any]], name: str, **values: Any) -> list[dict[str, Any]]:
    return [{**document, **(values if document["name"] == name else {})} for document in documents]


def only(changes: list[Change]) -> Change:
    assert len(changes) == 1, changes
    return changes[0]


def test_an_empty_broker_gets_everything_and_then_nothing() -> None:
    changes = compare(WANTED, EMPTY)
    assert [change.wanted for change in changes] == list(all_of(WANTED))
    assert {change.action for change in changes} == {Action.CREATE}
    assert compare(WANTED, DONE) == []


def test_a_policy_that_was_changed_is_set_again() -> None:
    policies = [
        {**policy, "definition": {**policy["definition"], "delivery-limit": 5}}
        if policy["name"] == "topology.inv"
        else policy
        for policy in DONE.policies
    ]
    change = only(compare(WANTED, replace(DONE, policies=policies)))
    assert (change.action, change.name, change.detail) == (
        Action.UPDATE,
        "topology.inv",
        "delivery-limit 5 instead of 20",
    )


@pytest.mark.parametrize(
    ("arguments", "detail"),
    [
        ({"x-queue-type": "classic"}, "exists otherwise: x-queue-type classic instead of quorum"),
        ({}, "exists otherwise: x-queue-type classic instead of quorum"),
        ({"x-queue-type": "quorum", "x-message-ttl": 9}, "exists otherwise: x-message-ttl 9 instead of none"),
    ],
)
def test_a_queue_of_other_arguments_is_a_conflict_and_its_policy_waits(arguments: dict[str, Any], detail: str) -> None:
    """A policy with a TTL would throw away what somebody keeps in a queue of that name."""
    found = replace(
        DONE,
        queues=changed(DONE.queues, "inv.retry.5s", arguments=arguments),
        policies=[policy for policy in DONE.policies if policy["name"] != "topology.inv.retry.5s"],
    )
    change = only(compare(WANTED, found))
    assert (change.action, change.kind, change.name, change.detail) == (
        Action.CONFLICT,
        "queue",
        "inv.retry.5s",
        detail,
    )
    assert change.mend is not None
    assert "delete this queue yourself" in change.mend


def test_an_exchange_of_another_type_is_a_conflict_and_its_bindings_wait() -> None:
    found = replace(DONE, exchanges=changed(DONE.exchanges, "orders", type="fanout"), bindings=[])
    conflict, binding = compare(WANTED, found)
    assert (conflict.action, conflict.detail) == (Action.CONFLICT, "exists otherwise: type fanout instead of topic")
    assert (binding.action, binding.name) == (Action.CREATE, "orders.dlx -> inv.parking")


def test_a_consumer_on_a_retry_queue_is_a_conflict() -> None:
    change = only(compare(WANTED, replace(DONE, consumers={"inv.retry.5s": 1, "inv": 3})))
    assert (change.action, change.detail) == (Action.CONFLICT, "has 1 consumer: messages do not wait there")


@pytest.mark.parametrize(("priority", "is_conflict"), [(9, False), (10, True), (11, True)])
def test_a_policy_that_takes_the_place_of_ours(priority: int, is_conflict: bool) -> None:
    other = {
        "name": "all",
        "pattern": "^inv$",
        "apply-to": "all",
        "priority": priority,
        "definition": {"ha-mode": "all"},
    }
    changes = compare(WANTED, replace(DONE, policies=[*DONE.policies, other]))
    if not is_conflict:
        assert changes == []
        return
    change = only(changes)
    assert (change.action, change.name) == (Action.CONFLICT, "topology.inv")
    assert f"all (priority {priority}) takes its place for inv" in change.detail
    assert change.mend == f"set policy_priority above {priority}, or narrow the pattern of all"


def test_a_policy_for_exchanges_or_with_a_pattern_of_pcre_only_is_no_conflict() -> None:
    others = [
        {"name": "e", "pattern": "inv", "apply-to": "exchanges", "priority": 99, "definition": {}},
        {"name": "p", "pattern": "(?|inv)", "apply-to": "queues", "priority": 99, "definition": {}},
    ]
    assert compare(WANTED, replace(DONE, policies=[*DONE.policies, *others])) == []


def test_a_flag_that_is_off_stops_everything() -> None:
    change = only(compare(WANTED, replace(EMPTY, feature_flags={"stream_queue": "disabled"})))
    assert (change.action, change.name) == (Action.CONFLICT, "stream_queue")
    assert change.mend == "rabbitmqctl enable_feature_flag stream_queue"
    assert compare(WANTED, replace(DONE, feature_flags=None)) == []


@pytest.mark.parametrize(
    ("version", "retry", "needed"),
    [("3.9.29", 'retry = ["5s"]', "3.10"), ("3.13.7", 'retry = "broker"\nretry_min = "1s"\nretry_max = "1m"', "4.3")],
)
def test_a_broker_that_is_too_old_is_told_what_it_lacks(version: str, retry: str, needed: str) -> None:
    wanted = expand(read(f'[[queue]]\nname = "q"\ndead_letter = "d"\n{retry}\n', "t.toml"))
    change = only(compare(wanted, replace(EMPTY, version=version)))
    assert (change.action, change.kind) == (Action.CONFLICT, "broker")
    assert f"needs RabbitMQ {needed}" in change.detail
    assert change.mend is not None and "a ladder" in change.mend
    assert Action.CONFLICT not in {change.action for change in compare(wanted, replace(EMPTY, version="4.3.6"))}


def test_a_hash_exchange_without_its_plugin_names_the_plugin() -> None:
    wanted = expand(read('[[queue]]\nname = "q"\nshards = 2\ndead_letter = "d"\n', "t.toml"))
    conflict = compare(wanted, EMPTY)[0]
    assert (conflict.action, conflict.name) == (Action.CONFLICT, "q.shards")
    assert conflict.mend == "rabbitmq-plugins enable rabbitmq_consistent_hash_exchange, on every node"


@pytest.mark.parametrize(
    ("users", "detail"),
    [
        ({}, "there is no such user"),
        (None, "only a user with the tag `administrator` may look at permissions"),
        (
            {"support": {"configure": ".*", "write": "^orders$", "read": "^inv\\.parking$"}},
            "configure .* instead of ^$",
        ),
    ],
)
def test_rights_are_granted_to_who_has_none_and_never_changed(users: dict[str, Any] | None, detail: str) -> None:
    change = only(compare(WANTED, replace(DONE, users=users)))
    assert (change.action, change.kind, change.detail) == (Action.CONFLICT, "permission", detail)


def test_leftovers_are_told_and_do_not_count() -> None:
    shorter = replace(DONE, queues=[*DONE.queues, {"name": "inv.retry.1m", "arguments": {"x-queue-type": "quorum"}}])
    extra = {"source": "orders", "destination": "inv", "destination_type": "queue", "routing_key": "#", "arguments": {}}
    policy = {"name": "topology.inv.retry.1m", "pattern": "x", "apply-to": "queues", "priority": 10, "definition": {}}
    found = replace(shorter, bindings=[*DONE.bindings, extra], policies=[*DONE.policies, policy])
    changes = compare(WANTED, found)
    assert [(change.action, change.kind, change.name) for change in changes] == [
        (Action.LEFTOVER, "queue", "inv.retry.1m"),
        (Action.LEFTOVER, "policy", "topology.inv.retry.1m"),
        (Action.LEFTOVER, "binding", "orders -> inv"),
    ]
