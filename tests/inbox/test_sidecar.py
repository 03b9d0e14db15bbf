"""`relay inbox run` as a process, and its right to write."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import secrets
import signal
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import asyncpg
import psycopg
import pytest

from relay import config
from relay.database import DRIVER_ERRORS
from relay.http import Readiness
from relay.inbox import mailbox as mailbox_module
from relay.inbox import scribe as scribe_module
from relay.inbox import sidecar as sidecar_module
from relay.inbox import station as station_module
from relay.inbox.mailbox import Mailbox
from relay.inbox.metrics import InboxMetrics
from relay.inbox.naming import channel_of, names_of
from relay.inbox.station import Standby
from relay.logs import get_logger
from relay.servers import PostgresServer, RabbitServer
from relay.topology import names
from relay.values import TableName, table_name
from tests.conftest import eventually
from tests.e2e.conftest import Daemon, command
from tests.inbox.site import QUEUE, Site, fill, message_of
from tests.pooler import IS_INSTALLED, Pooler
from tests.proxy import COMMIT, Proxy, Side, Trap
from tests.roles import login_role

ROOT = Path(__file__).parents[2]


class Sidecar(Daemon):
    """One life of `relay inbox run`."""

    program = ("inbox", "run")
    listen = "RELAY_INBOX_LISTEN"


@pytest.fixture
async def settings(inbox: Site) -> dict[str, str]:
    await inbox.declare(())
    return {
        "RELAY_INBOX_DATABASE_URL": inbox.database_url,
        "RELAY_INBOX_AMQP_URL": inbox.amqp_url,
        "RELAY_INBOX_QUEUE": QUEUE,
    }


@pytest.fixture
async def sidecars(settings: dict[str, str], tmp_path: Path) -> AsyncIterator[Any]:
    started: list[Sidecar] = []

    def start(**extra: str) -> Sidecar:
        named = {f"RELAY_{name.upper()}": value for name, value in extra.items()}
        started.append(Sidecar({**settings, **named}, tmp_path / f"sidecar-{len(started)}.log"))
        return started[-1]

    yield start
    for sidecar in started:
        sidecar.close()


async def rows(inbox: Site) -> list[str]:
    return [row["message_id"] for row in await inbox.database.fetch("SELECT message_id FROM inbox ORDER BY seq")]


async def test_a_queue_into_the_table_once_and_in_order(inbox: Site, sidecars: Any) -> None:
    rung: list[str] = []
    await inbox.database.add_listener("inbox", lambda *said: rung.append(str(said[2])))
    sidecar: Sidecar = await sidecars().ready()
    headers = {
        "schema_version": 2,
        "aggregate_type": "order",
        "aggregate_id": "42",
        "aggregate_version": 7,
        "occurred_at": "2026-11-29T18:00:00.123456Z",
        "price": 0.1,
    }
    await inbox.publish("first", b"\x00\xff", headers=headers, correlation_id="c", app_id="shop", content_type="x/y")
    wanted = ["first", *(f"m{number}" for number in range(300))]
    for _ in range(2):
        for message_id in wanted[1:]:
            await inbox.publish(message_id)

    async def are_there() -> bool:
        return len(await rows(inbox)) == len(wanted) and await inbox.ready() == 0

    await eventually(are_there, 20)
    await eventually(lambda: sidecar.metric("relay_inbox_unacked_messages") == 0 and len(rung) > 0, 20)
    assert await rows(inbox) == wanted
    row = dict(await inbox.database.fetchrow("SELECT * FROM inbox WHERE message_id = 'first'"))
    assert row["payload"] == b"\x00\xff" and row["event_type"] == "order.created" and row["schema_version"] == 2
    assert (row["aggregate_type"], row["aggregate_id"], row["aggregate_version"]) == ("order", "42", 7)
    assert (row["correlation_id"], row["producer"], row["content_type"]) == ("c", "shop", "x/y")
    assert json.loads(row["headers"])["price"] == 0.1
    assert row["occurred_at"].isoformat() == "2026-11-29T18:00:00.123456+00:00"
    metrics = sidecar.metrics()
    assert metrics['relay_inbox_messages_total{outcome="handled"}'] == 301
    assert metrics['relay_inbox_messages_total{outcome="duplicate"}'] == 300
    await eventually(lambda: sidecar.metric("relay_inbox_pending_rows") == 301)
    assert await sidecar.stop() == 0
    assert {event["event"] for event in sidecar.events()} >= {"started", "consuming", "stopping", "exited"}


async def test_what_the_table_cannot_hold_is_parked_alone(inbox: Site, sidecars: Any) -> None:
    await inbox.publish("good1")
    await inbox.publish(None)
    await inbox.publish("nul", headers={"aggregate_id": "a\0b"})
    await inbox.publish("json", headers={"note": "a\0b"})
    await inbox.publish("version", headers={"schema_version": 2**40})
    await inbox.publish("word", headers={"aggregate_version": "seven"})
    await inbox.publish("long", headers={"aggregate_id": secrets.token_hex(40_000)})
    await inbox.publish("good2")
    await sidecars().ready()
    parked = [await inbox.parked() for _ in range(6)]
    assert {message.message_id for message in parked} >= {"nul", "json", "version", "word", "long"}
    assert {message.headers[names.ERROR_CLASS] for message in parked} == {"constraint", "malformed"}

    async def are_there() -> bool:
        return await rows(inbox) == ["good1", "good2"] and await inbox.ready() == 0

    await eventually(are_there)


async def test_the_rights_that_the_manifests_name_are_enough(
    inbox: Site, sidecars: Any, rabbit_server: RabbitServer
) -> None:
    """It consumes, looks at both queues, and parks; docs/topology.md has the same rights for its picture."""
    text = (ROOT / "deploy/kubernetes/secret.yaml").read_text().replace("\n# ", " ")
    ((configure, write, read),) = re.findall(
        r"configure (\S+), write (\S+) \(the default exchange.*?read (\S+)\.\n", text
    )
    page = (ROOT / "docs/topology.md").read_text()
    of_picture = read.replace("^", r"^orders\.")
    row = f"| the consumer's sidecar, `relay inbox run` | `{configure}` | `{write}` | `{of_picture}` |"
    assert row in page
    vhost = unquote(urlsplit(inbox.amqp_url).path[1:])
    rabbit_server.add_user("sidecar", "secret")
    rabbit_server.permit("sidecar", vhost, configure=configure, write=write, read=read)
    await inbox.channel.queue_delete(names.parking_queue(QUEUE))
    sidecar: Sidecar = sidecars(inbox_amqp_url=rabbit_server.amqp_url(vhost, "sidecar", "secret"))
    await eventually(lambda: sidecar.reasons() == {"queues"}, 20)
    await inbox.declare(())
    await inbox.publish(None)
    await inbox.publish("good")
    await inbox.parked()

    async def is_there() -> bool:
        return await rows(inbox) == ["good"]

    await eventually(is_there, 20)
    assert f'relay_inbox_queue_messages{{queue="{QUEUE}"}}' in sidecar.metrics()


async def test_a_hand_of_large_messages_is_written_in_parts(
    inbox: Site, settings: dict[str, str], tmp_path: Path
) -> None:
    """Here every message is a large one."""
    wanted = [f"m{number}" for number in range(30)]
    for message_id in wanted:
        await inbox.publish(message_id)
    prelude = "import relay.inbox.scribe; relay.inbox.scribe.BATCH_BYTES_MAX = 0"
    sidecar = Sidecar(settings, tmp_path / "sidecar.log", prelude=prelude)
    try:
        await eventually(lambda: sidecar.metric("relay_inbox_messages_total") == len(wanted), 20)
        assert await rows(inbox) == wanted
        assert await inbox.database.fetchval("SELECT count(DISTINCT xmin::text) FROM inbox") == len(wanted)
        assert sidecar.metric("relay_inbox_unacked_messages") == 0
        assert await sidecar.stop() == 0
    finally:
        sidecar.close()
    assert await inbox.ready() == 0


async def test_a_session_that_ends_under_a_write_is_an_outage(inbox: Site, sidecars: Any) -> None:
    """At whatever point of the transaction it ends: the driver's own complaints about it are no faults of ours."""
    sidecar: Sidecar = await sidecars(log_level="debug").ready()
    wanted = [f"m{number}" for number in range(30)]
    for message_id in wanted:
        await inbox.publish(message_id)
        await inbox.database.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE application_name = 'outbox-relay inbox' AND datname = current_database()"
        )
        await sidecar.ready(30)

    async def are_there() -> bool:
        return await rows(inbox) == wanted

    await eventually(are_there, 30)
    assert await sidecar.stop() == 0


