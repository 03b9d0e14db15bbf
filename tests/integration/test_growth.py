"""Reads that must stay cheap whatever lies around what is due: very many sent rows above a floor, very many held keys."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import asyncpg

from relay.core.ports.outbox import Check
from relay.core.reading import Reading
from relay.errors import DatabaseRefused
from relay.sessions import Group
from tests.integration.relay import ALL, Relay, request
from tests.integration.test_plans import page_arguments, rows_touched

SENT = 100_000
HELD_KEYS = 20_000
INLINE = 8192

SHARDS = f"'{{{','.join(map(str, range(ALL)))}}}'"


async def test_no_page_walks_through_all_that_was_sent(
    database: asyncpg.Connection, started: Callable[..., Relay]
) -> None:
    """A restore voids the floors: reading begins at the oldest row. The first page walked through everything that was sent
    and met the statement's timeout, and so did each one after it."""
    await database.execute(
        "ALTER TABLE outbox SET (autovacuum_enabled = off);"
        "INSERT INTO outbox (event_type, aggregate_id, sent_at)"
        f" SELECT 'x', 'k' || n, CASE WHEN n NOT IN ({SENT // 2}, {SENT}) THEN now() END FROM generate_series(1, {SENT}) n"
    )
    relay = await started().start()
    connection = relay._sessions.connection(Group.READER)
    await connection.execute("SET statement_timeout = '25ms'")
    reading = Reading()
    for shard in range(ALL):
        reading.add_shard(shard, 0)
    reading.on_check(Check(SENT, [], 0.0))
    found: list[int] = []
    pages = itertools.count()
    while reading.behind(range(ALL)):
        assert next(pages) < 1000, "pages that come nowhere"
        wanted = reading.request(list(range(ALL)), 50, INLINE)
        try:
            page = await relay.page(wanted)
        except DatabaseRefused:
            reading.void_page()
            continue
        found += [row.seq for row in reading.on_page(wanted, page)]
        reading.on_page_took(0.1)
    assert found == [SENT // 2, SENT]
    await connection.execute("RESET statement_timeout")
    arguments = page_arguments(relay, 0, last_seq=SENT, limit=50, span=1000)
    touched, _ = await rows_touched(relay, Group.READER, "page", *arguments)
    assert touched <= 1000 + ALL, "a plan's rows are rounded, a shard"


async def test_a_row_of_a_shard_with_very_many_held_keys_costs_one_look(
    database: asyncpg.Connection, started: Callable[..., Relay]
) -> None:
    """Each row that was read there went by way of a settlement. The page that brings it looks, by the row's own key."""
    await database.execute(
        "ALTER TABLE outbox SET (autovacuum_enabled = off);"
        "INSERT INTO outbox (event_type, aggregate_id, aside, holds, due_at, attempts)"
        f" SELECT 'x', 'h' || n, 'deferred', true, now() + interval '1 day', 1 FROM generate_series(1, {HELD_KEYS}) n;"
        "INSERT INTO outbox (event_type, aggregate_id) SELECT 'x', 'p' || n FROM generate_series(1, 640) n;"
        "INSERT INTO outbox (event_type, aggregate_id) SELECT 'x', 'h' || n FROM generate_series(1, 20) n;"
        "ANALYZE outbox"
    )
    relay = await started().start()
    page = await relay.page(request(range(ALL), probed=list(range(ALL))))
    assert len(page.rows) == 660
    assert set(page.blocked) == {row.seq for row in page.rows if row.aggregate_id and row.aggregate_id[0] == "h"}
    values = page_arguments(relay, 0, last_seq=1_000_000, limit=100, span=1_000_000)
    plain, _ = await rows_touched(relay, Group.READER, "page", *values)
    touched, indexes = await rows_touched(relay, Group.READER, "page_probed", *values, SHARDS)
    assert plain <= 660 + ALL, "a plan's rows are rounded, a shard"
    # What holds the twenty, and nothing else of what is aside.
    assert touched <= plain + 20
    assert indexes == {"outbox_read", "outbox_aside_key"}
