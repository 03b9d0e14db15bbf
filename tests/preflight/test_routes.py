"""Bindings as the broker follows them, and queues as they are judged: no server needed."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.preflight import queues
from relay.preflight.finding import Level
from relay.preflight.routes import Topology, takes


def binding(source: str, destination: str, key: str = "", kind: str = "queue") -> dict[str, Any]:
    return {"source": source, "destination": destination, "destination_type": kind, "routing_key": key}


@pytest.mark.parametrize(
    ("pattern", "key", "expected"),
    [
        ("order.*", "order.paid", True),
        ("order.*", "order", False),
        ("order.*", "order.paid.late", False),
        ("order.#", "order", True),
        ("order.#", "order.paid.late", True),
        ("#", "", True),
        ("#", "a.b", True),
        ("#.late", "order.paid.late", True),
        ("#.late", "late", True),
        ("*.#.c", "a.c", True),
        ("*.#.c", "c", False),
        ("#.b.#", "a.b.c", True),
        ("#.b.#", "a.c", False),
        ("", "", True),
        ("", "a", False),
        ("a.b", "a.b", True),
        ("a.b", "a.bc", False),
    ],
)
def test_topic_patterns(pattern: str, key: str, expected: bool) -> None:
    assert takes("topic", pattern, key) is expected


words = st.lists(st.sampled_from("ab"), min_size=1, max_size=5)


@given(st.lists(st.sampled_from(["a", "b", "*", "#"]), min_size=1, max_size=5), words)
def test_topic_patterns_like_their_definition(pattern: list[str], key: list[str]) -> None:
    def naive(left: list[str], right: list[str]) -> bool:
        if not left:
            return not right
        if left[0] == "#":
            return any(naive(left[1:], right[at:]) for at in range(len(right) + 1))
        return bool(right) and left[0] in ("*", right[0]) and naive(left[1:], right[1:])

    assert takes("topic", ".".join(pattern), ".".join(key)) is naive(pattern, key)


def test_other_types() -> None:
    assert takes("direct", "a", "a") is True
    assert takes("direct", "a", "b") is False
    assert takes("fanout", "", "x") is True
    assert takes("headers", "", "x") is None
    assert takes("x-consistent-hash", "1", "x") is None


def test_exchanges_bound_to_exchanges_and_in_a_circle() -> None:
    topology = Topology(
        {"a": {"type": "topic"}, "b": {"type": "fanout"}, "c": {"type": "direct"}},
        [
            binding("a", "b", "x.#", "exchange"),
            binding("b", "a", "", "exchange"),
            binding("b", "q"),
            binding("c", "r", "k"),
        ],
    )
    assert topology.reach("a", "x.y").queues == {"q"}
    assert topology.reach("a", "y").is_nowhere
    assert topology.reach("c", "k").queues == {"r"}


def test_an_alternate_exchange_takes_what_no_binding_takes() -> None:
    topology = Topology(
        {"a": {"type": "topic"}, "spare": {"type": "fanout"}},
        [binding("a", "q", "ok.#"), binding("spare", "rest")],
        {"a": "spare"},
    )
    assert topology.reach("a", "ok.1").queues == {"q"}
    assert topology.reach("a", "no").queues == {"rest"}


def test_what_the_key_does_not_decide_is_no_verdict() -> None:
    topology = Topology({"h": {"type": "headers"}}, [binding("h", "q")])
    assert not topology.reach("h", "x").is_nowhere
    assert Topology({"h": {"type": "headers"}}, []).reach("h", "x").is_nowhere


GOOD = {
    "type": "quorum",
    "durable": True,
    "effective_policy_definition": {
        "dead-letter-exchange": "dlx",
        "dead-letter-strategy": "at-least-once",
        "overflow": "reject-publish",
        "delivery-limit": 20,
    },
}


def texts(queue: dict[str, Any], version: tuple[int, ...] = (3, 10)) -> list[str]:
    found = list(queues.judge("q", queue, {"dlx"}, 2000, version))
    assert all(finding.mend for finding in found if finding.level is not Level.OK)
    return [finding.text for finding in found if finding.level is Level.WARNING]


def test_a_queue_as_it_should_be() -> None:
    assert texts(GOOD) == []
    assert texts({"type": "stream", "durable": True, "effective_policy_definition": {}}) == []


def test_a_queue_just_declared_is_not_said_to_lack_a_policy() -> None:
    (finding,) = queues.judge("q", {"type": "quorum", "durable": True, "arguments": {}}, set(), 2000, (3, 10))
    assert finding.level is Level.NOT_CHECKED
    assert "does not tell yet" in finding.text


@pytest.mark.parametrize(
    ("changes", "policy", "words"),
    [
        ({"type": "classic"}, {}, "classic"),
        ({"durable": False}, {}, "transient"),
        ({"auto_delete": True}, {}, "last consumer"),
        ({}, {"dead-letter-exchange": None}, "no dead-lettering"),
        ({}, {"dead-letter-exchange": "gone"}, "does not exist"),
        ({}, {"dead-letter-strategy": "at-most-once"}, "at most once"),
        ({}, {"delivery-limit": None}, "no delivery limit"),
        ({}, {"delivery-limit": -1}, "no delivery limit"),
        ({}, {"max-length": 100_000, "overflow": "drop-head"}, "drops its oldest"),
        ({}, {"max-length": 10}, "at most 10 messages"),
        ({"arguments": {"x-max-length": 10}}, {"max-length": 100_000}, "at most 10 messages"),
    ],
)
def test_what_may_surprise_about_a_queue(changes: dict[str, Any], policy: dict[str, Any], words: str) -> None:
    definition = {**GOOD["effective_policy_definition"], **policy}  # type: ignore[dict-item]
    definition = {key: value for key, value in definition.items() if value is not None}
    (text,) = texts({**GOOD, "effective_policy_definition": definition, **changes})
    assert words in text


def test_rabbitmq_4_has_a_delivery_limit_by_itself() -> None:
    definition = {k: v for k, v in GOOD["effective_policy_definition"].items() if k != "delivery-limit"}  # type: ignore[attr-defined]
    assert texts({**GOOD, "effective_policy_definition": definition}, (4, 0)) == []
