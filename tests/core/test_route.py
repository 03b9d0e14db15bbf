"""Templates over a row, and who wins."""

from __future__ import annotations

from typing import Any

import pytest

from relay.errors import MessageInvalid
from relay.message import Row
from relay.route import FIELDS, Router, Template


def make_row(rare: dict[str, Any] | None = None, **columns: Any) -> Row:
    return Row(0, 1, "id-1", "order.created", rare=rare, **columns)


def test_the_defaults_route_by_event_type() -> None:
    router = Router("events", "{event_type}")
    assert router.route(make_row()) == ("events", "order.created")
    assert router.constant_exchange == "events"
    assert router.fields == {"event_type"}


def test_every_field_can_be_named() -> None:
    rare = {"schema_version": 7, "producer": "p", "correlation_id": "c", "causation_id": "k"}
    row = make_row(rare, aggregate_type="order", aggregate_id="42")
    text = "/".join(f"{{{field}}}" for field in sorted(FIELDS))
    assert Template.parse(text).fill(row) == "42/order/k/c/order.created/id-1/p/7"


def test_a_row_without_a_schema_version_has_the_columns_default() -> None:
    assert Router("ev", "v{schema_version}").route(make_row()) == ("ev", "v1")


def test_the_rows_own_columns_win() -> None:
    router = Router("{aggregate_type}", "{aggregate_id}")
    assert router.route(make_row({"exchange": "x", "routing_key": ""})) == ("x", "")
    assert router.constant_exchange is None


def test_braces_can_be_written() -> None:
    assert Router("ev", "{{{event_type}}}").route(make_row()) == ("ev", "{order.created}")


@pytest.mark.parametrize("exchange", ["{aggregate_type}", "a.{producer}"])
def test_a_template_over_a_null_column_is_invalid(exchange: str) -> None:
    with pytest.raises(MessageInvalid, match="null") as caught:
        Router(exchange, "k").route(make_row())
    assert caught.value.failure_class == "invalid"


@pytest.mark.parametrize(
    "row", [make_row({"exchange": ""}), make_row(aggregate_type="")], ids=["own column", "template"]
)
def test_never_the_default_exchange(row: Row) -> None:
    with pytest.raises(MessageInvalid, match="default exchange"):
        Router("{aggregate_type}", "k").route(row)


@pytest.mark.parametrize("text", ["{payload}", "{}", "{event_type!r}", "{event_type:>9}", "{a", "}"])
def test_a_template_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"no such field|brace"):
        Template.parse(text)


def test_an_empty_constant_exchange_is_refused() -> None:
    with pytest.raises(ValueError, match="default exchange"):
        Router("", "k")
