"""The consumer's sidecar: passwords rotate without a restart, the least rights suffice, nothing leaks."""

from __future__ import annotations

import asyncio
from pathlib import Path
from urllib.parse import unquote

from relay.servers import PostgresServer, RabbitServer
from tests.conftest import eventually
from tests.e2e.conftest import command
from tests.e2e.credentials import leaks, role, user
from tests.inbox.site import QUEUE, Site
from tests.inbox.test_sidecar import Sidecar

PASSWORD = "p@ss/w#rd:%2F +x"
LEAST = {"configure": "^$", "write": "^amq[.]default$", "read": f"^{QUEUE}$"}
"""Copies and parked messages go by the default exchange."""


async def test_passwords_change_while_it_runs(
    inbox: Site, rabbit_server: RabbitServer, postgres_server: PostgresServer, tmp_path: Path
) -> None:
    async def has_come(messages: int) -> bool:
        return bool(await inbox.database.fetchval("SELECT count(*) = $1 FROM inbox", messages))

    await inbox.declare(())
    vhost = unquote(inbox.amqp_url.rpartition("/")[2])
    files = {name: tmp_path / name for name in ("RELAY_INBOX_DATABASE_URL_FILE", "RELAY_INBOX_AMQP_URL_FILE")}
    database_file, amqp_file = files.values()
    async with role(inbox.database, postgres_server, "least inbox", PASSWORD) as at_database:
        settings = {"RELAY_INBOX_DATABASE_URL": inbox.database_url}
        done = await asyncio.to_thread(command, "inbox", "migrate", "--role", "least inbox", settings=settings)
        assert done.returncode == 0, done.stderr
        with user(rabbit_server, vhost, "least inbox", PASSWORD, **LEAST) as at_broker:
            database_file.write_text(at_database.url)
            amqp_file.write_text(at_broker.url)
            named = {name: str(path) for name, path in files.items()}
            sidecar = Sidecar(
                {**named, "RELAY_INBOX_QUEUE": QUEUE, "RELAY_LOG_LEVEL": "debug"}, tmp_path / "sidecar.log"
            )
            try:
                await sidecar.ready(30)
                await asyncio.to_thread(at_broker.change_password, "second at the broker")
                await eventually(lambda: "Login was refused" in sidecar.get("/readyz")[1], 30)
                await inbox.publish("m1")
                amqp_file.write_text(at_broker.url)
                await sidecar.ready(30)
                await eventually(lambda: has_come(1), 30)
                await at_database.change_password("second at the database")
                await inbox.publish("m2")
                await eventually(lambda: at_database.is_locked_out(lambda: sidecar.get("/readyz")[1]), 30)
                database_file.write_text(at_database.url)
                await sidecar.ready(30)
                await eventually(lambda: has_come(2), 20)
                assert await sidecar.stop() == 0
            finally:
                sidecar.close()
    said = [event["error"] for event in sidecar.events() if event["event"] == "consumer_waits"]
    assert len([text for text in said if "Login was refused" in text]) == 1, (
        "one line a reason, however often it is met"
    )
    assert len([text for text in said if "password authentication failed" in text]) == 1
    for secret in (PASSWORD, "second at the broker", "second at the database"):
        assert not leaks(secret, sidecar.text())
