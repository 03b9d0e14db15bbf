"""What every implementation of the outbox port must do: run on the fake and on PostgreSQL alike.

Each case takes a `Table`: an empty outbox with ways to write to it from outside and to open relays on it.
Cases do not time anything but the lease's end; they work on whatever shards their keys fall into.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from relay.core.ports.outbox import (
    SHARDS,
    Armed,
    Check,
    Claim,
    Held,
    Outbox,
    OutboxInfo,
    Page,
    PageRequest,
    Setback,
    Settlement,
)
from relay.message import TEXTS_MAX, TEXTS_UNREAD, Aside, Row


@dataclass(frozen=True, slots=True)
class Seen:
    """A row as an observer beside the relay finds it."""

    seq: int
    shard: int
    aside: str | None
    attempts: int
    is_sent: bool


class OpenWriter(Protocol):
    async def insert(self, key: str | None, count: int = 1) -> list[str]: ...
    async def commit(self) -> None: ...
    async def rollback(self) -> None: ...


class Table(Protocol):
    """`relay` opens all sessions of one more relay; `drop` ends them without a release, as a kill does.

    `rings` and `losses` are what the relays were told, by their names.
    """

    rings: Counter[str]
    losses: list[tuple[str, str]]

    async def begin(self) -> OpenWriter: ...
    async def insert(
        self,
        key: str | None,
        count: int = 1,
        *,
        available_in_s: float | None = None,
        size: int = 10,
        headers_size: int = 0,
    ) -> list[str]:
        """`size` is about that of the body, `headers_size`, none or more than 9, exactly that of the headers' text."""
        ...

    async def relay(self, name: str, *, holds_when_parked: bool = True) -> Outbox: ...
    async def open(self, relay: Outbox, name: str) -> OutboxInfo:
        """Once more, after its sessions were closed or lost."""
        ...

    async def sever(self, name: str) -> None:
        """The server ends the session of this relay that renews."""
        ...

    async def drop(self, relay: Outbox) -> None: ...
    async def row(self, id_: str) -> Seen | None: ...
    async def touch(self, id_: str) -> None:
        """An application changes the row: a new version at a new address."""
        ...

    async def lock(self, id_: str) -> Callable[[], Awaitable[None]]:
        """An application locks the row until the returned function is called."""
        ...

    async def lock_shard(self, shard: int) -> Callable[[], Awaitable[None]]:
        """An operator's command locks the shard's row until the returned function is called."""
        ...

    async def delete(self, id_: str) -> None: ...
    async def refuse(self, id_: str) -> None:
        """From now on every change of the row fails, whoever makes it."""
        ...

    async def run_out(self, shard: int) -> None:
        """Its lease has passed."""
        ...

    async def set_back(self, last_seq: int) -> None:
        """The sequence: it goes on behind this one."""
        ...

    async def pause(self, on: bool) -> None: ...
    async def steal(self, shard: int) -> None:
        """Another owner has the shard under the same epoch: what a rewound database can come to."""
        ...


Case = Callable[[Table], Awaitable[None]]


# ---------------------------------------------------------------- small steps


async def claim_all(outbox: Outbox) -> dict[int, Claim]:
    await outbox.renew({}, available=True)
    return {each.shard: each for each in await outbox.claim(SHARDS)}


async def read(
    outbox: Outbox,
    claims: Mapping[int, Claim],
    *,
    cursor: int = 0,
    limit: int = 100,
    check: Check | None = None,
    low: int = 0,
    beyond: bool = False,
    beyond_drawn: bool = False,
    inline_bytes: int = 1 << 20,
    span: int = 1 << 40,
    is_probed: bool = False,
) -> Page:
    """A page of all claimed shards; the writers of `check` are listed with one common `low`."""
    last = await outbox.check()
    listed = check.writers if check is not None else []
    shards = sorted(claims)
    return await outbox.page(
        PageRequest(
            numbers=list(range(len(listed))),
            lows=[low] * len(listed),
            xids=[each.xid for each in listed],
            gone=[False] * len(listed),
            asked=[True] * len(listed),
            shards=shards,
            cursors=[cursor] * len(shards),
            last_seq=check.last_seq if check is not None else last.last_seq,
            beyond=beyond,
            beyond_drawn=beyond_drawn,
            limit=limit,
            inline_bytes=inline_bytes,
            span=span,
            probed=shards if is_probed else [],
        )
    )


