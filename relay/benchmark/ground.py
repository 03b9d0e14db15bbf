"""The benchmark's own table, exchange and queue: made under names that nobody has, and taken away again.

Nothing else is touched: a name that exists already, however unlikely, ends the benchmark before anything is made of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Iterator
from dataclasses import dataclass
from typing import Final, TypeVar

from aiormq import Connection as BrokerConnection
from aiormq.abc import AbstractChannel
from aiormq.exceptions import AMQPError, ChannelNotFoundEntity
from pamqp.common import FieldValue

from relay import migrate
from relay.broker.opening import first_of, opened
from relay.config import Config
from relay.database import Connection, close, connect, fill, mapped_errors, sql_file
from relay.errors import BrokerRefused, BrokerUnavailable, CheckFailed, RelayError
from relay.values import TableName

T = TypeVar("T")

ANSWER_TIMEOUT_S: Final = 30.0
ROUND_TRIPS: Final = 15
QUEUE_EXPIRES_MS: Final = 3_600_000
"""Should this process be killed, the broker itself takes the queue away after an hour, and with it the exchange (`Ground.kept`)."""

_SUFFIXES: Final = {
    "table": "",
    "shard": "_shard",
    "relay": "_relay",
    "fault": "_fault",
    "meta": "_meta",
    "ring": "_ring",
    "bell_wait": "_bell_wait",
}


@dataclass(frozen=True, slots=True)
class Ground:
    """Where the benchmark works. `exchange` routes everything to `queue`; both have one name."""

    table: TableName
    queue: str
    database: Connection
    channel: AbstractChannel

    def sql(self, name: str) -> str:
        """A statement of sql/benchmark/, over the own table."""
        return fill(sql_file(f"benchmark/{name}.sql"), _names(self.table))

    async def empty_queue(self) -> None:
        """Nothing of the drain is left for the trickle's consumer. Raises BrokerUnavailable."""
        await answered(self.channel.queue_purge(self.queue, timeout=ANSWER_TIMEOUT_S))

    @contextlib.asynccontextmanager
    async def kept(self) -> AsyncIterator[None]:
        """During the block the queue does not expire, though it has no consumer: a message is taken now and then.

        To the broker publishing is no use of a queue; nor, of a quorum queue, is another declaration. Raises BrokerRefused,
        BrokerUnavailable.
        """

        async def use() -> None:
            while True:
                await asyncio.sleep(QUEUE_EXPIRES_MS / 1000 / 4)
                await answered(self.channel.basic_get(self.queue, no_ack=True, timeout=ANSWER_TIMEOUT_S))

        using = asyncio.create_task(use())
        try:
            yield
        finally:
            using.cancel()
            await asyncio.wait([using])
        if not using.cancelled() and (error := using.exception()) is not None:
            raise error

    async def database_round_trip_s(self) -> float:
        """The fastest of some empty questions. Raises DatabaseLost."""
        found = []
        for _ in range(ROUND_TRIPS):
            began = time.monotonic()
            with mapped_errors():
                await self.database.execute("SELECT", timeout=ANSWER_TIMEOUT_S)
            found.append(time.monotonic() - began)
        return min(found)

    async def is_direct(self) -> bool:
        """No pooling proxy stands before PostgreSQL, by what the relay itself goes by. Raises DatabaseLost."""
        with mapped_errors():
            pid = await self.database.fetchval("SELECT pg_backend_pid()", timeout=ANSWER_TIMEOUT_S)
        return bool(self.database.get_server_pid() == pid)

    async def broker_round_trip_s(self) -> float:
        """The same of the broker. Raises BrokerUnavailable."""
        found = []
        for _ in range(ROUND_TRIPS):
            began = time.monotonic()
            await answered(self.channel.basic_qos(prefetch_count=0, timeout=ANSWER_TIMEOUT_S))
            found.append(time.monotonic() - began)
        return min(found)


@contextlib.asynccontextmanager
async def prepared(config: Config, queue_type: str) -> AsyncIterator[Ground]:
    """Make everything; leaving the block takes it away, whatever ended it.

    Raises RelayError where a server refuses, and CheckFailed, naming what may be left, where something cannot be taken away, or
    taking it away is interrupted.
    """
    name = f"relay_bench_{secrets.token_hex(6)}"
    table, left, first = TableName(config.table.schema, name), list[str](), ""
    try:
        async with _made(config, table, queue_type, left) as ground:
            yield ground
    except RelayError as error:
        first = f"{error.message}; and "
        raise
    finally:
        if left:
            statements = " ".join(_drop(table).split())
            raise CheckFailed(
                f"{first}the benchmark may have left behind {', and '.join(left)}",
                hint=f"the table: {statements} The broker takes queue and exchange away an hour after their last use",
            )


@contextlib.asynccontextmanager
async def _made(config: Config, table: TableName, queue_type: str, left: list[str]) -> AsyncIterator[Ground]:
    """Goes on taking away where one thing cannot be; `left` has what that leaves."""
    name = table.name
    async with contextlib.AsyncExitStack() as stack:
        database = await connect(config.database(), application_name="outbox-relay bench")
        stack.push_async_callback(close, database)
        connection, channel = await first_of(config.amqp_urls(), _open)
        stack.push_async_callback(_close_broker, connection)
        table = await _make_table(config, database, table, stack, left)
        # Once more: it is closed before the table is dropped, or a transaction that it cannot end would keep that waiting.
        stack.push_async_callback(close, database)
        await _make_queue(connection, channel, name, queue_type, stack, left)
        yield Ground(table, name, database, channel)


