"""PostgreSQL fails in every way that a server can, with two relays under load."""

from __future__ import annotations

import asyncio
import time
from typing import Final

import asyncpg
import pytest

from tests.faults.stage import CALM, IN_FLIGHT, PATIENCE_S, Stage
from tests.faults.test_broker import LONG_RELAYS, OUTAGE_S, RELAYS, passed
from tests.pooler import IS_INSTALLED, Pooler

ALTER_S_MAX: Final = 5.0
"""Documented: an ALTER waits for one settlement at most, which is bounded by the lease (L7)."""


@RELAYS
async def test_postgres_killed(stage: Stage, relays: int) -> None:
    await stage.up(relays)
    await asyncio.to_thread(stage.postgres.crash)
    for post in stage.posts:
        await post.relay.not_ready("database")
    await asyncio.to_thread(stage.postgres.restart)
    await stage.back()
    await stage.verdict("PostgreSQL killed (SIGKILL) and started again", copies_max=relays * IN_FLIGHT, outage_s=10)


@pytest.mark.long
@LONG_RELAYS
async def test_postgres_restarted(stage: Stage, relays: int) -> None:
    await stage.up(relays)
    await asyncio.to_thread(stage.postgres.restart)
    await stage.back()
    await stage.verdict("PostgreSQL stopped in good order and started", copies_max=relays * IN_FLIGHT, outage_s=10)


@pytest.mark.long
@LONG_RELAYS
async def test_postgres_frozen(stage: Stage, relays: int) -> None:
    """Longer than a lease and than every deadline: what was confirmed meanwhile is settled, or published again."""
    await stage.up(relays)
    stage.postgres.freeze()
    try:
        for post in stage.posts:
            await post.relay.not_ready("database", 40)
        await passed(OUTAGE_S)
    finally:
        stage.postgres.thaw()
    await stage.back()
    await stage.verdict("PostgreSQL frozen, longer than the lease", copies_max=relays * IN_FLIGHT, outage_s=30)


@pytest.mark.long
@LONG_RELAYS
async def test_database_read_only_for_a_minute(stage: Stage, relays: int) -> None:
    """Writers are refused; the relays ask for READ WRITE and work on. A standby is the other kind (case 28)."""
    await stage.up(relays, lease=CALM)
    await asyncio.to_thread(stage.postgres.sql, "ALTER SYSTEM SET default_transaction_read_only = on")
    await asyncio.to_thread(stage.postgres.sql, "SELECT pg_reload_conf()")
    try:
        await passed(60.0)
    finally:
        await asyncio.to_thread(stage.postgres.sql, "ALTER SYSTEM RESET default_transaction_read_only")
        await asyncio.to_thread(stage.postgres.sql, "SELECT pg_reload_conf()")
    await stage.back()
    await stage.verdict("database read-only for a minute", copies_max=0)


@pytest.mark.long
@LONG_RELAYS
async def test_backends_terminated(stage: Stage, relays: int) -> None:
    """Every second, five times: each of the relays' sessions, wherever it is."""
    await stage.up(relays)
    for _ in range(5):
        for post in stage.posts:
            await stage.sends(post)
        await stage.site.database.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND application_name LIKE 'outbox-relay %'"
        )
    await stage.back()
    await stage.verdict("all backends terminated, five times", copies_max=5 * relays * IN_FLIGHT, faults=5)


@pytest.mark.parametrize(
    ("relays", "times"),
    [pytest.param(1, 10, marks=pytest.mark.long), pytest.param(2, 10, marks=pytest.mark.long), (2, 1)],
)
async def test_case_20_alter_table_under_load(stage: Stage, relays: int, times: int) -> None:
    await stage.up(relays)
    slowest_s = 0.0
    for number in range(times):
        for statement in (f"ADD COLUMN note_{number} int DEFAULT {number}", f"DROP COLUMN note_{number}"):
            began = time.monotonic()
            await stage.site.database.execute(f"ALTER TABLE outbox {statement}", timeout=PATIENCE_S)
            slowest_s = max(slowest_s, time.monotonic() - began)
            for post in stage.posts:
                await stage.sends(post)
    assert stage.is_short or slowest_s < ALTER_S_MAX
    await stage.back()
    # A cached plan or row type may end a session (R5): what was in flight then comes again.
    alters = 2 * times
    await stage.verdict(f"ALTER TABLE, {alters} times (case 20)", copies_max=alters * relays * IN_FLIGHT, faults=alters)


@RELAYS
@pytest.mark.skipif(not IS_INSTALLED, reason="pgbouncer is not installed")
async def test_case_21_behind_a_pooling_proxy_that_restarts(stage: Stage, relays: int) -> None:
    """Transaction pooling with fewer server sessions than the relays have, and the pooler killed midway."""
    with Pooler(stage.site.database_url) as pooler:
        stage.change_database_url = lambda _: pooler.url
        await stage.up(relays)
        pooler.kill()
        for post in stage.posts:
            await post.relay.not_ready("database")
        pooler.start()
        await stage.back()
        await stage.verdict(
            "transaction-pooling proxy killed and started again (case 21)", copies_max=relays * IN_FLIGHT, outage_s=10
        )


@pytest.mark.parametrize(
    ("relays", "timeout_ms", "seconds"),
    [
        (2, 100, 2.0),
        pytest.param(1, 5000, 12.0, marks=pytest.mark.long),
        pytest.param(2, 5000, 12.0, marks=pytest.mark.long),
    ],
)
async def test_case_25_nobody_waits_in_a_transaction(
    stage: Stage, relays: int, timeout_ms: int, seconds: float
) -> None:
    """The broker is frozen, and the server ends idle transactions: nobody has one, and the application may lock."""
    name = await stage.site.database.fetchval("SELECT quote_ident(current_database())")
    await stage.site.database.execute(f"ALTER DATABASE {name} SET idle_in_transaction_session_timeout = {timeout_ms}")
    await stage.up(relays, lease=CALM)
    stage.rabbit.freeze()
    try:
        await stage.until_metric(stage.posts[0], "relay_in_flight_messages", 1)
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            await passed(0.2)
            assert await stage.site.database.fetchval(
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
                " AND state LIKE 'idle in transaction%' AND state_change < now() - $1 * interval '1 s'",
                seconds / 2,
            ) == 0  # fmt: skip
        application = await asyncpg.connect(stage.site.database_url)
        await application.execute("SET lock_timeout = '10s'")
        await application.execute("SELECT count(*) FROM (SELECT FROM outbox WHERE sent_at IS NULL FOR UPDATE) _")
        await application.close()
    finally:
        stage.rabbit.thaw()
    await stage.back()
    assert not [
        event for post in stage.posts for event in post.relay.events() if event["event"] == "database_unavailable"
    ]
    await stage.verdict(f"idle transactions end after {timeout_ms} ms, broker frozen (case 25)", copies_max=0)
