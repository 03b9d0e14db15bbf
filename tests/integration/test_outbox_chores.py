"""`relay.outbox` on a real PostgreSQL: backlog, purge, search, the retention of parked rows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime

import asyncpg
import pytest

from relay.core.ports.outbox import Discarded, Held, Searched
from relay.refusal import SUPPRESSED
from tests.conftest import eventually
from tests.integration.relay import ALL, REFUSALS, Relay, deferred, insert, parked, states

# ---------------------------------------------------------------- backlog and purge


async def test_the_backlog(database: asyncpg.Connection, started: Callable[..., Relay]) -> None:
    relay = await started().start()
    empty = await relay.backlog()
    assert (empty.backlog_rows, empty.oldest_pending_age_s, empty.newest_seq) == (0, None, 0)
    await database.execute(
        "INSERT INTO outbox (aggregate_id, event_type, created_at, available_at)"
        " SELECT 'k' || n, 'e', now() - n * interval '1 s', CASE WHEN n = 9 THEN now() + interval '1 h' END"
        " FROM generate_series(1, 10) n"
    )
    rows = await relay.read()
    found = await relay.backlog()
    assert (found.backlog_rows, found.is_estimated, found.newest_seq) == (9, False, 10)
    assert (found.deferred_rows, found.scheduled_rows) == (1, 1), "read or not"
    assert found.oldest_pending_age_s == pytest.approx(10, abs=2)
    await relay.settle(
        relay.settlement(
            sent=rows[:2],
            setbacks=[parked(rows[9]), deferred(rows[7])],
            followers=rows[4:6],
            scheduled=[rows[8]],
        )
    )
    await relay.renew(relay.held(floor=2), available=True)
    found = await relay.backlog()
    assert (found.backlog_rows, found.deferred_rows, found.parked_rows) == (6, 4, 1)  # two held became due
    assert (found.held_rows, found.held_keys, found.scheduled_rows) == (0, 0, 1)
    assert found.oldest_pending_age_s == pytest.approx(8, abs=2)


async def test_the_purge(database: asyncpg.Connection, started: Callable[..., Relay]) -> None:
    """Marked rows past their age, below the floors, oldest first; nothing else ever."""
    relay = await started().start()
    await insert(database, *(f"k{number}" for number in range(10)))
    rows = await relay.read()
    await relay.settle(relay.settlement(sent=rows[:7], setbacks=[parked(rows[7]), deferred(rows[8])]))
    await database.execute("UPDATE outbox SET sent_at = sent_at - interval '2 days' WHERE seq <= 5")
    assert (await relay.purge(86400.0, 100)).rows == 0  # no floor yet
    await relay.renew(relay.held(floor=9), available=True)
    async with database.transaction():
        await database.execute("SELECT FROM outbox WHERE seq = 1 FOR UPDATE")
        assert (await relay.purge(86400.0, 2)).rows == 1
    assert (await relay.purge(86400.0, 2)).rows == 2
    assert (await relay.purge(86400.0, 100)).rows == 2
    assert (await relay.purge(86400.0, 100)).rows == 0
    assert await states(database) == ["sent", "sent", "parked+", "deferred+", "pending"]
    assert relay.lost == []


@pytest.mark.parametrize("refusal", ["trigger", "silence", "deferred", "foreign key"])
async def test_a_marked_row_that_cannot_be_deleted_keeps_no_others(
    database: asyncpg.Connection, started: Callable[..., Relay], refusal: str
) -> None:
    """One such row, and nothing was ever purged again; or the same rows at the bottom were looked at for ever."""
    relay = await started().start()
    for number in range(400):
        await insert(database, f"k{number}", event_type="bad" if number in (0, 5, 6, 399) else "ok")
    await database.execute("UPDATE outbox SET sent_at = now() - interval '2 days'; " + REFUSALS[refusal])
    await relay.renew(relay.held(floor=400), available=True)
    spared: list[int] = []
    rows = 0
    while (purged := await relay.purge(86400.0, 100, spared)).rows or purged.refused:
        rows += purged.rows
        assert len(purged.refused) == len({each.seq for each in purged.refused} - set(spared))
        spared += [each.seq for each in purged.refused]
        assert all(each.error and each.id for each in purged.refused)
    assert rows == 396
    assert sorted(spared) == [1, 6, 7, 400]
    assert await database.fetchval("SELECT array_agg(seq ORDER BY seq) FROM outbox") == [1, 6, 7, 400]


async def test_the_purge_passes_unmarkable_rows(database: asyncpg.Connection, started: Callable[..., Relay]) -> None:
    """More of them at the bottom of a shard than it looks at there."""
    relay = await started().start()
    await insert(database, *["k"] * 205)
    await database.execute(
        "INSERT INTO outbox_fault (seq, id, failure_class) SELECT seq, id, 'unmarkable' FROM outbox WHERE seq <= 200;"
        "UPDATE outbox SET sent_at = now() - interval '2 days' WHERE seq > 200"
    )
    await relay.renew(relay.held(floor=205), available=True)
    assert (await relay.purge(86400.0, 100)).rows == 5
    assert (await relay.purge(86400.0, 100)).rows == 0
    assert await database.fetchval("SELECT count(*) FROM outbox") == 200


@pytest.mark.parametrize("marks_sent", [True, False])
async def test_the_search_lowers_a_floor_that_hides_a_row(
    database: asyncpg.Connection, started: Callable[..., Relay], marks_sent: bool
) -> None:
    """R5 lowering: no fingerprint sees `setval`; the owner is unseated, or its renewal would undo it."""
    relay = await started(marks_sent=marks_sent).start()
    await insert(database, *["k"] * 9)
    rows = await relay.read()
    await relay.settle(relay.settlement(sent=rows))
    await relay.renew(relay.held(floor=9), available=True)
    await database.execute("DELETE FROM outbox; SELECT setval('outbox_seq_seq', 4)")
    await insert(database, *["k"] * 8)
    shard = rows[0].shard
    searched = await relay.search([(shard, 0), (shard, 7), ((shard + 1) % ALL, 0)], 3)
    assert searched == Searched([7, None, None], 5, {shard: 4})
    renewal = await relay.renew(relay.held(floor=12), available=True)
    assert renewal.mine[shard] == (2, 4)
    assert len(renewal.renewed) == ALL - 1
    await relay.release({shard: Held(2, None)})
    (claim,) = await relay.claim(1)
    assert (claim.shard, claim.epoch, claim.floor) == (shard, 3, 4)


async def test_the_search_goes_round_below_the_floors(
    database: asyncpg.Connection, started: Callable[..., Relay]
) -> None:
    """Sent rows, those of the fault table and those of others' shards hide nothing; it goes on where it stopped."""
    relay = await started().start()
    await insert(database, *["k"] * 9)
    rows = await relay.read()
    shard = rows[0].shard
    await relay.settle(relay.settlement(sent=rows[:8]))
    await database.execute("INSERT INTO outbox_fault (seq, id, failure_class) VALUES (9, $1, 'unmarkable')", rows[8].id)
    await relay.renew(relay.held(floor=9), available=True)
    assert await relay.search([(shard, 0)], 5) == Searched([5], 5, {})
    assert await relay.search([(shard, 5)], 5) == Searched([None], 4, {})
    await database.execute("DELETE FROM outbox_fault; UPDATE outbox_shard SET owner = 'other'")
    assert await relay.search([(shard, 0)], 50) == Searched([None], 0, {})


