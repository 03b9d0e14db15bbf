"""`relay run` end to end: what arrives, what waits, what is refused, how it ends."""

from __future__ import annotations

import asyncio
import json
import signal

import aio_pika
import asyncpg

from relay.servers import PostgresServer, RabbitServer, free_port
from tests.conftest import eventually
from tests.e2e.conftest import COMMAND, LADDER, Daemon, Site, command, environment
from tests.e2e.ledger import drain, ledger

ARTICLE = """
    INSERT INTO outbox (id, event_type, payload, created_at)
    VALUES ('01K0ORDERCREATED', 'order.created', '{"order_id":"42"}', now())
"""


async def test_the_articles_insert_arrives(site: Site) -> None:
    async with await aio_pika.connect(site.amqp_url) as connection:
        channel = await connection.channel()
        queue = await channel.declare_queue("orders", durable=True)
        await queue.bind("events", "order.*")
    daemon = await site.start().ready()
    await site.database.execute(ARTICLE)
    (message,) = await drain(site.amqp_url, 1, queue="orders")
    assert message.message_id == "01K0ORDERCREATED"
    assert message.type == message.routing_key == "order.created"
    assert message.delivery_mode is aio_pika.DeliveryMode.PERSISTENT
    assert message.content_type == "application/json"
    assert message.body == b'{"order_id":"42"}'
    await site.all_sent()
    assert await daemon.stop() == 0
    assert [event["event"] for event in daemon.events()][-1] == "exited"


async def test_a_thousand_rows_in_order_once(site: Site) -> None:
    await site.insert_many(1000, 50)
    daemon = await site.start().ready()
    await site.all_sent()
    (await ledger(site.database, site.amqp_url)).assert_complete()
    assert daemon.metric("relay_rows_sent_total") == 1000
    assert daemon.metric("relay_published_total") == 1000
    assert await daemon.stop() == 0


async def test_kill_9_while_publishing(site: Site) -> None:
    await site.insert_many(3000, 100)
    first = await site.start(max_rate="2000", max_in_flight="200").ready()
    await eventually(lambda: first.metric("relay_published_total") > 300)
    await first.kill()
    await site.start().ready()
    await site.all_sent()
    (await ledger(site.database, site.amqp_url)).assert_complete(duplicates_max=200)


async def test_broker_restart(site: Site, rabbit_server: RabbitServer) -> None:
    daemon = await site.start().ready()
    await site.insert_many(500, 20, prefix="a")
    await site.all_sent()
    await asyncio.to_thread(rabbit_server.stop)
    await daemon.not_ready("broker")
    await site.insert_many(500, 20, prefix="b")
    await asyncio.to_thread(rabbit_server.restart)
    await site.all_sent(30)
    (await ledger(site.database, site.amqp_url)).assert_complete()
    assert await daemon.stop() == 0


async def test_postgres_restart(site: Site, postgres_server: PostgresServer) -> None:
    await site.insert_many(3000, 100)
    daemon = await site.start(max_rate="2000", max_in_flight="200").ready()
    await eventually(lambda: daemon.metric("relay_published_total") > 300)
    await asyncio.to_thread(postgres_server.restart)
    await site.reconnect()
    await site.insert("after", key="1")
    await site.all_sent(30)
    (await ledger(site.database, site.amqp_url)).assert_complete(duplicates_max=200)
    await daemon.ready()
    assert await daemon.stop() == 0


async def test_sessions_cut_while_publishing(site: Site) -> None:
    """Every session of the relay is terminated midway: it opens new ones by itself, nothing is lost."""
    await site.insert_many(3000, 100)
    daemon = await site.start(max_rate="2000", max_in_flight="200").ready()
    await eventually(lambda: daemon.metric("relay_published_total") > 300)
    await site.database.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        " WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )
    await site.all_sent(30)
    (await ledger(site.database, site.amqp_url)).assert_complete(duplicates_max=200)
    assert daemon.metric("relay_reconnects_total") >= 1
    assert await daemon.stop() == 0


async def test_unroutable_row_is_deferred_and_harms_nobody(site: Site) -> None:
    await site.insert("before", key="a")
    await site.insert("nowhere", "nope.x", key="k")
    await site.insert("follower", key="k")
    await site.insert("after", key="b")
    daemon = await site.start(retry_delays=LADDER).ready()
    await site.until("(SELECT count(*) = 2 FROM outbox WHERE sent_at IS NOT NULL)")
    await site.until("(SELECT aside = 'deferred' AND attempts >= 1 FROM outbox WHERE id = 'nowhere')")
    row = await site.database.fetchrow("SELECT * FROM outbox WHERE id = 'nowhere'")
    assert row is not None
    assert row["failure_class"] == "unroutable"
    assert "NO_ROUTE" in row["failure_error"]
    assert row["sent_at"] is None
    status = json.loads((await asyncio.to_thread(lambda: command("status", "--json", settings=site.settings))).stdout)
    assert (status["deferred_rows"], status["held_rows"], status["held_keys"]) == (1, 1, 1)
    async with await aio_pika.connect(site.amqp_url) as connection:
        channel = await connection.channel()
        queue = await channel.get_queue("q")
        await queue.bind("events", "nope.#")
    await site.all_sent()
    found = await ledger(site.database, site.amqp_url)
    found.assert_complete()
    assert daemon.metric("relay_rows_deferred_total") >= 1


async def test_row_that_no_message_can_carry_is_parked_alone(site: Site) -> None:
    await site.insert("before", key="a")
    await site.insert("poison", key="k", priority=300)
    await site.insert("after", key="b")
    await site.start().ready()
    await site.until("(SELECT count(*) = 2 FROM outbox WHERE sent_at IS NOT NULL)")
    await site.until("(SELECT aside = 'parked' FROM outbox WHERE id = 'poison')")
    assert await site.database.fetchval("SELECT failure_class FROM outbox WHERE id = 'poison'") == "invalid"
    assert {message.message_id for message in await drain(site.amqp_url, 2)} == {"before", "after"}