async def test_killed_again_and_again_each_message_is_there_once_in_order(inbox: Site, sidecars: Any) -> None:
    wanted = [f"m{number}" for number in range(400)]
    publishing = asyncio.create_task(_publish_slowly(inbox, wanted))
    for _ in range(3):
        sidecar: Sidecar = await sidecars().ready()
        await _has_written(sidecar)
        await sidecar.kill()
    await publishing
    await sidecars().ready()

    async def are_there() -> bool:
        return len(await rows(inbox)) == len(wanted)

    await eventually(are_there, 20)
    assert await rows(inbox) == wanted


async def _has_written(sidecar: Sidecar) -> None:
    await eventually(lambda: sidecar.metric("relay_inbox_messages_total") > 0, 20)


async def _publish_slowly(inbox: Site, ids: list[str]) -> None:
    for message_id in ids:
        await inbox.publish(message_id)
        await asyncio.sleep(0.01)


async def test_a_second_one_stands_by_and_takes_over(inbox: Site, sidecars: Any) -> None:
    first: Sidecar = await sidecars().ready()
    second: Sidecar = sidecars()
    await eventually(lambda: second.reasons() >= {"standby"}, 20)
    await first.kill()
    await second.ready()
    await inbox.publish("m1")

    async def is_there() -> bool:
        return await rows(inbox) == ["m1"]

    await eventually(is_there)


