"""Where a fault happens: relays, each behind proxies of its own, a writer that never stops, and the oracle."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

import aio_pika
import asyncpg

from relay.servers import PostgresServer, RabbitServer
from tests.conftest import eventually
from tests.e2e.conftest import QUEUE, Daemon, Site, command
from tests.e2e.ledger import Ledger, drain, ledger
from tests.faults.load import Load
from tests.faults.report import PROPERTY, Finding
from tests.proxy import Proxy

IN_FLIGHT: Final = 200
"""`RELAY_MAX_IN_FLIGHT` of every relay here: what one fault may repeat per relay (G4)."""

LEASE_S: Final = 2.0
CALM: Final = "15s"
"""A lease where no takeover is under test: a relay that stands still for two seconds on a busy machine loses its shards by
right, and what it had in flight comes twice."""

BACK_S: Final = 15.0
"""Documented in docs/guarantees.md (G10): reconnects back off to 5 s, a lease is 5 s at its default, and then
there is a backlog to drain. A test that waits longer fails, in the long form, which has the machine to itself."""

PATIENCE_S: Final = 60.0
"""For what has no documented bound, and for all of the short form: on a busy machine only what hangs takes longer."""

LINES_A_LIFE: Final = 8
"""Start, two connections, stop: what a relay logs without any fault."""
LINES_A_FAULT: Final = 12
TRIES_S: Final = 3.0
"""Connections opened per second of outage are fewer than this, per relay and server (three sessions at PostgreSQL)."""


@contextlib.asynccontextmanager
async def site_at(
    database_url: str, amqp_url: str, directory: Path, settings: Mapping[str, str], *, is_quorum: bool = False
) -> AsyncIterator[Site]:
    """A site on servers of the test's own; `settings` are the relays', whose URLs may name several servers."""
    migrated = {"RELAY_DATABASE_URL": database_url}
    done = await asyncio.to_thread(lambda: command("migrate", settings=migrated))
    assert done.returncode == 0, done.stderr
    async with await aio_pika.connect(amqp_url) as connection:
        channel = await connection.channel()
        exchange = await channel.declare_exchange("events", aio_pika.ExchangeType.TOPIC, durable=True)
        kind = {"x-queue-type": "quorum" if is_quorum else "classic"}
        queue = await channel.declare_queue(QUEUE, durable=True, arguments={**kind})
        await queue.bind(exchange, "ok.#")
    site = Site(dict(settings), database_url, amqp_url, directory, await asyncpg.connect(database_url), [])
    try:
        yield site
    finally:
        for daemon in site.daemons:
            daemon.close()
        await site.database.close(timeout=5)


@dataclass(slots=True)
class Post:
    """A relay's place: its proxies stay when it is killed and started again."""

    name: str
    broker: Proxy
    database: Proxy
    settings: dict[str, str]
    daemon: Daemon | None = None

    @property
    def relay(self) -> Daemon:
        assert self.daemon is not None, "not started"
        return self.daemon