async def test_missing_exchange_uses_no_attempt(site: Site) -> None:
    await site.insert("m")
    daemon = site.start(exchange="later")
    await daemon.not_ready("exchange")
    async with await aio_pika.connect(site.amqp_url) as connection:
        channel = await connection.channel()
        exchange = await channel.declare_exchange("later", aio_pika.ExchangeType.TOPIC, durable=True)
        await (await channel.get_queue("q")).bind(exchange, "ok.#")
    await daemon.ready()
    await site.all_sent()
    assert await site.database.fetchval("SELECT attempts FROM outbox") == 0
    assert len([event for event in daemon.events() if event["event"] == "broker_refused"]) == 1


async def test_missing_schema_is_waited_for(database_url: str, amqp_url: str, site: Site) -> None:
    await site.database.execute("DROP TABLE outbox, outbox_shard, outbox_relay, outbox_fault, outbox_meta")
    await site.database.execute("DROP FUNCTION outbox_ring, outbox_bell_wait")
    daemon = site.start()
    await daemon.not_ready("schema")
    assert any("relay migrate" in str(event) for event in daemon.events())
    assert (await asyncio.to_thread(lambda: command("migrate", settings=site.settings))).returncode == 0
    await daemon.ready()
    await site.insert("m")
    await site.all_sent()
    assert await daemon.stop() == 0


async def test_incompatible_schema_exits_3(site: Site) -> None:
    await site.database.execute("UPDATE outbox_meta SET schema_version = 99, compatible_from = 99")
    daemon = site.start()
    assert await daemon.exit() == 3
    assert daemon.events()[-1]["exit_code"] == 3
    assert "upgrade the relay" in daemon.text()


async def test_newer_compatible_schema_is_fine(site: Site) -> None:
    await site.database.execute("UPDATE outbox_meta SET schema_version = 99")
    await site.start().ready()
    await site.insert("m")
    await site.all_sent()


async def test_both_servers_down_is_waited_for_and_stops_cleanly() -> None:
    settings = {
        "RELAY_DATABASE_URL": f"postgresql://me:s3cretword@127.0.0.1:{free_port()}/x",
        "RELAY_AMQP_URL": f"amqp://me:s3cretword@127.0.0.1:{free_port()}/",
        "RELAY_LISTEN": "",
    }
    process = await asyncio.create_subprocess_exec(
        *COMMAND, "run", env=environment(settings), stderr=asyncio.subprocess.PIPE
    )
    assert process.stderr is not None
    async with asyncio.timeout(20):
        while b"database_unavailable" not in await process.stderr.readline():
            pass
        process.send_signal(signal.SIGTERM)
        rest = await process.stderr.read()
        assert await process.wait() == 0
    assert b"s3cretword" not in rest
    assert b"Traceback" not in rest


async def test_delete_mode_leaves_an_empty_table(site: Site) -> None:
    await site.insert_many(300, 10)
    await site.start(sent_rows="delete").ready()
    await site.until("NOT EXISTS (SELECT FROM outbox)")
    assert len(await drain(site.amqp_url, 300)) == 300


async def test_status_names_the_relay_that_owns_the_shards(site: Site) -> None:
    daemon = await site.start(name="the-one").ready()
    await eventually(lambda: daemon.metric("relay_shards_owned") == 64)
    done = await asyncio.to_thread(lambda: command("status", "--json", settings=site.settings))
    status = json.loads(done.stdout)
    assert [relay["name"] for relay in status["relays"]] == ["the-one"]
    assert status["shards_owned"] == 64
    assert await daemon.stop() == 0
    done = await asyncio.to_thread(lambda: command("status", "--json", settings=site.settings))
    assert json.loads(done.stdout)["relays"] == []


async def test_two_outboxes_in_one_database_never_meet(site: Site) -> None:
    other = {**site.settings, "RELAY_TABLE": '"Other".outbox'}
    await site.database.execute('CREATE SCHEMA "Other"')
    assert (await asyncio.to_thread(lambda: command("migrate", settings=other))).returncode == 0
    await site.start(name="one").ready()
    second = await site.start(name="two", table='"Other".outbox').ready()
    await site.insert("m1")
    await site.database.execute("INSERT INTO \"Other\".outbox (id, event_type, payload) VALUES ('m2', 'ok.y', '2')")
    assert {message.message_id for message in await drain(site.amqp_url, 2)} == {"m1", "m2"}
    await eventually(lambda: second.metric("relay_rows_sent_total") == 1)


async def test_json_and_text_logs_are_one_event_a_line(site: Site) -> None:
    json_daemon = await site.start().ready()
    assert {"time", "level", "event"} <= json_daemon.events()[0].keys()
    assert await json_daemon.stop() == 0
    text_daemon: Daemon = await site.start(log_format="text", log_level="debug").ready()
    await site.insert("m")
    await site.all_sent()
    assert await text_daemon.stop() == 0
    assert "started" in text_daemon.text()


async def test_idle_relay_is_woken_by_an_insert(site: Site) -> None:
    """With a poll interval of a minute, only the doorbell can bring a row at once."""
    daemon = await site.start(poll_interval="60s").ready()
    settled = await asyncpg.connect(site.database_url)
    await site.until(
        "EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND mode = 'ExclusiveLock' AND granted"
        " AND database = (SELECT oid FROM pg_database WHERE datname = current_database()))"
    )
    await site.insert("m")
    await site.all_sent()
    await settled.close()
    assert await daemon.stop() == 0
