"""The servers of a benchmark and the databases and queues that its runs start from.

Owns: a private durable PostgreSQL, a private RabbitMQ, and the *templates*: databases migrated by `relay migrate` and filled
once. Each run gets a fresh copy of one and a fresh queue, so that no run inherits another's dead rows, segments or floors.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import aio_pika

from bench.children import run_command
from bench.errors import BenchFailed, Unavailable
from bench.load import ROW_ID, Backlog, Load, patience_s
from bench.procfs import Cpu, bind, children, family_cpu_s, process_cpu_s
from relay.servers import PostgresServer, RabbitServer

EXCHANGE = "events"  # the default of RELAY_EXCHANGE
QUEUE = "bench"
NOWHERE = "nowhere"
"""An exchange without a queue: what goes there is returned."""

POSTGRES_TROUBLE = r"\b(ERROR|FATAL|PANIC):"
RABBIT_TROUBLE = r"\[(error|critical|alert|emergency)\]|resource limit alarm set"
"""An alarm is a warning in the log, and blocks every publisher."""
OWN_DOING = "terminating autovacuum process due to administrator command"
"""What PostgreSQL logs when a database is dropped in which autovacuum is at work."""

EMPTY = "load_empty"
AMQP_TIMEOUT_S = 30.0
QUIET_CPU_SHARE = 0.05
QUIET_WINDOW_S = 0.3
QUIET_TIMEOUT_S = 60.0
SENT_LOOK_S, SENT_TIMEOUT_S = 0.1, 90.0


@dataclass(frozen=True, slots=True)
class Taken:
    """The first message of a queue that held `held` of them; what it looks like, see `shape_of`."""

    held: int
    message_id: str
    shape: dict[str, Any]


class Rig:
    """Use as a context manager; leaving it ends the servers that it started and removes everything.

    Given servers (a test's) are used and left running; `amqp_url` may then name a vhost.
    """

    def __init__(
        self,
        postgres: PostgresServer | None = None,
        rabbit: RabbitServer | None = None,
        amqp_url: str | None = None,
    ) -> None:
        self._given = postgres, rabbit, amqp_url
        self._exits = ExitStack()
        self._log_marks: dict[Path, int] = {}
        self._backlogs: dict[Load, Backlog] = {}
        self._numbers = itertools.count(1)

    def __enter__(self) -> Self:
        with ExitStack() as exits:
            self.directory = Path(exits.enter_context(tempfile.TemporaryDirectory(prefix="relay-bench-")))
            postgres, rabbit, amqp_url = self._given
            self.postgres = postgres or exits.enter_context(PostgresServer.start(durable=True))
            # The management plugin's statistics would be broker CPU that no relay causes.
            self.rabbit = rabbit or exits.enter_context(RabbitServer.start(plugins=()))
            self.amqp_url = amqp_url or self.rabbit.amqp_url()
            if postgres is not None:
                exits.callback(self._drop_templates)
            self._migrate(self.postgres.create_database(EMPTY))
            self.complaints()
            self._exits = exits.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._exits.close()

    def _drop_templates(self) -> None:
        for name in (EMPTY, *(load.template for load in self._backlogs)):
            self.postgres.drop_database(name)

    # ---------------------------------------------------------------- the database

    def _migrate(self, url: str) -> None:
        run_command("relay", "migrate", timeout_s=60.0, RELAY_DATABASE_URL=url)

    def backlog(self, load: Load) -> Backlog:
        """The rows of a load's template, which is filled at the first call. Raises BenchFailed."""
        if load not in self._backlogs:
            self._backlogs[load] = self._fill(load)
        return self._backlogs[load]

    def _fill(self, load: Load) -> Backlog:
        def sql(statement: str) -> str:
            return self.sql(statement, load.template, load.rows)

        self._copy(EMPTY, load.template)
        sql(load.fill())
        sql("vacuum analyze outbox")
        numbered = int(sql(f"select count(*) from outbox where id = {ROW_ID.format(n='seq')}"))
        keys = [sys.intern(key) for key in sql("select aggregate_id from outbox order by seq").splitlines()]
        body = self.directory / f"{load.template}.body"
        body.write_text(sql("select payload from outbox order by seq limit 1").removesuffix("\n"))
        if not numbered == len(keys) == load.rows or body.stat().st_size != load.body_bytes:
            raise BenchFailed(f"the fill made {len(keys)} rows with a body of {body.stat().st_size} bytes")
        return Backlog(keys, body)

    def sql(self, statement: str, database: str, rows: int = 0) -> str:
        """What the statement brings, by `psql`; it goes through so many `rows`, and may take as long as they need."""
        return self.postgres.sql(statement, database, patience_s(rows))

    def _copy(self, template: str, name: str, rows: int = 0) -> None:
        # Block by block from 15 on would write it all to the log first; a copy of files is what 14 does anyway.
        by_files = " strategy file_copy" if int(self.sql("show server_version_num", "postgres")) >= 150000 else ""
        self.sql(f"create database {name} template {template}{by_files}", "postgres", rows)

    @contextmanager
    def fresh_database(self, load: Load | None = None) -> Iterator[str]:
        """A copy of a load's template (None: an outbox without rows), checkpointed; yields its name, drops it afterwards."""
        template, rows = (EMPTY, 0) if load is None else (load.template, len(self.backlog(load).keys))
        name = f"run_{next(self._numbers)}"
        self._copy(template, name, rows)
        self.sql("checkpoint", "postgres", rows)
        try:
            yield name
        finally:
            self.postgres.drop_database(name)

    def count(self, database: str, rows: int = 0) -> tuple[int, int]:
        """How many rows the table holds (about `rows` it had), and how many of them are not marked sent."""
        total, pending = self.sql(
            "select count(*), count(*) filter (where sent_at is null) from outbox", database, rows
        ).split("|")
        return int(total), int(pending)

    def wait_until_sent(self, database: str, left: int = 0) -> None:
        """Wait until no more than `left` rows are still to be sent. Raises BenchFailed."""
        deadline = time.monotonic() + SENT_TIMEOUT_S
        while (pending := self.count(database)[1]) > left:
            if time.monotonic() > deadline:
                raise BenchFailed(f"{pending} rows were still not sent after {SENT_TIMEOUT_S:.0f} s")
            time.sleep(SENT_LOOK_S)

    def wal_bytes(self) -> int:
        """Bytes of write-ahead log written so far."""
        return int(self.sql("select pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0')::bigint", "postgres"))

    def versions(self) -> dict[str, str]:
        """The servers' own words."""
        return {
            "postgresql": self.postgres.sql("show server_version").split()[0],
            "rabbitmq": self.rabbit.ctl("version").strip(),
        }

    # ---------------------------------------------------------------- the broker

    @contextmanager
    def fresh_queue(self, kind: str = "quorum", *beside: str) -> Iterator[None]:
        """One empty queue, `quorum` or `classic`, that takes everything of the topic exchange, and unbound ones `beside` it;
        deleted afterwards.
        """
        asyncio.run(self._declare(kind, beside))
        try:
            yield
        finally:
            asyncio.run(self._delete(QUEUE, *beside))

    async def _declare(self, kind: str, beside: Sequence[str]) -> None:
        async with await aio_pika.connect(self.amqp_url, timeout=AMQP_TIMEOUT_S) as connection:
            channel = await connection.channel()
            exchange = await channel.declare_exchange(EXCHANGE, aio_pika.ExchangeType.TOPIC, durable=True)
            await channel.declare_exchange(NOWHERE, aio_pika.ExchangeType.TOPIC, durable=True)
            await channel.queue_delete(QUEUE)
            queue = await channel.declare_queue(QUEUE, durable=True, arguments={"x-queue-type": kind})
            await queue.bind(exchange, "#")
            for name in beside:
                await channel.declare_queue(name, durable=True)

    async def _delete(self, *names: str) -> None:
        async with await aio_pika.connect(self.amqp_url, timeout=AMQP_TIMEOUT_S) as connection:
            channel = await connection.channel()
            for name in names:
                await channel.queue_delete(name)

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

    def cpu(self, *relay_pids: int) -> Cpu:
        """CPU seconds of everybody so far; the relays' are summed, 0 without any."""
        return Cpu(
            sum(map(process_cpu_s, relay_pids)),
            family_cpu_s(self.postgres.pid),
            family_cpu_s(self.rabbit.broker_pid),
        )

    @contextmanager
    def apart(self) -> Iterator[None]:
        """The broker on one half of the cores, everything else that is started here or was on the other half, as on two machines.
        Raises Unavailable where there is one core only.
        """
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) < 2:
            raise Unavailable("the broker cannot be set apart on one core: give the benchmark two at least")
        brokers, others = cores[: len(cores) // 2], cores[len(cores) // 2 :]
        try:
            self._bind(brokers, others)
            yield
        finally:
            self._bind(cores, cores)

    def _bind(self, brokers: Sequence[int], others: Sequence[int]) -> None:
        bind(self.rabbit.broker_pid, brokers)
        bind(os.getpid(), others)
        bind(self.postgres.pid, others)
        for child in children(self.postgres.pid):
            with suppress(FileNotFoundError):
                bind(child, others)

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

    def complaints(self, *, of_broker: bool = True) -> list[str]:
        """The errors that the servers have logged since the last call; not the broker's where it was told to end."""
        postgres, rabbit = self._logged(self.postgres.log), self._logged(self.rabbit.directory / "log" / "rabbit.log")
        # A client that closes its connection at once after its channel: RabbitMQ's supervisor of channels reports that.
        closing = re.findall(r"supervisor: {(<[\d.]+>),rabbit_channel_sup_sup}", rabbit)
        found = _matching(postgres, POSTGRES_TROUBLE, [OWN_DOING])
        return found + (_matching(rabbit, RABBIT_TROUBLE, closing) if of_broker else [])

    def _logged(self, log: Path) -> str:
        """What was logged there since the last call."""
        text = log.read_text(errors="replace")
        fresh = text[self._log_marks.get(log, 0) :]
        self._log_marks[log] = len(text)
        return fresh


def _matching(text: str, pattern: str, harmless: Sequence[str]) -> list[str]:
    lines = [line.strip() for line in text.splitlines() if re.search(pattern, line)]
    return [line for line in lines if not any(each in line for each in harmless)]


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
