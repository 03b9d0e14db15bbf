"""The rows in memory: examples of P1-P3 and H1-H7."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from relay.core.chains import Chains
from relay.core.holding import Walk
from relay.core.ports.outbox import SHARDS, HeldKey, HeldPage
from relay.core.settings import Ordering
from relay.message import Row, State

INLINE = 100
ALL = [True] * SHARDS
ROOM = 1_000_000


def make_row(seq: int, key: str | None = "k", *, size: int = 10, shard: int = 0, **columns: Any) -> Row:
    columns.setdefault("id", f"m{seq}")
    row = Row(shard, seq, columns.pop("id"), "ok", aggregate_id=key, size=size, **columns)
    if not row.is_loaded:
        assert row.payload is None
    return row


def take(chains: Chains, room: int = 100) -> list[int]:
    return [row.seq for row in chains.take(room, ROOM, ALL)]


def confirm(chains: Chains, *rows: Row) -> None:
    """Confirmed and settled."""
    chains.finish(chains.on_confirmed(rows))


def begun(*rows: Row, ordering: Ordering = Ordering.STRICT) -> Chains:
    chains = Chains(ordering, INLINE)
    assert chains.admit(rows) == []
    return chains


# ---------------------------------------------------------------- order (P1, I3)


def test_strict_sends_the_next_of_a_key_on_the_confirm_of_the_one_before() -> None:
    one, two, other = make_row(1), make_row(2), make_row(3, "other")
    chains = begun(one, two, other)
    assert take(chains) == [1, 3]
    confirm(chains, other)
    assert take(chains) == []
    assert chains.on_confirmed([one]) == [one]
    assert take(chains) == [2], "confirmed is enough: the settlement comes behind"


def test_rows_without_a_key_and_unordered_rows_go_at_once() -> None:
    assert take(begun(make_row(1, None), make_row(2, None))) == [1, 2]
    assert take(begun(make_row(1), make_row(2), ordering=Ordering.NONE)) == [1, 2]


def test_pipelined_sends_a_key_in_order_without_waiting() -> None:
    assert take(begun(make_row(1), make_row(2), make_row(3), ordering=Ordering.PIPELINED)) == [1, 2, 3]


@pytest.mark.parametrize("ordering", [Ordering.STRICT, Ordering.PIPELINED])
def test_a_lower_row_that_comes_late_goes_before_those_that_are_only_ready(ordering: Ordering) -> None:
    """I3: a row that commits after a later one of its key was read goes next."""
    rows = {seq: make_row(seq) for seq in (1, 2, 3)}
    chains = begun(rows[2], rows[3], ordering=ordering)
    assert chains.admit([rows[1]]) == []
    order: list[int] = []
    while len(order) < 3:
        batch = chains.take(1, ROOM, ALL)
        order += [row.seq for row in batch]
        confirm(chains, *batch)
    assert order == [1, 2, 3]


def test_a_lower_row_that_comes_late_waits_for_the_one_in_flight() -> None:
    low, high = make_row(1), make_row(2)
    chains = begun(high)
    assert take(chains) == [2]
    chains.admit([low])
    assert take(chains) == []
    chains.on_lost([high])
    assert take(chains) == [1], "the link closed over 2, and 1 is lower"
    confirm(chains, low)
    assert take(chains) == [2]


def test_a_nack_lets_a_lower_row_that_came_late_go_at_once() -> None:
    low, high = make_row(1), make_row(2)
    chains = begun(high)
    take(chains)
    chains.admit([low])
    chains.on_nacked(high, due=30.0)
    assert take(chains) == [1]


def test_two_lives_of_a_row_may_back_off_until_the_same_instant() -> None:
    """Nacked, forgotten with its shard, read again, nacked again: rows do not compare."""
    first, second = make_row(1), make_row(1)
    chains = begun(first)
    take(chains)
    chains.on_nacked(first, due=1.0)
    chains.drop_shard(0)
    chains.admit([second])
    take(chains)
    chains.on_nacked(second, due=1.0)
    chains.wake_backoff(1.0)
    assert take(chains) == [1]


@pytest.mark.parametrize("size", [10, 1000])
def test_pipelined_waits_for_a_body_and_goes_on_when_it_has_come(size: int) -> None:
    """Small bodies are left behind too, when a row is loaded anew."""
    first = make_row(1, size=size, is_loaded=False)
    chains = begun(first, make_row(2), make_row(3), ordering=Ordering.PIPELINED)
    assert take(chains) == []
    assert list(chains.wanted) == [1]
    first.is_loaded = True
    chains.on_loaded([first])
    assert take(chains) == [1, 2, 3]


@pytest.mark.parametrize("ordering", [Ordering.STRICT, Ordering.PIPELINED])
def test_a_body_that_comes_after_a_lower_row_queues_its_row_once(ordering: Ordering) -> None:
    """The lower one was committed late, while the body was on its way."""
    later, behind = make_row(5, size=10, is_loaded=False), make_row(6)
    chains = begun(later, behind, ordering=ordering)
    assert take(chains) == []
    lower = make_row(3)
    chains.admit([lower])
    if ordering is Ordering.STRICT:
        assert take(chains) == [3]
        chains.on_confirmed([lower])
    later.is_loaded = True
    chains.on_loaded([later])
    ready = [row.seq for row in chains._queue.rows]
    assert sorted(ready) == sorted(set(ready))
    assert take(chains) == ([5] if ordering is Ordering.STRICT else [3, 5, 6])


# ---------------------------------------------------------------- identity, counts


def test_a_row_that_is_here_is_skipped() -> None:
    row = make_row(1)
    chains = begun(row)
    assert chains.admit([make_row(1)]) == []
    assert row in chains
    assert len(chains) == 1


@pytest.mark.parametrize("way", ["admit", "blocked", "scheduled"])
def test_another_id_under_a_known_seq_takes_its_place(way: str) -> None:
    """The database lost the old row in a crash and handed its seq out again: skipped, the new one would be lost, for
    the cursor is past it."""
    old, new = make_row(1), make_row(1, id="other", shard=3)
    chains = begun(old)
    take(chains)
    match way:
        case "admit":
            chains.admit([new])
        case "blocked":
            assert chains.admit_blocked([new]) == [new]
        case "scheduled":
            assert chains.admit_scheduled(new)
    assert old.state is State.FORGOTTEN
    assert new in chains
    assert len(chains) == 1
    assert (chains.count(0), chains.count(3)) == (0, 1)
    assert chains.has_orphans


@pytest.mark.parametrize("size", [10, 1000])
def test_bytes_are_given_back_however_the_body_came(size: int) -> None:
    """`large_bytes` must return to 0, or one day no body has room (or memory has no bound)."""
    with_row, apart = make_row(1, "a", size=size), make_row(2, "b", size=size, is_loaded=False)
    chains = begun(with_row, apart)
    take(chains)
    apart.is_loaded = True
    chains.on_loaded([apart])
    take(chains)
    assert chains.bytes == 2 * size
    assert chains.large_bytes == (2000 if size > INLINE else 0)
    confirm(chains, with_row, apart)
    assert (chains.bytes, chains.large_bytes) == (0, 0)


def test_what_is_forgotten_in_bulk_leaves_no_trace_in_the_queues() -> None:
    """While the broker is down or blocked nobody takes from the queue; sessions that come and go would fill it (I6)."""
    chains = Chains(Ordering.STRICT, INLINE)
    for turn in range(50):
        chains.admit(make_row(turn * 10 + n, f"k{n}") for n in range(10))
        chains.take(5, ROOM, [False] * SHARDS)
        chains.drop_unpublished()
    assert chains.ready == 0
    assert len(chains._queue._apart) == 0
    chains.admit(make_row(10_000 + n, f"k{n}") for n in range(10))
    chains.drop_shard(0)
    assert chains.ready == 0


# ---------------------------------------------------------------- aside (H1-H7)


def test_followers_go_aside_with_their_head() -> None:
    rows = [make_row(seq) for seq in (1, 2, 3)]
    chains = begun(*rows)
    take(chains)
    assert chains.set_back(rows[0], holds=True) == rows[1:]
    assert [row.state for row in rows] == [State.SETTLING] * 3
    assert take(chains) == []


def test_without_holding_the_next_waits_for_the_commit() -> None:
    """H7: a crash before the park's commit would leave 2 before 1."""
    rows = [make_row(seq) for seq in (1, 2)]
    chains = begun(*rows)
    take(chains)
    assert chains.set_back(rows[0], holds=False) == []
    assert take(chains) == []
    chains.finish([rows[0]])
    assert take(chains) == [2]


