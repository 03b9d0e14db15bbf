"""Leases: examples of L1-L6, and any history against a table of shards kept by the test."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from relay.core.leases import KEEP_LEASES, Leases
from relay.core.ports.outbox import SHARDS, Claim, Renewal
from tests.conftest import examples

LEASE_S = 5.0
MARGIN_S = 0.5


def renewal(
    mine: Mapping[int, tuple[int, int]],
    *,
    renewed: Iterable[int] | None = None,
    claimable: int = 0,
    relays: int = 1,
) -> Renewal:
    return Renewal(frozenset(mine if renewed is None else renewed), mine, claimable, relays, False, 0.0, None)


def held(*shards: int, at: float = 100.0) -> Leases:
    leases = Leases(LEASE_S)
    leases.on_claimed([Claim(shard, 1, 0) for shard in shards], at)
    return leases


def writable(leases: Leases, now: float) -> list[int]:
    return [shard for shard, flag in enumerate(leases.writable(now)) if flag]


# ---------------------------------------------------------------- the fence (L3, L4)


def test_a_lease_runs_from_before_the_claim_was_sent_less_a_margin() -> None:
    leases = held(3)
    assert writable(leases, 100.0 + LEASE_S - MARGIN_S - 0.001) == [3]
    assert writable(leases, 100.0 + LEASE_S - MARGIN_S) == []


def test_a_renewal_runs_from_before_it_was_sent() -> None:
    """After a freeze the answer may be very old."""
    leases = held(3)
    assert leases.on_renewal(renewal({3: (1, 0)}), sent_at=101.0) == []
    assert writable(leases, 101.0 + LEASE_S - MARGIN_S - 0.001) == [3]
    assert writable(leases, 101.0 + LEASE_S - MARGIN_S) == []


def test_a_shard_that_was_skipped_keeps_its_old_deadline_and_is_tried_again_soon() -> None:
    leases = held(3, 4)
    answer = renewal({3: (1, 0), 4: (1, 0)}, renewed=[4])
    assert leases.on_renewal(answer, sent_at=103.0) == []
    assert leases.was_skipped(answer)
    assert writable(leases, 106.0) == [4]


def test_a_missing_shard_and_another_epoch_are_lost() -> None:
    leases = held(3, 4, 5)
    assert leases.on_renewal(renewal({4: (1, 0), 5: (2, 0)}), sent_at=101.0) == [3, 5]
    assert leases.shards == [4]


def test_nothing_is_written_after_a_lost_session_until_the_shard_was_renewed() -> None:
    """L3: the stored lease names the dead session, so a shard that the renewal skipped may be another's by now."""
    leases = held(3, 4)
    leases.suspend()
    assert writable(leases, 101.0) == []
    leases.on_renewal(renewal({3: (1, 0), 4: (1, 0)}, renewed=[3]), sent_at=101.0)
    assert writable(leases, 101.0) == [3]
    leases.on_renewal(renewal({3: (1, 0), 4: (1, 0)}), sent_at=101.1)
    assert writable(leases, 101.2) == [3, 4]


def test_nothing_is_written_for_a_shard_that_a_settlement_lost() -> None:
    leases = held(3, 4)
    assert writable(leases, 101.0) == [3, 4]
    leases.drop(3)
    assert writable(leases, 101.0) == [4]


def test_a_lease_that_ran_out_or_lost_its_session_does_not_stand() -> None:
    """`relay_shards_owned` showed 64 while the database was away, and beside another relay that had taken them."""
    leases = held(3, 4)
    assert leases.standing(101.0) == 2
    leases.on_renewal(renewal({3: (1, 0), 4: (1, 0)}, renewed=[4]), sent_at=103.0)
    assert leases.standing(106.0) == 1
    leases.suspend()
    assert leases.standing(103.0) == 0


def test_a_floor_is_taken_as_stored_even_where_it_fell() -> None:
    """R5: a crash under asynchronous commit took back what had been settled, and the floor with it."""
    leases = held(3)
    leases.on_renewal(renewal({3: (1, 50)}), sent_at=101.0)
    leases.on_renewal(renewal({3: (1, 30)}), sent_at=102.0)
    assert [lease.floor for lease in leases.all()] == [30]


# ---------------------------------------------------------------- fair share (L5, L6)


def test_a_relay_claims_up_to_its_share() -> None:
    leases = held(0)
    assert leases.claims_wanted(renewal({0: (1, 0)}, claimable=63)) == 63
    assert leases.claims_wanted(renewal({0: (1, 0)}, claimable=63, relays=3)) == 21
    assert leases.claims_wanted(renewal({0: (1, 0)}, claimable=0)) == 0


def test_shards_of_a_claim_whose_answer_was_lost_are_claimed_again() -> None:
    """They carry our name, so the renewal does not count them as claimable; a lone relay would wait for ever."""
    leases = Leases(LEASE_S)
    answer = renewal(dict.fromkeys(range(SHARDS), (1, 0)), renewed=[])
    leases.on_renewal(answer, sent_at=101.0)
    assert leases.claims_wanted(answer) == SHARDS


