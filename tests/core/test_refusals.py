"""`core.refusals`: only the row's own fault is ever held against it."""

from __future__ import annotations

import pytest

from relay.core.refusals import Blame, blame


@pytest.mark.parametrize(
    ("sqlstate", "what"),
    [
        ("23514", "a check constraint"),
        ("23505", "an application's unique index"),
        ("23503", "a foreign key"),
        ("P0001", "RAISE EXCEPTION"),
        ("P0004", "ASSERT"),
        ("22012", "a trigger divides by zero"),
        ("27000", "a trigger changed the row itself"),
        ("44000", "a view's check option"),
        ("54000", "an application's index entry is too long"),
        ("38000", "a function in another language"),
        ("RLY99", "a code of the application's own"),
        ("45000", "another"),
    ],
)
def test_what_refuses_a_row(sqlstate: str, what: str) -> None:
    assert blame(sqlstate) is Blame.ROW, what
    assert blame(sqlstate, is_in_function=True) is Blame.ROW, what


@pytest.mark.parametrize(
    ("sqlstate", "what"),
    [
        ("25006", "read only"),
        ("25P02", "the transaction failed before"),
        ("40001", "serialization failure"),
        ("40P01", "deadlock"),
        ("53100", "disk full"),
        ("53200", "out of memory"),
        ("55P03", "lock timeout"),
        ("57014", "statement timeout"),
        ("57P01", "shutdown"),
        ("58030", "input or output"),
        ("08006", "connection failure"),
        ("26000", "a proxy lost the prepared statement"),
    ],
)
def test_what_is_the_servers_fault(sqlstate: str, what: str) -> None:
    assert blame(sqlstate) is Blame.SERVER, what
    assert blame(sqlstate, is_in_function=True) is Blame.SERVER, what


def test_a_missing_right_is_nobodys_row_unless_a_policy_says_so() -> None:
    assert blame("42501") is Blame.SERVER
    assert blame("42501", is_row_policy=True) is Blame.ROW


def test_a_broken_trigger_accuses_a_row_only_when_others_pass() -> None:
    assert blame("42703") is Blame.SERVER
    assert blame("42703", is_in_function=True) is Blame.DOUBTFUL
    assert blame("42P01", is_in_function=True) is Blame.DOUBTFUL
    assert blame("XX001") is Blame.DOUBTFUL
    assert blame("HV00N", is_in_function=True) is Blame.DOUBTFUL