def learn(chains: Chains, rows: Iterable[Row], known_until: int = -1) -> None:
    """Shard 0 is taken up, and a walk that saw the settlements up to `known_until` finds these rows to hold."""
    chains.holding.take_up(0)
    walk = Walk([0], known_until, 500)
    held = [HeldKey(0, 0, row.key, row.seq, is_lowest_held=False) for row in rows if row.key is not None]
    walk.take(HeldPage(held, None))
    chains.holding.end(walk)


def test_rows_of_a_held_key_are_tested() -> None:
    chains = begun(make_row(1))
    chains.note_holding(make_row(1), serial=4)
    row = make_row(5)
    assert chains.admit([row]) == [row]
    assert row.state is State.TESTING


def test_a_key_stays_held_while_a_holding_row_lies_above_the_tested_one() -> None:
    """5 is parked; 3, read late, has no blocker below: that does not free the key for 7."""
    chains = Chains(Ordering.STRICT, INLINE)
    learn(chains, [make_row(5)])
    three, seven, nine = make_row(3), make_row(7), make_row(9)
    assert chains.admit([three]) == [three]
    chains.on_unblocked(three)
    assert take(chains) == [3]
    assert chains.admit([seven]) == [seven]
    chains.on_unblocked(seven)
    confirm(chains, three)
    assert take(chains) == [7]
    assert chains.admit([nine]) == [], "nothing above 5 was known to hold: the key is free"


