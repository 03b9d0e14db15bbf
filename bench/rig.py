"""The servers of one benchmark and the backlog that every run starts from.

Owns: a private durable PostgreSQL, a private RabbitMQ, and the *template*: a database migrated by `relay migrate` and filled
once. Each run gets a fresh copy of it and a fresh queue, so that no run inherits another's dead rows, segments or floors.
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import aio_pika

from bench.procfs import Cpu, family_cpu_s, process_cpu_s
from relay.servers import PostgresServer, RabbitServer

EXCHANGE = "events"  # the default of RELAY_EXCHANGE
QUEUE = "bench"
EVENT_TYPE = "order.created"
BODY_BYTES = 250
ROWS_PER_TRANSACTION = 1000
AMQP_TIMEOUT_S = 30.0
QUIET_CPU_SHARE = 0.05
QUIET_WINDOW_S = 0.3
QUIET_TIMEOUT_S = 60.0


class BenchFailed(Exception):
    """A run that proves nothing: a row is missing, a server complained, something did not end. No result is written."""


@dataclass(frozen=True, slots=True)
class Backlog:
    """What the template holds: `keys[i]` is the ordering key of the row `ids[i]`, both by seq. `body`: a payload of it."""

    ids: list[str]
    keys: list[str]
    body: Path


@dataclass(frozen=True, slots=True)
class Taken:
    """The first message of a queue that held `held` of them; what it looks like, see `shape_of`."""

    held: int
    message_id: str
    shape: dict[str, Any]


class Rig:
    """Use as a context manager; leaving it ends the servers and removes everything."""

    def __init__(self, rows: int, keys: int) -> None:
        assert rows > 0 and keys > 0
        self.rows, self.keys = rows, keys
        self._exits = ExitStack()
        self._log_marks: dict[Path, int] = {}

    def __enter__(self) -> Self:
        with ExitStack() as exits:
            self.directory = Path(exits.enter_context(tempfile.TemporaryDirectory(prefix="relay-bench-")))
            self.postgres = exits.enter_context(PostgresServer.start(durable=True))
            # The management plugin's statistics would be broker CPU that no relay causes.
            self.rabbit = exits.enter_context(RabbitServer.start(plugins=()))
            self.amqp_url = self.rabbit.amqp_url()
            self.backlog = self._fill()
            self._exits = exits.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._exits.close()

    # ---------------------------------------------------------------- the backlog

    def _fill(self) -> Backlog:
        url = self.postgres.create_database("template_backlog")
        migration = subprocess.run(
            [sys.executable, "-m", "relay", "migrate"],
            check=False,
            env=relay_environment(RELAY_DATABASE_URL=url),
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=60.0,
        )
        if migration.returncode != 0:
            raise BenchFailed(f"relay migrate: exit {migration.returncode}\n{migration.stderr}{migration.stdout}")
        self._sql(
            f"""do $$ declare first int := 1; begin
                while first <= {self.rows} loop
                    insert into outbox (event_type, aggregate_type, aggregate_id, payload)
                    select '{EVENT_TYPE}', 'customer', 'c-' || key,
                           (rpad(format('{{"order_id": "%s", "customer_id": "c-%s", "note": "', n, key),
                                 {BODY_BYTES - 2}, 'lorem ipsum ') || '"}}')::json
                    from generate_series(first, least(first + {ROWS_PER_TRANSACTION - 1}, {self.rows})) as n,
                         lateral (select abs(hashint4(n)::bigint) % {self.keys}) as k(key);
                    commit;
                    first := first + {ROWS_PER_TRANSACTION};
                end loop;
            end $$"""
        )
        self._sql("vacuum analyze")
        self._sql("checkpoint")
        pairs = [line.split("|") for line in self._sql("select id, aggregate_id from outbox order by seq").splitlines()]
        body = self.directory / "body"
        body.write_text(self._sql("select payload from outbox order by seq limit 1").removesuffix("\n"))
        if len(pairs) != self.rows or body.stat().st_size != BODY_BYTES:
            raise BenchFailed(f"the fill made {len(pairs)} rows with a body of {body.stat().st_size} bytes")
        return Backlog([row_id for row_id, _ in pairs], [key for _, key in pairs], body)

    def _sql(self, statement: str, database: str = "template_backlog") -> str:
        return self.postgres.sql(statement, database)

    @contextmanager
    def fresh_database(self) -> Iterator[str]:
        """A copy of the template, checkpointed; yields its name, drops it afterwards."""
        name = "backlog_run"
        self.postgres.drop_database(name)
        # Block by block from 15 on would write it all to the log first; a copy of files is what 14 does anyway.
        by_files = " strategy file_copy" if int(self._sql("show server_version_num", "postgres")) >= 150000 else ""
        self._sql(f"create database {name} template template_backlog{by_files}", "postgres")
        self._sql("checkpoint", "postgres")
        try:
            yield name
        finally:
            self.postgres.drop_database(name)

    def count(self, database: str) -> tuple[int, int]:
        """How many rows the table holds, and how many of them are not marked sent."""
        total, pending = self._sql(
            "select count(*), count(*) filter (where sent_at is null) from outbox", database
        ).split("|")
        return int(total), int(pending)

    def settings(self) -> dict[str, Any]:
        """What a report says about the load and the servers."""
        return {
            "rows": self.rows,
            "keys": self.keys,
            "body_bytes": self.backlog.body.stat().st_size,
            "ordering": "strict",
            "queue": "one quorum queue bound with # to a topic exchange, new for each run",
            "postgresql": "durable (fsync, synchronous_commit on), otherwise its defaults; new database for each run",
            "relay": "defaults but RELAY_SENT_ROWS",
        }

    def versions(self) -> dict[str, str]:
        """The servers' own words."""
        return {
            "postgresql": self.postgres.sql("show server_version").split()[0],
            "rabbitmq": self.rabbit.ctl("version").strip(),
        }

    # ---------------------------------------------------------------- the broker

    @contextmanager
    def fresh_queue(self) -> Iterator[None]:
        """One empty quorum queue that takes everything of the topic exchange; deleted afterwards."""
        asyncio.run(self._declare())
        try:
            yield
        finally:
            asyncio.run(self._delete())

    async def _declare(self) -> None:
        async with await aio_pika.connect(self.amqp_url, timeout=AMQP_TIMEOUT_S) as connection:
            channel = await connection.channel()
            exchange = await channel.declare_exchange(EXCHANGE, aio_pika.ExchangeType.TOPIC, durable=True)
            await channel.queue_delete(QUEUE)
            queue = await channel.declare_queue(QUEUE, durable=True, arguments={"x-queue-type": "quorum"})
            await queue.bind(exchange, "#")

    async def _delete(self) -> None:
        async with await aio_pika.connect(self.amqp_url, timeout=AMQP_TIMEOUT_S) as connection:
            channel = await connection.channel()
            await channel.queue_delete(QUEUE)

    def take_first(self) -> Taken:
        """Take the first message out of the queue; giving it back would put it at the end. Raises BenchFailed."""
        return asyncio.run(self._take_first())

    async def _take_first(self) -> Taken:
        async with await aio_pika.connect(self.amqp_url, timeout=AMQP_TIMEOUT_S) as connection:
            channel = await connection.channel()
            queue = await channel.declare_queue(QUEUE, passive=True)
            message = await queue.get(no_ack=True, fail=False, timeout=AMQP_TIMEOUT_S)
            if message is None:
                raise BenchFailed("the queue is empty")
            held = queue.declaration_result.message_count or 0
            return Taken(held, str(message.message_id), shape_of(message))

    # ---------------------------------------------------------------- the machine

    def cpu(self, relay_pid: int | None = None) -> Cpu:
        """CPU seconds of everybody so far; the relay's are 0 without a `relay_pid`."""
        return Cpu(
            process_cpu_s(relay_pid) if relay_pid is not None else 0.0,
            family_cpu_s(self.postgres.pid),
            family_cpu_s(self.rabbit.broker_pid),
        )

    def wait_until_quiet(self) -> None:
        """Wait until both servers have stopped working on what the run before left behind. Raises BenchFailed."""
        deadline = time.monotonic() + QUIET_TIMEOUT_S
        before, since = self.cpu(), time.monotonic()
        while time.monotonic() < deadline:
            time.sleep(QUIET_WINDOW_S)
            now, at = self.cpu(), time.monotonic()
            used = now - before
            if (used.postgres_s + used.rabbitmq_s) / (at - since) < QUIET_CPU_SHARE:
                return
            before, since = now, at
        raise BenchFailed(f"the servers did not become quiet within {QUIET_TIMEOUT_S:.0f} s")

    def complaints(self) -> list[str]:
        """The errors that the servers have logged since the last call."""
        pattern = re.compile(r"\b(ERROR|FATAL|PANIC):|\[(error|critical|alert|emergency)\]")
        found: list[str] = []
        for log in (self.postgres.log, self.rabbit.directory / "log" / "rabbit.log"):
            text = log.read_text(errors="replace")
            fresh = text[self._log_marks.get(log, 0) :]
            self._log_marks[log] = len(text)
            found += [line.strip() for line in fresh.splitlines() if pattern.search(line)]
        return found


def relay_environment(**settings: str) -> dict[str, str]:
    """This process's environment without any `RELAY_*` of the caller's: a benchmark measures what it says it does."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RELAY_")}
    return inherited | settings


def shape_of(message: aio_pika.abc.AbstractIncomingMessage) -> dict[str, Any]:
    """Which properties and headers a message carries, with their types: two publishers compared must send the same."""
    # The queue counts deliveries of its own accord.
    headers = {name: type(value).__name__ for name, value in message.headers.items() if name != "x-delivery-count"}
    names = (
        "content_type",
        "content_encoding",
        "correlation_id",
        "reply_to",
        "expiration",
        "message_id",
        "timestamp",
    )
    carried = [name for name in (*names, "type", "user_id", "app_id", "priority") if getattr(message, name)]
    return {
        "routing_key": message.routing_key,
        "body_bytes": len(message.body),
        "delivery_mode": int(message.delivery_mode or 0),
        "properties": sorted(carried),
        "headers": dict(sorted(headers.items())),
    }
