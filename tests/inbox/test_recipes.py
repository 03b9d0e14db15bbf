"""The recipes of docs/inbox.md on real servers: psycopg, SQLAlchemy, an effect over HTTP; the consumer's own events.

Each ledger has to do what the library's own does: once, whatever fails; an error that the handler swallowed is none of
its successes.
"""

from __future__ import annotations

import asyncio
import http.server
import json
import threading
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Any

import asyncpg
import psycopg
import psycopg_pool
import pytest
from sqlalchemy import text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine

from relay import migrate
from relay.inbox import (
    Consumer,
    ConsumerSettings,
    Handler,
    Ledger,
    Message,
    Outcome,
    Outgoing,
    Permanent,
    RetryPolicy,
    Transient,
    outgoing_id,
)
from relay.topology import names
from tests.conftest import eventually
from tests.inbox.site import QUEUE, Site, apply

LADDER = (0.05, 0.1)


class PsycopgLedger:
    """As in docs/inbox.md."""

    def __init__(self, pool: psycopg_pool.AsyncConnectionPool[psycopg.AsyncConnection[Any]]) -> None:
        self._pool = pool

    async def apply(self, message: Message, handler: Handler) -> Outcome:
        async with self._pool.connection() as connection:
            claimed = await connection.execute(
                "INSERT INTO processed_messages (consumer_name, message_id) VALUES (%s, %s) ON CONFLICT DO NOTHING",
                (message.consumer, message.id),
            )
            if claimed.rowcount == 0:
                return Outcome.DUPLICATE
            await handler(message, connection)
            await connection.execute("SELECT 1")
            return Outcome.HANDLED

    async def check(self) -> None:
        return None

    async def close(self) -> None:
        await self._pool.close()


class SqlalchemyLedger:
    """As in docs/inbox.md."""

    def __init__(self, sessions: async_sessionmaker[AsyncSession]) -> None:
        self._sessions = sessions

    async def apply(self, message: Message, handler: Handler) -> Outcome:
        async with self._sessions.begin() as session:
            claimed = await session.execute(
                text(
                    "INSERT INTO processed_messages (consumer_name, message_id) VALUES (:consumer, :id)"
                    " ON CONFLICT DO NOTHING RETURNING 1"
                ),
                {"consumer": message.consumer, "id": message.id},
            )
            if claimed.first() is None:
                return Outcome.DUPLICATE
            await handler(message, session)
            await session.execute(text("SELECT 1"))
            return Outcome.HANDLED

    async def check(self) -> None:
        return None

    async def close(self) -> None:
        return None


@pytest.fixture
async def psycopg_ledger(inbox: Site) -> AsyncIterator[Ledger]:
    async with psycopg_pool.AsyncConnectionPool(inbox.database_url, min_size=1, max_size=4) as pool:
        yield PsycopgLedger(pool)


@pytest.fixture
async def sqlalchemy_ledger(inbox: Site) -> AsyncIterator[Ledger]:
    engine = create_async_engine(inbox.database_url.replace("postgresql://", "postgresql+asyncpg://"))
    yield SqlalchemyLedger(async_sessionmaker(engine))
    await engine.dispose()


def over(inbox: Site, ledger: Ledger, handler: Handler) -> Consumer:
    settings = ConsumerSettings(retry=RetryPolicy(LADDER, unknown_retries_max=0, jitter=0.0), gauge_interval_s=0.1)
    return Consumer(
        name="inventory", queue=QUEUE, handler=handler, amqp_url=inbox.amqp_url, ledger=ledger, settings=settings
    )


async def judged(inbox: Site, ledger: Ledger, handler: Handler) -> None:
    """`handler` applies `once`; fails first for `later`; violates a constraint for `bad`; swallows an error for `odd`."""
    await inbox.declare(LADDER)
    consumer = await inbox.start(over(inbox, ledger, handler))
    for message_id in ("once", "once", "later", "bad", "odd"):
        await inbox.publish(message_id)
    await inbox.effects_are({"once": 1, "later": 1})
    parked = [await inbox.parked() for _ in range(2)]
    classes = {message.message_id: message.headers[names.ERROR_CLASS] for message in parked}
    assert classes == {"bad": "constraint", "odd": "unknown"}
    await eventually(lambda: consumer.metrics.messages[Outcome.DUPLICATE] == 1)
    assert await inbox.effects() == {"once": 1, "later": 1}
    await inbox.stop(consumer)


async def test_psycopg(inbox: Site, psycopg_ledger: Ledger) -> None:
    async def handle(message: Message, connection: psycopg.AsyncConnection[Any]) -> None:
        await connection.execute("INSERT INTO effect (message_id) VALUES (%s)", (message.id,))
        if message.id == "later" and message.attempt == 0:
            raise Transient("not yet")
        if message.id == "bad":
            await connection.execute("INSERT INTO effect (message_id) VALUES (NULL)")
        if message.id == "odd":
            try:
                await connection.execute("INSERT INTO nowhere VALUES (1)")
            except psycopg.errors.UndefinedTable:
                return

    await judged(inbox, psycopg_ledger, handle)


