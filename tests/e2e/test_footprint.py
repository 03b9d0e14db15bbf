"""What a relay costs the database when there is nothing to do, and how many connections it keeps."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

import asyncpg
import pytest

from relay.servers import PostgresServer
from tests.conftest import eventually
from tests.e2e.conftest import Site

IDLE_CONNECTIONS = 2
BUSY_CONNECTIONS_MAX = 4
TRANSACTIONS_PER_S_MAX = 40.0
RELAYS = 10

OURS = "datname = current_database() AND application_name LIKE 'outbox-relay %'"


async def connections(database: asyncpg.Connection) -> int:
    """PostgreSQL connections of all relays."""
    return int(await database.fetchval(f"SELECT count(*) FROM pg_stat_activity WHERE {OURS}"))


async def transactions(database: asyncpg.Connection) -> int:
    """So far in this database; the server's own bookkeeping may be a second behind."""
    text = "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = current_database()"
    return int(await database.fetchval(text))


def cpu_s(server: PostgresServer) -> float:
    """CPU seconds of the server's processes so far, to the nanosecond; one that has ended is not counted."""
    pids = [server.pid, *map(int, Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split())]
    return sum(int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) for pid in pids) / 1e9


async def test_an_idle_relay_keeps_two_connections(site: Site) -> None:
    """And the one that waits for the doorbell is the reader's: who wakes reads on it, without opening another first."""
    relay = site.start(prelude="from relay import sessions; sessions.SETTLER_IDLE_S = 0.3")
    await relay.ready()

    async def is_idle() -> bool:
        return await connections(site.database) == IDLE_CONNECTIONS

    await eventually(is_idle)
    holder = (
        "SELECT a.application_name FROM pg_locks l JOIN pg_stat_activity a USING (pid)"
        " WHERE l.locktype = 'advisory' AND l.mode = 'ExclusiveLock' AND l.granted AND a.datname = current_database()"
    )

    async def holds() -> bool:
        return str(await site.database.fetchval(holder)).startswith("outbox-relay reader")

    await eventually(holds)
    await site.insert_many(500, 50)
    await site.all_sent()
    assert await connections(site.database) <= BUSY_CONNECTIONS_MAX
    await eventually(is_idle)
    assert relay.metric("relay_reconnects_total") == 0
    assert relay.metric("relay_published_total") == 500


@pytest.mark.long
async def test_ten_idle_relays(site: Site, postgres_server: PostgresServer) -> None:
    """The contract's footprint. The share of a core is written out (pytest -s) and not judged: the machine has other work."""
    prelude = "from relay import sessions; sessions.SETTLER_IDLE_S = 0.3"
    relays = [site.start(name=f"idle-{number}", prelude=prelude) for number in range(RELAYS)]
    await asyncio.gather(*(relay.ready(60.0) for relay in relays))
    await site.insert_many(100, 10)
    await site.all_sent()

    async def is_idle() -> bool:
        return await connections(site.database) == RELAYS * IDLE_CONNECTIONS

    # Seldom: the questions are transactions too.
    await eventually(is_idle, 60.0, interval_s=1.0)
    count, cpu, at = await transactions(site.database), cpu_s(postgres_server), time.monotonic()
    # A measurement, not a wait for something: half a minute of nothing to do.
    await asyncio.sleep(30.0)
    seconds = time.monotonic() - at
    rate = (await transactions(site.database) - count) / seconds
    share = (cpu_s(postgres_server) - cpu) / seconds
    sys.stdout.write(f"\n{RELAYS} idle relays: {rate:.1f} transactions/s, {share:.2%} of a core of PostgreSQL\n")
    assert rate < TRANSACTIONS_PER_S_MAX
    assert await connections(site.database) == RELAYS * IDLE_CONNECTIONS