# ---------------------------------------------------------------- the retention of parked rows


async def age(database: asyncpg.Connection, *seqs: int) -> None:
    """Parked two days ago."""
    await database.execute("UPDATE outbox SET parked_at = parked_at - interval '2 days' WHERE seq = ANY ($1)", seqs)
    await database.execute(
        "UPDATE outbox_fault SET failed_at = failed_at - interval '2 days' WHERE seq = ANY ($1)", seqs
    )


async def test_parked_rows_go_by_the_time_since_they_were_parked(
    database: asyncpg.Connection, started: Callable[..., Relay]
) -> None:
    """Neither by `created_at`, nor what is deferred, held or another relay's; and what they held is due (H3)."""
    relay = await started().start()
    await insert(database, "a", "a", "b", "c", "d", created_at=datetime.fromtimestamp(0, UTC))
    a, after_a, b, c, d = await relay.read()
    setbacks = [parked(a), parked(b), deferred(c), parked(d, holds=False, reason="expired")]
    await relay.settle(relay.settlement(setbacks=setbacks, followers=[after_a]))
    assert await relay.discard_parked(86400.0, 10, []) == Discarded(0, [], [], is_full=False)
    await age(database, 1, 4, 5)
    assert await relay.discard_parked(86400.0, 1, []) == Discarded(1, [], [], is_full=True)
    assert await relay.discard_parked(86400.0, 10, []) == Discarded(1, [], [], is_full=False)
    assert await states(database) == ["deferred+", "parked+", "deferred+"]
    await age(database, 3)
    await database.execute("UPDATE outbox_shard SET owner = 'other'")
    assert (await relay.discard_parked(86400.0, 10, [])).rows == 0
    assert relay.lost == []


