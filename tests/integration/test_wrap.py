"""Transaction ids that wrap around their 32 bits under the relay's eyes, on a server of its own."""

from __future__ import annotations

import asyncio
import os
import subprocess
from pathlib import Path

import asyncpg

from relay import migrate
from relay.servers import PostgresServer, find_postgres
from tests.integration.relay import Relay

LEFT = 40
"""So many ids before the wrap."""


async def test_a_writer_with_savepoints_across_the_wrap_is_known_by_its_own_id() -> None:
    """R1: the lowest number among its locks is a subtransaction's of after the wrap. Taken for the writer's it looks as if it
    had ended, for no snapshot knows subtransactions: cursors and floors would pass what it has written."""
    with await asyncio.to_thread(PostgresServer.start, durable=False) as server:
        url = server.create_database("shop")
        await migrate.run(url)
        await asyncio.to_thread(_wind_forward, server, ["postgres", "template1", "shop"])
        relay, writer = Relay(url, "a"), await asyncpg.connect(url)
        try:
            await relay.start()
            async with writer.transaction():
                await writer.execute("INSERT INTO outbox (event_type) VALUES ('e')")
                own = await writer.fetchval("SELECT pg_current_xact_id()::text::bigint")
                assert own < 2**32
                for number in range(LEFT):
                    await writer.execute(f"SAVEPOINT s{number}; INSERT INTO outbox (event_type) VALUES ('e')")
                lowest = "SELECT min(transactionid::text::bigint) FROM pg_locks WHERE pid = pg_backend_pid()"
                assert await writer.fetchval(lowest) < LEFT, "wrapped"
                assert [found.xid for found in (await relay.check()).writers] == [own]
        finally:
            await relay.close()
            await writer.close()


def _wind_forward(server: PostgresServer, databases: list[str]) -> None:
    for name in databases:
        server.sql("VACUUM FREEZE", name)
    server.stop()
    (data,) = (path.parent for path in server.directory.rglob("pg_xact"))
    owner = (data / "pg_xact").stat()
    xid = 2**32 - LEFT
    segment = data / "pg_xact" / f"{xid // (4 * 8192 * 32):04X}"
    segment.write_bytes(bytes(32 * 8192))
    os.chown(segment, owner.st_uid, owner.st_gid)
    command: list[str | Path] = [find_postgres() / "pg_resetwal", "-f", "-x", str(xid), "-D", data]
    user = owner.st_uid if os.geteuid() == 0 else None
    subprocess.run(command, user=user, check=True, capture_output=True, timeout=60)
    server.restart()
