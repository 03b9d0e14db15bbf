"""More of what every implementation of the outbox port must do: sessions, floors, followers, policy and the chores.

The rest stands in `outbox_suite`; the same tables play both.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from relay.core.ports.outbox import SHARDS, Armed, Held, Outbox, Setback, Settlement
from relay.errors import DatabaseLost
from relay.message import Aside, Key, Row
from tests.conftest import eventually

from .outbox_suite import Case, Table, claim_all, defer, fenced, read

BOTTOM = -(2**63)


async def parked(outbox: Outbox, fences: dict[int, int], rows: Sequence[Row], *, holds: bool = True) -> None:
    """The first row is parked, the others are its followers."""
    setback = Setback(rows[0], Aside.PARKED, holds, 0.0, 5, "unroutable", "312 NO_ROUTE", "events", "ok")
    settled = await outbox.settle(Settlement(fences=fences, setbacks=[setback], followers=list(rows[1:])))
    assert len(settled.done) == len(rows)


# ---------------------------------------------------------------- sessions


async def case_a_closed_outbox_answers_nothing_and_opens_anew(table: Table) -> None:
    outbox = await table.relay("a")
    await claim_all(outbox)
    await outbox.close()
    await outbox.close()
    with pytest.raises(DatabaseLost):
        await outbox.check()
    assert table.losses == [], "who closes is not told of a loss"
    info = await table.open(outbox, "a")
    assert info.is_direct
    assert info.has_doorbell
    # Its old leases are those of a session that is gone.
    assert len(await eventually(lambda: outbox.claim(SHARDS))) == SHARDS


async def case_the_loss_of_a_session_is_told_once(table: Table) -> None:
    outbox, other = await table.relay("a"), await table.relay("b")
    await claim_all(outbox)
    await table.sever("a")
    await eventually(lambda: table.losses)
    with pytest.raises(DatabaseLost):
        await outbox.check()
    with pytest.raises(DatabaseLost):
        await outbox.settle(Settlement())
    assert [name for name, _ in table.losses] == ["a"]
    await other.check()
    await outbox.close()
    await table.open(outbox, "a")
    await outbox.check()


# ---------------------------------------------------------------- leases and floors


async def case_a_lease_that_ran_out_is_taken(table: Table) -> None:
    first, second = await table.relay("a"), await table.relay("b")
    claims = await claim_all(first)
    shard = min(claims)
    await second.renew({}, available=True)
    assert list(await second.claim(SHARDS)) == []
    await table.run_out(shard)
    assert (await second.renew({}, available=True)).claimable == 1
    (taken,) = await second.claim(SHARDS)
    assert (taken.shard, taken.epoch) == (shard, claims[shard].epoch + 1)
    renewal = await first.renew({number: Held(each.epoch, None) for number, each in claims.items()}, available=True)
    assert shard not in renewal.mine
    assert renewal.renewed == renewal.mine.keys() == claims.keys() - {shard}
    assert renewal.claimable == 0


async def case_a_relay_whose_session_is_gone_is_no_relay(table: Table) -> None:
    first, second = await table.relay("a"), await table.relay("b")
    for _ in range(2):  # The first one only joins.
        await second.renew({}, available=True)
    assert (await first.renew({}, available=True)).relays == 2
    await table.drop(second)

    async def is_alone() -> bool:
        return (await first.renew({}, available=True)).relays == 1

    await eventually(is_alone)


async def case_floors_only_rise(table: Table) -> None:
    """A renewal that comes late, or too high, moves nothing back and nothing beyond S."""
    await table.insert("k", 5)
    outbox = await table.relay("a")
    claims = await claim_all(outbox)
    shard, mine = next(iter(claims.items()))
    for floor, stored in ((3, 3), (2, 3), (None, 3), (9, 5)):
        renewal = await outbox.renew({shard: Held(mine.epoch, floor)}, available=True)
        assert renewal.mine[shard] == (mine.epoch, stored), floor
    await outbox.release({shard: Held(mine.epoch, 1)})
    (again,) = await outbox.claim(SHARDS)
    assert (again.shard, again.floor, again.floor_was_void) == (shard, 5, False)


async def case_a_release_under_another_epoch_does_nothing(table: Table) -> None:
    outbox, other = await table.relay("a"), await table.relay("b")
    claims = await claim_all(outbox)
    shard, mine = next(iter(claims.items()))
    assert not await outbox.release({shard: Held(mine.epoch + 1, 0)})
    await other.renew({}, available=True)
    assert list(await other.claim(SHARDS)) == []


async def case_a_release_leaves_a_shard_that_somebody_has_locked(table: Table) -> None:
    """L2: it does not wait for it; every lease's renewal would wait behind."""
    outbox, other = await table.relay("a"), await table.relay("b")
    epochs = {shard: each.epoch for shard, each in (await claim_all(outbox)).items()}
    locked, free = sorted(epochs)[:2]
    unlock = await table.lock_shard(locked)
    # PostgreSQL's lock_timeout would refuse it after a second.
    async with asyncio.timeout(30.0):
        left = await outbox.release({shard: Held(epochs[shard], None) for shard in (locked, free)})
    assert left == {locked}
    assert locked in (await outbox.renew({locked: Held(epochs[locked], None)}, available=True)).mine
    await unlock()
    assert not await outbox.release({locked: Held(epochs[locked], None)})
    await other.renew({}, available=True)
    assert sorted(each.shard for each in await other.claim(SHARDS)) == [locked, free]


