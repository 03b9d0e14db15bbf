"""With the rights that `relay migrate --writer` and `relay inbox migrate --role` grant, and no others, everything works."""

from __future__ import annotations

import os
import runpy
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import asyncpg
import pytest

from relay import migrate as outbox
from relay.database import fill, sql_file
from relay.inbox import AsyncpgLedger, Message, Order, Outcome, Outgoing, migrate, retention
from relay.inbox.mailbox import Mailbox
from relay.inbox.naming import names_of
from relay.servers import PostgresServer
from relay.topology import names
from relay.values import TableName
from tests.conftest import eventually
from tests.inbox.site import QUEUE, Site, apply, message_of

EXAMPLES = Path(__file__).parents[2] / "examples"
OLD = "now() - interval '30 days'"


@pytest.fixture
async def least_url(inbox: Site, postgres_server: PostgresServer) -> AsyncIterator[str]:
    """The site's database as a role that may do what the documents say, and what it needs of its own tables."""
    database, role = inbox.database, f"least_{os.getpid()}"
    await database.execute(f"CREATE ROLE {role} LOGIN; GRANT INSERT ON effect TO {role}")
    await outbox.migrate(database, writer=role)
    await migrate.migrate(database, role=role)
    yield postgres_server.url(inbox.database_url.rpartition("/")[2], user=role)
    for consumer in list(inbox.running):
        await inbox.kill(consumer)
    await database.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")


async def test_a_consumer_with_events_of_its_own_and_a_retention(inbox: Site, least_url: str) -> None:
    async def handle(message: Message, connection: asyncpg.Connection) -> None:
        await Outgoing(connection, message).add("stock.reserved", {"order": 42})
        await apply(message, connection)

    await inbox.database.execute(f"INSERT INTO processed_messages VALUES ('inventory', 'old', {OLD})")
    await inbox.declare()
    consumer = await inbox.start(
        inbox.consumer(handle, database_url=least_url, order=Order.VERSION, workers=1, retention_s=15 * 86400.0)
    )
    await eventually(lambda: consumer.metrics.forgotten == 1)
    for version in (1, 2):
        headers = {"aggregate_type": "order", "aggregate_id": "42", "aggregate_version": version}
        for _ in range(2):
            await inbox.publish(f"m{version}", headers=headers)
    await inbox.effects_are({"m1": 1, "m2": 1})
    # Long after it was forgotten a copy comes once more, and the id of its event is there already.
    await inbox.database.execute("DELETE FROM processed_messages; DELETE FROM processed_versions")
    await inbox.publish("m1", headers={**headers, "aggregate_version": 1, names.RETRY_ATTEMPT: 1})
    await inbox.effects_are({"m1": 2, "m2": 1})
    assert await inbox.database.fetchval("SELECT count(*) FROM outbox") == 2
    assert consumer.metrics.messages[Outcome.DUPLICATE] == 2


async def test_an_event_that_a_unique_index_of_the_users_refuses(inbox: Site, least_url: str) -> None:
    """Only an event that is there by its id is passed over."""
    await inbox.database.execute("CREATE UNIQUE INDEX one_of_each ON outbox (aggregate_id, event_type)")
    service = await asyncpg.connect(least_url)
    try:
        for _ in range(2):
            async with service.transaction():
                await Outgoing(service, message_of("m1")).add("stock.reserved", {}, aggregate_id="42")
        with pytest.raises(asyncpg.UniqueViolationError, match="one_of_each"):
            async with service.transaction():
                await Outgoing(service, message_of("m2")).add("stock.reserved", {}, aggregate_id="42")
    finally:
        await service.close(timeout=5)
    assert await inbox.database.fetchval("SELECT count(*) FROM outbox") == 1


async def test_a_consumer_whose_role_reads_only_by_default(inbox: Site) -> None:
    name = await inbox.database.fetchval("SELECT current_database()")
    await inbox.database.execute(f'ALTER DATABASE "{name}" SET default_transaction_read_only = on')
    ledger = AsyncpgLedger(lambda: inbox.database_url)

    async def nothing(message: Message, connection: object) -> None:
        """No effect."""

    try:
        assert await ledger.apply(message_of("m1"), nothing) is Outcome.HANDLED
        assert await ledger.apply(message_of("m1"), nothing) is Outcome.DUPLICATE
    finally:
        await ledger.close()


@pytest.mark.parametrize("default", ["off", "on"])
async def test_a_sidecar(inbox: Site, least_url: str, default: str) -> None:
    """Also where sessions read only by default."""
    name = await inbox.database.fetchval("SELECT current_database()")
    await inbox.database.execute(f'ALTER DATABASE "{name}" SET default_transaction_read_only = {default}')
    table = TableName(None, "inbox")
    mailbox = Mailbox(lambda: least_url, table, QUEUE)
    message = message_of("m1")
    await mailbox.check()
    assert [await mailbox.write([message]), await mailbox.write([message])] == [1, 0]
    assert (await mailbox.gauges()).pending == 1
    await inbox.database.execute("UPDATE inbox SET due_at = now() - interval '50 seconds', aggregate_id = '42'")
    assert (await mailbox.gauges()).due_age_s == pytest.approx(50.0, abs=20.0)
    # One of its key that comes after it, and may not go before it, is not due; nor is what is parked.
    await mailbox.write([message_of("m2")])
    await inbox.database.execute(
        "UPDATE inbox SET due_at = now() - interval '1 day', aggregate_id = '42' WHERE message_id = 'm2'"
    )
    assert (await mailbox.gauges()).due_age_s < 100.0
    await inbox.database.execute("UPDATE inbox SET parked_at = now() WHERE message_id = 'm1'")
    assert (await mailbox.gauges()).due_age_s == 0.0
    await mailbox.close()
    await inbox.database.execute(f"UPDATE inbox SET done_at = {OLD}")
    purge = fill(sql_file("inbox/mailbox_purge.sql"), names_of(table))
    assert await retention.forget(least_url, purge, (timedelta(days=15),), on_batch=lambda _: None) == 2


async def test_the_examples(inbox: Site, least_url: str) -> None:
    orders, inventory = (runpy.run_path(str(EXAMPLES / name)) for name in ("orders.py", "inventory.py"))
    await inbox.database.execute(f"{orders['SCHEMA']}; {inventory['SCHEMA']}")
    await inbox.database.execute("INSERT INTO stock VALUES ('sku-1', 1)")
    role = f"least_{os.getpid()}"
    await inbox.database.execute(
        f"GRANT INSERT ON orders, reservation TO {role}; GRANT SELECT, UPDATE ON stock TO {role}"
    )
    await inbox.declare()
    await inbox.start(inbox.consumer(inventory["reserve"], database_url=least_url, workers=1))
    shop = await asyncpg.connect(least_url)
    for _ in range(2):
        await orders["place_order"](shop, "sku-1", 1)
    await shop.close(timeout=5)
    for row in await inbox.database.fetch("SELECT id, payload FROM outbox ORDER BY seq"):
        await inbox.publish(row["id"], row["payload"].encode())

    async def told() -> list[str]:
        rows = await inbox.database.fetch("SELECT event_type FROM outbox WHERE event_type LIKE 'stock.%' ORDER BY seq")
        return [row["event_type"] for row in rows]

    async def are_told() -> bool:
        return await told() == ["stock.reserved", "stock.rejected"]

    await eventually(are_told)
