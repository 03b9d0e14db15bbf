"""What the statements that run all the time touch in a table of 100,000 rows: not the sent ones, nor those set aside."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import asyncpg
import pytest

from relay import migrate
from relay.outbox import SEQ_MAX
from relay.outbox_sql import texts
from relay.sessions import Group
from tests.integration.relay import Relay

PENDING = 640


@pytest.fixture
async def relay(database: asyncpg.Connection, started: Callable[..., Relay]) -> Relay:
    """A relay over 100,000 rows: most sent and below the floors, 5,000 parked, some hundred pending."""
    await database.execute(
        "ALTER TABLE outbox SET (autovacuum_enabled = off);"
        "INSERT INTO outbox (event_type, aggregate_id, sent_at, aside, holds, failure_class) OVERRIDING USER VALUE"
        " SELECT 'x', 'k' || n, CASE WHEN n % 20 > 0 THEN now() END, CASE WHEN n % 20 = 0 THEN 'parked' END,"
        " CASE WHEN n % 20 = 0 THEN true END, CASE WHEN n % 20 = 0 THEN 'unroutable' END"
        " FROM generate_series(1, 100000) n"
    )
    # The floors count under the fingerprint that a claim stores (R5).
    relay = await started().start()
    await relay.release(relay.held())
    await database.execute("UPDATE outbox_shard SET floor = 100000, last_seq = 100000")
    relay.take(await relay.claim(64))
    await database.execute(
        "INSERT INTO outbox (event_type, aggregate_id) SELECT 'x', 'p' || n FROM generate_series(1, $1::int) n", PENDING
    )
    await database.execute("ANALYZE outbox")
    return relay


def nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for child in plan.get("Plans", ()):
        yield from nodes(child)


def instance_of(relay: Relay) -> str:
    """As an argument of a statement's text."""
    return f"'{relay._instance}'"


def page_arguments(
    relay: Relay, cursor: int, last_seq: int = 200_000, limit: int = 5, span: int = 100_000, drawn: int = SEQ_MAX
) -> list[str]:
    """Those of `page.sql` for all shards; without writers."""
    shards = f"'{{{','.join(map(str, range(64)))}}}'"
    cursors = f"'{{{','.join([str(cursor)] * 64)}}}'"
    bounds = map(str, (last_seq, limit, span, 8192))
    return [*["'{}'"] * 5, shards, cursors, *bounds, instance_of(relay), str(drawn)]


async def looks(relay: Relay, group: Group, name: str, *arguments: str) -> list[dict[str, Any]]:
    """The looks at the outbox in the statement's plan; run, and rolled back."""
    session = relay._sessions._sessions[group]
    connection = session.connection
    text = session._texts[name]
    await connection.execute(f"PREPARE explained AS {text}")
    try:
        given = f"({', '.join(arguments)})" if arguments else ""
        await connection.execute("BEGIN")
        found = await connection.fetchval(f"EXPLAIN (ANALYZE, FORMAT JSON) EXECUTE explained{given}")
    finally:
        await connection.execute("ROLLBACK")
        await connection.execute("DEALLOCATE explained")
    return [node for node in nodes(json.loads(found)[0]["Plan"]) if node.get("Relation Name") == "outbox"]


async def rows_touched(relay: Relay, group: Group, name: str, *arguments: str) -> tuple[float, set[str]]:
    """Rows of the outbox that the statement looked at, and the indexes by which."""
    touched, indexes = 0.0, set()
    for node in await looks(relay, group, name, *arguments):
        seen = (
            node["Actual Rows"] + node.get("Rows Removed by Filter", 0) + node.get("Rows Removed by Index Recheck", 0)
        )
        touched += seen * node["Actual Loops"]
        indexes.add(node.get("Index Name", node["Node Type"]))
    return touched, indexes


async def gauges_look_at_what_waits_and_not_at_what_was_sent(relay: Relay) -> None:
    touched, indexes = await rows_touched(relay, Group.READER, "backlog", "'{}'", "'{}'")
    assert indexes <= {"outbox_read", "outbox_aside_key"}
    # What is pending, the oldest of each shard, and what is aside: its number first, in the index alone, then itself.
    assert PENDING + 2 * 5000 <= touched <= PENDING + 64 + 2 * 5000
    backlog = await relay.backlog()
    assert (backlog.backlog_rows, backlog.parked_rows, backlog.is_estimated) == (PENDING, 5000, False)


async def a_page_looks_at_the_rows_that_it_brings(relay: Relay) -> None:
    touched, indexes = await rows_touched(relay, Group.READER, "page", *page_arguments(relay, 100_000))
    assert "outbox_read" in indexes
    assert 0 < touched <= 64 * 5