LINKLESS_SOON = "import relay.inbox.station; relay.inbox.station.LINKLESS_S = 1.0"


async def test_one_that_lost_the_broker_alone_gives_its_right_back(
    inbox: Site, settings: dict[str, str], sidecars: Any, tmp_path: Path
) -> None:
    """Its lease would be renewed for ever, and the one that has a broker would never consume. Back again, it stands by."""
    async with Proxy(inbox.amqp_url) as proxy:
        first = Sidecar({**settings, "RELAY_INBOX_AMQP_URL": proxy.url}, tmp_path / "first.log", prelude=LINKLESS_SOON)
        try:
            await first.ready()
            second: Sidecar = sidecars()
            await eventually(lambda: second.reasons() >= {"standby"}, 20)
            proxy.refuses = True
            proxy.cut()
            await second.ready(30)
            await inbox.publish("m1")

            async def is_there() -> bool:
                return await rows(inbox) == ["m1"]

            await eventually(is_there, 20)
            await eventually(lambda: first.reasons() == {"broker"} and "relay_inbox_pending_rows" in first.metrics())
            proxy.refuses = False
            await eventually(lambda: "standby" in first.reasons(), 20)
            assert [event["event"] for event in first.events()].count("right_given_back") == 1
            assert [event["event"] for event in second.events()].count("consuming") == 1
            assert await second.stop() == 0
            await first.ready(30)
        finally:
            first.close()


async def test_where_none_has_a_broker_the_right_is_nobodys(
    inbox: Site, settings: dict[str, str], tmp_path: Path
) -> None:
    """It does not go to and fro between them: each gives it back once, and the first one with a broker has it."""
    async with Proxy(inbox.amqp_url) as one, Proxy(inbox.amqp_url) as other:
        both: list[Sidecar] = []
        try:
            for proxy in one, other:
                named = {**settings, "RELAY_INBOX_AMQP_URL": proxy.url}
                both.append(Sidecar(named, tmp_path / f"{len(both)}.log", prelude=LINKLESS_SOON))
                await eventually(lambda: both[-1].reasons() in (set(), {"broker", "standby"}), 20)
            for proxy in one, other:
                proxy.refuses = True
                proxy.cut()
            await eventually(lambda: all("right_given_back" in sidecar.text() for sidecar in both), 30)
            free = "SELECT leased_until < clock_timestamp() FROM inbox_writer"
            assert await inbox.database.fetchval(free)
            tried = one.accepted + other.accepted
            await eventually(lambda: one.accepted + other.accepted >= tried + 3, 30)
            assert await inbox.database.fetchval(free)
            other.refuses = False
            await both[1].ready(30)
            one.refuses = False
            await eventually(lambda: "standby" in both[0].reasons(), 20)
            for sidecar in both:
                assert [event["event"] for event in sidecar.events()].count("right_given_back") == 1
        finally:
            for sidecar in both:
                sidecar.close()