async def case_a_floor_above_a_sequence_that_fell_is_void(table: Table) -> None:
    """R5: also where it has risen beyond the floor again before anybody looked."""
    await table.insert("k", 6)
    outbox, other = await table.relay("a"), await table.relay("b")
    claims = await claim_all(outbox)
    low, high = sorted(claims)[:2]
    await outbox.renew({low: Held(claims[low].epoch, 2), high: Held(claims[high].epoch, 6)}, available=True)
    await outbox.release({shard: Held(claims[shard].epoch, None) for shard in (low, high)})
    await table.set_back(4)
    await other.renew({}, available=True)
    taken = {each.shard: each for each in await other.claim(SHARDS)}
    assert {shard: (each.floor, each.floor_was_void) for shard, each in taken.items()} == {
        low: (0, True),
        high: (0, True),
    }


async def case_a_renewal_tells_of_the_pause_and_of_what_is_due(table: Table) -> None:
    outbox = await table.relay("a")
    claims = await claim_all(outbox)
    held = {shard: Held(each.epoch, None) for shard, each in claims.items()}
    renewal = await outbox.renew(held, available=True)
    assert (renewal.is_paused, renewal.next_due_in_s) == (False, None)
    await table.insert("k", available_in_s=3600.0)
    rows = list((await read(outbox, claims)).rows)
    await outbox.settle(Settlement(fences=fenced(claims, rows), scheduled=rows))
    await table.pause(True)
    renewal = await outbox.renew(held, available=True)
    assert renewal.is_paused
    assert renewal.next_due_in_s is not None
    assert 3500 < renewal.next_due_in_s <= 3600
    await table.pause(False)
    assert not (await outbox.renew(held, available=True)).is_paused


# ---------------------------------------------------------------- the bell


async def case_an_armed_bell_rings_for_all_who_listen(table: Table) -> None:
    """At the commit; and once for the others when its holder lets go, not for itself."""
    first, _ = await table.relay("a"), await table.relay("b")
    await table.insert("k")
    assert table.rings == {}
    assert await first.arm(0.5) is Armed.GRANTED
    assert await first.arm(0.5) is Armed.GRANTED, "it has it"
    writer = await table.begin()
    await writer.insert("k")
    assert table.rings == {}
    await writer.commit()
    await eventually(lambda: table.rings == {"a": 1, "b": 1})
    await first.disarm()
    await eventually(lambda: table.rings["b"] == 2)
    await first.disarm()
    await table.insert("k")
    await first.check()
    assert table.rings == {"a": 1, "b": 2}


# ---------------------------------------------------------------- rows aside