def fenced(claims: Mapping[int, Claim], rows: Sequence[Row]) -> dict[int, int]:
    return {row.shard: claims[row.shard].epoch for row in rows}


async def defer(outbox: Outbox, claims: Mapping[int, Claim], rows: Sequence[Row], delay_s: float, aside: Aside) -> None:
    """The first row goes aside, the others are its followers."""
    setback = Setback(rows[0], aside, True, delay_s, 1, "unroutable", "312 NO_ROUTE", "events", "ok")
    settled = await outbox.settle(Settlement(fences=fenced(claims, rows), setbacks=[setback], followers=list(rows[1:])))
    assert not settled.changed
    assert not settled.lost


# ---------------------------------------------------------------- leases


async def case_claims_what_is_free_and_gives_it_back(table: Table) -> None:
    first, second = await table.relay("a"), await table.relay("b")
    await first.renew({}, available=True)
    assert len(await first.claim(10)) == 10
    claims = {each.shard: each for each in await first.claim(SHARDS)}
    assert len(claims) == SHARDS - 10
    assert await second.claim(SHARDS) == [] or not list(await second.claim(SHARDS))
    shard, mine = next(iter(claims.items()))
    await first.release({shard: Held(mine.epoch, 7)})
    taken = list(await second.claim(SHARDS))
    assert [each.shard for each in taken] == [shard]
    assert taken[0].epoch == mine.epoch + 1


async def case_takes_over_when_the_session_is_gone(table: Table) -> None:
    first, second = await table.relay("a"), await table.relay("b")
    claims = await claim_all(first)
    await table.drop(first)
    await second.renew({}, available=True)
    for _ in range(1000):
        renewal = await second.renew({}, available=True)
        if renewal.claimable == SHARDS:
            break
    taken = {each.shard: each for each in await second.claim(SHARDS)}
    assert taken.keys() == claims.keys()
    assert all(taken[shard].epoch == claims[shard].epoch + 1 for shard in taken)


async def case_renews_what_is_ours_and_stores_floors(table: Table) -> None:
    await table.insert("k", 3)
    first, second = await table.relay("a"), await table.relay("b")
    claims = await claim_all(first)
    shards = sorted(claims)
    held = {
        shards[0]: Held(claims[shards[0]].epoch, 2),
        shards[1]: Held(claims[shards[1]].epoch, None),
        shards[2]: Held(claims[shards[2]].epoch + 1, 3),
    }
    renewal = await first.renew(held, available=True)
    assert renewal.renewed == {shards[0], shards[1]}
    assert renewal.mine[shards[0]] == (claims[shards[0]].epoch, 2)
    assert renewal.mine[shards[1]] == (claims[shards[1]].epoch, 0)
    assert renewal.mine.keys() == claims.keys()
    assert not renewal.is_paused
    assert (await second.renew({}, available=False)).relays == 1
    assert (await second.renew({}, available=True)).relays == 2
    await second.leave()
    assert (await first.renew(held, available=True)).relays == 1


async def case_who_leaves_keeps_nothing(table: Table) -> None:
    """L5: also where it was unseated since its last renewal, so that its release names an epoch of the past."""
    first, second = await table.relay("a"), await table.relay("b")
    claims = await claim_all(first)
    await first.release({shard: Held(claim.epoch - 1, None) for shard, claim in claims.items()})
    assert not await second.claim(SHARDS)
    await first.leave()
    assert (await claim_all(second)).keys() == claims.keys()


async def case_a_former_owner_reads_nothing(table: Table) -> None:
    """L8: whether it has heard of the other's claim or not, and whoever claimed it."""
    await table.insert("k", 2)
    first, second = await table.relay("a"), await table.relay("b")
    claims = await claim_all(first)
    one, two = (await read(first, claims)).rows
    shard = one.shard
    await first.settle(
        Settlement(
            fences=fenced(claims, [one]),
            setbacks=[Setback(one, Aside.DEFERRED, False, -1.0, 1, "unroutable", "no")],
        )
    )
    assert [row.seq for row in (await first.due({shard: two.seq}, 10)).released] == [one.seq]
    await first.release({each: Held(claim.epoch, None) for each, claim in claims.items()})
    assert (await claim_all(second)).keys() == claims.keys()
    assert not (await read(first, claims)).rows
    assert not (await read(first, claims, is_probed=True)).rows
    due = await first.due({shard: two.seq}, 10)
    assert not (due.released or due.blocked)
    assert [row.seq for row in (await read(second, claims)).rows] == [two.seq]