async def test_a_database_that_refuses_every_write_uses_up_no_delivery(inbox: Site, sidecars: Any) -> None:
    """A full disk answers every question: a batch that went back to the queue each time would be dead-lettered soon."""
    limited = {"x-queue-type": "quorum", "x-delivery-limit": 1, "x-dead-letter-exchange": ""}
    limited["x-dead-letter-routing-key"] = names.parking_queue("limited")
    await inbox.declare((), queue="limited", arguments=limited)
    await inbox.database.execute(
        "CREATE FUNCTION full_disk() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN RAISE EXCEPTION 'no space left on device' USING ERRCODE = '53100'; END $$;"
        "CREATE TRIGGER full_disk BEFORE INSERT ON inbox EXECUTE FUNCTION full_disk()"
    )
    sidecar: Sidecar = await sidecars(inbox_queue="limited").ready()
    await inbox.publish("m1")
    refused = "SELECT sum(xact_rollback) FROM pg_stat_database WHERE datname = current_database()"
    before = await inbox.database.fetchval(refused)

    async def has_tried_again() -> bool:
        return bool(await inbox.database.fetchval(refused) >= before + 4)

    await eventually(has_tried_again, 20)
    assert sidecar.reasons() == {"database"}
    await inbox.database.execute("DROP TRIGGER full_disk ON inbox")

    async def is_there() -> bool:
        return await rows(inbox) == ["m1"]

    await eventually(is_there, 20)
    await sidecar.ready()
    assert sidecar.metric("relay_inbox_reconnects_total") == 0
    assert await inbox.ready(names.parking_queue("limited")) == 0
    assert len([event for event in sidecar.events() if event["event"] == "consumer_waits"]) == 1