def test_what_is_above_the_share_is_given() -> None:
    leases = held(*range(SHARDS))
    answer = renewal(dict.fromkeys(range(SHARDS), (1, 0)), relays=2)
    surplus = leases.surplus(answer, 100.0)
    assert surplus == list(range(32, 64))
    for shard in surplus:
        leases.give(shard, 100.0)
    assert leases.surplus(answer, 100.0) == []
    assert writable(leases, 100.0) == list(range(32))


def test_a_hand_over_that_took_too_long_is_not_begun_again_at_once() -> None:
    """One sent row that an application keeps locked: the shard would be given, kept and given again, and none of its
    rows published meanwhile. Another shard goes instead."""
    leases = held(*range(SHARDS))
    answer = renewal(dict.fromkeys(range(SHARDS), (1, 0)), relays=2)
    for shard in leases.surplus(answer, 100.0):
        leases.give(shard, 100.0)
    leases.keep(63, 106.0)
    assert leases.is_kept(63)
    assert leases.surplus(answer, 106.0) == [31]
    leases.give(31, 106.0)
    assert leases.surplus(answer, 106.0) == []
    leases.drop(31)
    assert leases.surplus(answer, 106.0 + KEEP_LEASES * LEASE_S) == []


# ---------------------------------------------------------------- any history


class Histories(RuleBasedStateMachine):
    """Claims, renewals, losses, freezes and hand-overs; the table's side is kept beside it, on the same clock."""

    def __init__(self) -> None:
        super().__init__()
        self.leases = Leases(LEASE_S)
        self.now = 0.0
        self.table: dict[int, tuple[int, float]] = {}  # ours in the table: epoch, leased until
        self.epochs = dict.fromkeys(range(SHARDS), 0)
        self.named_dead: set[int] = set()  # the stored lease names a session that is gone

    @rule(seconds=st.floats(0, 3))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(shards=st.sets(st.integers(0, SHARDS - 1), max_size=8), travel=st.floats(0, 2))
    def claim(self, shards: set[int], travel: float) -> None:
        sent_at = self.now
        claims = []
        for shard in sorted(shards - self.table.keys()):
            self.epochs[shard] += 1
            self.table[shard] = (self.epochs[shard], sent_at + travel / 2 + LEASE_S)
            self.named_dead.discard(shard)
            claims.append(Claim(shard, self.epochs[shard], 0))
        self.now += travel
        self.leases.on_claimed(claims, sent_at)

    @rule(shard=st.integers(0, SHARDS - 1))
    def taken_by_another(self, shard: int) -> None:
        if shard in self.table and (shard in self.named_dead or self.table[shard][1] < self.now):
            del self.table[shard]
            self.epochs[shard] += 1

    @rule(skipped=st.sets(st.integers(0, SHARDS - 1), max_size=20), travel=st.floats(0, 2))
    def renew(self, skipped: set[int], travel: float) -> None:
        sent_at = self.now
        ran_at = sent_at + travel / 2
        before = set(self.leases.shards)
        renewed = []
        for shard, (epoch, _) in self.table.items():
            if shard in before and self.leases.epoch(shard) == epoch and shard not in skipped:
                self.table[shard] = (epoch, ran_at + LEASE_S)
                renewed.append(shard)
        self.now += travel
        answer = renewal({shard: (epoch, 0) for shard, (epoch, _) in self.table.items()}, renewed=renewed)
        lost = self.leases.on_renewal(answer, sent_at)
        assert set(lost) == {shard for shard in before if shard not in self.table}
        self.named_dead.difference_update(renewed)

    @precondition(lambda self: len(self.leases) > 0)
    @rule(data=st.data())
    def told_by_a_settlement(self, data: st.DataObject) -> None:
        """That the shard is another's by now; it may be a moment early, for the drop is what counts here."""
        self.leases.drop(data.draw(st.sampled_from(list(self.leases.shards))))

    @rule()
    def session_lost(self) -> None:
        self.leases.suspend()
        self.named_dead = set(self.table)

    @precondition(lambda self: len(self.leases) > 0)
    @rule(data=st.data())
    def give_or_keep(self, data: st.DataObject) -> None:
        shard = data.draw(st.sampled_from(list(self.leases.shards)))
        if self.leases.is_kept(shard):
            self.leases.give(shard, self.now)
        else:
            self.leases.keep(shard, self.now)

    @invariant()
    def nothing_is_written_for_what_is_not_ours(self) -> None:
        for shard, flag in enumerate(self.leases.writable(self.now)):
            if flag:
                assert self.leases.is_kept(shard)
                epoch, until = self.table[shard]
                assert epoch == self.leases.epoch(shard)
                assert shard not in self.named_dead
                assert self.now < until

    @invariant()
    def whatever_stands_and_is_kept_is_written_for(self) -> None:
        """The answer is kept from one question to the next, and must not outlive what it was made of."""
        is_any = self.leases.standing(self.now) > 0
        stand = [
            lease.shard for lease in self.leases.all() if self.now < lease.until and self.leases.is_kept(lease.shard)
        ]
        assert writable(self.leases, self.now) == (sorted(stand) if is_any else [])


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=examples(40), stateful_step_count=30)
