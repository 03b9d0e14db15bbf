"""Commands, exit codes and what they say, through the installed command."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import Mapping
from urllib.parse import urlsplit

import aio_pika
import asyncpg
import pytest

from relay import __version__
from relay.servers import PostgresServer, RabbitServer, free_port
from tests.e2e.conftest import COMMAND, Site, command, environment

COMMANDS = ("run", "migrate", "check", "status", "topology plan", "redrive", "demo", "inbox migrate")


async def _command(*arguments: str, settings: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    return await asyncio.to_thread(lambda: command(*arguments, settings=settings))


# ---------------------------------------------------------------- usage


def test_a_full_disk_is_no_fault_of_the_command() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*COMMAND, "migrate", "--print"],
            env=environment({}),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    assert (done.returncode, done.stderr) == (1, "relay: cannot write the output: No space left on device\n")


def test_version_and_help() -> None:
    assert command("--version").stdout == f"relay {__version__}\n"
    text = command("--help").stdout
    assert all(name.split()[0] in text for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_version_and_help(name: str) -> None:
    for option in ("--version", "--help"):
        done = command(*name.split(), option)
        assert (done.returncode, done.stderr) == (0, "")
        assert "relay" in done.stdout


def test_help_says_what_a_commands_own_no_is() -> None:
    assert "4 there is an error among the findings." in command("check", "--help").stdout
    assert command("migrate", "--help").stdout.endswith("3 schema incompatible.\n")


@pytest.mark.parametrize(
    "arguments",
    [(), ("nope",), ("run", "--fast"), ("inbox",), ("migrate", "--payload", "xml"), ("status", "x")],
)
def test_wrong_usage_exits_2(arguments: tuple[str, ...]) -> None:
    done = command(*arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("usage: relay")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("migrate", "--print", "--role", "a\udcff"), "--role a\\udcff"),
        (("redrive", "q", "--to-exchange", "\udcff"), "--to-exchange \\udcff"),
        (("redrive", "q", "--where", "type=\udcff"), "--where type=\\udcff"),
        (("redrive", "\udcff"), "QUEUE \\udcff"),
    ],
)
def test_arguments_that_are_no_utf8_are_refused(arguments: tuple[str, ...], said: str) -> None:
    """They reached the driver, or the SQL for a DBA."""
    done = command(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"relay: {said}: not UTF-8; allowed: text in UTF-8 without zero bytes\n"


# ---------------------------------------------------------------- configuration


@pytest.mark.parametrize("name", ["run", "migrate", "check", "status", "inbox migrate"])
def test_missing_settings_exit_2_and_are_named(name: str) -> None:
    done = command(*name.split())
    assert done.returncode == 2
    expected = "RELAY_INBOX_DATABASE_URL" if name == "inbox migrate" else "RELAY_DATABASE_URL"
    assert expected in done.stderr
    assert "Traceback" not in done.stderr


def test_all_configuration_errors_at_once() -> None:
    settings = {
        "RELAY_DATABASE_URL": "mysql://me:hunter2secret@db/x",
        "RELAY_LEASE": "soon",
        "RELAY_MAX_BYTES": "-1",
        "RELAY_ORDERING": "random",
    }
    done = command("run", settings=settings)
    assert done.returncode == 2
    for variable in (
        "RELAY_DATABASE_URL",
        "RELAY_AMQP_URL",
        "RELAY_LEASE",
        "RELAY_MAX_BYTES",
        "RELAY_ORDERING",
    ):
        assert variable in done.stderr
    assert "hunter2secret" not in done.stderr + done.stdout


def test_a_command_looks_only_at_its_own_settings() -> None:
    done = command("migrate", "--print", settings={"RELAY_LEASE": "soon"})
    assert (done.returncode, done.stderr) == (0, "")
    assert "CREATE TABLE" in done.stdout


@pytest.mark.parametrize("name", ["migrate", "status", "parked list", "redrive q"])
def test_an_unreachable_server_exits_1_with_one_line_and_the_mend(name: str) -> None:
    settings = {
        "RELAY_DATABASE_URL": f"postgresql://me:s3cretword@127.0.0.1:{free_port()}/x",
        "RELAY_AMQP_URL": f"amqp://me:s3cretword@127.0.0.1:{free_port()}/",
    }
    done = command(*name.split(), settings=settings)
    assert done.returncode == 1
    said, mend = done.stderr.splitlines()
    assert "cannot be reached: Connect call failed" in said
    assert mend == "  is it up, and are host and port of its URL right?"
    assert "s3cretword" not in done.stderr


async def test_a_server_that_is_not_the_wanted_one(database_url: str, amqp_url: str) -> None:
    """Ports mixed up, TLS asked of a server that has none, a name mistyped: the second line leads there."""
    amqp_port, sql_port = urlsplit(amqp_url).port, urlsplit(database_url).port
    for url, mend in (
        (f"postgresql://me@127.0.0.1:{amqp_port}/x", "sslmode, host and port"),
        (f"{database_url}?sslmode=require", "sslmode, host and port"),
        (f"{database_url}_mistyped", "mend the name at the end of its URL"),
    ):
        done = await _command("status", settings={"RELAY_DATABASE_URL": url})
        assert done.returncode == 1
        assert mend in done.stderr.splitlines()[1], done.stderr
    done = await _command("redrive", "q", settings={"RELAY_AMQP_URL": f"amqp://127.0.0.1:{sql_port}/"})
    assert done.returncode == 1
    assert "check the port of its URL" in done.stderr.splitlines()[1], done.stderr


def test_closed_pipe_is_no_traceback() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        process = subprocess.run(
            [*COMMAND, "migrate", "--print"],
            env=environment({}),
            stdout=writer,
            stderr=subprocess.PIPE,
            check=False,
        )
    finally:
        os.close(writer)
    assert process.returncode == 1
    assert process.stderr == b""


# ---------------------------------------------------------------- migrate, status, check


async def test_migrate_is_idempotent_and_says_what_it_did(database_url: str) -> None:
    settings = {"RELAY_DATABASE_URL": database_url}
    first = await _command("migrate", settings=settings)
    second = await _command("migrate", settings=settings)
    assert (first.returncode, second.returncode) == (0, 0)
    assert "created" in first.stdout
    assert "up to date" in second.stdout


async def test_migrate_refuses_a_foreign_table(database_url: str) -> None:
    connection = await asyncpg.connect(database_url)
    await connection.execute("CREATE TABLE outbox (id int)")
    await connection.close()
    done = await _command("migrate", settings={"RELAY_DATABASE_URL": database_url})
    assert done.returncode == 1
    assert "did not create" in done.stderr


async def test_inbox_migrate(database_url: str) -> None:
    settings = {"RELAY_INBOX_DATABASE_URL": database_url}
    for _ in range(2):
        assert (await _command("inbox", "migrate", settings=settings)).returncode == 0
    connection = await asyncpg.connect(database_url)
    await connection.execute("INSERT INTO processed_messages (consumer_name, message_id) VALUES ('c', 'm')")
    await connection.close()


async def test_status_counts_the_states(site: Site) -> None:
    await site.insert_many(3, 3)
    await site.insert("late", available_at=await site.database.fetchval("SELECT now() + interval '1 hour'"))
    await site.database.execute(
        "INSERT INTO outbox (id, event_type, aggregate_id, aside, holds, failure_class, due_at, attempts)"
        " OVERRIDING USER VALUE VALUES ('p', 'ok.x', 'k', 'parked', true, 'unroutable', NULL, 5),"
        " ('h', 'ok.x', 'k', 'held', true, NULL, NULL, 0),"
        " ('d', 'ok.x', 'j', 'deferred', true, 'unroutable', now() + interval '1 minute', 1),"
        " ('o', 'ok.x', 'i', 'scheduled', false, NULL, now() - interval '1 minute', 0)"
    )
    done = await _command("status", "--json", settings=site.settings)
    assert done.returncode == 0, done.stderr
    status = json.loads(done.stdout)
    assert status["backlog_rows"] == 6
    assert status["pending_rows"] == 4, "one is overdue, though it is aside"
    assert (status["deferred_rows"], status["scheduled_rows"]) == (2, 1), "a scheduled row is a deferred one"
    assert (status["held_rows"], status["held_keys"]) == (1, 1)
    assert (status["parked_rows"], status["parked_by_class"]) == (1, {"unroutable": 1})
    assert status["oldest_pending_age_seconds"] >= 0
    assert status["relays"] == []
    assert status["unknown_aside"] == {}
    text = (await _command("status", settings=site.settings)).stdout
    assert "parked" in text
    assert "unroutable 1" in text


async def test_status_counts_unmarkable_rows_as_parked(site: Site) -> None:
    """The gauge and `parked list` had them and `status` had not: the dashboard said two and the command none."""
    await site.insert_many(2, 2)
    await site.database.execute(
        "UPDATE outbox SET aside = 'deferred', holds = true, due_at = now() WHERE seq = 2;"
        "INSERT INTO outbox (event_type, aside, failure_class) VALUES ('ok.x', 'parked', 'unroutable');"
        "INSERT INTO outbox_fault (seq, id, failure_class) SELECT seq, id, 'unmarkable' FROM outbox WHERE seq <= 2"
    )
    status = json.loads((await _command("status", "--json", settings=site.settings)).stdout)
    assert (status["parked_rows"], status["parked_by_class"]) == (3, {"unroutable": 1, "unmarkable": 2})
    assert (status["unmarkable_rows"], status["backlog_rows"], status["deferred_rows"]) == (2, 0, 0)
    listed = json.loads((await _command("parked", "list", "--json", settings=site.settings)).stdout)
    assert len(listed["rows"]) == status["parked_rows"]
    text = (await _command("status", settings=site.settings)).stdout
    assert "unmarkable 2" in text
    assert "2 rows of these" in text


async def test_a_row_that_somebody_put_aside_is_seen(site: Site) -> None:
    """No relay looks for what no relay writes; such a row counted as sent."""
    await site.database.execute("INSERT INTO outbox (id, event_type, aside) VALUES ('w', 'ok.x', 'waiting')")
    status = json.loads((await _command("status", "--json", settings=site.settings)).stdout)
    assert (status["unknown_aside"], status["backlog_rows"]) == ({"waiting": 1}, 0)
    text = (await _command("status", settings=site.settings)).stdout
    assert "1 row whose aside is 'waiting', which no relay writes or reads" in text
    done = await _command("parked", "show", "w", settings=site.settings)
    assert done.returncode == 4
    assert "its aside is 'waiting'" in done.stderr


async def test_status_without_a_schema_names_the_command(database_url: str) -> None:
    done = await _command("status", settings={"RELAY_DATABASE_URL": database_url})
    assert done.returncode == 1
    assert "relay migrate" in done.stderr


async def test_status_watch_ends_on_interrupt(site: Site) -> None:
    process = await asyncio.create_subprocess_exec(
        *COMMAND,
        "status",
        "--watch",
        env=environment(site.settings),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(20):
            await process.stdout.readuntil(b"relays")
            process.send_signal(signal.SIGINT)
            _, stderr = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()
    assert (process.returncode, stderr) == (0, b"")


async def test_check_passes_on_a_good_site(site: Site, rabbit_server: RabbitServer) -> None:
    settings = {**site.settings, "RELAY_MANAGEMENT_URL": rabbit_server.management_url}
    done = await _command("check", "--json", settings=settings)
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(done.stdout)
    assert document["ok"] is True
    levels = {finding["check"]: finding["level"] for finding in document["findings"]}
    assert {levels[name] for name in ("database", "schema", "rights", "broker", "exchange", "routes")} == {"ok"}


async def test_check_without_management_says_what_nobody_looked_at(site: Site) -> None:
    done = await _command("check", settings=site.settings)
    assert done.returncode == 0
    assert any(line.startswith("not checked  routes") for line in done.stdout.splitlines())


async def test_check_finds_what_is_missing(database_url: str, amqp_url: str) -> None:
    done = await _command("check", settings={"RELAY_DATABASE_URL": database_url, "RELAY_AMQP_URL": amqp_url})
    assert done.returncode == 4
    errors = [line for line in done.stdout.splitlines() if line.startswith("error")]
    assert any("relay migrate" in line for line in errors)
    assert any("'events'" in line and "declare it" in line for line in errors)
    assert "the table could not be looked at" in done.stdout


async def test_check_reports_both_servers_unreachable() -> None:
    settings = {
        "RELAY_DATABASE_URL": f"postgresql://me:s3cretword@127.0.0.1:{free_port()}/x",
        "RELAY_AMQP_URL": f"amqp://me:s3cretword@127.0.0.1:{free_port()}/",
    }
    done = await _command("check", settings=settings)
    assert done.returncode == 4
    assert {line.split()[1] for line in done.stdout.splitlines() if line.startswith("error")} == {
        "database",
        "broker",
    }
    assert "s3cretword" not in done.stdout + done.stderr


async def test_check_finds_missing_rights_and_hidden_rows(site: Site, postgres_server: PostgresServer) -> None:
    role = f"weak_{os.getpid()}"
    await site.database.execute(
        f"CREATE ROLE {role} LOGIN; GRANT SELECT ON outbox, outbox_meta, outbox_shard TO {role}"
    )
    await site.database.execute("ALTER TABLE outbox ENABLE ROW LEVEL SECURITY")
    name = site.database_url.rpartition("/")[2]
    settings = {**site.settings, "RELAY_DATABASE_URL": postgres_server.url(name, user=role)}
    done = await _command("check", settings=settings)
    assert done.returncode == 4
    errors = {" ".join(line.split()[1:3]) for line in done.stdout.splitlines() if line.startswith("error")}
    assert any(text.startswith("rights") for text in errors), done.stdout
    assert any(text == "row security" for text in errors), done.stdout
    await site.database.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")


async def test_check_finds_a_sequence_that_fell_behind(site: Site) -> None:
    await site.insert_many(5, 1)
    await site.database.execute("SELECT setval('outbox_seq_seq', 2)")
    done = await _command("check", settings=site.settings)
    assert done.returncode == 4
    assert "setval" in done.stdout


@pytest.mark.parametrize("sent_rows", ["mark", "delete"])
async def test_check_deep_finds_rows_below_a_floor(site: Site, sent_rows: str) -> None:
    """Unsent rows at or below the floors, neither aside nor in the fault table; the mend that it prints mends."""
    ids = await site.insert_many(60, 10)
    daemon = await site.start(sent_rows=sent_rows).ready()
    await site.until(f"(SELECT min(floor) FROM outbox_shard) >= {len(ids)}")
    assert await daemon.stop() == 0
    done = await _command("check", "--deep", "--json", settings=site.settings)
    assert done.returncode == 0, done.stdout
    assert {f["check"]: f["level"] for f in json.loads(done.stdout)["findings"]}["floors"] == "ok"
    # Rows that come back from a copy under their old numbers; three of them are an operator's already.
    await site.database.execute(
        "DELETE FROM outbox; INSERT INTO outbox (seq, id, event_type, aggregate_id, payload) OVERRIDING SYSTEM VALUE"
        " SELECT n, 'back' || n, 'ok.x', CASE WHEN n = 7 THEN 'b' ELSE 'a' END, '{}' FROM generate_series(3, 9) n;"
        "UPDATE outbox SET aside = 'parked', holds = true, parked_at = now() WHERE seq IN (3, 9);"
        "UPDATE outbox SET sent_at = now() WHERE seq = 4;"
        "INSERT INTO outbox_fault (seq, id, failure_class) VALUES (5, 'back5', 'unmarkable')"
    )
    done = await _command("check", "--deep", "--json", settings=site.settings)
    assert (done.returncode, done.stderr) == (4, "")
    found = [f for f in json.loads(done.stdout)["findings"] if f["check"] == "floors"]
    assert {(f["details"]["rows"], f["details"]["lowest_seq"]) for f in found} == {(2, 6), (1, 7)}
    assert (
        "2 rows were never sent at or below its floor"
        in (await _command("check", "--deep", settings=site.settings)).stdout
    )
    for finding in found:
        await site.database.execute(finding["mend"].partition(";")[0])
    assert (await _command("check", "--deep", settings=site.settings)).returncode == 0
    await site.start(sent_rows=sent_rows).ready()
    await site.until("NOT EXISTS (SELECT FROM outbox WHERE seq IN (6, 7, 8) AND sent_at IS NULL AND aside IS NULL)")


async def test_check_deep_trusts_the_floors_that_a_relay_would(site: Site) -> None:
    """After a TRUNCATE or a restore into another table a floor means nothing, and hides nothing."""
    await site.insert_many(20, 10)
    await site.database.execute(
        "UPDATE outbox_shard SET floor = 9, last_seq = 9, fingerprint = '1/2/3/4/5'; SELECT setval('outbox_seq_seq', 20)"
    )
    done = await _command("check", "--deep", settings=site.settings)
    assert any(line.startswith("ok") and " floors " in line for line in done.stdout.splitlines()), done.stdout


async def test_check_names_every_url_of_the_broker(site: Site) -> None:
    dead = f"amqp://guest:guest@127.0.0.1:{free_port()}/"
    done = await _command("check", settings={**site.settings, "RELAY_AMQP_URL": f"{dead},{site.amqp_url}"})
    assert done.returncode == 0
    assert sum(line.split()[1] == "broker" for line in done.stdout.splitlines()) == 2


async def test_check_warns_of_an_exchange_without_routes(site: Site, rabbit_server: RabbitServer) -> None:
    async with await aio_pika.connect(site.amqp_url) as connection:
        channel = await connection.channel()
        await channel.declare_exchange("lonely", aio_pika.ExchangeType.TOPIC, durable=True)
    settings = {
        **site.settings,
        "RELAY_EXCHANGE": "lonely",
        "RELAY_MANAGEMENT_URL": rabbit_server.management_url,
    }
    done = await _command("check", settings=settings)
    assert done.returncode == 0
    assert "nothing is bound to lonely" in done.stdout
