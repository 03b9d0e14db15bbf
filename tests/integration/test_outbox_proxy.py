"""`relay.outbox` through a transaction-pooling proxy: no session state, no LISTEN, no pid that means anything."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import asyncpg
import pytest

from relay import migrate
from relay.core.ports import Armed, Settlement
from relay.servers import free_port
from tests.conftest import eventually
from tests.integration.test_outbox import Relay, deferred, insert, parked, states

pytestmark = pytest.mark.skipif(shutil.which("pgbouncer") is None, reason="pgbouncer is not installed")


@pytest.fixture
async def proxy_url(database_url: str) -> AsyncIterator[str]:
    """A private pgbouncer in front of the test's database; two server sessions, shared by all."""
    await migrate.run(database_url)
    server = urlsplit(database_url)
    port = free_port()
    user = "postgres" if os.geteuid() == 0 else None  # it refuses to run as root
    with tempfile.TemporaryDirectory(prefix="relay-proxy-") as name:
        directory = Path(name)
        config = directory / "pgbouncer.ini"
        config.write_text(
            f"[databases]\n* = host={server.hostname} port={server.port} user={server.username or 'postgres'}\n"
            f"[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\nauth_type = any\n"
            f"pool_mode = transaction\ndefault_pool_size = 2\nlogfile = {directory / 'log'}\n"
        )
        if user is not None:
            shutil.chown(directory, user)
        process = _start(config, user)
        url = server._replace(netloc=f"postgres@127.0.0.1:{port}").geturl()

        async def accepts() -> bool:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                return False
            writer.close()
            await writer.wait_closed()
            return True

        try:
            await eventually(accepts)
            yield url
        finally:
            process.terminate()
            process.wait(10)


def _start(config: Path, user: str | None) -> subprocess.Popen[bytes]:
    command = ["pgbouncer", "-q", str(config)]
    return subprocess.Popen(command, user=user, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


async def test_every_call_passes_a_transaction_pooling_proxy(proxy_url: str, database_url: str) -> None:
    database = await asyncpg.connect(database_url)
    a, b = Relay(proxy_url, "a"), Relay(proxy_url, "b")
    try:
        info = await a.open(lambda: None, a.lost.append)
        assert (info.is_direct, info.has_doorbell) == (False, False)
        await b.start(0)
        a.take(await a.claim(64))
        assert len(a.epochs) == 64
        assert await a.arm(0.2) is Armed.TIMED_OUT
        await insert(database, *"kkkabcde")

        async def busy(relay: Relay) -> None:
            """What makes the proxy hand its server sessions round."""
            for _ in range(20):
                await relay.check()
                await relay.renew(relay.held(), available=True)

        (rows, *_) = await asyncio.gather(a.read(), busy(a), busy(b))
        one, two, three, *others = rows
        settling = a.settle(
            Settlement(fences=a.epochs, setbacks=[deferred(one, delay_s=0.0)], followers=[two, three], sent=others[:2])
        )
        settled, *_ = await asyncio.gather(settling, busy(b))
        assert len(settled.done) == 5
        assert await states(database) == ["deferred+", "held+", "held+", "sent", "sent", *["pending"] * 3]
        (again,) = (await a.due(dict.fromkeys(a.epochs, 99), 9)).released
        assert (await a.settle(a.settlement(sent=[again]))).promoted == {one.shard}
        assert (await a.settle(a.settlement(tested=others[2:]))).unblocked == others[2:]
        assert (await a.settle(a.settlement(setbacks=[parked(others[4])]))).done == others[4:]
        assert await a.load(others[2:4]) == []
        assert len(await a.reload(others)) == 2
        assert len((await a.held_keys(range(64), None, 9)).keys) == 2
        assert (await a.backlog()).backlog_rows == 4
        assert await a.purge(0.0, 10) == 0
        owners = "SELECT count(*) FROM outbox_shard WHERE owner = 'a-1' AND owner_pid IS NULL"
        assert await database.fetchval(owners) == 64
        # No pid, so nobody can tell that its session is gone: the lease runs out.
        assert await b.claim(64) == []
        await a.release(a.held(floor=3))
        await a.leave()
        assert len(await b.claim(64)) == 64
        # Nothing of ours stays behind on the sessions that others use next.
        leftovers = await asyncpg.connect(proxy_url, statement_cache_size=0)
        for setting in ("jit", "enable_seqscan", "plan_cache_mode", "lock_timeout"):
            async with leftovers.transaction():
                found = await leftovers.fetchrow(
                    "SELECT setting = reset_val AS is_untouched FROM pg_settings WHERE name = $1", setting
                )
            assert found["is_untouched"], setting
        await leftovers.close()
        assert a.lost == b.lost == []
    finally:
        await a.close()
        await b.close()
        await database.close()
