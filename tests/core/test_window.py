"""The confirm window: examples of the rules W1-W4, and any history against a naive model."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.core.window import SETTLED_MAX, ProtocolViolation, Window
from relay.message import Row


def make_row(seq: int) -> Row:
    return Row(0, seq, f"id-{seq}", "order.created")


def filled(count: int) -> tuple[Window, list[Row]]:
    window = Window()
    rows = [make_row(seq) for seq in range(1, count + 1)]
    window.add(rows)
    assert window.last_tag == count
    return window, rows


def test_a_single_ack_settles_its_own_row_only() -> None:
    window, rows = filled(3)
    assert window.ack(2) == ([rows[1]], [])
    assert len(window) == 2
    assert not window.is_in_flight("id-2")
    assert window.drain() == [rows[0], rows[2]]
    assert len(window) == 0


def test_case_05_the_rows_without_a_confirm_are_left() -> None:
    """Stub acks 4 of 6, then cuts: 1, 2, 3 together and 5; exactly 4 and 6 have no outcome."""
    window, rows = filled(6)
    assert window.ack(3, multiple=True) == (rows[:3], [])
    assert window.ack(5) == ([rows[4]], [])
    assert window.drain() == [rows[3], rows[5]]


def test_case_06_a_nack_before_a_covering_multiple_ack_stays_a_nack() -> None:
    window, rows = filled(3)
    assert window.nack(2) == ([rows[1]], [])
    assert window.ack(3, multiple=True) == ([rows[0], rows[2]], [])


def test_an_ack_after_a_return_is_not_delivery() -> None:
    window, rows = filled(4)
    window.mark_returned("id-2", "312 NO_ROUTE", "ev", "nope.x")
    window.mark_returned("id-4", "312 NO_ROUTE", "ev", "nope.y")
    delivered, returned = window.ack(3, multiple=True)
    assert delivered == [rows[0], rows[2]]
    assert [(each.row, each.error, each.exchange, each.routing_key) for each in returned] == [
        (rows[1], "312 NO_ROUTE", "ev", "nope.x")
    ]
    delivered, returned = window.ack(4)
    assert delivered == []
    assert [each.row for each in returned] == [rows[3]]


def test_a_return_without_its_confirm_has_no_outcome_yet() -> None:
    window, rows = filled(1)
    window.mark_returned("id-1", "312 NO_ROUTE", "ev", "nope.x")
    assert window.is_in_flight("id-1")
    assert window.drain() == rows


def test_tag_zero_with_multiple_means_all_so_far() -> None:
    window, rows = filled(3)
    assert window.ack(0, multiple=True) == (rows, [])


@pytest.mark.parametrize(("tag", "multiple"), [(1, False), (4, False), (0, False), (4, True), (1, True), (2, True)])
def test_a_confirm_of_what_is_not_in_flight_is_a_violation(tag: int, multiple: bool) -> None:
    window, rows = filled(3)
    window.ack(2, multiple=True)
    with pytest.raises(ProtocolViolation):
        window.ack(tag, multiple)
    assert window.drain() == rows[2:]


def test_a_return_of_what_is_not_in_flight_is_a_violation() -> None:
    window, _ = filled(1)
    window.ack(1)
    with pytest.raises(ProtocolViolation):
        window.mark_returned("id-1", "312 NO_ROUTE", "", "")


def test_a_message_id_is_in_flight_once() -> None:
    window, _ = filled(1)
    window.add([make_row(1)])
    with pytest.raises(AssertionError):
        window.is_in_flight("id-1")


def test_tags_go_on_after_everything_was_settled() -> None:
    window, _ = filled(2)
    window.ack(2, multiple=True)
    row = make_row(1)
    window.add([row])
    assert window.last_tag == 3
    assert window.ack(3, multiple=True) == ([row], [])


def test_multiple_costs_what_it_settles() -> None:
    """A window as large as memory allows, settled two at a time: not a scan of the window each time."""
    count = 100_000
    window, rows = filled(count)
    began = time.process_time()
    settled: list[Row] = []
    for tag in range(2, count + 1, 2):
        settled += window.ack(tag, multiple=True)[0]
    assert settled == rows
    assert time.process_time() - began < 5, "50,000 scans of the window would take minutes"


def test_a_row_that_stays_costs_nothing_for_what_goes_after_it() -> None:
    """Its queue is mute, all others answer: a slot a message, and each return a look at all of them."""
    window, (first, second) = filled(2)
    for seq in range(3, 60_003):
        window.add([make_row(seq)])
        window.ack(seq)
    assert len(window._rows) <= 2 * SETTLED_MAX
    assert window.oldest is first
    window.mark_returned("id-1", "312 NO_ROUTE", "ev", "x")
    delivered, returned = window.ack(window.last_tag, multiple=True)
    assert (delivered, [each.row for each in returned]) == ([second], [first])
    assert len(window) == 0


class Model:
    """The rules, said as plainly as possible: a list of tags and what was said about each."""

    def __init__(self) -> None:
        self.open: dict[int, Row] = {}
        self.returned: set[int] = set()
        self.last = 0

    def settle(self, tag: int, multiple: bool) -> tuple[Sequence[Row], Sequence[Row]]:
        upto = self.last if multiple and tag == 0 else tag
        tags = [each for each in self.open if (each <= upto if multiple else each == upto)]
        if not tags or upto > self.last:
            raise ProtocolViolation("not in flight")
        rows = [(each, self.open.pop(each)) for each in sorted(tags)]
        return (
            [row for each, row in rows if each not in self.returned],
            [row for each, row in rows if each in self.returned],
        )


steps = st.one_of(
    st.tuples(st.just("add"), st.just(0), st.just(False)),
    st.tuples(st.just("add"), st.just(0), st.just(False)),
    st.tuples(st.sampled_from(["ack", "nack"]), st.integers(0, 25), st.booleans()),
    st.tuples(st.just("return"), st.integers(1, 25), st.just(False)),
)


@given(st.lists(steps, max_size=60), st.sampled_from([0, 2, 4096]))
def test_any_history_agrees_with_the_model(history: list[tuple[str, int, bool]], settled_max: int) -> None:
    window, model = Window(settled_max), Model()
    outcomes: list[int] = []
    for kind, tag, multiple in history:
        match kind:
            case "add":
                row = make_row(model.last + 1)
                model.last += 1
                model.open[model.last] = row
                window.add([row])
                assert window.last_tag == model.last
            case "return":
                if tag in model.open:
                    window.mark_returned(f"id-{tag}", "312 NO_ROUTE", "ev", "x")
                    model.returned.add(tag)
                else:
                    with pytest.raises(ProtocolViolation):
                        window.mark_returned(f"id-{tag}", "312 NO_ROUTE", "ev", "x")
            case _:
                try:
                    expected = model.settle(tag, multiple)
                except ProtocolViolation:
                    with pytest.raises(ProtocolViolation):
                        window.ack(tag, multiple)
                else:
                    settle = window.ack if kind == "ack" else window.nack
                    delivered, returned = settle(tag, multiple)
                    assert (delivered, [each.row for each in returned]) == expected
                    outcomes += [row.seq for row in delivered] + [each.row.seq for each in returned]
        assert len(window) == len(model.open)
        assert window.last_tag == model.last
        assert window.oldest is (model.open[min(model.open)] if model.open else None)
    left = [row.seq for row in window.drain()]
    assert left == sorted(model.open)
    assert sorted(outcomes + left) == list(range(1, model.last + 1)), "each row leaves exactly once"
