"""`relay.outbox` through a transaction-pooling proxy: no session state, no LISTEN, no pid that means anything."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import asyncpg
import pytest

from relay import migrate
from relay.core.ports.outbox import Armed, Settlement
from tests.integration.relay import Relay, deferred, insert, parked, states
from tests.pooler import IS_INSTALLED, Pooler

pytestmark = pytest.mark.skipif(not IS_INSTALLED, reason="pgbouncer is not installed")


@pytest.fixture
async def proxy_url(database_url: str) -> AsyncIterator[str]:
    """A private pgbouncer in front of the test's database; two server sessions, shared by all."""
    await migrate.run(database_url)
    with Pooler(database_url) as pooler:
        yield pooler.url


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
        assert (await a.purge(0.0, 10)).rows == 0
        owners = "SELECT count(*) FROM outbox_shard WHERE owner = 'a-1' AND owner_pid IS NULL"
        assert await database.fetchval(owners) == 64
        # No pid, so nobody can tell that its session is gone: the lease runs out.
        await a.renew(a.held(), available=True)
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
