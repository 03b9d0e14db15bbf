"""The engine's settler and keeper, without a simulation: one call, one look at what became of it."""

from __future__ import annotations

import asyncio
import logging

import pytest

from relay import settler
from relay.core.ports.outbox import Claim, Held, Page, Settled, Settlement
from relay.core.settings import EngineSettings
from relay.errors import DatabaseLost, DatabaseRefused, StatementTooSlow
from relay.keeper import LEAVING_TRIES, RENEWALS_PER_LEASE, SKIPPED_RETRY_S, Keeper
from relay.message import Row, State
from tests.core.parts import Parts, eventually, make_row, renewal, turns

# ---------------------------------------------------------------- the settler


async def test_decisions_of_a_settlement_that_was_cancelled_are_kept() -> None:
    """The keeper lost its session first: the settler is cancelled within `settle`, and what was sent must be settled
    again in the next life of the sessions (S3), not stay SETTLING for ever with the floor and the drain behind it."""
    parts = Parts()
    row = make_row(1)
    parts.confirm(row)
    async with parts.running(parts.settler.run()):
        assert (await parts.settled()).sent == [row]
    parts.engine.lose_sessions()
    assert parts.engine.decisions.sent == [row]
    async with parts.running(parts.settler.run()):
        assert (await parts.settled()).sent == [row]
        parts.commit(done=[row])
        await eventually(lambda: len(parts.engine.chains) == 0)


async def test_what_else_a_cancelled_settlement_carried_is_dropped_with_its_rows() -> None:
    """A deferral and its followers under way when the session is lost: none of them stays SETTLING in memory."""
    parts = Parts()
    rows = [make_row(1), make_row(2), make_row(3, "other")]
    parts.engine.admit(rows)
    parts.turn()
    parts.link.give_back(rows[0])
    async with parts.running(parts.settler.run()):
        settlement = await parts.settled()
        assert [each.row for each in settlement.setbacks] == rows[:1]
        assert settlement.followers == rows[1:2]
    parts.engine.lose_sessions()
    assert [row.state for row in rows] == [State.FORGOTTEN, State.FORGOTTEN, State.IN_FLIGHT]
    assert len(parts.engine.decisions) == 0


async def test_a_refused_settlement_is_tried_again_with_the_same_decisions() -> None:
    parts = Parts()
    rows = [make_row(1), make_row(2, "other")]
    parts.engine.admit(rows)
    parts.turn()
    parts.link.ack(rows[0])
    async with parts.running(parts.settler.run()):
        assert (await parts.settled()).sent == rows[:1]
        parts.link.ack(rows[1])
        parts._call.fail(DatabaseRefused("lock timeout"))
        assert (await parts.settled()).sent == rows
        parts.commit(done=rows)
        await eventually(lambda: len(parts.engine.chains) == 0)


async def test_what_takes_too_long_is_settled_in_smaller_parts() -> None:
    """A trigger of five milliseconds a row: the same thousand rows ran into the time limit for ever, and all else behind them."""
    parts = Parts()
    rows = [make_row(seq, f"k{seq}") for seq in range(1, 41)]
    held = make_row(41, "k40")
    parts.engine.admit([*rows, held])
    parts.turn()
    for row in rows[:20]:
        parts.link.ack(row)
    for row in rows[20:]:
        parts.link.give_back(row)
    sizes: list[int] = []
    done: list[Row] = []

    def settle(settlement: Settlement) -> Settled:
        sizes.append(len(settlement))
        if len(settlement) > 5:
            raise StatementTooSlow("canceling statement due to statement timeout")
        rows = [*settlement.sent, *(each.row for each in settlement.setbacks), *settlement.followers]
        done.extend(rows)
        return Settled(done=rows)

    parts.outbox.answers["settle"] = settle
    async with parts.running(parts.settler.run()):
        await eventually(lambda: len(done) == 41)
        await eventually(lambda: len(parts.engine.chains) == 0)
    assert done == [*rows, held]
    assert sizes[:3] == [41, 10, 2]


