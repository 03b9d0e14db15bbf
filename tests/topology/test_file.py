"""Topology files: what is read, and what each mistake is told, with its line."""

from __future__ import annotations

import random

import pytest

from relay.errors import ConfigError
from relay.topology.commands import all_of, commands
from relay.topology.contradictions import retry_queues, work_queues
from relay.topology.description import BrokerRetry, Hash, QueueType, Strategy
from relay.topology.expand import expand
from relay.topology.fields import BIND, EXCHANGE, PARKING, QUEUE, TOP
from relay.topology.file import read

HEAD = """\
[[exchange]]
name = "orders"

[[queue]]
name = "orders.inventory"
bind = [{ exchange = "orders", key = "order.*" }]
"""


def problems(text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read(text, "t.toml")
    return list(caught.value.problems)


def test_what_a_short_file_means() -> None:
    topology = read(HEAD + 'retry = ["5s", "5m"]\n', "t.toml")
    (queue,) = topology.queues
    assert (topology.vhost, queue.type, queue.strategy) == ("/", QueueType.QUORUM, Strategy.AT_LEAST_ONCE)
    assert (queue.dead_letter, queue.delivery_limit, queue.single_active_consumer) == ("orders.dlx", 20, False)
    assert queue.parking is not None
    assert queue.parking.name == "orders.inventory.parking"
    assert retry_queues(queue) == (
        ("orders.inventory.retry.5s", "orders.inventory", 5.0),
        ("orders.inventory.retry.5m", "orders.inventory", 300.0),
    )


def test_shards_have_one_consumer_each_and_a_ladder_each() -> None:
    (queue,) = read(HEAD + 'shards = 2\nretry = ["1s"]\n', "t.toml").queues
    assert queue.single_active_consumer
    assert queue.shards is not None
    assert (queue.shards.hash, queue.shards.by) == (Hash.CONSISTENT, "aggregate_id")
    assert work_queues(queue) == ("orders.inventory.0", "orders.inventory.1")
    assert [name for name, _, _ in retry_queues(queue)] == [
        "orders.inventory.0.retry.1s",
        "orders.inventory.1.retry.1s",
    ]


def test_the_brokers_own_retry() -> None:
    (queue,) = read(HEAD + 'retry = "broker"\nretry_min = "1s"\nretry_max = "5m"\n', "t.toml").queues
    assert queue.retry == BrokerRetry(1.0, 300.0)


def test_no_dead_letters_on_purpose() -> None:
    (queue,) = read(HEAD + 'type = "classic"\ndead_letter = ""\n', "t.toml").queues
    assert (queue.dead_letter, queue.parking, queue.strategy) == (None, None, Strategy.AT_MOST_ONCE)


def test_everything_wrong_at_once_each_with_its_line() -> None:
    text = """\
policy_prioriti = 3

[[exchange]]
name = "orders"
type = "topik"

[[queue]]
name = "orders.inventory"
bind = [
  { exchange = "orders", key = "order.*" },
  { exchange = "orders", kye = "x" },
]
retry = ["5s", "30"]
deliverylimit = 4

[queue.parking]
retention = "soon"
"""
    found = problems(text)
    assert [line.partition(": ")[0] for line in found] == [f"t.toml:{n}" for n in (1, 5, 11, 13, 14, 17)]
    assert "unknown key 'policy_prioriti' in the file; nearest: policy_priority; allowed: vhost" in found[0]
    assert "type = 'topik': unknown; nearest: topic; allowed: topic, direct, fanout, headers" in found[1]
    assert "unknown key 'kye' in bind; nearest: key; allowed: exchange, key, arguments" in found[2]
    assert "not a duration; allowed: up to 32 durations" in found[3]
    assert "nearest: delivery_limit" in found[4]
    assert "retention = 'soon': not a duration; allowed: a duration: 250ms 5s 2m 1h 7d" in found[5]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (
            'type = "classic"\nstrategy = "at-least-once"',
            "8: at-least-once dead lettering on a classic queue; allowed: type",
        ),
        ('type = "classic"\ndelivery_limit = 5', "8: a classic queue has no delivery limit; allowed: type"),
        (
            'overflow = "drop-head"',
            '7: at-least-once dead lettering needs overflow = "reject-publish"; allowed: that, or',
        ),
        ('retry = ["5m", "5s"]', "7: a retry ladder goes up, each delay once; allowed: ascending durations"),
        ('retry = ["5s", "5000ms"]', "7: a retry ladder goes up"),
        ('retry = "broker"', '7: retry = "broker" needs retry_min; allowed: a duration'),
        ('retry = "broker"\nretry_min = "5s"\nretry_max = "1s"', "9: retry_max is below retry_min"),
        (
            'shards = 4\nretry = "broker"\nretry_min = "1s"\nretry_max = "1s"',
            "8: a queue that delays by itself lets later messages pass those that a dead consumer had in hand; allowed: a ladder",
        ),
        ('type = "classic"\nretry = "broker"\nretry_min = "1s"\nretry_max = "1s"', "8: a classic queue cannot delay"),
        ('retry_min = "5s"', '7: retry_min without retry = "broker"; allowed: only with it'),
        ('dead_letter = ""\nretry = ["5s"]', "8: retries end in a parking queue; allowed: with dead_letter"),
        ('dead_letter = ""\nparking = {}', "8: parking without dead_letter; allowed: with dead_letter"),
        ('dead_letter = ""\nstrategy = "at-least-once"', "8: at-least-once to nowhere; allowed: with dead_letter"),
        ("shard_by = 'x'", "7: shard_by without shards; allowed: with shards = a number"),
        (
            'shards = 4\nhash = "modulus"\nshard_by = "aggregate_id"',
            "9: the modulus hash sees only the routing key; allowed:",
        ),
        ("shards = 1", "7: shards = 1: too small; allowed: a whole number from 2 to 256"),
        ("max_bytes = '5 GB'", "7: max_bytes = '5 GB': not a size; allowed: a size: 64KiB 1MiB 2GiB, or bytes"),
        ("single_active_consumer = 1", "7: single_active_consumer = 1: not true or false; allowed: true or false"),
        ("delivery_limit = true", "7: delivery_limit = True: not a whole number"),
        ("retry = '5s'", "7: retry = '5s': not a ladder; allowed: up to 32 durations"),
        ("parking = 'p'", "7: parking = 'p': not a table; allowed: a table: [queue.parking]"),
        (
            "dead_letter = 'amq.foo'",
            "7: dead_letter = 'amq.foo': reserved for RabbitMQ itself; allowed: an exchange's name",
        ),
        ("parking = { name = 'amq.p' }", "7: name = 'amq.p': reserved for RabbitMQ itself; allowed: a name"),
    ],
)
def test_an_impossible_line(line: str, told: str) -> None:
    assert any(problem.startswith(f"t.toml:{told}") for problem in problems(HEAD + line + "\n")), problems(HEAD + line)