async def case_followers_come_without_a_gap(table: Table) -> None:
    """H4: the next held ones of each head's key, up to a holding row that is not held, or to the cursor."""
    outbox = await table.relay("a")
    claims = await claim_all(outbox)
    ids = await table.insert("k", 5)
    rows = list((await read(outbox, claims)).rows)
    await defer(outbox, claims, rows, 0.0, Aside.DEFERRED)
    shard = rows[0].shard
    heads = (await outbox.due({shard: 5}, 10)).released
    assert [row.id for row in heads] == ids[:1]
    assert [row.id for row in await outbox.followers(heads, {shard: 5}, 2)] == ids[1:3]
    assert [row.id for row in await outbox.followers(heads, {shard: 3}, 10)] == ids[1:3]
    found = await outbox.followers(heads, {shard: 5}, 10)
    assert [row.id for row in found] == ids[1:]
    assert [row.seq for row in found] == [2, 3, 4, 5]
    await parked(outbox, fenced(claims, found), [found[1]])
    assert [row.id for row in await outbox.followers(heads, {shard: 5}, 10)] == ids[1:2], "a parked one is a gap"


async def case_a_due_row_behind_another_is_blocked(table: Table) -> None:
    """H4: it becomes held under the lock, and is promoted when its turn comes."""
    outbox = await table.relay("a")
    claims = await claim_all(outbox)
    ids = await table.insert("k", 2)
    rows = list((await read(outbox, claims)).rows)
    for row in (rows[1], rows[0]):
        await defer(outbox, claims, [row], 0.0, Aside.DEFERRED)
    cursors = {rows[0].shard: 2}
    due = await outbox.due(cursors, 10)
    assert ([row.id for row in due.released], [row.id for row in due.blocked]) == (ids[:1], ids[1:])
    settled = await outbox.settle(Settlement(fences=fenced(claims, rows), tested=list(due.blocked)))
    assert [row.id for row in settled.done] == ids[1:]
    assert not settled.promoted
    due = await outbox.due(cursors, 10)
    assert ([row.id for row in due.released], list(due.blocked)) == (ids[:1], [])
    settled = await outbox.settle(Settlement(fences=fenced(claims, rows), sent=list(due.released)))
    assert settled.promoted == {rows[0].shard}
    assert [row.id for row in (await outbox.due(cursors, 10)).released] == ids[1:]


async def case_due_gives_so_many_the_longest_due_first(table: Table) -> None:
    outbox = await table.relay("a")
    claims = await claim_all(outbox)
    for key in ("a", "b", "c"):
        await table.insert(key)
    rows = sorted((await read(outbox, claims)).rows, key=lambda row: row.seq)
    for row in reversed(rows):
        await defer(outbox, claims, [row], 0.0, Aside.DEFERRED)
    cursors = {row.shard: 3 for row in rows}
    assert [row.seq for row in (await outbox.due(cursors, 2)).released] == [3, 2]
    assert [row.seq for row in (await outbox.due(cursors, 10)).released] == [3, 2, 1]
    assert [row.seq for row in (await outbox.due(cursors, 1, [3, 1])).released] == [2], "but for those that are here"
    assert list((await outbox.due(cursors, 10, [1, 2, 3])).released) == []
    assert [(await outbox.due(cursors, limit)).has_more for limit in (2, 10)] == [True, False]


async def case_due_tells_of_a_shard_that_has_more_than_its_share(table: Table) -> None:
    """Fewer came than were asked for, and yet there are more."""
    outbox = await table.relay("a")
    claims = await claim_all(outbox)
    await table.insert("hot", 14)
    for number in range(20):
        await table.insert(f"k{number}")
    rows = sorted((await read(outbox, claims)).rows, key=lambda row: row.seq)
    by_shard = {row.shard: row for row in rows if row.shard != rows[0].shard}
    waiting = rows[:14] + list(by_shard.values())[:5]
    for row in waiting:
        await defer(outbox, claims, [row], 0.0, Aside.DEFERRED)
    cursors = {row.shard: 34 for row in waiting}
    here: set[int] = set()
    has_more = True
    while has_more:
        due = await outbox.due(cursors, 12, sorted(here))
        found = {row.seq for row in [*due.released, *due.blocked]}
        assert found, "nothing more, it was said"
        assert len(found) <= 12
        here |= found
        has_more = due.has_more
    assert here == {row.seq for row in waiting}