async def test_what_took_too_long_with_its_sessions_is_smaller_in_the_next_ones() -> None:
    parts = Parts()
    rows = [make_row(seq, f"k{seq}") for seq in range(1, 41)]
    parts.engine.admit(rows)
    parts.turn()
    for row in rows:
        parts.link.ack(row)
    async with parts.running(parts.settler.run()) as (task,):
        assert len(await parts.settled()) == 40
        parts.pass_time(5.0)
        parts._call.fail(DatabaseLost("no answer in time"))
        await eventually(task.done)
        assert isinstance(task.exception(), DatabaseLost)
    async with parts.running(parts.settler.run()):
        assert (await parts.settled()).sent == rows[:10]
        parts.commit(done=rows[:10])
        assert (await parts.settled()).sent == rows[10:30], "twice as many after one that was quick"


async def test_a_row_that_somebody_changed_keeps_its_place_until_it_is_loaded_anew() -> None:
    """1 was returned, its deferral missed (somebody touched the row); 2, read since and without a blocker in the table,
    must not go before 1 has been loaded again (I3)."""
    parts = Parts()
    one, two = make_row(1), make_row(2)
    parts.engine.admit([one])
    parts.turn()
    parts.link.give_back(one)
    parts.engine.admit([two])
    assert two.state is State.TESTING
    async with parts.running(parts.settler.run(), parts.publisher.run()):
        settlement = await parts.settled()
        assert settlement.tested == [two]
        parts.commit(changed=[one], unblocked=[two])
        await eventually(lambda: parts.engine.reread == [one])
        await turns()
        assert parts.link.ids == ["m1"]
        again = make_row(1)
        parts.outbox.answers["reload"] = [again]
        await parts.reader._reread()
        await eventually(lambda: parts.link.sent[1:] == [again])
        parts.link.ack(again)
        await eventually(lambda: parts.link.ids == ["m1", "m1", "m2"])


async def test_an_old_fence_does_not_cost_the_lease_that_was_claimed_since() -> None:
    """Shard 0 was lost and claimed again while a settlement under the old epoch was under way."""
    parts = Parts()
    row = make_row(1)
    parts.confirm(row)
    async with parts.running(parts.settler.run()):
        assert (await parts.settled()).fences == {0: 1}
        parts.engine.lose_shard(0)
        parts.engine.leases.on_claimed([Claim(0, 3, 0)], parts.clock.now())
        parts.commit(lost={0})
        await eventually(lambda: parts.engine.applied_serial == 0)
        assert 0 in parts.engine.leases