async def a_poll_that_finds_nothing_descends_nowhere(relay: Relay) -> None:
    newest = 100_000 + PENDING
    for drawn, descents in (newest, [0]), (SEQ_MAX, [64]):
        found = await looks(relay, Group.READER, "page", *page_arguments(relay, newest, drawn=drawn))
        assert [node["Actual Loops"] for node in found] == descents


async def a_claim_looks_at_no_event(relay: Relay) -> None:
    """Shards and members only: taking over costs the same whatever the table holds."""
    touched, indexes = await rows_touched(relay, Group.KEEPER, "claim", "64", "'other'", "5", "true", "'f'", "true")
    assert (touched, indexes) == (0, set())


async def gauges_look_above_what_was_sent_since_a_writer_opened(relay: Relay, database: asyncpg.Connection) -> None:
    """The floors stand still meanwhile; the relay knows better."""
    await database.execute("UPDATE outbox_shard SET floor = 0")
    shards = f"'{{{','.join(map(str, range(64)))}}}'"
    starts = f"'{{{','.join(['100000'] * 64)}}}'"
    touched, _ = await rows_touched(relay, Group.READER, "backlog", shards, starts)
    assert touched <= PENDING + 64 + 2 * 5000
    assert (await relay.backlog(dict.fromkeys(range(64), 100_000))).backlog_rows == PENDING
    assert (await relay.backlog({0: 100_000})).backlog_rows == PENDING


async def test_what_runs_all_the_time_costs_the_same_whatever_was_sent(
    relay: Relay, database: asyncpg.Connection
) -> None:
    await gauges_look_at_what_waits_and_not_at_what_was_sent(relay)
    await a_page_looks_at_the_rows_that_it_brings(relay)
    await a_poll_that_finds_nothing_descends_nowhere(relay)
    await a_claim_looks_at_no_event(relay)
    await gauges_look_above_what_was_sent_since_a_writer_opened(relay, database)


def scaled(text: str) -> str:
    """A statement of the gauges with a hundredth of its bounds, and samples of a tenth."""
    bounds = {"200001": "2001", "200000": "2000", "100001": "1001", "100000": "1000", "20000": "500"}
    text = re.sub(r"\b\d+\b", lambda match: bounds.get(match[0], match[0]), text)
    return text.replace("LIMIT 200)", "LIMIT 20)").replace("p.rows < 200 ", "p.rows < 20 ")


@pytest.fixture
async def small(database: asyncpg.Connection, started: Callable[..., Relay], monkeypatch: pytest.MonkeyPatch) -> Relay:
    """A relay whose gauges count to a hundredth of what they do."""
    monkeypatch.setattr("relay.outbox.ROWS_COUNTED_MAX", 1000)
    found = texts(await migrate.read_schema(database), "")
    for name in ("backlog", "backlog_aside"):
        found[name] = scaled(found[name])
    monkeypatch.setattr("relay.outbox.texts", lambda *_: found)
    await database.execute("ALTER TABLE outbox SET (autovacuum_enabled = off)")
    return await started().start()


async def put_aside(
    database: asyncpg.Connection, aside: str, rows: int, key: str = "'k' || n", due: str = "1 h"
) -> None:
    """`key` is of the row's number, `n`."""
    await database.execute(
        "INSERT INTO outbox (event_type, aggregate_id, aside, holds, due_at, created_at)"
        f" SELECT 'x', {key}, $1, $1 <> 'scheduled', now() + $3::text::interval, now() - interval '1 min'"
        " FROM generate_series(1, $2::int) n",
        aside, rows, due,
    )  # fmt: skip


async def test_many_parked_rows_leave_a_small_backlog_counted(small: Relay, database: asyncpg.Connection) -> None:
    """150,000 parked rows said of a backlog of ten that it was an estimate, crowded the held ones out of the sample, and were
    100,001 themselves."""
    await put_aside(database, "parked", 1500)
    await database.execute("INSERT INTO outbox (event_type) SELECT 'x' FROM generate_series(1, 10)")
    found = await small.backlog()
    assert (found.backlog_rows, found.is_estimated, found.parked_rows) == (10, False, 1500)
    await put_aside(database, "held", 20, "'k' || 75 * n")
    await put_aside(database, "deferred", 3, "'d' || n")
    await put_aside(database, "scheduled", 4, "'s' || n")
    await put_aside(database, "scheduled", 2, "'o' || n", "-1 s")
    found = await small.backlog()
    assert (found.backlog_rows, found.is_estimated, found.parked_rows) == (10 + 20 + 3 + 2, False, 1500)
    assert (found.deferred_rows, found.scheduled_rows, found.held_rows) == (7, 4, 20)
    assert found.held_keys == pytest.approx(20, rel=0.5)
    assert found.oldest_pending_age_s == pytest.approx(60, abs=20)
    # Recorded as unmarkable: an operator's, whatever they look like.
    await database.execute(
        "INSERT INTO outbox_fault (seq, id, failure_class) SELECT seq, id, 'unmarkable' FROM"
        " (SELECT DISTINCT ON (aside) seq, id FROM outbox WHERE aside IN ('held', 'deferred', 'parked')) o"
    )
    found = await small.backlog()
    assert (found.backlog_rows, found.parked_rows) == (10 + 19 + 2 + 2, 1500 - 1 + 3)


