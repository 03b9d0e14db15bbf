"""Secrets and rights: rotated without a restart, nowhere to be read, and no right more than is needed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from urllib.parse import quote, unquote

import asyncpg
import pytest

from relay.servers import PostgresServer, RabbitServer, free_port
from tests.conftest import eventually

from .conftest import Daemon, Site, command
from .credentials import Role, User, leaks, role, user
from .ledger import drain

PASSWORD = "p@ss/w#rd:%2F +x"
LEAST = {"configure": "^$", "write": "^events$", "read": "^$"}


@pytest.fixture
async def relay_role(site: Site, postgres_server: PostgresServer) -> AsyncIterator[Role]:
    """What `migrate --role` makes of a role that can nothing."""
    async with role(site.database, postgres_server, "least relay", PASSWORD) as found:
        done = await asyncio.to_thread(lambda: command("migrate", "--role", found.name, settings=site.settings))
        assert done.returncode == 0, done.stderr
        yield found


@pytest.fixture
def relay_user(site: Site, rabbit_server: RabbitServer) -> Iterator[User]:
    """A user that may write to the exchange, and nothing else."""
    vhost = unquote(site.amqp_url.rpartition("/")[2])
    with user(rabbit_server, vhost, "least relay", PASSWORD, **LEAST) as found:
        yield found


def by_files(site: Site, **urls: str) -> dict[str, str]:
    """The URLs as secret files of the site's directory; the site's own settings lose theirs."""
    for name, url in urls.items():
        site.settings.pop(f"RELAY_{name.upper()}", None)
        (site.directory / name).write_text(url + "\n")
    return {f"{name}_file": str(site.directory / name) for name in urls}


# ---------------------------------------------------------------- rotation


async def test_case_40_passwords_change_while_it_runs(site: Site, relay_role: Role, relay_user: User) -> None:
    """At both servers: not ready with a clear reason, backing off, until the new secret's file is there."""
    files = by_files(site, database_url=relay_role.url, amqp_url=relay_user.url)
    daemon = await site.start(**files).ready()
    await asyncio.to_thread(relay_user.change_password, "second at the broker")
    await eventually(lambda: "refused the login" in daemon.get("/readyz")[1])
    assert daemon.reasons() == {"broker"}
    await site.insert("m1")
    by_files(site, amqp_url=relay_user.url)
    await daemon.ready()
    await site.all_sent()
    await relay_role.change_password("second at the database")
    await eventually(lambda: relay_role.is_locked_out(lambda: daemon.get("/readyz")[1]))
    await site.insert("m2")
    by_files(site, database_url="")
    await eventually(lambda: "RELAY_DATABASE_URL_FILE: is empty" in daemon.get("/readyz")[1])
    by_files(site, database_url=relay_role.url)
    await daemon.ready()
    await site.all_sent()
    assert daemon.get("/livez")[0] == 200
    assert await daemon.stop() == 0
    events = [event["event"] for event in daemon.events()]
    assert events.count("broker_refused") == 1, "one line per change of state"
    assert sorted(str(message.message_id) for message in await drain(site.amqp_url, 2)) == ["m1", "m2"]
    for secret in (PASSWORD, "second at the broker", "second at the database"):
        assert not leaks(secret, daemon.text())


# ---------------------------------------------------------------- least rights


async def test_the_whole_work_with_the_least_rights(
    site: Site, postgres_server: PostgresServer, relay_role: Role, relay_user: User
) -> None:
    """A role and a user that can do nothing else publish, defer, park, redrive, discard, pause and purge."""
    async with role(site.database, postgres_server, "least writer", "w") as writer:
        done = await asyncio.to_thread(lambda: command("migrate", "--writer", writer.name, settings=site.settings))
        assert done.returncode == 0, done.stderr
        settings = site.settings | {"RELAY_DATABASE_URL": relay_role.url, "RELAY_AMQP_URL": relay_user.url}
        site.settings.update(settings)
        daemon = await site.start(retry_delays="100ms", retention="100ms").ready()
        connection = await asyncpg.connect(writer.url)
        for id, event_type in (("good", "ok.x"), ("lost", "nope.x"), ("gone", "nope.y")):
            await connection.execute(
                "INSERT INTO outbox (id, event_type, payload) VALUES ($1, $2, '{}')", id, event_type
            )
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await connection.fetch("SELECT * FROM outbox")
        await connection.close()
        await site.until("(SELECT count(*) FROM outbox WHERE aside = 'parked') = 2")

        async def operate(*arguments: str) -> str:
            done = await asyncio.to_thread(lambda: command(*arguments, settings=settings))
            assert done.returncode == 0, done.stderr
            return done.stdout

        assert "lost" in await operate("parked", "list")
        await operate("parked", "discard", "--id", "gone", "--yes")
        await operate("pause")
        await daemon.not_ready("paused")
        await operate("resume")
        await operate("parked", "redrive", "--id", "lost")
        await site.until("NOT EXISTS (SELECT FROM outbox WHERE id IN ('good', 'gone'))")
        found = json.loads(await operate("check", "--json"))["findings"]
        assert not [finding for finding in found if finding["level"] == "error"]
        assert await daemon.stop() == 0
    warned = [event for event in daemon.events() if event["level"] in ("warning", "error")]
    assert {event["event"] for event in warned} <= {"row_parked", "row_deferred", "paused"}


