"""The relay as a user has it: a process, its environment, its log, its three endpoints."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aio_pika
import asyncpg
import pytest

from relay.servers import free_port
from tests.conftest import eventually

SCRIPT: Final = Path(sys.executable).with_name("relay")
COMMAND: Final = [str(SCRIPT)] if SCRIPT.exists() else [sys.executable, "-m", "relay"]
QUEUE: Final = "q"
LADDER: Final = ",".join(["1s"] * 32)
"""Retry delays whose end no test reaches before it has mended what was wrong, on any machine."""


def environment(settings: Mapping[str, str]) -> dict[str, str]:
    """An environment with these settings and none of the tests' own."""
    return {"PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8", **settings}


def command(
    *arguments: str, settings: Mapping[str, str] | None = None, timeout_s: float = 60.0
) -> subprocess.CompletedProcess[str]:
    """Run `relay` with these arguments to its end."""
    return subprocess.run(
        [*COMMAND, *arguments],
        env=environment(settings or {}),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


class Daemon:
    """One life of `relay run`, or of another daemon: `program` is its command, `listen` the variable of its port."""

    program: tuple[str, ...] = ("run",)
    listen = "RELAY_LISTEN"

    def __init__(self, settings: Mapping[str, str], log: Path, *, prelude: str = "") -> None:
        """`prelude` is Python that runs before the command, in its process."""
        script = f"{prelude}\nfrom relay.cli import main\nraise SystemExit(main({[*self.program]}))"
        self.port = free_port()
        listen = {self.listen: f"127.0.0.1:{self.port}", **settings}
        self.log = log
        self._output = log.open("wb")
        self.process = subprocess.Popen(
            [sys.executable, "-c", script] if prelude else [*COMMAND, *self.program],
            env=environment(listen),
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def events(self) -> list[dict[str, Any]]:
        """The log's lines as documents; a line that is none fails the test."""
        return [json.loads(line) for line in self.text().splitlines()]

    def get(self, path: str) -> tuple[int, str]:
        """(status, body); status 0 where nobody answers."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=3.0) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def metrics(self) -> dict[str, float]:
        """The exposition by series, as written there."""
        status, text = self.get("/metrics")
        assert status in (0, 200)
        lines = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
        return {series: float(value) for series, _, value in lines}

    def metric(self, name: str) -> float:
        """The sum of a metric's series; 0 where it is absent or nobody answers."""
        return sum(value for series, value in self.metrics().items() if series.partition("{")[0] == name)

    def reasons(self) -> set[str]:
        """Why it is not ready."""
        _, body = self.get("/readyz")
        return {reason["reason"] for reason in json.loads(body)["reasons"]} if body else {"no answer"}

    async def ready(self, timeout_s: float = 20.0) -> Daemon:
        def is_ready() -> bool:
            assert self.process.poll() is None, self.text()
            return self.get("/readyz")[0] == 200

        await eventually(is_ready, timeout_s)
        return self

    async def not_ready(self, reason: str, timeout_s: float = 20.0) -> None:
        await eventually(lambda: reason in self.reasons(), timeout_s)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    async def exit(self, timeout_s: float = 20.0) -> int:
        """Its exit code."""
        await asyncio.to_thread(self.process.wait, timeout_s)
        return int(self.process.returncode)

    async def stop(self, timeout_s: float = 20.0) -> int:
        self.signal(signal.SIGTERM)
        return await self.exit(timeout_s)

    async def kill(self) -> None:
        self.signal(signal.SIGKILL)
        await self.exit()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._output.close()


@dataclass(slots=True)
class Site:
    """An outbox, an exchange `events` with a queue `q` bound to `ok.#`, and the relays started there."""

    settings: dict[str, str]
    database_url: str
    amqp_url: str
    directory: Path
    database: asyncpg.Connection[asyncpg.Record]
    daemons: list[Daemon]

    def start(self, *, prelude: str = "", **settings: str) -> Daemon:
        """Start `relay run`; `settings` without their RELAY_ prefix, in lower case."""
        extra = {f"RELAY_{name.upper()}": value for name, value in settings.items()}
        daemon = Daemon({**self.settings, **extra}, self.directory / f"relay-{len(self.daemons)}.log", prelude=prelude)
        self.daemons.append(daemon)
        return daemon

    async def insert(self, id: str, event_type: str = "ok.x", key: str | None = None, **columns: Any) -> None:
        """One committed row."""
        values = {"id": id, "event_type": event_type, "payload": '{"n":1}', "aggregate_id": key, **columns}
        names = ", ".join(values)
        places = ", ".join(f"${number}" for number in range(1, len(values) + 1))
        await self.database.execute(f"INSERT INTO outbox ({names}) VALUES ({places})", *values.values())

    async def insert_many(self, count: int, keys: int, *, prefix: str = "m") -> list[str]:
        """`count` committed rows over `keys` keys; returns the ids in the order of their seq."""
        await self.database.execute(
            "INSERT INTO outbox (id, event_type, aggregate_type, aggregate_id, payload)"
            " SELECT $1 || n, 'ok.x', 'order', n % $3, json_build_object('n', n)"
            " FROM generate_series(1, $2::int) n",
            prefix, count, keys,
        )  # fmt: skip
        return [f"{prefix}{n}" for n in range(1, count + 1)]

    async def unsent(self) -> int:
        return int(await self.database.fetchval("SELECT count(*) FROM outbox WHERE sent_at IS NULL"))

    async def all_sent(self, timeout_s: float = 20.0) -> None:
        await self.until("NOT EXISTS (SELECT FROM outbox WHERE sent_at IS NULL)", timeout_s)

    async def until(self, condition: str, timeout_s: float = 20.0) -> None:
        """Wait until SQL says so."""

        async def is_so() -> bool:
            return bool(await self.database.fetchval(f"SELECT {condition}"))

        predicate: Callable[[], Awaitable[bool]] = is_so
        await eventually(predicate, timeout_s)

    async def reconnect(self) -> None:
        """A new session of the test's own, after the server was restarted."""
        self.database = await asyncpg.connect(self.database_url)


@pytest.fixture
async def site(database_url: str, amqp_url: str, tmp_path: Path) -> AsyncIterator[Site]:
    settings = {"RELAY_DATABASE_URL": database_url, "RELAY_AMQP_URL": amqp_url}
    done = await asyncio.to_thread(lambda: command("migrate", settings=settings))
    assert done.returncode == 0, done.stderr
    async with await aio_pika.connect(amqp_url) as connection:
        channel = await connection.channel()
        exchange = await channel.declare_exchange("events", aio_pika.ExchangeType.TOPIC, durable=True)
        queue = await channel.declare_queue(QUEUE, durable=True)
        await queue.bind(exchange, "ok.#")
    database = await asyncpg.connect(database_url)
    here = Site(settings, database_url, amqp_url, tmp_path, database, [])
    yield here
    for daemon in here.daemons:
        daemon.close()
    await here.database.close(timeout=5)