async def case_a_stale_epoch_settles_nothing(table: Table) -> None:
    (id_,) = await table.insert("k")
    first, second = await table.relay("a"), await table.relay("b")
    claims = await claim_all(first)
    (row,) = (await read(first, claims)).rows
    await first.release({row.shard: Held(claims[row.shard].epoch, None)})
    await second.claim(SHARDS)
    settled = await first.settle(Settlement(fences=fenced(claims, [row]), sent=[row]))
    assert settled.lost == {row.shard}
    assert not settled.done
    seen = await table.row(id_)
    assert seen is not None
    assert not seen.is_sent


async def case_the_fence_asks_for_the_owner_too(table: Table) -> None:
    """R5: a rewound database gives two instances the same epoch."""
    (id_,) = await table.insert("k")
    outbox = await table.relay("a")
    claims = await claim_all(outbox)
    (row,) = (await read(outbox, claims)).rows
    await table.steal(row.shard)
    settled = await outbox.settle(Settlement(fences=fenced(claims, [row]), sent=[row]))
    assert settled.lost == {row.shard}
    held = {row.shard: Held(claims[row.shard].epoch, 1)}
    renewal = await outbox.renew(held, available=True)
    assert row.shard not in renewal.renewed
    assert row.shard not in renewal.mine
    await outbox.release(held)
    seen = await table.row(id_)
    assert seen is not None
    assert not seen.is_sent


# ---------------------------------------------------------------- reading


async def case_s_is_what_was_handed_out(table: Table) -> None:
    """R1, `is_called`: before the first row S is 0, after it 1."""
    outbox = await table.relay("a")
    assert (await outbox.check()).last_seq == 0
    await table.insert("k")
    assert (await outbox.check()).last_seq == 1


async def case_a_check_sees_writers_and_not_relays(table: Table) -> None:
    outbox = await table.relay("a")
    claims = await claim_all(outbox)
    await table.insert("k")
    rows = (await read(outbox, claims)).rows
    await outbox.settle(Settlement(fences=fenced(claims, rows), sent=list(rows)))
    assert list((await outbox.check()).writers) == []
    writer = await table.begin()
    await writer.insert("k")
    check = await outbox.check()
    assert len(check.writers) == 1
    assert check.writers[0].xid is not None
    assert check.last_seq == 2
    await writer.commit()
    assert list((await outbox.check()).writers) == []


async def case_a_page_reads_by_shard_and_seq(table: Table) -> None:
    outbox = await table.relay("a")
    claims = await claim_all(outbox)
    for key in ("a", "b", "c"):
        await table.insert(key, 3)
    rows = (await read(outbox, claims)).rows
    assert len(rows) == 9
    assert [(row.shard, row.seq) for row in rows] == sorted((row.shard, row.seq) for row in rows)
    assert all(row.key in {("t", "a"), ("t", "b"), ("t", "c")} for row in rows)
    above = (await read(outbox, claims, cursor=5)).rows
    assert sorted(row.seq for row in above) == [6, 7, 8, 9]
    limited = (await read(outbox, claims, limit=1)).rows
    assert len(limited) == len({row.shard for row in rows})


async def case_a_page_tells_who_has_ended_in_its_own_snapshot(table: Table) -> None:
    """R2: the check saw the writer open; the page reads above its low once it has ended."""
    outbox = await table.relay("a")
    claims = await claim_all(outbox)
    writer = await table.begin()
    (late,) = await writer.insert("k")
    await table.insert("other", 2)
    check = await outbox.check()
    page = await read(outbox, claims, check=check, low=0, cursor=3)
    assert list(page.ended) == []
    assert list(page.rows) == []
    await writer.commit()
    page = await read(outbox, claims, check=check, low=0, cursor=3)
    assert list(page.ended) == [0]
    assert late in [row.id for row in page.rows]