@dataclass(slots=True)
class Stage:
    """Use: `up`, the fault, `back` when it has ended, `verdict`."""

    site: Site
    load: Load
    rabbit: RabbitServer
    postgres: PostgresServer
    record: Callable[[str, object], None]
    stack: contextlib.AsyncExitStack
    posts: list[Post] = field(default_factory=list)
    change_url: Callable[[str], str] = str
    """What becomes of the broker's URL before it is led through a proxy."""
    change_database_url: Callable[[str], str] = str
    lives: int = 0
    back_s: float = 0.0
    is_short: bool = False
    """The form that runs on any machine, beside anything: no documented time is judged."""
    earlier: list[str] = field(default_factory=list)
    """Ids that were taken off the queue before the end."""

    @property
    def vhost(self) -> str:
        return unquote(urlsplit(self.site.amqp_url).path[1:])

    async def post(self, name: str, **settings: str) -> Post:
        """A new relay's place; nothing is started."""
        broker = await self.stack.enter_async_context(Proxy(self.change_url(self.site.amqp_url)))
        database = await self.stack.enter_async_context(Proxy(self.change_database_url(self.site.database_url)))
        through = {"amqp_url": broker.url, "database_url": database.url}
        defaults = {"max_in_flight": str(IN_FLIGHT), "max_read_ahead": str(2 * IN_FLIGHT), "lease": f"{LEASE_S:g}s"}
        post = Post(name, broker, database, {"name": name, **defaults, **through, **settings})
        self.posts.append(post)
        return post

    def start(self, post: Post) -> Daemon:
        self.lives += 1
        post.daemon = self.site.start(**post.settings)
        return post.daemon

    async def up(self, relays: int, **settings: str) -> list[Post]:
        """So many relays under load, each with a share of the shards and rows of its own sent."""
        for number in range(relays):
            self.start(await self.post(f"relay-{number + 1}", **settings))
        for post in self.posts:
            await post.relay.ready(PATIENCE_S)
        for post in self.posts:
            await self.works(post, shards=64 // relays)
        return self.posts

    async def works(self, post: Post, *, shards: int) -> None:
        """It owns that many shards, and its rows arrive."""
        await eventually(lambda: post.relay.metric("relay_shards_owned") == shards, PATIENCE_S, interval_s=0.05)
        await self.sends(post)

    async def sends(self, post: Post, rows: int = 50) -> None:
        """It has settled so many rows from now on."""
        before = post.relay.metric("relay_rows_sent_total")
        await eventually(
            lambda: post.relay.metric("relay_rows_sent_total") >= before + rows, PATIENCE_S, interval_s=0.05
        )

    async def until_metric(self, post: Post, name: str, value: float, timeout_s: float = PATIENCE_S) -> None:
        await eventually(lambda: post.relay.metric(name) >= value, timeout_s, interval_s=0.05)

    async def logged(self, post: Post, event: str, timeout_s: float = PATIENCE_S) -> None:
        await eventually(lambda: any(each["event"] == event for each in post.relay.events()), timeout_s)

    async def back(self, *, within_s: float = BACK_S) -> float:
        """The fault has ended: wait until everything committed so far is sent. Seconds; AssertionError after
        `within_s`, in the short form after a minute at the least."""
        began = time.monotonic()
        if self.site.database.is_closed():
            await self.site.reconnect()
        newest = await self.site.database.fetchval("SELECT coalesce(max(seq), 0) FROM outbox")
        owed = f"FROM outbox WHERE sent_at IS NULL AND seq <= {int(newest)}"

        async def is_back() -> bool:
            return not await self.site.database.fetchval(f"SELECT EXISTS (SELECT {owed})")

        try:
            await eventually(is_back, self._bound_s(within_s), interval_s=0.05)
        except AssertionError as error:
            left = await self.site.database.fetch(f"SELECT seq, id, aside, attempts {owed} ORDER BY seq LIMIT 5")
            raise AssertionError(f"{error}; left {left}; logs {self.logs()}") from error
        self.back_s = time.monotonic() - began
        return self.back_s

    def _bound_s(self, within_s: float) -> float:
        return max(within_s, PATIENCE_S) if self.is_short else within_s

    async def take_off(self) -> None:
        """Take what is marked off the queue already: a test of many rows has them not all in hand at its end."""
        marked = await self.site.database.fetchval("SELECT count(*) FROM outbox WHERE sent_at IS NOT NULL")
        missing = int(marked) - len(set(self.earlier))
        found = await drain(self.site.amqp_url, missing, is_all=False)
        self.earlier += [message.message_id or "" for message in found]

    def logs(self) -> list[str]:
        """What each life of each relay wrote, for a failure's text."""
        return [daemon.text() for daemon in self.site.daemons]

    async def verdict(
        self,
        fault: str,
        *,
        copies_max: int,
        within_s: float = BACK_S,
        attempts_max: int = 0,
        faults: int = 1,
        outage_s: float = 0.0,
    ) -> Finding:
        """Stop the writer, let the relays finish, judge. `faults` bounds the log, `outage_s` the reconnects.

        `attempts_max` is what one row may have used up.
        """
        await self.load.stop()
        if self.site.database.is_closed():
            await self.site.reconnect()
        await self.site.all_sent(2 * PATIENCE_S)
        reconnects = sum(int(post.relay.metric("relay_reconnects_total")) for post in self.posts)
        for post in self.posts:
            assert await post.relay.stop() == 0, post.relay.text()
        attempts = int(await self.site.database.fetchval("SELECT coalesce(max(attempts), 0) FROM outbox"))
        found = await ledger(self.site.database, self.site.amqp_url, earlier=self.earlier)
        finding = Finding(
            fault=fault,
            relays=len(self.posts),
            rows=len(found.keys),
            lost=len(found.lost) + len(set(self.load.answered) - found.keys.keys()),
            out_of_order=len(found.overtaken()),
            copies=found.duplicates,
            copies_max=copies_max,
            back_s=self.back_s,
            back_s_max=self._bound_s(within_s),
            attempts=attempts,
            log_lines=sum(len(daemon.events()) for daemon in self.site.daemons),
            reconnects=reconnects,
        )
        self.record(PROPERTY, finding.text())
        self._judge(finding, found, attempts_max=attempts_max, faults=faults, outage_s=outage_s)
        return finding

    def _judge(self, finding: Finding, found: Ledger, *, attempts_max: int, faults: int, outage_s: float) -> None:
        assert not set(self.load.answered) - found.keys.keys(), "PostgreSQL lost what it had answered"
        found.assert_complete(duplicates_max=finding.copies_max)
        assert finding.attempts <= attempts_max
        assert finding.back_s <= finding.back_s_max
        texts = self.logs()
        assert not any("Traceback" in text for text in texts), texts
        assert not [said for daemon in self.site.daemons for said in said_again(daemon)], "one line a change, not a try"
        lines_max = LINES_A_LIFE * self.lives + LINES_A_FAULT * faults * len(self.posts)
        assert finding.log_lines <= lines_max, texts
        for post in self.posts:
            # A start opens one connection at the broker and three at the database; each fault another set.
            tries = 4 * (self.lives + faults) + TRIES_S * outage_s
            assert post.broker.accepted <= tries, (post.name, post.broker.accepted)
            assert post.database.accepted <= 3 * tries, (post.name, post.database.accepted)


def said_again(daemon: Daemon) -> list[str]:
    """Outages that a relay told with the words of the line before, of the same server: nothing had changed."""
    found: list[str] = []
    for server in ("broker", "database"):
        said = [
            (each["event"], each.get("error")) for each in daemon.events() if each["event"].startswith(f"{server}_")
        ]
        found += [f"{event}: {error}" for (event, error), after in pairwise(said) if (event, error) == after and error]
    return found