async def test_sqlalchemy(inbox: Site, sqlalchemy_ledger: Ledger) -> None:
    async def handle(message: Message, session: AsyncSession) -> None:
        await session.execute(text("INSERT INTO effect (message_id) VALUES (:id)"), {"id": message.id})
        if message.id == "later" and message.attempt == 0:
            raise Transient("not yet")
        if message.id == "bad":
            await session.execute(text("INSERT INTO effect (message_id) VALUES (NULL)"))
        if message.id == "odd":
            try:
                await session.execute(text("INSERT INTO nowhere VALUES (1)"))
            except SQLAlchemyError:
                return

    await judged(inbox, sqlalchemy_ledger, handle)


async def test_a_lost_session_of_another_driver_is_transient(
    inbox: Site, psycopg_ledger: Ledger, sqlalchemy_ledger: Ledger
) -> None:
    ending = "SELECT pg_terminate_backend(pg_backend_pid())"

    async def with_psycopg(message: Message, connection: psycopg.AsyncConnection[Any]) -> None:
        await connection.execute(ending)

    async def with_sqlalchemy(message: Message, session: AsyncSession) -> None:
        await session.execute(text(ending))

    await inbox.declare(LADDER)
    for ledger, handle in ((psycopg_ledger, with_psycopg), (sqlalchemy_ledger, with_sqlalchemy)):
        consumer = await inbox.start(over(inbox, ledger, handle))
        await inbox.publish("m1")
        parked = await inbox.parked()
        assert (parked.headers[names.ERROR_CLASS], parked.headers[names.RETRY_ATTEMPT]) == ("database", 2)
        await inbox.stop(consumer)


# ---------------------------------------------------------------- an effect over HTTP


class _Payments(http.server.BaseHTTPRequestHandler):
    """Charges once a key; the first call of a key that ends in `slow` is charged and its answer lost."""

    charges: Counter[str]
    calls: Counter[str]

    def do_POST(self) -> None:
        key = self.headers["Idempotency-Key"]
        self.rfile.read(int(self.headers["Content-Length"]))
        self.calls[key] += 1
        if key.endswith("busy") and self.calls[key] == 1:
            self.send_error(503)
            return
        if key.endswith("declined"):
            self.send_error(422)
            return
        self.charges.setdefault(key, 1)
        if key.endswith("slow") and self.calls[key] == 1:
            self.connection.close()
            return
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


@pytest.fixture
def payments() -> Iterator[tuple[str, type[_Payments]]]:
    handler = type("Payments", (_Payments,), {"charges": Counter(), "calls": Counter()})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/charges", handler
        server.shutdown()
        thread.join()


def post(url: str, body: bytes, key: str) -> int:
    request = urllib.request.Request(url, data=body, headers={"Idempotency-Key": key}, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=5.0) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


async def test_an_effect_over_http_has_the_message_id_as_its_key(
    inbox: Site, payments: tuple[str, type[_Payments]]
) -> None:
    url, service = payments

    async def charge(message: Message, connection: asyncpg.Connection) -> None:
        status = await asyncio.to_thread(post, url, message.body, message.id)
        if status in (408, 425, 429) or status >= 500:
            raise Transient(f"the payment service says {status}")
        if status >= 400:
            raise Permanent(f"the payment service says {status}")
        await apply(message, connection)

    await inbox.declare(LADDER)
    await inbox.start(inbox.consumer(charge, retry=RetryPolicy(LADDER, jitter=0.0)))
    for message_id in ("1-good", "2-busy", "3-slow", "4-declined"):
        await inbox.publish(message_id)
    await inbox.effects_are({"1-good": 1, "2-busy": 1, "3-slow": 1})
    parked = await inbox.parked()
    assert (parked.message_id, parked.headers[names.LAST_ERROR]) == ("4-declined", "the payment service says 422")
    assert service.charges == {"1-good": 1, "2-busy": 1, "3-slow": 1}
    assert service.calls["3-slow"] == 2, "called again with the same key, charged once"


# ---------------------------------------------------------------- its own events


async def test_its_own_events_have_ids_that_follow_from_the_message(inbox: Site) -> None:
    await migrate.run(inbox.database_url)

    async def handle(message: Message, connection: asyncpg.Connection) -> None:
        outgoing = Outgoing(connection, message)
        await outgoing.add("stock.reserved", {"order": 42}, aggregate_id="42")
        await outgoing.add("mail.wanted", json.dumps({"to": "x"}), headers='{"a": 1}')
        await apply(message, connection)
        if message.attempt == 0:
            raise Transient("not yet")

    await inbox.declare(LADDER)
    consumer = await inbox.start(inbox.consumer(handle, retry=RetryPolicy(LADDER, jitter=0.0)))
    await inbox.publish("m1", correlation_id="checkout-9", headers={"traceparent": "00-1-2-01"})
    await inbox.effects_are({"m1": 1})
    rows = await inbox.database.fetch(
        "SELECT id, event_type, aggregate_id, correlation_id, causation_id, traceparent FROM outbox ORDER BY seq"
    )
    ids = [outgoing_id("inventory", "m1", number) for number in (0, 1)]
    told = ("checkout-9", "m1", "00-1-2-01")
    assert [tuple(row) for row in rows] == [
        (ids[0], "stock.reserved", "42", *told),
        (ids[1], "mail.wanted", None, *told),
    ]
    # Long after its inbox row was forgotten, a copy makes no second event.
    await inbox.database.execute("DELETE FROM processed_messages")
    await inbox.publish("m1", headers={names.RETRY_ATTEMPT: 1})
    await inbox.effects_are({"m1": 2})
    assert await inbox.database.fetchval("SELECT count(*) FROM outbox") == 2
    await inbox.stop(consumer)