def test_what_is_known_of_holding_rows_outlives_an_older_answer() -> None:
    """A deferral is being written when the shard is taken up again: the query of holding keys did not see it yet, and
    the key's next row must be tested all the same."""
    chains = Chains(Ordering.STRICT, INLINE)
    chains.note_holding(make_row(5), serial=4)
    chains.note_holding(make_row(1, "old"), serial=2)
    learn(chains, [make_row(3, "found")], known_until=3)
    six, old, found = make_row(6), make_row(7, "old"), make_row(8, "found")
    assert chains.admit([six, old, found]) == [six, found]


def test_above_the_bound_every_row_is_tested_until_an_answer_says_better() -> None:
    chains = Chains(Ordering.STRICT, INLINE, held_keys_max=10)
    for n in range(10):
        chains.note_holding(make_row(n, f"k{n}"), serial=7)
    stranger = make_row(10_000, "stranger")
    assert chains.admit([stranger]) == [stranger]
    learn(chains, [], known_until=6)
    assert chains.admit([second := make_row(10_001, "second")]) == [second], "settlement 7 was not seen"
    learn(chains, [], known_until=7)
    assert chains.admit([make_row(10_002, "third")]) == []


def test_a_released_row_is_tested_only_if_its_key_was_held_since() -> None:
    chains = Chains(Ordering.STRICT, INLINE)
    chains.note_holding(make_row(1), serial=4)
    assert chains.admit([make_row(1)], known_until=4) == []
    chains.note_holding(make_row(0, "other"), serial=5)
    late = make_row(2, "other")
    assert chains.admit([late], known_until=4) == [late]