async def case_a_page_stops_at_s_unless_told(table: Table) -> None:
    outbox = await table.relay("a")
    claims = await claim_all(outbox)
    await table.insert("k")
    check = await outbox.check()
    await table.insert("k")
    assert [row.seq for row in (await read(outbox, claims, check=check)).rows] == [1]
    assert [row.seq for row in (await read(outbox, claims, check=check, beyond=True)).rows] == [1, 2]


async def case_a_page_looks_where_the_sequence_has_not_been_only_when_told(table: Table) -> None:
    """Rows lie there after a `setval`. Up to S they are brought in any case, for the cursor will be there."""
    outbox = await table.relay("a")
    claims = await claim_all(outbox)
    await table.insert("k", 5)
    check = await outbox.check()
    await table.set_back(2)
    page = await read(outbox, claims, check=check, cursor=2, beyond=True)
    assert [row.seq for row in page.rows] == [3, 4, 5]
    for beyond_drawn, found in (True, [3, 4, 5]), (False, []):
        page = await read(outbox, claims, cursor=2, beyond=True, beyond_drawn=beyond_drawn)
        assert [row.seq for row in page.rows] == found
    writer = await table.begin()
    await writer.insert("l")
    check = await outbox.check()
    await writer.commit()
    page = await read(outbox, claims, check=check, cursor=5, low=2)
    assert 3 in [row.seq for row in page.rows]


async def case_a_page_spans_no_more_than_it_is_told(table: Table) -> None:
    """From where it begins: the cursor, or the low of a writer that has ended."""
    outbox = await table.relay("a")
    claims = await claim_all(outbox)
    await table.insert("k", 5)
    assert [row.seq for row in (await read(outbox, claims, cursor=1, span=2)).rows] == [2, 3]
    assert [row.seq for row in (await read(outbox, claims, cursor=1, span=2, beyond=True)).rows] == [2, 3]
    writer = await table.begin()
    await writer.insert("k")
    check = await outbox.check()
    await writer.commit()
    page = await read(outbox, claims, check=check, cursor=5, low=3, span=2)
    assert [row.seq for row in page.rows] == [4, 5]


async def case_a_page_tells_which_rows_are_held_where_it_is_asked(table: Table) -> None:
    outbox = await table.relay("a")
    claims = await claim_all(outbox)
    await table.insert("k", 1)
    await table.insert("other")
    await table.insert(None)
    (first, *_) = sorted((await read(outbox, claims)).rows, key=lambda row: row.seq)
    await defer(outbox, claims, [first], 60.0, Aside.PARKED)
    await table.insert("k", 2)
    page = await read(outbox, claims, is_probed=True)
    assert sorted(row.seq for row in page.rows) == [2, 3, 4, 5]
    assert set(page.blocked) == {4, 5}
    assert not (await read(outbox, claims)).blocked


async def case_rolled_back_rows_are_never_seen(table: Table) -> None:
    outbox = await table.relay("a")
    claims = await claim_all(outbox)
    writer = await table.begin()
    await writer.insert("k", 2)
    check = await outbox.check()
    await writer.rollback()
    (id_,) = await table.insert("k")
    page = await read(outbox, claims, check=check, beyond=True)
    assert list(page.ended) == [0]
    assert [(row.id, row.seq) for row in page.rows] == [(id_, 3)]


async def case_large_bodies_stay_behind_and_are_loaded(table: Table) -> None:
    outbox = await table.relay("a")
    claims = await claim_all(outbox)
    ids = await table.insert("k", 2, size=5000)
    rows = list((await read(outbox, claims, inline_bytes=100)).rows)
    assert [row.is_loaded for row in rows] == [False, False]
    assert all(row.size >= 5000 and row.payload is None for row in rows)
    await outbox.settle(Settlement(fences=fenced(claims, rows[1:]), sent=rows[1:]))
    gone = await outbox.load(rows)
    assert [row.id for row in gone] in ([ids[1]], [])
    assert rows[0].is_loaded
    assert rows[0].payload is not None
    assert len(rows[0].payload) == rows[0].size