async def test_a_user_that_may_not_write_is_told_so(site: Site, rabbit_server: RabbitServer) -> None:
    """The configuration's fault and no row's: not ready, no attempt used, and well once the right is there."""
    vhost = unquote(site.amqp_url.rpartition("/")[2])
    with user(rabbit_server, vhost, "mute", "m", configure="^$", write="^$", read="^$") as mute:
        daemon = site.start(amqp_url=mute.url)
        await site.insert("m")
        await eventually(lambda: "access to exchange 'events'" in daemon.get("/readyz")[1])
        assert await site.database.fetchval("SELECT attempts FROM outbox") == 0
        rabbit_server.ctl("set_permissions", "-p", vhost, "mute", "^$", "^events$", "^$")
        await site.all_sent()
        await daemon.ready()
        assert await daemon.stop() == 0


# ---------------------------------------------------------------- nowhere to be read


def outside(daemon: Daemon) -> str:
    """What others on the machine, and whoever may scrape it, see of a relay."""
    process = Path("/proc") / str(daemon.process.pid)
    titles = [(process / name).read_text(errors="replace") for name in ("cmdline", "comm", "stat")]
    answers = [text for path in ("/metrics", "/readyz", "/livez", "/", "/nope?x=1") for text in [daemon.get(path)[1]]]
    return "\n".join([daemon.text(), *titles, *answers])


async def test_no_password_is_to_be_seen(
    site: Site, rabbit_server: RabbitServer, relay_role: Role, relay_user: User
) -> None:
    """Not in the log at debug level, the titles, the answers, the servers' lists: neither while it works nor while it fails."""
    files = by_files(site, database_url=relay_role.url, amqp_url=relay_user.url)
    daemon = await site.start(**files, log_level="debug").ready()
    await site.insert("m")
    await site.all_sent()
    seen = await site.database.fetch("SELECT application_name, query FROM pg_stat_activity")
    listed = await asyncio.to_thread(rabbit_server.ctl, "list_connections", "name", "client_properties")
    assert not leaks(PASSWORD, listed + repr(seen))
    # From here on nothing works: refused logins, ports where nobody listens, a URL that is none.
    nobody = f"postgresql://u:{quote(PASSWORD, safe='')}@127.0.0.1:{free_port()}/x"
    by_files(site, amqp_url=f"amqp://u:{PASSWORD}@127.0.0.1:{free_port()}/")
    old = relay_user.url
    await asyncio.to_thread(relay_user.change_password, "another")
    await eventually(lambda: "RELAY_AMQP_URL_FILE: has a raw" in daemon.get("/readyz")[1])
    by_files(site, amqp_url=old)
    await eventually(lambda: "refused the login" in daemon.get("/readyz")[1])
    by_files(site, database_url=nobody)
    await relay_role.change_password("another")
    await daemon.not_ready("database")
    assert not leaks(PASSWORD, await asyncio.to_thread(outside, daemon))
    environ = await asyncio.to_thread((Path("/proc") / str(daemon.process.pid) / "environ").read_text)
    assert not leaks(PASSWORD, environ), "a secret's file is only named there"
    await daemon.stop()
    settings = {"RELAY_DATABASE_URL": nobody, "RELAY_AMQP_URL": relay_user.url.replace("another", "%70%40ss")}
    for arguments in (["status"], ["check"], ["parked", "list"], ["migrate"]):
        done = await asyncio.to_thread(command, *arguments, settings=settings)
        assert done.returncode in (1, 4)
        assert not leaks(PASSWORD, done.stdout + done.stderr)
        assert not leaks("p@ss", done.stdout + done.stderr)


async def test_the_endpoints_and_the_log_tell_nothing_of_a_row(site: Site) -> None:
    """Rows sent, held, deferred, parked and impossible: what anybody may scrape knows none of their contents."""
    canary = "canaryq7x"
    daemon = await site.start(log_level="debug", retry_delays="100ms,60s").ready()
    columns = {
        "payload": json.dumps({"name": canary}),
        "headers": json.dumps({canary: canary}),
        "aggregate_type": canary,
        "correlation_id": canary,
        "causation_id": canary,
        "producer": canary,
        "tracestate": canary,
    }
    await site.insert(f"{canary}-1", "ok.x", key=canary, **columns)
    await site.insert(f"{canary}-2", f"nope.{canary}", key=f"{canary}2", **columns)
    await site.insert(f"{canary}-3", "ok.x", key=f"{canary}2", **columns)
    await site.insert(f"{canary}-4", "ok.x", key=f"{canary}3", **columns | {"headers": json.dumps({"CC": canary})})
    await site.insert(f"{canary}-5", "ok.x", key=f"{canary}4", **columns | {"priority": 300})
    await site.insert(f"{canary}-6", "ok.x", key=f"{canary}5", **columns | {"exchange": f"no {canary}"})
    await site.until(
        "(SELECT count(*) FILTER (WHERE aside = 'parked') = 2 AND count(*) FILTER (WHERE aside = 'held') = 1"
        " AND count(*) FILTER (WHERE sent_at IS NOT NULL) = 1 FROM outbox)"
    )
    await eventually(lambda: daemon.metric("relay_parked_rows") == 2, 20)
    answers = [daemon.get(path)[1] for path in ("/metrics", "/readyz", "/livez")]
    assert all(answers)
    assert canary not in "".join(answers)
    told = [event for event in daemon.events() if canary in json.dumps(event)]
    assert {event["event"] for event in told} <= {"row_parked"}, "an operator's line names the row by its id"
    for event in told:
        assert {name for name, value in event.items() if canary in str(value)} <= {"id"}
    assert await daemon.stop() == 0
