"""From a description to the broker's objects, and to commands; no server is asked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from relay.topology.commands import all_of, commands
from relay.topology.expand import BindingObject, Expansion, PermissionObject, QueueObject, expand
from relay.topology.file import read

EXAMPLE = Path(__file__).parents[2] / "examples" / "topology.toml"

QUORUM = (("x-queue-type", "quorum"),)

FILE = """\
[[exchange]]
name = "orders"

[[queue]]
name = "orders.inventory"
bind = [{ exchange = "orders", key = "order.*" }]
"""


def expanded(lines: str = "") -> Expansion:
    return expand(read(FILE + lines, "t.toml"))


def policy(wanted: Expansion, name: str) -> dict[str, object]:
    (found,) = (policy for policy in wanted.policies if policy.name == f"topology.{name}")
    return dict(found.definition)


def test_the_articles_topology() -> None:
    wanted = expanded('retry = ["5s", "30s", "5m"]\n')
    assert [(exchange.name, exchange.type) for exchange in wanted.exchanges] == [
        ("orders", "topic"),
        ("orders.dlx", "direct"),
    ]
    retries = [f"orders.inventory.retry.{delay}" for delay in ("5s", "30s", "5m")]
    assert list(wanted.queues) == [
        QueueObject("orders.inventory", QUORUM),
        *(QueueObject(name, QUORUM, is_consumed=False) for name in retries),
        QueueObject("orders.inventory.parking", QUORUM),
    ]
    assert list(wanted.bindings) == [
        BindingObject("orders", "orders.inventory", True, "order.*"),
        BindingObject("orders.dlx", "orders.inventory.parking", True, "orders.inventory.parking"),
    ]
    assert policy(wanted, "orders.inventory") == {
        "dead-letter-exchange": "orders.dlx",
        "dead-letter-routing-key": "orders.inventory.parking",
        "dead-letter-strategy": "at-least-once",
        "delivery-limit": 20,
        "overflow": "reject-publish",
    }
    assert wanted.needs_feature_flag
    assert wanted.version_min == (3, 10)


def test_a_retry_goes_back_to_its_own_queue_only() -> None:
    """By the work exchange a retried message would reach every queue that is bound to it."""
    assert policy(expanded('retry = ["5s"]\n'), "orders.inventory.retry.5s") == {
        "message-ttl": 5000,
        "dead-letter-exchange": "",
        "dead-letter-routing-key": "orders.inventory",
        "dead-letter-strategy": "at-least-once",
        "overflow": "reject-publish",
    }


def test_a_queue_has_one_policy() -> None:
    """RabbitMQ merges none: a second one would take the first one's place."""
    wanted = expand(read(EXAMPLE.read_text(), "example"))
    for queue in wanted.queues:
        assert len([policy for policy in wanted.policies if queue.name in policy.queues]) == 1, queue


def test_a_parking_queue_keeps_its_messages() -> None:
    """RabbitMQ 4 would drop what was looked at 20 times."""
    parking = policy(
        expanded('[queue.parking]\nretention = "30d"\nmax_length = 9\nmax_bytes = "1MiB"\n'), "orders.inventory.parking"
    )
    assert parking == {
        "delivery-limit": 2**31 - 1,
        "max-length": 9,
        "max-length-bytes": 2**20,
        "message-ttl": 30 * 86_400_000,
        "overflow": "reject-publish",
    }
    assert "message-ttl" not in policy(expanded(), "orders.inventory.parking")


def test_parkings_own_user() -> None:
    (granted,) = expanded('[queue.parking]\nuser = "support"\n').permissions
    assert granted == PermissionObject("support", "^$", r"^orders$", r"^orders\.inventory\.parking$")


def test_the_brokers_own_retry_needs_its_version() -> None:
    wanted = expanded('retry = "broker"\nretry_min = "1s"\nretry_max = "1m"\n')
    definition = policy(wanted, "orders.inventory")
    assert {key: value for key, value in definition.items() if "retry" in key} == {
        "delayed-retry-type": "all",
        "delayed-retry-min": 1000,
        "delayed-retry-max": 60_000,
    }
    assert wanted.version_min == (4, 3)
    assert [queue.name for queue in wanted.queues] == ["orders.inventory", "orders.inventory.parking"]


@pytest.mark.parametrize(
    ("lines", "type", "arguments"),
    [
        ("", "x-consistent-hash", (("hash-header", "aggregate_id"),)),
        ('shard_by = "message_id"\n', "x-consistent-hash", (("hash-property", "message_id"),)),
        ('shard_by = "routing_key"\n', "x-consistent-hash", ()),
        ('hash = "modulus"\n', "x-modulus-hash", ()),
    ],
)
def test_shards(lines: str, type: str, arguments: tuple[object, ...]) -> None:
    wanted = expanded(f"shards = 2\n{lines}")
    assert (wanted.exchanges[2].name, wanted.exchanges[2].type) == ("orders.inventory.shards", type)
    assert wanted.exchanges[2].arguments == arguments
    assert list(wanted.bindings[:3]) == [
        BindingObject("orders", "orders.inventory.shards", False, "order.*"),
        BindingObject("orders.inventory.shards", "orders.inventory.0", True, "1"),
        BindingObject("orders.inventory.shards", "orders.inventory.1", True, "1"),
    ]
    single = (("x-queue-type", "quorum"), ("x-single-active-consumer", True))
    assert [queue.arguments for queue in wanted.queues] == [single, single, QUORUM]
    assert wanted.policies[0].pattern == r"^orders\.inventory\.[0-9]+$"


def test_a_classic_queue_is_asked_for_nothing_that_it_cannot_do() -> None:
    wanted = expanded('type = "classic"\nretry = ["5s"]\n')
    assert policy(wanted, "orders.inventory").keys() == {"dead-letter-exchange", "dead-letter-routing-key", "overflow"}
    assert wanted.queues[0].arguments == (("x-queue-type", "classic"),)
    assert wanted.queues[1].arguments == QUORUM


def test_no_flag_where_nothing_needs_it() -> None:
    wanted = expanded('dead_letter = ""\n')
    assert not wanted.needs_feature_flag
    assert not any(line.startswith("rabbitmqctl enable") for line in commands(wanted, all_of(wanted)))


def test_a_vhost_and_names_that_need_quoting() -> None:
    text = 'vhost = "a b"\n' + FILE.replace("orders.inventory", "it's")
    wanted = expand(read(text, "t.toml"))
    lines = commands(wanted, all_of(wanted))
    assert lines[1].startswith("rabbitmqctl set_policy -p 'a b' --priority 10 --apply-to queues 'topology.it'\"'\"'s'")
    begin, end = lines.index("cat > topology.json <<'JSON'"), lines.index("JSON")
    assert json.loads("\n".join(lines[begin + 1 : end]))["queues"][0]["name"] == "it's"


def test_commands_are_what_they_say_though_a_name_does_not_print() -> None:
    wanted = expand(read('vhost = "a\\u0085b"\n' + FILE.replace("orders.inventory", "turned\\u202e"), "t.toml"))
    lines = commands(wanted, all_of(wanted))
    assert "-p $'a\\xc2\\x85b' " in lines[1] and all(line.isprintable() for line in lines)
    begin, end = lines.index("cat > topology.json <<'JSON'"), lines.index("JSON")
    assert json.loads("\n".join(lines[begin + 1 : end]))["queues"][0]["name"] == "turned\u202e"
