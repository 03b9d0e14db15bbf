"""What to read next: examples of R1-R5, and any history of writers against a small model of the database."""

from __future__ import annotations

from relay.core.ports import Check, Page, Writer
from relay.core.reading import Reading
from relay.message import Row

INLINE = 8192


def check(last_seq: int, *writers: Writer) -> Check:
    return Check(last_seq, writers, 0.0)


def make_row(seq: int, shard: int = 0) -> Row:
    return Row(shard, seq, f"m{seq}", "ok", aggregate_id="k")


def began(floor: int = 0, *shards: int) -> Reading:
    reading = Reading()
    for shard in shards or (0,):
        reading.add_shard(shard, floor)
    return reading


# ---------------------------------------------------------------- R1


def test_nothing_is_asked_or_stored_before_the_first_check() -> None:
    reading = began(7)
    assert reading.behind([0]) == []
    assert reading.floor(0, None) is None
    reading.on_check(check(7))
    assert reading.floor(0, None) == 7


def test_a_writer_of_the_first_check_may_have_written_anywhere_above_the_lowest_floor() -> None:
    reading = began(5)
    reading.add_shard(1, 9)
    reading.on_check(check(20, Writer("3/1", 700)))
    assert reading.request([0, 1], 10, INLINE).lows == [5]


def test_a_later_writer_lies_above_s_of_the_check_before() -> None:
    reading = began()
    reading.on_check(check(20))
    reading.on_check(check(24, Writer("3/1", None)))
    assert reading.request([0], 10, INLINE).lows == [20]


def test_a_prepared_writer_takes_the_lowest_low_that_is_known() -> None:
    """R1 prepared: PREPARE changes a transaction's id; it is no new writer."""
    reading = began()
    reading.on_check(check(10))
    reading.on_check(check(11, Writer("3/1", 700)))
    reading.on_check(check(19, Writer("-1/700", 700)))
    request = reading.request([0], 10, INLINE)
    assert dict(zip(request.numbers, request.lows, strict=True)) == {0: 10, 1: 10}


def test_a_prepared_writer_of_the_first_check_goes_down_with_a_lower_floor() -> None:
    """Seen open at the first check, prepared by the second; then a shard is claimed with a lower floor. Its rows may lie
    anywhere above that floor too: with a low of 100 the floor of shard 1 would pass its row 60 (lost)."""
    reading = began(100)
    reading.on_check(check(120, Writer("3/1", 700)))
    reading.on_check(check(120, Writer("-1/700", 700)))
    request = reading.request([0], 10, INLINE)
    reading.on_page(request, Page([0], []))
    reading.add_shard(1, 50)
    reading.on_check(check(130, Writer("-1/700", 700)))
    request = reading.request([0, 1], 10, INLINE)
    reading.on_page(request, Page([], []))
    assert reading.floor(1, None) == 50
