"""Suspects: who is tried next, and what a broker's close costs the innocent."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from relay.core.ports.outbox import SHARDS
from relay.core.suspects import Suspects
from relay.message import Row, State

ALL = [True] * SHARDS


def rows(count: int, *, shard: int = 0) -> list[Row]:
    made = [Row(shard, seq, f"m{seq}", "ok") for seq in range(1, count + 1)]
    for row in made:
        row.state = State.READY
    return made


def test_the_highest_is_tried_first_and_one_at_a_time() -> None:
    suspects = Suspects()
    one, two, three = rows(3)
    suspects.add([one, two, three], alone=False)
    assert suspects.next(ALL) is three
    suspects.begin(three)
    assert suspects.next(ALL) is None
    suspects.clear(three)
    assert suspects.next(ALL) is two
    assert three not in suspects
    assert len(suspects) == 2


def test_a_row_that_may_not_go_does_not_keep_others_back() -> None:
    suspects = Suspects()
    one, two, three = rows(3)
    suspects.add([one, two, three], alone=True)
    three.state = State.WAITING
    two.shard = 1
    writable = [shard != 1 for shard in range(SHARDS)]
    assert suspects.next(writable) is one
    three.state = State.READY
    assert suspects.next(writable) is three


def test_what_is_set_aside_or_forgotten_is_dropped() -> None:
    suspects = Suspects()
    one, two, three = rows(3)
    suspects.add([one, two, three], alone=True)
    two.state, three.state = State.FORGOTTEN, State.SETTLING
    assert suspects.next(ALL) is one
    one.state = State.FORGOTTEN
    assert suspects.next(ALL) is None
    assert not suspects
    assert not suspects.are_alone


def test_who_is_only_doubted_comes_last_and_the_oldest_first() -> None:
    """They keep coming: newest first, the oldest waited as long as there was traffic."""
    suspects = Suspects()
    one, two, three, four = rows(4)
    for row in (two, three):
        suspects.doubt(row)
    suspects.add([one, four], alone=True)
    tried = []
    while (row := suspects.next(ALL)) is not None:  # type: ignore[assignment]
        tried.append((row.seq, suspects.is_alone(row)))
        suspects.clear(row)
    assert tried == [(4, True), (1, True), (2, False), (3, False)]
    assert not suspects.are_alone


def test_one_whose_exchange_is_asked_for_keeps_its_place() -> None:
    """Those below it are tried behind it, or the close over it repeats them twice; who was never published may go."""
    suspects = Suspects()
    one, two, three = rows(3)
    suspects.add([one, two], alone=False)
    suspects.doubt(three)
    suspects.put_off(two, "x")
    assert suspects.next(ALL) is three
    suspects.put_off(three, "y")
    assert suspects.next(ALL) is None
    suspects.on_verified("y")
    assert suspects.next(ALL) is three
    suspects.on_verified("x")
    assert suspects.next(ALL) is two
    suspects.put_off(two, "x")
    suspects.clear(two)
    assert suspects.next(ALL) is one


def test_all_that_are_doubted_for_one_exchange_wait_for_it_together() -> None:
    """Each was tried, and each try went past all before it: four thousand rows stopped the loop for seconds."""
    suspects = Suspects()
    made = rows(5)
    for row in made:
        row.rare = {"exchange": "y" if row.seq == 3 else "x"}
        suspects.doubt(row)
    one, two, three, four, five = made
    suspects.put_off(one, "x")
    assert suspects.next(ALL) is three
    assert len(suspects) == 5 and all(row in suspects for row in made)
    suspects.clear(two)
    suspects.add([four], alone=False)
    assert suspects.next(ALL) is four
    suspects.clear(four)
    suspects.on_verified("x")
    tried = []
    while (row := suspects.next(ALL)) is not None:  # type: ignore[assignment]
        tried.append(row)
        suspects.clear(row)
    assert tried == [one, three, five]
    assert not suspects


def test_who_waits_for_an_exchange_is_freed_when_it_is_trusted() -> None:
    suspects = Suspects()
    one, two = rows(2)
    for row in (one, two):
        row.rare = {"exchange": "x"}
        suspects.doubt(row)
    suspects.put_off(one, "x")
    assert suspects.trust("x") == [one, two]
    assert not suspects


def test_an_exchange_that_is_trusted_frees_who_was_doubted_over_it() -> None:
    suspects = Suspects()
    one, two, three, four = rows(4)
    for row in (one, two, three, four):
        row.rare = {"exchange": "y" if row is two else "x"}
    for row in (one, two, three):
        suspects.doubt(row)
    suspects.add([three, four], alone=False)
    assert suspects.trust("x") == [one], "but for those over which a link was closed"
    assert [row in suspects for row in (one, two, three, four)] == [False, True, True, True]


def test_a_probe_that_went_down_with_its_link_is_a_suspect_still() -> None:
    suspects = Suspects()
    (row,) = rows(1)
    suspects.add([row], alone=False)
    suspects.begin(row)
    assert suspects.lose_probe() is row
    assert suspects.next(ALL) is row
    suspects.add([row], alone=True)
    assert len(suspects) == 1
    assert suspects.are_alone


@given(count=st.integers(1, 40), data=st.data())
def test_each_innocent_is_repeated_at_most_once_and_a_culprit_costs_one_close(count: int, data: st.DataObject) -> None:
    """Against a broker that looks at messages in order: confirms may be lost with any close of the channel."""
    all_rows = rows(count)
    culprits = data.draw(st.sets(st.sampled_from([row.seq for row in all_rows]), min_size=1))
    copies = dict.fromkeys((row.seq for row in all_rows), 0)
    for row in all_rows:
        if row.seq in culprits:
            break
        copies[row.seq] += 1
    suspects = Suspects()
    suspects.add(all_rows, alone=False)
    closes, again, unconfirmed = 0, list[Row](), list[Row]()
    found: set[int] = set()
    asked: set[int] = set()
    while suspects:
        probed = suspects.next(ALL)
        if probed is None:
            suspects.on_verified("x")
            continue
        if probed.seq not in asked and data.draw(st.booleans()):
            asked.add(probed.seq)
            suspects.put_off(probed, "x")
            continue
        suspects.begin(probed)
        suspects.clear(probed)
        probed.state = State.IN_FLIGHT
        if probed.seq in culprits:
            closes += 1
            found.add(probed.seq)
            again += unconfirmed
            unconfirmed = []
            continue
        copies[probed.seq] += 1
        if data.draw(st.booleans()):
            unconfirmed.append(probed)
    for row in again:
        copies[row.seq] += 1
    assert found == culprits
    assert closes == len(culprits)
    assert all(copies[row.seq] in (1, 2) for row in all_rows if row.seq not in culprits)