async def case_large_headers_stay_behind_as_bodies_do(table: Table) -> None:
    """What a page brings is bounded by the bytes of whole rows."""
    outbox = await table.relay("a")
    claims = await claim_all(outbox)
    await table.insert("small", headers_size=60)
    await table.insert("large", headers_size=5000)
    await table.insert("both", size=60, headers_size=60)
    rows = sorted((await read(outbox, claims, inline_bytes=100)).rows, key=lambda row: row.seq)
    assert [row.is_loaded for row in rows] == [True, False, False]
    bodies = [len(row.payload or b"") for row in rows]
    assert [len(row.headers or "") for row in rows] == [60, 0, 0]
    assert rows[0].size == bodies[0] + 60
    assert 5000 < rows[1].size < 5030
    assert 120 <= rows[2].size < 140
    assert bodies[1:] == [0, 0]
    assert await outbox.load(rows[1:]) == []
    for row in rows:
        assert row.payload is not None
        assert row.headers is not None
        assert row.is_loaded
        assert len(row.payload) + len(row.headers) == row.size
    (again,) = await outbox.reload(rows[:1])
    assert (again.is_loaded, again.payload, again.headers) == (False, None, None)
    assert again.size > 60


async def case_headers_that_no_message_could_carry_are_not_read(table: Table) -> None:
    """Their size comes in their place, with the page or, where the body stays behind, with that."""
    outbox = await table.relay("a")
    claims = await claim_all(outbox)
    await table.insert("k", headers_size=TEXTS_MAX + 1)
    await table.insert("k", size=5000, headers_size=TEXTS_MAX + 1)
    await table.insert("k", headers_size=TEXTS_MAX)
    rows = sorted((await read(outbox, claims, inline_bytes=100)).rows, key=lambda row: row.seq)
    unread = f"{TEXTS_MAX + 1}{TEXTS_UNREAD}"
    assert [row.is_loaded for row in rows] == [True, False, False]
    assert [row.headers for row in rows] == [unread, unread, None]
    assert [row.size < limit for row, limit in zip(rows, (100, 5100, TEXTS_MAX + 100), strict=True)] == [True] * 3
    assert await outbox.load(rows[1:]) == []
    assert rows[1].headers == unread
    assert len(rows[1].payload or b"") >= 5000
    assert len(rows[2].headers or "") == TEXTS_MAX


# ---------------------------------------------------------------- settling


async def case_sent_is_settled_once_and_again(table: Table) -> None:
    """S2, S3: a settlement repeated after an unknown outcome finds its rows done."""
    outbox = await table.relay("a")
    claims = await claim_all(outbox)
    ids = await table.insert("k", 2)
    rows = list((await read(outbox, claims)).rows)
    for _ in range(2):
        settled = await outbox.settle(Settlement(fences=fenced(claims, rows), sent=rows))
        assert {row.id for row in settled.done} == set(ids)
        assert not settled.locked
        assert not settled.changed
    assert list((await read(outbox, claims)).rows) == []
    seen = await table.row(ids[0])
    assert seen is None or seen.is_sent


async def case_sent_goes_by_id_when_the_address_changed(table: Table) -> None:
    outbox = await table.relay("a")
    claims = await claim_all(outbox)
    (id_,) = await table.insert("k")
    rows = list((await read(outbox, claims)).rows)
    await table.touch(id_)
    settled = await outbox.settle(Settlement(fences=fenced(claims, rows), sent=rows))
    assert [row.id for row in settled.done] == [id_]
    seen = await table.row(id_)
    assert seen is None or seen.is_sent


async def case_a_locked_row_stalls_nobody(table: Table) -> None:
    outbox = await table.relay("a")
    claims = await claim_all(outbox)
    ids = await table.insert("k", 2)
    rows = list((await read(outbox, claims)).rows)
    unlock = await table.lock(ids[0])
    settled = await outbox.settle(Settlement(fences=fenced(claims, rows), sent=rows))
    assert [row.id for row in settled.locked] == [ids[0]]
    assert [row.id for row in settled.done] == [ids[1]]
    await unlock()
    settled = await outbox.settle(Settlement(fences=fenced(claims, rows[:1]), sent=rows[:1]))
    assert [row.id for row in settled.done] == [ids[0]]