async def test_who_has_no_room_gives_back_what_it_has_in_hand(
    inbox: Site, settings: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was in hand stayed unacknowledged until the broker closed the channel over it, each time nearer to its delivery limit."""
    for module in mailbox_module, scribe_module:
        monkeypatch.setattr(module, "PENDING_MAX", 3)
    monkeypatch.setattr(scribe_module, "FULL_PATIENCE_S", 0.5)
    monkeypatch.setattr(station_module, "BACKOFF_MAX_S", 0.5)
    metrics, readiness = InboxMetrics(), Readiness()
    station = sidecar_module.assembled(config.load(settings)[0], metrics, readiness, get_logger())
    running = asyncio.create_task(station.run())

    async def all_ready() -> bool:
        return await inbox.ready() == 3

    try:
        for number in range(3):
            await inbox.publish(f"m{number}")
        await eventually(lambda: metrics.pending_rows == 3)
        for number in range(3, 6):
            await inbox.publish(f"m{number}")
        await eventually(lambda: metrics.unacked_messages)
        await eventually(all_ready)
        # Between giving back and the next look at the table it says nothing.
        await eventually(lambda: "full" in dict(readiness.reasons))
        await inbox.database.execute("UPDATE inbox SET done_at = now()")
        await eventually(lambda: inbox.database.fetchval("SELECT count(*) = 6 FROM inbox"))
        await eventually(lambda: not readiness.reasons)
    finally:
        station.stop()
        await running


async def test_a_database_that_goes_away_from_an_idle_sidecar_is_noticed(inbox: Site, sidecars: Any) -> None:
    """Without a message nothing is written that could fail."""
    sidecar: Sidecar = await sidecars().ready()
    name = inbox.database_url.rpartition("/")[2]
    server = await asyncpg.connect(f"{inbox.database_url.rpartition('/')[0]}/postgres")
    try:
        await server.execute(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS false')
        await server.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = $1", name)
        await eventually(lambda: "database" in sidecar.reasons(), 20)
        assert sidecar.metrics()['relay_inbox_connected{peer="database"}'] == 0
        await server.execute(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS true')
    finally:
        await server.close()
    await sidecar.ready(30)
    await inbox.reconnect()
    await inbox.publish("m1")

    async def is_there() -> bool:
        return await rows(inbox) == ["m1"]

    await eventually(is_there, 20)
    assert sidecar.metric("relay_inbox_reconnects_total") == 0


async def test_who_has_lost_the_right_to_write_writes_nothing(inbox: Site) -> None:
    """Frozen for longer than its lease, say: the fence is in the batch's own transaction."""
    target, table = (lambda: inbox.database_url), TableName(None, "inbox")
    first, second = Mailbox(target, table, QUEUE), Mailbox(target, table, QUEUE)
    message = message_of("m1")
    try:
        await first.check()
        with pytest.raises(Standby, match="another sidecar writes inventory into inbox"):
            await second.check()
        await inbox.database.execute("UPDATE inbox_writer SET leased_until = now() - interval '1 second'")
        await second.check()
        for attempt in (first.write([message]), first.gauges()):
            with pytest.raises(Standby):
                await attempt
        assert await rows(inbox) == []
        assert await second.write([message]) == 1
        with pytest.raises(Standby):
            await first.check()
        await second.close()
        await first.check()
    finally:
        await first.close()
        await second.close()


LONG_TABLE = f'"{"S" * 63}"."{"t" * 43}"'


@pytest.mark.parametrize("name", ["sales.mail", '"Sales"."Mail"', '"we ""sell"""."in box"', LONG_TABLE])
async def test_a_table_of_any_name_rings_where_its_service_was_told_to_listen(inbox: Site, name: str) -> None:
    """No channel has more than 63 bytes: with a schema's name and a table's that had more together, every message was taken
    for data that PostgreSQL refuses, and parked."""
    table = table_name(name)
    await inbox.database.execute(f"CREATE SCHEMA {name.rpartition('.')[0]}")
    settings = {"RELAY_INBOX_DATABASE_URL": inbox.database_url, "RELAY_INBOX_TABLE": name}
    migrated = await asyncio.to_thread(lambda: command("inbox", "migrate", settings=settings))
    assert migrated.returncode == 0, migrated.stderr
    listen = migrated.stdout.splitlines()[-1].removeprefix("its doorbell: ")
    mailbox = Mailbox(lambda: inbox.database_url, table, QUEUE)
    calls = names_of(table)
    async with await psycopg.AsyncConnection.connect(inbox.database_url, autocommit=True) as service:

        async def rang() -> list[str]:
            return [rung.channel async for rung in service.notifies(timeout=10.0, stop_after=1)]

        await service.execute(listen.encode())
        try:
            await mailbox.check()
            assert await mailbox.write([message_of("m1")]) == 1
            assert await rang() == [channel_of(table)]
            await inbox.database.execute(f"SELECT {calls['failed']}('m1', 'permanent')")
            assert await inbox.database.fetchval(f"SELECT {calls['redrive']}('m1')")
            assert await rang() == [channel_of(table)]
        finally:
            await mailbox.close()


async def test_a_service_can_work_out_a_long_tables_channel(inbox: Site) -> None:
    """By what docs/inbox.md says, in SQL."""
    (rule,) = re.findall(r"`('inbox_' .*)`", (ROOT / "docs/inbox.md").read_text())
    table = table_name(LONG_TABLE)
    found = await inbox.database.fetchval(f"SELECT {rule.replace('a_very_long_schema.mail', str(table))}")
    assert found == channel_of(table)


async def test_a_writer_of_another_role_is_not_taken_for_gone(inbox: Site, postgres_server: PostgresServer) -> None:
    """One login a pod: PostgreSQL hides from each when the sessions of the others began."""
    name, table = inbox.database_url.rpartition("/")[2], TableName(None, "inbox")
    async with login_role(inbox.database) as one, login_role(inbox.database) as other:
        for role in (one, other):
            await inbox.database.execute(
                f"GRANT ALL ON ALL TABLES IN SCHEMA public TO {role}; GRANT ALL ON ALL SEQUENCES IN SCHEMA public TO {role}"
            )
        first, second = (Mailbox(partial(postgres_server.url, name, user=role), table, QUEUE) for role in (one, other))
        try:
            await first.check()
            with pytest.raises(Standby):
                await second.check()
            assert await first.write([message_of("m1")]) == 1
            await first.abandon()

            async def has_taken_over() -> bool:
                with contextlib.suppress(Standby):
                    await second.check()
                    return True
                return False

            await eventually(has_taken_over)
            assert await second.write([message_of("m2")]) == 1
        finally:
            await first.close()
            await second.close()


@pytest.mark.parametrize("amid", [b"BEGIN;", b"INSERT INTO", COMMIT[:-1]], ids=["begin", "insert", "commit"])
async def test_a_session_that_hangs_holds_no_batch_for_ever(
    inbox: Site, monkeypatch: pytest.MonkeyPatch, amid: bytes
) -> None:
    """Half open: nobody closes it, and no request to cancel arrives either. The same batch goes by another session."""
    monkeypatch.setattr(mailbox_module, "ANSWER_TIMEOUT_S", 0.5)
    message = message_of("m1")
    async with Proxy(inbox.database_url) as proxy:
        mailbox = Mailbox(lambda: proxy.url, TableName(None, "inbox"), QUEUE)
        try:
            await mailbox.check()
            sprung = proxy.trap(Trap(Side.CLIENT, amid, proxy.half_open))
            writing = asyncio.ensure_future(mailbox.write([message]))
            assert (await asyncio.wait((writing,), timeout=20))[0] and sprung.is_set()
            with pytest.raises(DRIVER_ERRORS):
                await writing
            await mailbox.abandon()
            proxy.heal()
            proxy.cut()
            await inbox.database.execute("UPDATE inbox_writer SET leased_until = now() - interval '1 second'")
            await mailbox.check()
            assert await mailbox.write([message]) == 1
        finally:
            await mailbox.close()
    assert await rows(inbox) == ["m1"]


@pytest.mark.parametrize("has_messages", [True, False])
async def test_one_that_was_frozen_past_its_lease_stands_by_and_takes_over_again(
    inbox: Site, sidecars: Any, has_messages: bool
) -> None:
    """It wakes with its link and its session alive. Whatever it would take from the queue it could only give back, which
    counts towards the delivery limit and breaks the order.
    """
    frozen: Sidecar = await sidecars().ready()
    await _freeze(inbox, frozen)
    wanted = [f"m{number}" for number in range(20)]
    if has_messages:
        for message_id in wanted:
            await inbox.publish(message_id)
    other: Sidecar = sidecars()
    await eventually(lambda: other.reasons() >= {"standby"}, 20)
    await inbox.database.execute("UPDATE inbox_writer SET leased_until = now() - interval '1 second'")
    await other.ready()
    frozen.signal(signal.SIGCONT)
    await eventually(lambda: frozen.reasons() == {"broker", "standby"}, 20)

    async def has_one_consumer() -> bool:
        return (await inbox.channel.declare_queue(QUEUE, passive=True)).declaration_result.consumer_count == 1

    await eventually(has_one_consumer)
    if not has_messages:
        for message_id in wanted:
            await inbox.publish(message_id)

    async def are_there() -> bool:
        return sorted(await rows(inbox)) == sorted(wanted)

    await eventually(are_there, 20)
    asked = "SELECT sum(xact_rollback) FROM pg_stat_database WHERE datname = current_database()"
    before = await inbox.database.fetchval(asked)

    async def has_asked_again() -> bool:
        return bool(await inbox.database.fetchval(asked) >= before + 4)

    await eventually(has_asked_again, 30)
    assert frozen.reasons() == {"broker", "standby"} and await has_one_consumer()
    assert frozen.metrics()['relay_inbox_connected{peer="broker"}'] == 0
    assert [event["event"] for event in frozen.events()].count("consuming") == 1, "no link that it may not use"
    assert await other.stop() == 0
    await frozen.ready()
    await inbox.publish("last")

    async def is_there() -> bool:
        return (await rows(inbox))[-1] == "last"

    await eventually(is_there)


async def _freeze(inbox: Site, sidecar: Sidecar) -> None:
    """Between two of its transactions: nobody could take over in the middle of one."""
    working = (
        "SELECT count(*) FROM pg_stat_activity"
        " WHERE application_name = 'outbox-relay inbox' AND state <> 'idle' AND datname = current_database()"
    )

    async def is_between() -> bool:
        sidecar.signal(signal.SIGSTOP)
        await eventually(lambda: ") T " in Path(f"/proc/{sidecar.process.pid}/stat").read_text())
        if await inbox.database.fetchval(working) == 0:
            return True
        sidecar.signal(signal.SIGCONT)
        return False

    await eventually(is_between)


@pytest.mark.skipif(not IS_INSTALLED, reason="pgbouncer is not installed")
async def test_behind_a_pooling_proxy_there_is_one_writer_too(inbox: Site, sidecars: Any) -> None:
    """A session's lock would stay with the proxy's own session: nobody could take over, or anybody write."""
    with Pooler(inbox.database_url) as pooler:
        first: Sidecar = await sidecars(inbox_database_url=pooler.url).ready()
        second: Sidecar = sidecars(inbox_database_url=pooler.url)
        await eventually(lambda: second.reasons() >= {"standby"}, 20)
        wanted = [f"m{number}" for number in range(20)]
        for message_id in wanted[:10]:
            await inbox.publish(message_id)
        await _has_written(first)
        await first.kill()
        for message_id in wanted[10:]:
            await inbox.publish(message_id)

        async def are_there() -> bool:
            return await rows(inbox) == wanted

        await eventually(are_there, 30)
        third: Sidecar = sidecars(inbox_database_url=pooler.url)
        await eventually(lambda: third.reasons() >= {"standby"}, 20)
        assert await second.stop() == 0
        await third.ready()


async def test_servers_that_come_late_are_waited_for(inbox: Site, sidecars: Any, rabbit_server: RabbitServer) -> None:
    await inbox.database.execute("ALTER TABLE inbox RENAME TO elsewhere")
    sidecar: Sidecar = sidecars()
    await eventually(lambda: sidecar.reasons() >= {"database"}, 20)
    assert "relay inbox migrate" in sidecar.text()
    warnings = [event["event"] for event in sidecar.events() if event["level"] == "warning"]
    assert warnings == ["consumer_waits"], "one line, with the command"
    assert sidecar.get("/livez")[0] == 200
    await inbox.database.execute("ALTER TABLE elsewhere RENAME TO inbox")
    await sidecar.ready()
    assert await sidecar.stop() == 0


async def test_wrong_settings_are_named(settings: dict[str, str]) -> None:
    done = await asyncio.to_thread(lambda: command("inbox", "run", settings={}))
    assert done.returncode == 2
    for variable in settings:
        assert f"{variable}: not set" in done.stderr
    short = {**settings, "RELAY_INBOX_RETENTION": "7d"}
    done = await asyncio.to_thread(lambda: command("inbox", "run", settings=short))
    assert done.returncode == 2
    assert "not longer than RELAY_RETENTION" in done.stderr
    taken = {**settings, "RELAY_INBOX_LISTEN": "203.0.113.1:1"}
    done = await asyncio.to_thread(lambda: command("inbox", "run", settings=taken))
    assert done.returncode == 2
    assert "RELAY_INBOX_LISTEN names an address" in done.stderr


async def test_a_second_signal_ends_it_at_once(inbox: Site, sidecars: Any) -> None:
    """With a batch in hand that cannot be written, and an hour to wait for it."""
    sidecar: Sidecar = await sidecars(shutdown_grace="1h").ready()
    async with inbox.database.transaction():
        await inbox.database.execute("LOCK TABLE inbox IN ACCESS EXCLUSIVE MODE")
        await inbox.publish("m1")
        await eventually(lambda: sidecar.metric("relay_inbox_busy_workers") > 0, 20)
        sidecar.signal(signal.SIGTERM)
        await eventually(lambda: '"stopping"' in sidecar.text(), 20)
        assert sidecar.process.poll() is None
        sidecar.signal(signal.SIGTERM)
        assert await sidecar.exit() == 4
    assert sidecar.events()[-1]["event"] == "second_signal"
    assert "Traceback" not in sidecar.text()
    second: Sidecar = await sidecars().ready()
    await _has_written(second)
    assert await rows(inbox) == ["m1"]


async def test_old_rows_go_and_unfinished_ones_stay(inbox: Site, sidecars: Any) -> None:
    await fill(inbox, *(f"m{number}" for number in range(1500)))
    await inbox.database.execute("UPDATE inbox SET received_at = '2020-01-01'")
    await inbox.database.execute("UPDATE inbox SET done_at = '2020-01-01' WHERE message_id <> 'm7'")
    sidecar: Sidecar = await sidecars().ready()
    await eventually(lambda: sidecar.metric("relay_inbox_forgotten_total") == 1499, 20)
    assert await rows(inbox) == ["m7"]


async def test_what_is_held_by_nobody_is_let_go(inbox: Site, sidecars: Any) -> None:
    """Its predecessors were deleted by hand: no `inbox_done` will come for them."""
    await fill(inbox, *(f"m{number}" for number in range(100)), key="k")
    await inbox.database.execute("DELETE FROM inbox WHERE NOT held")
    claim = "SELECT message_id FROM inbox_claim(1)"
    assert await inbox.database.fetchval(claim) is None
    await sidecars().ready()
    await eventually(lambda: inbox.database.fetchval(claim))
