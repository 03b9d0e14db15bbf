"""What happens to the relays and servers of a soak, drawn at random; each fault is over when its function returns.

Only the first relay's process is killed and started again: the others live through everything, so that what one process
gathers over hours shows.
"""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import asyncpg

from relay.servers import PostgresServer, RabbitServer
from tests.e2e.conftest import Site
from tests.faults.stage import Post


@dataclass(frozen=True, slots=True)
class Kind:
    happen: Callable[[Post], Awaitable[None]]
    windows: int
    """How many relays' windows it may repeat (G4)."""
    is_first_only: bool = False


class Faults:
    def __init__(
        self, site: Site, posts: list[Post], rabbit: RabbitServer, postgres: PostgresServer, seed: int
    ) -> None:
        self._site = site
        self._posts = posts
        self._rabbit = rabbit
        self._postgres = postgres
        self._random = random.Random(seed)
        every = len(posts)
        self.kinds = {
            "relay killed": Kind(self._kill, 1, is_first_only=True),
            "relay restarted": Kind(self._restart, 1, is_first_only=True),
            "relay frozen past its lease": Kind(self._freeze, 1),
            "link cut": Kind(self._cut_broker, 1),
            "sessions cut": Kind(self._cut_database, 1),
            "broker restarted": Kind(self._restart_broker, every),
            "broker frozen": Kind(self._freeze_broker, 0),
            "backends terminated": Kind(self._terminate, every),
            "PostgreSQL restarted": Kind(self._restart_postgres, every),
        }

    def draw(self) -> str:
        """The next one's name."""
        return self._random.choice(list(self.kinds))

    async def happen(self, name: str) -> None:
        kind = self.kinds[name]
        await kind.happen(self._posts[0] if kind.is_first_only else self._random.choice(self._posts))

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