@pytest.mark.parametrize(
    ("table", "told"),
    [
        (
            '[[queue]]\nname = "orders.inventory"',
            "10: queue orders.inventory is there twice, first in line 4; allowed: once",
        ),
        ('[[exchange]]\nname = "orders"', "10: exchange orders is there twice, first in line 1"),
        (
            '[[queue]]\nname = "orders.inventory.retry.5s"\ndead_letter = ""',
            "10: orders.inventory.retry.5s is the retry queue of orders.inventory: no consumer, no bindings of its own;",
        ),
        (
            '[[queue]]\nname = "orders.inventory.parking"\ndead_letter = ""',
            "10: orders.inventory.parking is the parking queue of orders.inventory; allowed: another name",
        ),
        (
            '[[queue]]\nname = "q"\nbind = [{ exchange = "order", key = "#" }]\ndead_letter = "orders.dlx"',
            "11: no [[exchange]] is named 'order'; nearest: orders; allowed: one of the file's, or amq.…",
        ),
        (
            '[[queue]]\nname = "q"\nbind = [{ exchange = "orders" }]',
            "11: a binding of the topic exchange orders without a key; allowed: key = a routing key",
        ),
        (
            '[[exchange]]\nname = "f"\ntype = "fanout"\n[[queue]]\nname = "q"\ndead_letter = "f"',
            "14: the fanout exchange f cannot tell parking queues apart; allowed: direct, topic",
        ),
        (
            '[[queue]]\nname = "q"\ndead_letter = "d"\n[queue.parking]\nname = "orders.inventory.parking"\nretention = "1d"',
            "12: the parking queue orders.inventory.parking is shared with orders.inventory and described differently",
        ),
        ("[[queues]]\nname = 'q'", "9: unknown key 'queues' in the file; nearest: queue; allowed: vhost"),
        ("[[queue]]\ndead_letter = ''", "9: [[queue]] without name; allowed: a name of up to 255 bytes"),
        (
            f"[[queue]]\nname = '{'q' * 250}'\nretry = ['5s']\ndead_letter = 'd'",
            "10: '" + "q" * 250 + ".retry.5s', which is",
        ),
        (
            "[queue.parking]\nname = 'orders.inventory.retry.5s'",
            "10: the parking queue orders.inventory.retry.5s is the retry queue of orders.inventory: no consumer, no",
        ),
        (f"[[queue]]\nname = '{'q' * 250}'\ndead_letter = 'd'", "10: '" + "q" * 250 + ".parking', which is"),
        (
            f"[[exchange]]\nname = '{'x' * 253}'\n[[queue]]\nname = 'q'\nbind = [{{ exchange = '{'x' * 253}', key = 'a' }}]",
            f"13: the dead letter exchange would be {'x' * 253}.dlx: longer than 255 bytes; allowed: with dead_letter =",
        ),
        (
            "[[queue]]\nname = 'q'\nbind = [{ exchange = 'amq.topic', key = 'a' }]",
            "11: the dead letter exchange would be amq.topic.dlx: reserved for RabbitMQ itself; allowed: with dead_letter =",
        ),
        (
            f"[[queue]]\nname = 'q'\nbind = [{{ exchange = 'orders', key = 'a', arguments = {{ x = {2**63} }} }}]",
            "11: arguments = {'x': 9223372036854775808}: a number of more than 64 bits; allowed: a table of",
        ),
        ("[queue.nope]\nx = 1", "9: unknown key 'nope' in [[queue]]"),
    ],
)
def test_an_impossible_table(table: str, told: str) -> None:
    found = problems(HEAD + 'retry = ["5s"]\n\n' + table + "\n")
    assert any(problem.startswith(f"t.toml:{told}") for problem in found), found