async def test_a_parked_row_that_is_redriven_is_not_discarded(
    database: asyncpg.Connection, started: Callable[..., Relay]
) -> None:
    """It is looked for under the shard's lock: a redrive that comes first wins, and its time begins anew."""
    relay = await started().start()
    await insert(database, "a")
    (a,) = await relay.read()
    await relay.settle(relay.settlement(setbacks=[parked(a)]))
    await age(database, 1)
    async with database.transaction():
        await database.execute("SELECT FROM outbox_shard WHERE shard = $1 FOR UPDATE", a.shard)
        discarding = asyncio.create_task(relay.discard_parked(86400.0, 10, []))
        await eventually(lambda: _waits(database))
        await database.execute("UPDATE outbox SET aside = 'deferred', parked_at = NULL, due_at = now()")
    assert (await discarding).rows == 0
    assert await states(database) == ["deferred+"]


async def _waits(database: asyncpg.Connection) -> bool:
    return bool(
        await database.fetchval(
            "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
        )
    )


@pytest.mark.parametrize("refuse", ["RAISE 'an auditor keeps this row'", "RETURN NULL"])
async def test_a_row_that_may_not_be_deleted_stops_no_retention(
    database: asyncpg.Connection, started: Callable[..., Relay], refuse: str
) -> None:
    """The oldest rows refuse: they are told once and left out, and what was parked after them goes."""
    relay = await started().start()
    await insert(database, *"abcdef")
    rows = await relay.read()
    await relay.settle(relay.settlement(setbacks=[parked(row) for row in rows]))
    await age(database, *range(1, 7))
    await database.execute(
        "CREATE FUNCTION kept() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        f" IF OLD.aggregate_id IN ('a', 'd') THEN {refuse}; END IF; RETURN OLD; END $$;"
        "CREATE TRIGGER kept BEFORE DELETE ON outbox FOR EACH ROW EXECUTE FUNCTION kept()"
    )
    discarded = await relay.discard_parked(86400.0, 4, [])
    assert (discarded.rows, discarded.is_full) == (2, True)
    assert {each.seq for each in discarded.refused} == {1, 4}
    said = SUPPRESSED if refuse == "RETURN NULL" else "an auditor keeps this row"
    assert all(said in each.error for each in discarded.refused)
    assert await relay.discard_parked(86400.0, 4, [1, 4]) == Discarded(2, [], [], is_full=False)
    assert await states(database) == ["parked+", "parked+"]


@pytest.mark.parametrize("refuse", ["RAISE 'immutable'", "RETURN NULL"])
async def test_unmarkable_rows_have_the_same_retention(
    database: asyncpg.Connection, started: Callable[..., Relay], refuse: str
) -> None:
    """The row and its fault go together, or both stay: without the fault the row would be published again."""
    relay = await started().start()
    await insert(database, *"abc")
    rows = await relay.read()
    for row in rows:
        await database.execute(
            "INSERT INTO outbox_fault (seq, id, failure_class) VALUES ($1, $2, 'unmarkable')", row.seq, row.id
        )
    await database.execute("INSERT INTO outbox_fault (seq, id, failure_class) VALUES (99, 'gone', 'unmarkable')")
    await database.execute(
        "CREATE FUNCTION kept() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        f" IF OLD.aggregate_id = 'b' THEN {refuse}; END IF; RETURN OLD; END $$;"
        "CREATE TRIGGER kept BEFORE DELETE ON outbox FOR EACH ROW EXECUTE FUNCTION kept()"
    )
    assert await relay.discard_parked(86400.0, 10, []) == Discarded(0, [], [], is_full=False)
    await age(database, 1, 2, 99)
    discarded = await relay.discard_parked(86400.0, 10, [])
    assert (discarded.rows, [each.seq for each in discarded.refused]) == (2, [2])
    assert await database.fetch("SELECT seq FROM outbox_fault ORDER BY 1") == [(2,), (3,)]
    assert await database.fetch("SELECT seq FROM outbox ORDER BY 1") == [(2,), (3,)]
