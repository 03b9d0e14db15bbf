"""How many rows a statement is given."""

from __future__ import annotations

from relay.core.batch import QUICK_S, Batch


def test_a_quarter_of_what_was_too_slow_and_twice_as_many_after_a_quick_one() -> None:
    batch = Batch(1000)
    assert (batch.rows, batch.is_cut) == (1000, False)
    batch.too_slow(1000)
    assert (batch.rows, batch.is_cut) == (250, True)
    batch.too_slow(41)
    assert batch.rows == 10, "fewer than that were too many"
    batch.took(QUICK_S)
    assert batch.rows == 10
    for _ in range(10):
        batch.took(0.0)
    assert (batch.rows, batch.is_cut) == (1000, False)


def test_one_row_is_tried_for_ever() -> None:
    batch = Batch(1000)
    for _ in range(10):
        batch.too_slow(batch.rows)
    assert batch.rows == 1
