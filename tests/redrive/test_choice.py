"""Which messages, where to, and what the copy looks like; no broker is asked."""

from __future__ import annotations

from typing import Any

import pytest
from aiormq import spec

from relay.errors import UsageError
from relay.redrive.choice import Order, Route, Taken, copy_of, matches, route_of, was_seen
from relay.redrive.words import read_order
from relay.topology import names


def taken(headers: dict[str, Any] | None = None, **properties: Any) -> Taken:
    return Taken(1, "orders.dlx", "inv.parking", spec.Basic.Properties(headers=headers, **properties), b"{}")


DIAGNOSED = {
    names.ORIGINAL_EXCHANGE: "orders",
    names.ORIGINAL_ROUTING_KEY: "order.paid",
    names.RETRY_ATTEMPT: 3,
    names.ERROR_CLASS: "transient",
    names.FIRST_FAILURE: "2026-01-01T00:00:00Z",
}


@pytest.mark.parametrize(
    ("where", "is_match"),
    [
        ([], True),
        ([("x-error-class", "transient")], True),
        ([("x-error-class", "permanent")], False),
        ([("x-error-class", "permanent"), ("x-error-class", "transient")], True),
        ([("x-error-class", "transient"), ("type", "order.refunded")], False),
        ([("x-retry-attempt", "3"), ("type", "order.paid"), ("app_id", "shop")], True),
        ([("flag", "true")], True),
        ([("routing_key", "inv.parking")], True),
        ([("nowhere", "")], False),
        ([("message_id", "m1")], True),
    ],
)
def test_selected_by_headers_and_properties(where: list[tuple[str, str]], is_match: bool) -> None:
    message = taken({**DIAGNOSED, "flag": True}, message_type="order.paid", app_id="shop", message_id="m1")
    assert matches(message, where) is is_match


def test_a_header_goes_before_a_property_of_its_name() -> None:
    message = taken({"type": "header"}, message_type="property")
    assert matches(message, [("type", "header")])
    assert not matches(message, [("type", "property")])


@pytest.mark.parametrize(
    ("exchange", "key", "route"),
    [
        (None, None, Route("orders", "order.paid")),
        ("other", None, Route("other", "order.paid")),
        (None, "k", Route("orders", "k")),
        ("", "inv", Route("", "inv")),
    ],
)
def test_goes_where_it_came_from_unless_it_is_said(exchange: str | None, key: str | None, route: Route) -> None:
    assert route_of(taken(DIAGNOSED), Order("q", exchange=exchange, routing_key=key)) == route


def test_without_a_diagnosis_the_death_tells_the_route() -> None:
    """Of a message that the broker parked by itself; the end of a wait in a retry queue is no route."""
    deaths = [
        {"reason": "expired", "queue": "inv.retry.5s", "exchange": "", "routing-keys": ["inv.retry.5s"]},
        {"reason": "rejected", "queue": "inv", "exchange": "orders", "routing-keys": ["order.paid"]},
    ]
    assert route_of(taken({"x-death": deaths}), Order("q")) == Route("orders", "order.paid")


@pytest.mark.parametrize("headers", [None, {"x-death": "nonsense"}, {"x-death": [{"reason": "rejected"}, 3]}])
def test_a_message_that_remembers_no_route(headers: dict[str, Any] | None) -> None:
    assert route_of(taken(headers), Order("q")) is None
    assert route_of(taken(headers), Order("q", exchange="e", routing_key="k")) == Route("e", "k")


def test_the_copy_keeps_everything_of_the_message() -> None:
    message = taken(
        {**DIAGNOSED, "f": 0.1, "n": 2**40, "t": {"a": [None, True]}, "h" * 200: "x"},
        message_id="m1",
        message_type="order.paid",
        content_type="application/json",
        correlation_id="c",
        app_id="shop",
        priority=3,
        delivery_mode=2,
        reply_to="r",
        expiration="60000",
    )
    copy = copy_of(message, "run", "guest")
    for name in ("message_id", "message_type", "content_type", "correlation_id", "app_id", "priority", "reply_to"):
        assert getattr(copy, name) == getattr(message.properties, name)
    assert (copy.delivery_mode, copy.expiration) == (2, "60000")
    assert copy.headers == {
        **message.headers,
        names.RETRY_ATTEMPT: 0,
        names.REDRIVE_COUNT: 1,
        names.REDRIVE_RUN: "run",
    }


def test_the_copy_leaves_behind_what_would_change_its_fate() -> None:
    own = {"x-death": [], "x-first-death-queue": "q", "x-delivery-count": 4, "CC": ["other"], "BCC": ["other"]}
    copy = copy_of(taken({**own, "keep": 1}, message_id="m"), "run", "guest")
    assert copy.headers == {"keep": 1, names.REDRIVE_COUNT: 1, names.REDRIVE_RUN: "run"}


def test_passes_are_counted() -> None:
    message = taken({names.REDRIVE_COUNT: 2, names.REDRIVE_RUN: "earlier"})
    assert (copy_of(message, "now", "guest").headers or {})[names.REDRIVE_COUNT] == 3
    assert was_seen(message, "earlier")
    assert not was_seen(message, "now")


def test_another_users_id_stays_readable() -> None:
    """RabbitMQ closes the channel over a `user_id` that is not the publisher's."""
    copy = copy_of(taken({}, user_id="shop"), "run", "guest")
    assert copy.user_id is None
    assert (copy.headers or {})["x-original-user-id"] == "shop"
    assert copy_of(taken({}, user_id="guest"), "run", "guest").user_id == "guest"
    assert copy_of(taken({}, user_id="guest"), "run", None).user_id is None, "the certificate says who publishes"


@pytest.mark.parametrize(
    ("queue", "where", "exchange", "told"),
    [
        ("q", ["x"], None, "--where x: allowed: HEADER=VALUE"),
        ("q", ["=x"], None, "--where =x"),
        ("", [], None, "QUEUE: allowed: a queue's name"),
        ("q" * 256, [], None, "QUEUE: longer than 255 bytes"),
        ("q", [], "e" * 256, "--to-exchange: longer"),
    ],
)
def test_options_that_mean_nothing(queue: str, where: list[str], exchange: str | None, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        read_order(queue, where, exchange, None, limit=None, rate_per_s=None, is_dry=False)


def test_a_value_may_hold_an_equals_sign() -> None:
    order = read_order("q", ["h=a=b", "e="], None, None, limit=None, rate_per_s=None, is_dry=False)
    assert order.where == (("h", "a=b"), ("e", ""))