async def _make_table(
    config: Config, database: Connection, table: TableName, stack: contextlib.AsyncExitStack, left: list[str]
) -> TableName:
    with mapped_errors():
        is_taken = await database.fetchval("SELECT to_regclass($1) IS NOT NULL", table.quoted, timeout=ANSWER_TIMEOUT_S)
    if is_taken:
        raise CheckFailed(f"the table {table} exists already: nothing is touched", hint="run it again")
    # From here on whatever has this name is ours, also when the migration is cut short.
    stack.push_async_callback(_drop_table, config, table, left)
    return (await migrate.migrate(database, table)).schema.table


async def _drop_table(config: Config, table: TableName, left: list[str]) -> None:
    """On a session of its own: the other one may be in any state by now."""
    with _noting(f"the table {table}", left):
        async with contextlib.AsyncExitStack() as stack:
            database = await connect(config.database(), application_name="outbox-relay bench")
            stack.push_async_callback(close, database)
            with mapped_errors():
                await database.execute(_drop(table), timeout=ANSWER_TIMEOUT_S)


def _drop(table: TableName) -> str:
    return fill(sql_file("benchmark/drop.sql"), _names(table))


@contextlib.contextmanager
def _noting(what: str, left: list[str]) -> Iterator[None]:
    """What keeps the block from taking `what` away does not keep the others from it: an error, or another signal."""
    try:
        yield
    except RelayError as error:
        left.append(f"{what} ({error.message})")
    except asyncio.CancelledError:
        left.append(f"{what} (interrupted)")


async def _make_queue(
    connection: BrokerConnection,
    channel: AbstractChannel,
    name: str,
    queue_type: str,
    stack: contextlib.AsyncExitStack,
    left: list[str],
) -> None:
    await _expect_nothing(connection, name)
    # From here on whatever has this name is ours.
    stack.push_async_callback(_delete, connection, name, left)
    # Goes with its last queue.
    await answered(
        channel.exchange_declare(name, exchange_type="fanout", durable=True, auto_delete=True, timeout=ANSWER_TIMEOUT_S)
    )
    arguments: dict[str, FieldValue] = {"x-queue-type": queue_type, "x-expires": QUEUE_EXPIRES_MS}
    await answered(channel.queue_declare(name, durable=True, arguments=arguments, timeout=ANSWER_TIMEOUT_S))
    await answered(channel.queue_bind(name, name, timeout=ANSWER_TIMEOUT_S))


async def _expect_nothing(connection: BrokerConnection, name: str) -> None:
    """Neither an exchange nor a queue of this name. Raises CheckFailed."""
    for kind in ("exchange", "queue"):
        # The broker closes the channel with its "no".
        asking = await answered(connection.channel())
        ask = asking.exchange_declare if kind == "exchange" else asking.queue_declare
        try:
            await answered(ask(name, passive=True, timeout=ANSWER_TIMEOUT_S))
        except BrokerRefused as refused:
            if isinstance(refused.__cause__, ChannelNotFoundEntity):
                continue
            raise
        raise CheckFailed(f"the {kind} {name} exists already: nothing is touched", hint="run it again")


async def _delete(connection: BrokerConnection, name: str, left: list[str]) -> None:
    """On a channel of its own: the other one may be waiting for an answer still."""
    with _noting(f"the queue and the exchange {name}", left):
        channel = await answered(connection.channel())
        await answered(channel.queue_delete(name, timeout=ANSWER_TIMEOUT_S))
        await answered(channel.exchange_delete(name, timeout=ANSWER_TIMEOUT_S))


async def _open(url: str) -> tuple[BrokerConnection, AbstractChannel]:
    async def with_channel(connection: BrokerConnection, _: object) -> tuple[BrokerConnection, AbstractChannel]:
        return connection, await connection.channel(publisher_confirms=False)

    return await opened(url, "outbox-relay bench", with_channel)


async def _close_broker(connection: BrokerConnection) -> None:
    with contextlib.suppress(AMQPError, OSError, TimeoutError, asyncio.InvalidStateError):
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            await connection.close()


@contextlib.contextmanager
def _broker_errors() -> Iterator[None]:
    """aiormq's errors as ours."""
    try:
        yield
    except AMQPError as error:
        raise BrokerRefused(
            f"RabbitMQ: {' '.join(map(str, error.args)) or type(error).__name__}", reply_code=0
        ) from error
    except (OSError, TimeoutError, asyncio.InvalidStateError, RuntimeError) as error:
        raise BrokerUnavailable(f"RabbitMQ gave no answer: {str(error) or type(error).__name__}") from error


async def answered(call: Awaitable[T]) -> T:
    """The broker's answer. Raises BrokerRefused, BrokerUnavailable.

    A call of aiormq must not be cancelled: it may never end then, and its channel with it. So a cancellation waits for the
    answer, and goes on after it.
    """
    asking = asyncio.ensure_future(call)
    try:
        with _broker_errors():
            return await asyncio.shield(asking)
    except asyncio.CancelledError:
        await asyncio.wait([asking], timeout=ANSWER_TIMEOUT_S)
        if asking.done() and not asking.cancelled():
            asking.exception()  # nobody wants to know any more
        raise


def _names(table: TableName) -> dict[str, str]:
    return {name: table.derived(suffix) for name, suffix in _SUFFIXES.items()}