@pytest.mark.parametrize(
    "key",
    [
        pytest.param("'hot'", id="one key"),
        pytest.param("'k' || n % 50", id="fifty"),
        pytest.param("'k' || n", id="each"),
    ],
)
async def test_a_backlog_of_held_rows_shows_that_it_grows(small: Relay, database: asyncpg.Connection, key: str) -> None:
    """500,000 held rows were 100,001, and stayed so while they became more: no alert on growth ever fired."""
    await put_aside(database, "parked", 50, key)
    seen = []
    for _ in range(2):
        await put_aside(database, "held", 10_000, key)
        found = await small.backlog()
        assert found.is_estimated
        assert found.parked_rows == 50
        assert 0 < found.held_keys <= 2 * found.held_rows
        seen.append(found.backlog_rows)
    assert seen[0] == pytest.approx(10_000, rel=0.5)
    assert seen[1] > 1.5 * seen[0]
    # With what vacuum says of the index it is nearly the number.
    await database.execute("VACUUM outbox")
    assert (await small.backlog()).backlog_rows == pytest.approx(20_000, rel=0.5)


async def test_very_many_deferred_rows_are_estimated_by_kind(small: Relay, database: asyncpg.Connection) -> None:
    """They were 100,001 with what is parked and held, whatever they were."""
    await put_aside(database, "deferred", 6000, "NULL")
    await put_aside(database, "scheduled", 3000, "NULL", "1 d")
    await put_aside(database, "parked", 10)
    found = await small.backlog()
    assert (found.is_estimated, found.parked_rows, found.held_rows, found.held_keys) == (True, 10, 0, 0)
    assert found.deferred_rows == pytest.approx(9000, rel=0.5)
    assert found.backlog_rows == found.deferred_rows - found.scheduled_rows > 1000


async def test_a_bounded_number_of_rows_aside_is_looked_at(small: Relay, database: asyncpg.Connection) -> None:
    """Their gauges cost the same however many there are: at a hundredth of the scale."""
    for aside in ("parked", "held", "deferred"):
        await put_aside(database, aside, 3000)
    await database.execute("VACUUM ANALYZE outbox")
    touched, indexes = await rows_touched(small, Group.READER, "backlog", "'{}'", "'{}'")
    assert (touched, indexes) == (2001, {"outbox_read", "outbox_aside_key"})
    touched, indexes = await rows_touched(small, Group.READER, "backlog_aside", "2001")
    assert touched == 1001 + 1001 + 500
    assert indexes <= {"outbox_aside_key", "outbox_aside_due", "outbox_aside_parked", "outbox_pkey"}


@pytest.mark.parametrize(
    ("pending", "sent"),
    [
        ("'k' || n", 0),
        # Two thirds of the rows are one key's: of one shard.
        ("CASE WHEN n % 3 > 0 THEN 'hot' ELSE 'k' || n END", 0),
        # A writer that stays open keeps the floors below what was sent since.
        ("'k' || n", 20_000),
    ],
)
async def test_a_backlog_that_is_too_long_to_count_is_estimated(
    database: asyncpg.Connection, pending: str, sent: int
) -> None:
    """At a hundredth of the scale. An estimate by the floors alone counts all that was sent above them."""
    rows = 12_000
    await database.execute(
        "ALTER TABLE outbox SET (autovacuum_enabled = off);"
        f"INSERT INTO outbox (event_type, aggregate_id, sent_at) OVERRIDING USER VALUE"
        f" SELECT 'x', 's' || n, now() FROM generate_series(1, {sent}) n;"
        f"INSERT INTO outbox (event_type, aggregate_id) SELECT 'x', {pending} FROM generate_series(1, {rows}) n"
    )
    schema = await migrate.read_schema(database)
    text = scaled(texts(schema, "")["backlog"])
    found = await database.fetchrow(text, [], [])
    assert found["is_capped"]
    assert found["estimate"] == pytest.approx(rows, rel=0.15)
    in_full = await database.fetchrow(texts(schema, "")["backlog"], [], [])
    assert (in_full["pending"], in_full["is_capped"], in_full["estimate"]) == (rows, False, None)