async def case_a_changed_row_is_not_set_back(table: Table) -> None:
    """S2: deferral goes by address and seq only; the row is loaded anew."""
    outbox = await table.relay("a")
    claims = await claim_all(outbox)
    (id_,) = await table.insert("k")
    rows = list((await read(outbox, claims)).rows)
    await table.touch(id_)
    setback = Setback(rows[0], Aside.DEFERRED, True, 1.0, 1, "unroutable", "no route")
    settled = await outbox.settle(Settlement(fences=fenced(claims, rows), setbacks=[setback]))
    assert [row.id for row in settled.changed] == [id_]
    (anew,) = await outbox.reload(rows)
    assert (anew.id, anew.seq, anew.aside) == (id_, rows[0].seq, None)
    assert anew.ctid != rows[0].ctid
    assert not anew.is_loaded


# ---------------------------------------------------------------- aside


async def case_a_deferred_head_holds_its_followers(table: Table) -> None:
    """H1, H3, H4: only the lowest is due; when it is sent, the next is promoted."""
    outbox = await table.relay("a")
    claims = await claim_all(outbox)
    ids = await table.insert("k", 3)
    rows = list((await read(outbox, claims)).rows)
    await defer(outbox, claims, rows, 0.0, Aside.DEFERRED)
    assert list((await read(outbox, claims)).rows) == []
    page = await outbox.held_keys(sorted(claims), None, 10)
    assert [(held.key, held.highest, held.is_lowest_held) for held in page.keys] == [(("t", "k"), rows[2].seq, False)]
    assert page.reached is None
    shard = rows[0].shard
    for index, id_ in enumerate(ids):
        due = await outbox.due({shard: 3}, 10)
        assert [row.id for row in due.released] == [id_], index
        assert list(due.blocked) == []
        settled = await outbox.settle(Settlement(fences=fenced(claims, due.released), sent=list(due.released)))
        assert settled.promoted == ({shard} if index < 2 else set())
    assert (await outbox.backlog()).backlog_rows == 0


async def case_due_stays_below_the_cursor(table: Table) -> None:
    outbox = await table.relay("a")
    claims = await claim_all(outbox)
    await table.insert("k", 1)
    rows = list((await read(outbox, claims)).rows)
    await defer(outbox, claims, rows, 0.0, Aside.DEFERRED)
    assert list((await outbox.due({rows[0].shard: 0}, 10)).released) == []
    renewal = await outbox.renew({}, available=True)
    assert renewal.next_due_in_s is not None
    assert renewal.next_due_in_s <= 0


async def case_a_later_time_is_waited_for(table: Table) -> None:
    outbox = await table.relay("a")
    claims = await claim_all(outbox)
    await table.insert("k", 1)
    rows = list((await read(outbox, claims)).rows)
    await defer(outbox, claims, rows, 3600.0, Aside.DEFERRED)
    due = await outbox.due({rows[0].shard: 1}, 10)
    assert list(due.released) == []
    assert due.next_due_in_s is not None
    assert 3500 < due.next_due_in_s <= 3600


async def case_a_row_behind_a_holding_one_is_held(table: Table) -> None:
    """H2: tested under the lock; without a blocker it is ready."""
    outbox = await table.relay("a")
    claims = await claim_all(outbox)
    await table.insert("k", 1)
    head = list((await read(outbox, claims)).rows)
    await defer(outbox, claims, head, 3600.0, Aside.DEFERRED)
    (behind,) = await table.insert("k")
    (free,) = await table.insert("free")
    rows = list((await read(outbox, claims)).rows)
    settled = await outbox.settle(Settlement(fences=fenced(claims, rows), tested=rows))
    assert [row.id for row in settled.unblocked] == [free]
    assert [row.id for row in settled.done] == [behind]
    seen = await table.row(behind)
    assert seen is not None
    assert seen.aside == "held"


