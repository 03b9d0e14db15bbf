"""What happens to the relays and servers of a soak, drawn at random; each fault is over when its function returns."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Awaitable, Callable

import asyncpg

from relay.servers import PostgresServer, RabbitServer
from tests.e2e.conftest import Site
from tests.faults.stage import Post


class Faults:
    def __init__(
        self, site: Site, posts: list[Post], rabbit: RabbitServer, postgres: PostgresServer, seed: int
    ) -> None:
        self._site = site
        self._posts = posts
        self._rabbit = rabbit
        self._postgres = postgres
        self._random = random.Random(seed)
        self._kinds: dict[str, Callable[[Post], Awaitable[None]]] = {
            "relay killed": self._kill,
            "relay frozen past its lease": self._freeze,
            "relay restarted": self._restart,
            "link cut": self._cut_broker,
            "sessions cut": self._cut_database,
            "broker restarted": self._restart_broker,
            "broker frozen": self._freeze_broker,
            "backends terminated": self._terminate,
            "PostgreSQL restarted": self._restart_postgres,
        }

    async def one(self) -> str:
        """Do one; its name."""
        name = self._random.choice(list(self._kinds))
        await self._kinds[name](self._random.choice(self._posts))
        return name

    def pause_s(self, mean_s: float) -> float:
        return self._random.uniform(0.5, 1.5) * mean_s

    async def _kill(self, post: Post) -> None:
        await post.relay.kill()
        post.daemon = self._site.start(**post.settings)

    async def _freeze(self, post: Post) -> None:
        post.relay.signal(signal.SIGSTOP)
        await asyncio.sleep(8.0)
        post.relay.signal(signal.SIGCONT)

    async def _restart(self, post: Post) -> None:
        assert await post.relay.stop() in (0, 4), post.relay.text()
        post.daemon = self._site.start(**post.settings)

    async def _cut_broker(self, post: Post) -> None:
        post.broker.cut()

    async def _cut_database(self, post: Post) -> None:
        post.database.cut()

    async def _restart_broker(self, post: Post) -> None:
        await asyncio.to_thread(self._rabbit.stop)
        await asyncio.to_thread(self._rabbit.restart)

    async def _freeze_broker(self, post: Post) -> None:
        self._rabbit.freeze()
        await asyncio.sleep(5.0)
        self._rabbit.thaw()

    async def _terminate(self, post: Post) -> None:
        connection = await asyncpg.connect(self._site.database_url)
        try:
            await connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name LIKE 'outbox-relay%'"
            )
        finally:
            await connection.close()

    async def _restart_postgres(self, post: Post) -> None:
        await asyncio.to_thread(self._postgres.stop)
        await asyncio.to_thread(self._postgres.restart)

    async def mend(self) -> None:
        """Whatever was under way when the time was over: servers and relays run."""
        for server in (self._postgres, self._rabbit):
            if not server.is_running:
                await asyncio.to_thread(server.restart)
        self._rabbit.thaw()
        for post in self._posts:
            if post.relay.process.poll() is not None:
                post.daemon = self._site.start(**post.settings)
            post.relay.signal(signal.SIGCONT)