def test_a_changed_row_holds_its_place_until_it_is_loaded_anew() -> None:
    one, two = make_row(1), make_row(2)
    chains = begun(one)
    take(chains)
    chains.set_back(one, holds=True)
    chains.note_holding(one, serial=0)
    assert chains.admit([two]) == [two]
    chains.hold_places([one])
    chains.on_unblocked(two)
    assert take(chains) == []
    chains.finish([one])
    again = make_row(1)
    chains.admit([again])
    chains.on_unblocked(again)
    assert take(chains) == [1]


# ---------------------------------------------------------------- leases, links


def test_an_orphan_settles_nothing() -> None:
    """P3: the lease was lost with the row in flight."""
    row = make_row(1)
    chains = begun(row)
    take(chains)
    chains.drop_shard(0)
    assert row.state is State.FORGOTTEN
    assert chains.has_orphans
    assert chains.on_confirmed([row]) == []
    assert len(chains) == 0


def test_a_verdict_on_a_row_that_is_tested_meanwhile_frees_its_key() -> None:
    """`pipelined`: the row stood as put off for ever, and those behind it with it, until another row of the key came."""
    first, second = make_row(2), make_row(3)
    chains = begun(first, second, ordering=Ordering.PIPELINED)
    assert take(chains) == [2, 3]
    lower = make_row(1)
    assert chains.admit_blocked([lower]) == [lower]
    chains.on_lost([first, second])
    assert chains.put_off(chains.take(10, ROOM, [True] * SHARDS), "x") == []
    assert chains.test_behind(lower) == [first, second]
    chains.on_verified("x")
    chains.forget(lower)
    chains.on_unblocked(first)
    chains.on_unblocked(second)
    assert take(chains) == [2, 3]


def test_rows_of_an_unwritable_shard_are_kept_back_and_offered_again_first() -> None:
    chains = begun(make_row(1, "a", shard=1), make_row(2, "b", shard=2))
    assert [row.seq for row in chains.take(10, ROOM, [shard == 2 for shard in range(SHARDS)])] == [2]
    chains.admit([make_row(3, "c", shard=2)])
    chains.offer_again()
    assert take(chains) == [1, 3]


@pytest.mark.parametrize("ordering", [Ordering.STRICT, Ordering.PIPELINED])
def test_a_row_whose_exchange_is_unknown_keeps_its_key_back_and_nobody_else(ordering: Ordering) -> None:
    chains = begun(make_row(1, "a"), make_row(2, "a"), make_row(3, "b"), make_row(4, "a"), ordering=ordering)
    batch = chains.take(3, ROOM, [True] * SHARDS)
    going = list(chains.put_off(batch, "x"))
    assert [row.seq for row in going + chains.take(10, ROOM, [True] * SHARDS)] == [3]
    chains.admit([make_row(5, "a")])
    chains.on_verified("another")
    assert take(chains) == []
    chains.on_verified("x")
    expected = [1] if ordering is Ordering.STRICT else [1, 2, 4, 5]
    assert take(chains) == expected


def test_a_row_forgotten_with_its_body_on_the_way_leaves_no_wish() -> None:
    row = make_row(1, is_loaded=False)
    chains = begun(row)
    take(chains)
    assert chains.wanted
    row.is_loaded = True
    chains.forget(row)
    assert not chains.wanted


def test_bodies_that_wait_behind_one_that_has_no_room_do_not_keep_it_out() -> None:
    """Loaded 2 waits behind 1, which came late and whose body has no room beside 2's: 1 passes all the same."""
    one, two = make_row(1, size=1000, is_loaded=False), make_row(2, size=1000)
    chains = begun(two)
    chains.admit([one])
    assert take(chains) == []
    assert list(chains.wanted) == [1]
    assert chains.large_bytes == 1000
    assert not chains.has_large_to_go()