def test_what_is_no_toml_names_its_line() -> None:
    (problem,) = problems(HEAD + "retry = [\n")
    assert problem.startswith("t.toml:7: not TOML: ")
    assert "allowed: TOML 1.0" in problem


@pytest.mark.parametrize(
    ("value", "told"),
    [("9" * 5000, "5000 digits"), ("[" * 3000 + "]" * 3000, "recursion"), ("0x" + "f" * 5000, "too large")],
)
def test_what_python_cannot_read_is_a_fault_of_the_file(value: str, told: str) -> None:
    (problem,) = problems(f"policy_priority = {value}\n")
    assert problem.startswith("t.toml:1: ") and told in problem, problem


def test_lines_are_right_behind_a_long_text() -> None:
    text = 'vhost = """\n[[queue]]\nname = 3\n"""\n[[queue]]\nname = 3\n'
    assert any(line.startswith("t.toml:6: name = 3: not a text") for line in problems(text))


KEYS = sorted({field.key for fields in (TOP, EXCHANGE, QUEUE, BIND, PARKING) for field in fields} | {"nope"})
TABLES = ("[[exchange]]", "[[queue]]", "[[queue]]", "[queue.parking]", "[[queue.bind]]", "[queue]", "[parking]")
VALUES = (
    '"orders"', '"orders.inventory"', '"5s"', '""', '"broker"', '"classic"', '"at-least-once"', '"modulus"', '"1MiB"',
    '"amq.x"', '"""a\n[[queue]]\nb"""', "0", "3", "-1", "9223372036854775807", "true", "1.5", "nan", "2026-01-01", "[]", "{}",
    '["5s", "1m"]', '[{ exchange = "orders", key = "a" }]', "[{ nope = 1 }, 3]", '{ name = "p", retention = 4 }',
)  # fmt: skip


@pytest.mark.parametrize("seed", range(10))
def test_no_file_is_more_than_wrong(seed: int) -> None:
    """Whatever stands in it: a topology, or faults that each name a line and what is allowed."""
    draw = random.Random(seed)
    for _ in range(100):
        lines = [f"{key} = {draw.choice(VALUES)}" for key in draw.sample(KEYS, draw.randrange(2))]
        for _ in range(draw.randrange(4)):
            lines += [draw.choice(TABLES), f'name = "{draw.choice(("orders", "q", "q.1"))}"']
            lines += [f"{key} = {draw.choice(VALUES)}" for key in draw.sample(KEYS, draw.randrange(4)) if key != "name"]
        try:
            wanted = expand(read("\n".join(lines), "t.toml"))
        except ConfigError as error:
            for problem in error.problems:
                assert problem.startswith("t.toml:") and problem.split(":")[1].isdigit() and "; allowed: " in problem
        else:
            commands(wanted, all_of(wanted))