async def test_confirmed_rows_wait_for_more_but_never_fill_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transaction a row cost a hot key more than its messages; a window that its own unsettled rows fill would stand
    still until the wait ends."""
    monkeypatch.setattr(settler, "LINGER_S", 60.0)
    parts = Parts(EngineSettings(in_flight_max=8))
    rows = [make_row(seq, f"k{seq}") for seq in (1, 2)]
    parts.engine.admit(rows)
    parts.turn()
    async with parts.running(parts.settler.run()):
        parts.link.ack(rows[0])
        await turns()
        assert not parts.outbox.calls("settle")
        parts.link.ack(rows[1])
        assert (await parts.settled()).sent == rows


async def test_what_is_confirmed_and_not_settled_takes_up_the_window() -> None:
    """G4: a kill repeats all that is published and not settled, and that is never more than RELAY_MAX_IN_FLIGHT."""
    parts = Parts(EngineSettings(in_flight_max=4))
    rows = [make_row(seq, f"k{seq}") for seq in range(1, 11)]
    parts.engine.admit(rows)
    parts.turn()
    assert parts.link.sent == rows[:4]
    parts.link.ack(*rows[:3])
    parts.turn()
    assert parts.link.sent == rows[:4], "decided"
    async with parts.running(parts.settler.run()):
        assert (await parts.settled()).sent == rows[:3]
        parts.turn()
        assert parts.link.sent == rows[:4], "on its way to the database"
        parts.commit(done=rows[:3])
        await eventually(lambda: parts.engine.applied_serial == 0)
        parts.turn()
        assert parts.link.sent == rows[:7]


async def test_rows_that_go_aside_do_not_wait_with_the_confirmed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settler, "LINGER_S", 60.0)
    parts = Parts()
    rows = [make_row(seq, f"k{seq}") for seq in (1, 2)]
    parts.engine.admit(rows)
    parts.turn()
    async with parts.running(parts.settler.run()):
        parts.link.ack(rows[0])
        await turns()
        parts.link.give_back(rows[1])
        assert [each.row for each in (await parts.settled()).setbacks] == rows[1:]


# ---------------------------------------------------------------- the settler's locked rows


async def test_a_locked_row_is_settled_again_though_others_are_locked_meanwhile() -> None:
    """Each locked row put the next try off for all: an application that walks through the table kept them unsettled."""
    parts = Parts()
    rows = [make_row(seq, f"k{seq}") for seq in range(1, 40)]
    parts.engine.admit(rows)
    parts.turn()
    async with parts.running(parts.settler.run()):
        for row in rows:
            parts.link.ack(row)
            settlement = await parts.settled()
            if rows[0] in settlement.sent and row is not rows[0]:
                return
            parts.commit(locked=[row])
            parts.clock.time += 0.02
    raise AssertionError("the first row was never tried again")


# ---------------------------------------------------------------- the keeper


async def test_a_new_session_takes_up_what_is_kept_and_lets_go_what_was_being_given() -> None:
    """A shard being handed over when the sessions were lost: read again, it would never be idle, and a relay that has
    left the fair share (no broker) would keep it for ever (L6)."""
    parts = Parts(renew=renewal({0: (1, 0), 1: (1, 7)}))
    parts.own(1, 7)
    parts.engine.broker_lost_at = parts.clock.now()
    parts.keeper.give([0])
    parts.engine.lose_sessions()
    keeper = Keeper(parts.engine)
    await keeper._renew()
    assert [claim.shard for claim in parts.engine.claimed] == [1]
    assert parts.outbox.calls("release")[0].arguments[0].keys() == {0}


async def test_a_shard_of_ours_that_is_claimed_anew_begins_anew() -> None:
    """Its lease ran out while its row was locked, and the claim behind the renewal took it. The old epoch's settlement
    was fenced off, and the lease of now was not its: the row was neither settled nor forgotten, for ever. Seed 410390."""
    parts = Parts(renew=renewal({0: (1, 0)}, renewed=(), claimable=1), claim=[Claim(0, 2, 0)])
    row = make_row(1)
    parts.confirm(row)
    await parts.keeper._renew()
    assert parts.engine.leases.epoch(0) == 2
    assert row.state is State.FORGOTTEN, "it is read again"


async def test_a_hand_over_is_not_held_up_by_rows_that_came_back_unsent() -> None:
    """In flight when the shard was given; then nacked, or its link closed: it goes with the shard (L5)."""
    parts = Parts(renew=renewal({0: (1, 0)}))
    nacked, lost = make_row(1, "a"), make_row(2, "b")
    parts.engine.admit([nacked, lost])
    parts.turn()
    parts.keeper.give([0])
    await parts.keeper._renew()
    assert not parts.outbox.calls("release"), "two are in flight"
    parts.link.nack(nacked)
    parts.link.cut()
    await parts.keeper._renew()
    assert parts.outbox.calls("release")[0].arguments[0] == {0: Held(1, None)}
    assert 0 not in parts.engine.leases


async def test_a_hand_over_that_ends_writes_the_floor_of_when_it_began() -> None:
    """What was read ahead and dropped lies above it; the row in flight may still fail."""
    parts = Parts(renew=renewal({0: (1, 0)}))
    parts.check(9)
    request = parts.engine.reading.request([0], 100, 100)
    rows = [make_row(4, "a"), make_row(6, "b")]
    parts.engine.admit(parts.engine.reading.on_page(request, Page([], rows)))
    assert [row.seq for row in parts.engine.chains.take(1, 100, [True] * 64)] == [4]
    parts.keeper.give([0])
    assert rows[1].state is State.FORGOTTEN
    parts.publisher.on_acked([rows[0]])
    parts.engine.chains.finish([rows[0]])
    await parts.keeper._renew()
    assert parts.outbox.calls("release")[0].arguments[0] == {0: Held(1, 3)}


async def test_a_shard_whose_row_is_locked_is_given_with_a_later_renewal() -> None:
    parts = Parts(renew=renewal({0: (1, 0), 1: (1, 0)}))
    parts.own(1, 0)
    parts.keeper.give([0, 1])
    parts.outbox.answers["release"] = frozenset({1})
    assert await parts.keeper._renew() == SKIPPED_RETRY_S
    assert parts.engine.leases.shards == [1]
    parts.outbox.answers |= {"renew": renewal({1: (1, 0)}), "release": frozenset()}
    await parts.keeper._renew()
    assert not len(parts.engine.leases)


async def test_what_is_ours_in_the_table_alone_is_given_back_and_claimed_anew() -> None:
    """Unseated under a higher epoch, or the answer to a claim was lost: nobody could claim it before the lease ran out."""
    parts = Parts(renew=renewal({0: (2, 0), 3: (5, 0)}), claim=[Claim(0, 3, 0)])
    await parts.keeper._renew()
    assert parts.outbox.calls("release")[0].arguments[0] == {0: Held(2, None), 3: Held(5, None)}
    assert [call.name for call in parts.outbox.log[:3]] == ["renew", "release", "claim"]
    assert parts.engine.leases.epoch(0) == 3


@pytest.mark.parametrize(("locked_for", "tries"), [(0, 1), (2, 3), (99, LEAVING_TRIES)])
async def test_a_relay_that_stops_tries_some_times_to_give_a_locked_shard(locked_for: int, tries: int) -> None:
    answers = iter([frozenset({0})] * locked_for + [frozenset()])
    parts = Parts(release=lambda held: next(answers), leave=None)
    await parts.keeper.leave()
    assert len(parts.outbox.calls("release")) == tries
    assert parts.outbox.log[-1].name == "leave"


async def test_a_renewal_that_is_refused_again_and_again_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """Somebody had locked the table: five lines for one life of the sessions (I8)."""
    caplog.set_level(logging.INFO, "tests.parts")
    parts = Parts(renew=DatabaseRefused("lock timeout"))
    keeping = asyncio.get_running_loop().create_task(parts.keeper.run())
    while not keeping.done():
        parts.engine.to_renew.set()
        await turns(1)
    with pytest.raises(DatabaseRefused):
        await keeping
    assert len(parts.outbox.calls("renew")) == RENEWALS_PER_LEASE
    assert [record.getMessage() for record in caplog.records] == ["renewal_refused"]


async def test_leases_that_are_lost_together_are_counted_each_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """Another relay has 0 and 1 since: seen by a renewal; 2 is gone by the next settlement."""
    caplog.set_level(logging.INFO, "tests.parts")
    parts = Parts(renew=renewal({2: (1, 0)}))
    parts.own(1)
    parts.own(2)
    rows = [make_row(1, "a"), make_row(2, "b", shard=1), make_row(3, "c", shard=2)]
    parts.engine.admit(rows)
    await parts.keeper._renew()
    assert parts.engine.leases.shards == [2]
    assert [row.state is State.FORGOTTEN for row in rows] == [True, True, False]
    assert parts.engine.metrics.lease_lost == 2
    await parts.keeper._renew()
    assert parts.engine.metrics.lease_lost == 2
    parts.turn()
    parts.link.ack(rows[2])
    async with parts.running(parts.settler.run()):
        assert (await parts.settled()).fences == {2: 1}
        parts.commit(lost={2})
        await eventually(lambda: parts.engine.metrics.lease_lost == 3)
    assert len(parts.engine.leases) == 0
    said = [record.__dict__["fields"] for record in caplog.records if record.message == "leases_lost"]
    assert said == [{"shards": 2, "seen": "renewal"}, {"shards": 1, "seen": "settlement"}]


async def test_without_a_broker_for_some_leases_time_the_shards_go() -> None:
    parts = Parts(renew=renewal({0: (1, 0)}))
    parts.engine.broker_lost_at = parts.clock.now()
    parts.clock.time += 100.0
    await parts.keeper._renew()
    assert parts.outbox.calls("renew")[0].arguments[1] is False
    assert len(parts.engine.leases) == 0