async def case_an_owed_promotion_is_made_up_for(table: Table) -> None:
    """H3: while somebody keeps the held row locked its key is owed one."""
    outbox = await table.relay("a")
    claims = await claim_all(outbox)
    ids = await table.insert("k", 2)
    rows = list((await read(outbox, claims)).rows)
    await defer(outbox, claims, rows, 0.0, Aside.DEFERRED)
    shard = rows[0].shard
    head = list((await outbox.due({shard: 2}, 10)).released)
    unlock = await table.lock(ids[1])
    settled = await outbox.settle(Settlement(fences=fenced(claims, head), sent=head))
    assert [row.id for row in settled.done] == ids[:1]
    assert settled.unpromoted == [(shard, ("t", "k"))]
    assert not settled.promoted
    page = await outbox.held_keys([shard], None, 10)
    assert [each.is_lowest_held for each in page.keys] == [True]
    await unlock()
    settled = await outbox.settle(Settlement(fences=fenced(claims, head), promotions=[(shard, ("t", "k"))]))
    assert settled.promoted == {shard}
    assert not settled.unpromoted
    (released,) = (await outbox.due({shard: 2}, 10)).released
    assert settled.moved == {released.seq: released.ctid}


async def case_held_keys_are_walked_page_by_page(table: Table) -> None:
    outbox = await table.relay("a")
    claims = await claim_all(outbox)
    for key in ("a", "b", "c"):
        await table.insert(key, 2)
        rows = [row for row in (await read(outbox, claims)).rows if row.key == ("t", key)]
        await defer(outbox, claims, rows, 3600.0, Aside.DEFERRED)
    seen: dict[Key | None, int] = {}
    after, pages = None, 0
    while pages == 0 or after is not None:
        page = await outbox.held_keys(sorted(claims), after, 1)
        for held in page.keys:
            seen[held.key] = max(held.highest, seen.get(held.key, 0))
        after, pages = page.reached, pages + 1
        assert pages < 20
    assert seen == {("t", "a"): 2, ("t", "b"): 4, ("t", "c"): 6}
    assert pages == 7, "six rows aside, and a page to see the end"
    assert list((await outbox.held_keys([], None, 10)).keys) == [], "of these shards only"


async def case_only_what_waits_is_read_anew(table: Table) -> None:
    outbox = await table.relay("a")
    claims = await claim_all(outbox)
    for key in ("sent", "aside", "gone", "waits"):
        await table.insert(key)
    rows = sorted((await read(outbox, claims)).rows, key=lambda row: row.seq)
    sent, aside, gone, waits = rows
    await outbox.settle(Settlement(fences=fenced(claims, [sent]), sent=[sent]))
    await defer(outbox, claims, [aside], 3600.0, Aside.DEFERRED)
    await table.delete(gone.id)
    assert [row.id for row in await outbox.reload(rows)] == [waits.id]
    assert gone in await outbox.load([gone, waits])
    settled = await outbox.settle(Settlement(fences=fenced(claims, [gone]), sent=[gone]))
    assert [row.id for row in settled.done] == [gone.id], "gone: forget it"


# ---------------------------------------------------------------- the policy of parked rows