async def case_a_parked_row_holds_or_does_not(table: Table) -> None:
    outbox = await table.relay("a")
    claims = await claim_all(outbox)
    await table.insert("hold", 2)
    rows = list((await read(outbox, claims)).rows)
    await defer(outbox, claims, rows, 0.0, Aside.PARKED)
    await table.insert("go", 1)
    go = list((await read(outbox, claims)).rows)
    setback = Setback(go[0], Aside.PARKED, False, 0.0, 5, "unroutable", "no route")
    await outbox.settle(Settlement(fences=fenced(claims, go), setbacks=[setback]))
    seen = await table.row(go[0].id)
    assert seen is not None
    assert (seen.aside, seen.attempts) == ("parked", 5)
    page = await outbox.held_keys(sorted(claims), None, 10)
    assert {held.key for held in page.keys} == {("t", "hold")}
    backlog = await outbox.backlog()
    assert (backlog.parked_rows, backlog.held_rows, backlog.held_keys) == (2, 1, 1)
    assert backlog.backlog_rows == 1


async def case_a_scheduled_row_waits_and_holds_nobody(table: Table) -> None:
    """H6."""
    outbox = await table.relay("a")
    claims = await claim_all(outbox)
    (id_,) = await table.insert("k", available_in_s=3600.0)
    await table.insert("k", 1)
    rows = list((await read(outbox, claims)).rows)
    assert rows[0].rare is not None
    assert rows[0].rare["available_at"] > (await outbox.check()).database_time + 3500
    settled = await outbox.settle(Settlement(fences=fenced(claims, rows[:1]), scheduled=rows[:1]))
    assert [row.id for row in settled.done] == [id_]
    settled = await outbox.settle(Settlement(fences=fenced(claims, rows[1:]), tested=rows[1:]))
    assert [row.id for row in settled.unblocked] == [rows[1].id]
    backlog = await outbox.backlog()
    assert (backlog.deferred_rows, backlog.scheduled_rows, backlog.backlog_rows) == (1, 1, 1)


async def case_a_scheduled_row_whose_time_has_come_is_one_to_publish(table: Table) -> None:
    """While nobody looks: the broker is away, or the relays are paused (I8)."""
    outbox = await table.relay("a")
    claims = await claim_all(outbox)
    await table.insert("k", available_in_s=0.0)
    rows = list((await read(outbox, claims)).rows)
    await outbox.settle(Settlement(fences=fenced(claims, rows), scheduled=rows))
    backlog = await outbox.backlog()
    assert (backlog.deferred_rows, backlog.scheduled_rows, backlog.backlog_rows) == (0, 0, 1)
    assert backlog.oldest_pending_age_s is not None


async def case_a_row_without_key_has_no_blocker(table: Table) -> None:
    outbox = await table.relay("a")
    claims = await claim_all(outbox)
    await table.insert(None, 2)
    rows = sorted((await read(outbox, claims)).rows, key=lambda row: row.seq)
    assert all(row.key is None for row in rows)
    setback = Setback(rows[0], Aside.DEFERRED, True, 0.0, 1, "unroutable", "no route")
    await outbox.settle(Settlement(fences=fenced(claims, rows[:1]), setbacks=[setback]))
    settled = await outbox.settle(Settlement(fences=fenced(claims, rows[1:]), tested=rows[1:]))
    assert [row.id for row in settled.unblocked] == [rows[1].id]
    due = await outbox.due({rows[0].shard: 2}, 10)
    assert [row.id for row in due.released] == [rows[0].id]


async def case_one_holds_the_bell(table: Table) -> None:
    first, second = await table.relay("a"), await table.relay("b")
    assert await first.arm(0.05) is Armed.GRANTED
    assert await second.arm(0.05) is Armed.ELSEWHERE
    await first.disarm()
    writer = await table.begin()
    await writer.insert("k")
    assert await second.arm(0.05) is Armed.TIMED_OUT
    await writer.commit()
    assert await second.arm(0.05) is Armed.GRANTED
    await second.disarm()


async def case_who_waits_for_the_bell_has_it_not(table: Table) -> None:
    """A waiting relay may give up, and then nothing rings: another one must not rely on it."""
    waiter, other = await table.relay("a"), await table.relay("b")
    writer = await table.begin()
    await writer.insert("k")
    waiting = asyncio.ensure_future(waiter.arm(0.3))
    await asyncio.sleep(0.05)
    assert await other.arm(0.05) is Armed.TIMED_OUT
    assert await waiting is Armed.TIMED_OUT
    await writer.commit()
    assert await other.arm(1.0) is Armed.GRANTED


CASES: list[Case] = [case for name, case in list(globals().items()) if name.startswith("case_")]
