"""What the relay knows of held keys: never too few (H2), and everything again after a walk."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from relay.core.holding import Holding, Walk
from relay.core.ports.outbox import HeldKey, HeldPage
from relay.message import Key
from tests.conftest import examples

A, B = ("", "a"), ("", "b")
KEYS_MAX = 3


def found(*keys: Key, is_lowest_held: bool = False, hash: int = 0) -> list[HeldKey]:
    return [HeldKey(hash, 0, key, 9, is_lowest_held) for key in keys]


def walked(holding: Holding, *pages: HeldPage, known_until: int = 0) -> None:
    walk = Walk([0], known_until, 500)
    for page in pages:
        walk.take(page)
    holding.end(walk)


def test_until_a_walk_has_ended_every_row_that_is_read_is_tested() -> None:
    """And those that are released only if their key was held since: a key with many held rows drains meanwhile."""
    holding = Holding(500)
    holding.take_up(0)
    assert holding.may_hold(0, A, None)
    assert not holding.may_hold(0, A, 5)
    holding.note(0, A, 3, serial=6)
    assert holding.may_hold(0, A, 5)
    walked(holding, HeldPage(found(B), None), known_until=5)
    assert [holding.may_hold(0, key, None) for key in (A, B, ("", "c"))] == [True, True, False]
    assert holding.incomplete == []


def test_what_is_noted_while_a_walk_is_under_way_is_kept() -> None:
    holding = Holding(500)
    holding.take_up(0)
    walk = Walk([0], 4, 500)
    walk.take(HeldPage([], (7, 7)))
    holding.note(0, A, 3, serial=5)
    walk.take(HeldPage([], None))
    holding.end(walk)
    assert holding.may_hold(0, A, None)
    assert not holding.may_hold(0, B, None)


def test_a_shard_that_was_dropped_meanwhile_learns_nothing() -> None:
    holding = Holding(500)
    holding.take_up(0)
    walk = Walk([0], 4, 500)
    holding.drop(0)
    walk.take(HeldPage(found(A), None))
    holding.end(walk)
    assert not holding.is_any


def test_a_key_over_several_pages_is_stuck_only_if_its_very_lowest_row_is_held() -> None:
    """Also where two keys share a hash: a head on the first page, its held followers on the next ones."""
    walk = Walk([0], 0, 500)
    assert walk.take(HeldPage(found(A, hash=5), (5, 10))) == []
    assert walk.take(HeldPage(found(A, is_lowest_held=True, hash=5), (5, 20))) == []
    assert walk.take(HeldPage(found(A, B, is_lowest_held=True, hash=5), (5, 30))) == [(0, B)]
    assert walk.take(HeldPage(found(A, B, is_lowest_held=True, hash=5), (6, 1))) == []
    assert walk.take(HeldPage(found(A, is_lowest_held=True, hash=7), None)) == [(0, A)]


def test_what_is_forgotten_for_its_number_counts_with_the_latest_of_all() -> None:
    """A's row was decided on first, for the settlement after the one whose tests held B's, which is noted when it is applied."""
    holding = Holding(2)
    holding.note(0, A, 1, serial=7)
    holding.note(0, B, 2, serial=6)
    assert not holding.is_known(0)
    assert [holding.may_hold(0, key, 6) for key in (A, B)] == [True, True]
    assert not holding.may_hold(0, A, 7)


class Histories(RuleBasedStateMachine):
    """Decisions, commits, lost sessions, freed keys and walks at random: no held key is ever unknown."""

    KEYS = st.sampled_from([("", name) for name in "abcdef"])

    def __init__(self) -> None:
        super().__init__()
        self.holding = Holding(KEYS_MAX)
        self.holding.take_up(0)
        self.table: dict[int, Key] = {}
        self.deciding: dict[int, Key] = {}
        self.serial, self.applied, self.seq = 1, 0, 0
        self.walk: Walk | None = None

    @rule(key=KEYS)
    def decide(self, key: Key) -> None:
        self.seq += 1
        self.deciding[self.seq] = key
        self.holding.note(0, key, self.seq, self.serial)

    @rule(is_written=st.booleans(), is_acknowledged=st.sampled_from([True, True, False]))
    def commit(self, is_written: bool, is_acknowledged: bool) -> None:
        """Or the sessions are lost: whether it was written is not known, and the shard is taken up again."""
        if is_written or is_acknowledged:
            self.table |= self.deciding
        self.deciding = {}
        if is_acknowledged:
            self.applied = self.serial
        else:
            self.holding.take_up(0)
            self.walk = None
        self.serial += 1

    @precondition(lambda self: bool(self.table))
    @rule(dice=st.integers(0, 5))
    def send(self, dice: int) -> None:
        del self.table[sorted(self.table)[dice % len(self.table)]]

    @rule(key=KEYS)
    def test(self, key: Key) -> None:
        """A row above all others of its key is tested, with what the last settlement wrote."""
        self.seq += 1
        if key not in self.table.values() and key not in self.deciding.values():
            self.holding.note_free(0, key, self.seq)

    @rule()
    def begin(self) -> None:
        self.walk = Walk([0], self.applied, KEYS_MAX)

    @precondition(lambda self: self.walk is not None)
    @rule(rows=st.integers(1, 3))
    def page(self, rows: int) -> None:
        assert self.walk is not None
        after = self.walk.after or (-1, -1)
        places = sorted(((ord(key[1]) % 3, seq), key) for seq, key in self.table.items())
        places = [(place, key) for place, key in places if place > after]
        keys: dict[Key, HeldKey] = {}
        for (hash_, seq), key in places[:rows]:
            keys[key] = HeldKey(hash_, 0, key, seq, is_lowest_held=False)
        self.walk.take(HeldPage(list(keys.values()), places[rows - 1][0] if len(places) >= rows else None))
        if self.walk.is_over:
            self.holding.end(self.walk)
            self.walk = None

    @invariant()
    def no_held_key_is_unknown(self) -> None:
        for key in (*self.table.values(), *self.deciding.values()):
            assert self.holding.may_hold(0, key, None)
        for key in self.deciding.values():
            assert self.holding.may_hold(0, key, self.applied)


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=examples(150), stateful_step_count=40)


@pytest.mark.parametrize("keys_max", [1, 500])
def test_h2_an_earlier_settlement_noted_later_frees_nothing(keys_max: int) -> None:
    """The settlement before is applied, and what its tests held is noted, when the next one has decided already: a page sent
    then does not see that one."""
    holding = Holding(keys_max)
    holding.note(0, ("t", "a"), 1, serial=7)
    holding.note(0, ("t", "a"), 2, serial=6)
    assert holding.may_hold(0, ("t", "a"), known_until=6)