async def case_parked_rows_take_their_owners_policy(table: Table) -> None:
    """In steps; and then nobody has to ask again."""
    first = await table.relay("a", holds_when_parked=True)
    claims = await claim_all(first)
    assert (await first.apply_policy({shard: each.epoch for shard, each in claims.items()}, 10)).is_done
    for key in ("a", "b", "c"):
        await table.insert(key, 2)
        rows = [row for row in (await read(first, claims)).rows if row.key == ("t", key)]
        await parked(first, fenced(claims, rows), rows)
    await first.release({shard: Held(each.epoch, None) for shard, each in claims.items()})
    second = await table.relay("b", holds_when_parked=False)
    taken = await claim_all(second)
    assert all(each.has_other_policy for each in taken.values())
    epochs = {shard: each.epoch for shard, each in taken.items()}
    assert (await second.apply_policy({shard: epoch + 1 for shard, epoch in epochs.items()}, 10)).is_done, (
        "not ours: nothing to do"
    )
    assert not (await second.apply_policy(epochs, 2)).is_done
    assert (await second.apply_policy(epochs, 2)).is_done
    page = await second.held_keys(sorted(taken), None, 100)
    assert all(each.is_lowest_held for each in page.keys), "what was held by them waits for its promotion"
    assert len(page.keys) == 3
    await second.release({shard: Held(epoch, None) for shard, epoch in epochs.items()})
    assert not any(each.has_other_policy for each in (await claim_all(second)).values())


# ---------------------------------------------------------------- the row that refuses every change


async def case_an_unmarkable_row_is_recorded_and_costs_nobody_else(table: Table) -> None:
    outbox = await table.relay("a")
    claims = await claim_all(outbox)
    ids = await table.insert("k", 3)
    rows = list((await read(outbox, claims)).rows)
    await table.refuse(ids[1])
    settled = await outbox.settle(Settlement(fences=fenced(claims, rows), sent=rows))
    assert sorted(row.id for row in settled.done) == sorted(ids)
    assert [(each.id, each.seq, each.attempts) for each in settled.faults] == [(ids[1], 2, 1)]
    assert list((await read(outbox, claims)).rows) == []
    assert list(await outbox.reload(rows[1:2])) == []


async def case_an_unmarkable_held_row_holds_nobody(table: Table) -> None:
    """It was to be promoted: the next one is, in its place."""
    outbox = await table.relay("a")
    claims = await claim_all(outbox)
    ids = await table.insert("k", 3)
    rows = list((await read(outbox, claims)).rows)
    await defer(outbox, claims, rows, 0.0, Aside.DEFERRED)
    await table.refuse(ids[1])
    shard = rows[0].shard
    head = list((await outbox.due({shard: 3}, 10)).released)
    settled = await outbox.settle(Settlement(fences=fenced(claims, head), sent=head))
    assert [each.id for each in settled.faults] == [ids[1]]
    assert settled.promoted == {shard}
    assert [row.id for row in (await outbox.due({shard: 3}, 10)).released] == [ids[2]]


# ---------------------------------------------------------------- chores


async def case_the_purge_takes_marked_rows_below_the_floors(table: Table) -> None:
    """Of our own shards, past their age, so many at a time; what waits stays, whatever its age."""
    outbox, other = await table.relay("a"), await table.relay("b")
    claims = await claim_all(outbox)
    ids = await table.insert("k", 5)
    await table.insert("waits", 2)
    rows = sorted((await read(outbox, claims)).rows, key=lambda row: row.seq)
    sent, (parked_row, pending) = rows[:5], rows[5:]
    await outbox.settle(Settlement(fences=fenced(claims, sent), sent=sent))
    await parked(outbox, fenced(claims, [parked_row]), [parked_row])
    marked = [id_ for id_ in ids if await table.row(id_) is not None]
    assert marked in ([], ids), "deleted or marked"
    assert (await outbox.purge(-1.0, 10)).rows == 0, "nothing is below a floor yet"
    shard = sent[0].shard
    await outbox.renew({shard: Held(claims[shard].epoch, 4)}, available=True)
    assert (await outbox.purge(3600.0, 10)).rows == 0
    assert (await other.purge(-1.0, 10)).rows == 0
    assert (await outbox.purge(-1.0, 3)).rows == min(3, len(marked))
    assert (await outbox.purge(-1.0, 3)).rows == (1 if marked else 0)
    assert [id_ for id_ in ids if await table.row(id_) is not None] == marked[4:]
    for row in (parked_row, pending):
        assert await table.row(row.id) is not None


