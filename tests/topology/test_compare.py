"""What differs, what is in conflict and what is left over, from documents as the API gives them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from relay.topology.changes import Action, Change, Found
from relay.topology.commands import all_of, commands
from relay.topology.compare import compare
from relay.topology.expand import (
    AnyObject,
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


def after(objects: Iterable[AnyObject], found: Found = EMPTY) -> Found:
    """What a broker has once these were declared."""
    exchanges, queues, bindings, policies = (
        list(found.exchanges),
        list(found.queues),
        list(found.bindings),
        list(found.policies),
    )
    users = dict(found.users or {})
    for one in objects:
        match one:
            case ExchangeObject():
                exchanges.append(
                    {"name": one.name, "type": one.type, "durable": True, "arguments": dict(one.arguments)}
                )
            case QueueObject():
                queues.append({"name": one.name, "durable": True, "arguments": dict(one.arguments)})
            case PolicyObject():
                body = {"pattern": one.pattern, "apply-to": "queues", "priority": one.priority}
                policies = [policy for policy in policies if policy["name"] != one.name]
                policies.append({"name": one.name, **body, "definition": dict(one.definition)})
            case BindingObject():
                kind = "queue" if one.to_queue else "exchange"
                body = {"destination": one.destination, "destination_type": kind, "routing_key": one.key}
                bindings.append({"source": one.source, **body, "arguments": dict(one.arguments)})
            case PermissionObject():
                users[one.user] = {"configure": one.configure, "write": one.write, "read": one.read}
    return replace(found, exchanges=exchanges, queues=queues, bindings=bindings, policies=policies, users=users)


DONE = after(all_of(WANTED))


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


@pytest.mark.parametrize("to", ["all", "queues", "quorum_queues"])
@pytest.mark.parametrize(("priority", "is_conflict"), [(9, False), (10, True), (11, True)])
def test_a_policy_that_takes_the_place_of_ours(priority: int, is_conflict: bool, to: str) -> None:
    other = {
        "name": "all",
        "pattern": "^inv$",
        "apply-to": to,
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


def test_a_policy_for_other_objects_or_with_a_pattern_of_pcre_only_is_no_conflict() -> None:
    others = [
        {"name": "c", "pattern": "inv", "apply-to": "classic_queues", "priority": 99, "definition": {}},
        {"name": "s", "pattern": "inv", "apply-to": "streams", "priority": 99, "definition": {}},
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


# ---------------------------------------------------------------- another number of shards


def billing(shards: int | None, key: str = "#") -> Expansion:
    return expand(
        read(
            f'[[exchange]]\nname = "orders"\n[[queue]]\nname = "billing"\nretry = ["5s"]\n'
            f'bind = [{{ exchange = "orders", key = "{key}" }}]\n{f"shards = {shards}" if shards else ""}\n',
            "t.toml",
        )
    )


HASHING = replace(EMPTY, exchange_types=EMPTY.exchange_types | {"x-consistent-hash"})


def reshaped(before: Expansion, wanted: Expansion) -> Found:
    """A broker where `before` was applied, and then what can be of `wanted`."""
    found = after(all_of(before), HASHING)
    return after([change.wanted for change in compare(wanted, found) if change.wanted is not None], found)


def without(found: Found, *names: str) -> Found:
    """These bindings were taken away."""
    kept = [each for each in found.bindings if f"{each['source']} -> {each['destination']}" not in names]
    return replace(found, bindings=kept)


@pytest.mark.parametrize(
    ("before", "now", "bound", "left"),
    [
        (4, 2, {"billing.shards -> billing.2", "billing.shards -> billing.3"}, {"billing.2", "billing.3"}),
        (2, None, {"orders -> billing.shards"}, {"billing.shards", "billing.0", "billing.1"}),
        (None, 2, {"orders -> billing"}, {"billing"}),
    ],
)
def test_what_messages_still_go_to_is_a_conflict_until_it_is_unbound(
    before: int | None, now: int | None, bound: set[str], left: set[str]
) -> None:
    """Half of the messages would go to queues that nobody consumes, or each to a second queue."""
    wanted = billing(now)
    found = reshaped(billing(before), wanted)
    changes = compare(wanted, found)
    assert {change.name for change in changes if change.action is Action.CONFLICT} == bound
    assert {change.kind for change in changes if change.action is Action.CONFLICT} == {"binding"}
    changes = compare(wanted, without(found, *bound))
    assert {change.action for change in changes} == {Action.LEFTOVER}
    names = {change.name for change in changes if change.kind in ("queue", "exchange")}
    retries = {f"{name}.retry.5s" for name in left if not name.endswith(".shards")}
    assert names == left | retries
    assert {change.name for change in changes if change.kind == "policy"} == {f"topology.{name}" for name in retries}


@pytest.mark.parametrize(("before", "now"), [(4, 2), (2, None), (None, 2)])
def test_a_queue_that_drains_keeps_its_policy(before: int | None, now: int | None) -> None:
    """Without it, what waits there loses its dead letter exchange and its delivery limit."""
    old, wanted = billing(before), billing(now)
    found = reshaped(old, wanted)
    patterns = [policy["pattern"] for policy in found.policies if policy["name"] == "topology.billing"]
    queues = {name for each in (old, wanted) for name in each.policies[0].queues}
    assert all(re.search(pattern, queue) for pattern in patterns for queue in queues)
    # Once they are gone, it is as it would be without them.
    described = {queue.name for queue in wanted.queues}
    emptied = replace(found, queues=[queue for queue in found.queues if queue["name"] in described])
    updates = [change.wanted for change in compare(wanted, emptied) if change.action is Action.UPDATE]
    assert updates == ([] if before and now else [wanted.policies[0]])


def test_a_numbered_queue_of_somebody_else_is_none_of_ours() -> None:
    wanted = billing(None)
    found = after(all_of(wanted), HASHING)
    extra = {"source": "orders", "destination": "billing.2031", "destination_type": "queue", "routing_key": "#"}
    queues = [*found.queues, {"name": "billing.2031", "arguments": {}}]
    assert compare(wanted, replace(found, queues=queues, bindings=[*found.bindings, extra])) == []


def test_an_old_key_of_a_sharded_queue_is_left_over() -> None:
    change = only(compare(billing(2, "order.*"), reshaped(billing(2, "#"), billing(2, "order.*"))))
    assert (change.action, change.name) == (Action.LEFTOVER, "orders -> billing.shards")
    assert change.detail == "'#', which the file does not have"


def test_a_foreign_queue_behind_the_hash_exchange_is_a_conflict() -> None:
    """It would take its part of the messages away."""
    found = after([*all_of(billing(2)), BindingObject("billing.shards", "audit", True, "1")], HASHING)
    change = only(compare(billing(2), found))
    assert (change.action, change.name) == (Action.CONFLICT, "billing.shards -> audit")


def test_arguments_that_no_file_can_have_are_only_told() -> None:
    extra = {"source": "orders", "destination": "inv", "destination_type": "queue", "routing_key": "x"}
    found = replace(DONE, bindings=[*DONE.bindings, {**extra, "arguments": {"list": [1], "table": {}}}])
    assert only(compare(WANTED, found)).action is Action.LEFTOVER


def test_a_queue_that_is_there_dead_letters_once_there_is_a_queue_behind() -> None:
    """Its policy came first: what it dead-lettered until its parking queue was bound went nowhere."""
    there = after([queue for queue in WANTED.queues if queue.name == "inv"])

    def order(found: Found) -> list[str]:
        return [f"{change.kind} {change.name}" for change in compare(WANTED, found)]

    def at(found: Found, what: str) -> int:
        return order(found).index(what)

    dead_letters = next(name for name in order(EMPTY) if name.startswith("binding") and "parking" in name)
    assert at(there, "policy topology.inv") > at(there, dead_letters)
    assert at(EMPTY, "policy topology.inv") < at(EMPTY, "queue inv"), "no new queue is there without its limits"
    lines = commands(WANTED, [change.wanted for change in compare(WANTED, there) if change.wanted is not None])
    (policy,) = [number for number, line in enumerate(lines) if " topology.inv " in line]
    (defined,) = [number for number, line in enumerate(lines) if "import_definitions" in line]
    assert policy > defined


def test_no_policy_dead_letters_to_an_exchange_that_is_somebody_elses() -> None:
    """The binding behind it was left out, the policy was not: what the queue rejected went nowhere, its own old policy displaced."""
    (dlx,) = [exchange for exchange in WANTED.exchanges if exchange.type == "direct"]
    there = after([replace(dlx, type="fanout"), *(queue for queue in WANTED.queues if queue.name == "inv")])
    changes = compare(WANTED, there)
    assert ("exchange", dlx.name) in [(each.kind, each.name) for each in changes if each.action is Action.CONFLICT]
    assert "topology.inv" not in [each.name for each in changes if each.kind == "policy"]
    assert "topology.inv.retry.5s" in [each.name for each in changes if each.kind == "policy"]
