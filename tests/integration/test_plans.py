"""What the statements that run all the time touch in a table of 100,000 rows: not the sent ones, nor those set aside."""

from __future__ import annotations

import json
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
    # What is pending, the oldest of each shard, and what is aside.
    assert PENDING + 5000 <= touched <= PENDING + 64 + 5000
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
    assert touched <= PENDING + 64 + 5000
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
    text = texts(schema, "")["backlog"].replace("100001", "1001").replace("100000", "1000").replace("200", "20")
    found = await database.fetchrow(text, [], [])
    assert found["is_capped"]
    assert found["estimate"] == pytest.approx(rows, rel=0.15)
    in_full = await database.fetchrow(texts(schema, "")["backlog"], [], [])
    assert (in_full["pending"], in_full["is_capped"], in_full["estimate"]) == (rows, False, None)