async def case_the_search_finds_what_a_floor_has_passed(table: Table) -> None:
    """R5: the floor is lowered and its owner unseated; looked at in steps."""
    outbox = await table.relay("a")
    claims = await claim_all(outbox)
    await table.insert("k", 4)
    rows = list((await read(outbox, claims)).rows)
    shard = rows[0].shard
    # As after a `setval`, without which no floor passes an unsent row.
    await table.set_back(4)
    await outbox.renew({shard: Held(claims[shard].epoch, 3)}, available=True)
    searched = await outbox.search([(shard, 3)], 10)
    assert (list(searched.reached), searched.rows, searched.lowered) == ([None], 0, {})
    searched = await outbox.search([(shard, 1), (shard, BOTTOM)], 1)
    assert (list(searched.reached), searched.rows, searched.lowered) == ([2, 1], 2, {shard: 0})
    unseated = (await outbox.renew({shard: Held(claims[shard].epoch, 3)}, available=True)).mine[shard]
    assert unseated == (claims[shard].epoch + 1, 0)
    assert not await outbox.claim(SHARDS), "nobody's while its owner may not have heard of it"
    await outbox.release({shard: Held(unseated[0], None)})
    (again,) = await outbox.claim(SHARDS)
    assert (again.shard, again.floor) == (shard, 0)
    assert again.epoch > claims[shard].epoch + 1
    # Once all of it is sent there is nothing to find.
    await outbox.settle(Settlement(fences={shard: again.epoch}, sent=rows))
    await outbox.renew({shard: Held(again.epoch, 4)}, available=True)
    assert (await outbox.search([(shard, BOTTOM)], 10)).lowered == {}


async def case_retention_discards_old_parked_rows(table: Table) -> None:
    """O2: of our own shards, past their age, but for those spared; what they held is promoted."""
    outbox, other = await table.relay("a"), await table.relay("b")
    claims = await claim_all(outbox)
    heads = []
    for key in ("a", "b", "c"):
        heads += (await table.insert(key, 2))[:1]
        rows = [row for row in (await read(outbox, claims)).rows if row.key == ("t", key)]
        await parked(outbox, fenced(claims, rows), rows)
    spared = await table.row(heads[0])
    assert spared is not None
    await table.refuse(heads[1])
    assert (await outbox.discard_parked(3600.0, 10, [])).rows == 0
    assert (await other.discard_parked(-1.0, 10, [])).rows == 0
    discarded = await outbox.discard_parked(-1.0, 10, [spared.seq])
    assert discarded.rows == 1
    assert [each.id for each in discarded.refused] == heads[1:2]
    assert not discarded.unpromoted
    assert not discarded.is_full
    assert [await table.row(id_) is not None for id_ in heads] == [True, True, False]
    page = await outbox.held_keys(sorted(claims), None, 100)
    assert not any(each.is_lowest_held for each in page.keys)
    due = await outbox.due(dict.fromkeys(claims, 6), 10)
    assert [row.key for row in due.released] == [("t", "c")]
    assert (await outbox.discard_parked(-1.0, 1, [each.seq for each in discarded.refused])).is_full


async def case_the_backlog_is_the_same_from_where_nothing_waits(table: Table) -> None:
    outbox = await table.relay("a")
    claims = await claim_all(outbox)
    empty = await outbox.backlog()
    assert (empty.backlog_rows, empty.oldest_pending_age_s, empty.newest_seq) == (0, None, 0)
    await table.insert("k", 5)
    rows = list((await read(outbox, claims)).rows)
    await outbox.settle(Settlement(fences=fenced(claims, rows), sent=rows[:2]))
    await defer(outbox, claims, rows[2:4], 3600.0, Aside.DEFERRED)
    for starts in (None, {rows[0].shard: 2}, {rows[0].shard: 4}):
        backlog = await outbox.backlog(starts)
        assert (backlog.backlog_rows, backlog.is_estimated, backlog.newest_seq) == (3, False, 5), starts
        assert (backlog.deferred_rows, backlog.held_rows, backlog.held_keys) == (1, 1, 1)
        assert backlog.oldest_pending_age_s is not None
        assert backlog.oldest_pending_age_s >= 0


CASES: list[Case] = [case for name, case in list(globals().items()) if name.startswith("case_")]
