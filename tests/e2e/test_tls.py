"""TLS to both servers as a user sets it up, certificates that are wrong and renewed, a reset in the middle of it."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import asyncpg
import pytest

from relay.servers import PostgresServer, RabbitServer
from tests.authority import Authority, give
from tests.conftest import eventually
from tests.tls_proxy import TlsProxy

from .conftest import Site, command
from .ledger import drain


@dataclass(slots=True)
class Secured:
    """A PostgreSQL that lets `shop relay` in by certificate only, and encrypted only."""

    server: PostgresServer
    authority: Authority
    admin: asyncpg.Connection[asyncpg.Record]

    async def show(self, *hosts: str, has_expired: bool = False) -> None:
        """Have the server show a certificate for these hosts."""
        certificate, key = self.authority.sign(*hosts, has_expired=has_expired)
        give(certificate, self.server.data / "server.crt", self.server.data)
        give(key, self.server.data / "server.key", self.server.data)
        await self.admin.execute("SELECT pg_reload_conf()")

    def url(self, host: str = "127.0.0.1", *, authority: Path | None = None, identity: tuple[Path, Path]) -> str:
        certificate, key = identity
        return (
            f"postgresql://shop%20relay@{host}:{self.server.port}/postgres?sslmode=verify-full"
            f"&sslrootcert={authority or self.authority.file}&sslcert={certificate}&sslkey={key}"
        )


@pytest.fixture
async def secured(tmp_path: Path) -> AsyncIterator[Secured]:
    with await asyncio.to_thread(lambda: PostgresServer.start(durable=False)) as server:
        authority = Authority(tmp_path)
        admin = await asyncpg.connect(server.url(), ssl=False)
        here = Secured(server, authority, admin)
        give(authority.file, server.data / "root.crt", server.data)
        hba = server.data / "pg_hba.conf"
        await asyncio.to_thread(
            hba.write_text,
            'host all postgres 127.0.0.1/32 trust\nhostssl all "shop relay" 127.0.0.1/32 cert\n',
        )
        await here.show("127.0.0.1")
        for setting in ("ssl = on", "ssl_ca_file = 'root.crt'"):
            await admin.execute(f"ALTER SYSTEM SET {setting}")
        await admin.execute("SELECT pg_reload_conf()")
        await admin.execute('CREATE ROLE "shop relay" LOGIN')
        yield here
        await admin.close()


async def test_verify_full_and_a_client_certificate(secured: Secured, site: Site) -> None:
    """The relay works over it, every session of it, with no password anywhere."""
    settings = site.settings | {"RELAY_DATABASE_URL": secured.server.url()}
    done = await asyncio.to_thread(lambda: command("migrate", "--role", "shop relay", settings=settings))
    assert done.returncode == 0, done.stderr
    identity = secured.authority.sign(name="shop relay")
    daemon = await site.start(database_url=secured.url(identity=identity)).ready()
    await secured.admin.execute("INSERT INTO outbox (event_type, payload) VALUES ('ok.x', '1')")
    await eventually(lambda: daemon.metric("relay_rows_sent_total") == 1)
    sessions = await secured.admin.fetch(
        "SELECT ssl, client_dn FROM pg_stat_ssl JOIN pg_stat_activity USING (pid) WHERE usename = 'shop relay'"
    )
    assert len(sessions) >= 2
    assert {(session["ssl"], session["client_dn"]) for session in sessions} == {(True, sessions[0]["client_dn"])}
    assert "CN=shop" in sessions[0]["client_dn"], "cut at 63 bytes by the view"
    assert await daemon.stop() == 0


async def test_what_is_wrong_with_a_certificate_is_one_clear_line(secured: Secured, tmp_path: Path) -> None:
    identity = secured.authority.sign(name="shop relay")
    stranger = Authority(tmp_path, "stranger")

    async def status(url: str) -> str:
        done = await asyncio.to_thread(lambda: command("status", settings={"RELAY_DATABASE_URL": url}))
        assert done.returncode == 1
        assert len(done.stderr.splitlines()) == 2, "what is wrong, and what to do"
        return done.stderr

    said = await status(secured.url(authority=stranger.file, identity=identity))
    assert "certificate is not accepted: " in said
    assert "sslrootcert" in said
    said = await status(secured.url("localhost", identity=identity))
    assert "Hostname mismatch, certificate is not valid for 'localhost'" in said
    said = await status(secured.url(identity=stranger.sign(name="shop relay")))
    # The server says why and hangs up: whether that is read in time is chance.
    assert "no TLS with PostgreSQL: tlsv1 alert unknown ca" in said or "closed in the middle" in said
    assert "certificate" in said or "sslcert" in said
    said = await status(secured.url(identity=secured.authority.sign(name="somebody")))
    assert "certificate authentication failed" in said
    await secured.show("127.0.0.1", has_expired=True)
    assert "certificate has expired" in await status(secured.url(identity=identity))


async def test_certificates_are_renewed_without_a_restart(
    secured: Secured, site: Site, rabbit_server: RabbitServer, tmp_path: Path
) -> None:
    """The wrong authorities' files are replaced in place: both servers are reached, and the log has said why they were not."""
    settings = site.settings | {"RELAY_DATABASE_URL": secured.server.url()}
    done = await asyncio.to_thread(lambda: command("migrate", "--role", "shop relay", settings=settings))
    assert done.returncode == 0, done.stderr
    file = tmp_path / "mounted.pem"
    stranger = Authority(tmp_path, "stranger")
    shutil.copyfile(stranger.file, file)
    identity = secured.authority.sign(name="shop relay")
    async with TlsProxy.start(rabbit_server.port, secured.authority.server_context("127.0.0.1")) as front:
        vhost = site.amqp_url.rpartition("/")[2]
        daemon = site.start(
            database_url=secured.url(authority=file, identity=identity),
            amqp_url=f"amqps://guest:guest@127.0.0.1:{front.port}/{vhost}?cafile={file}",
        )
        await eventually(lambda: "certificate is not accepted" in daemon.get("/readyz")[1])
        shutil.copyfile(secured.authority.file, file)
        await daemon.ready()
        shutil.copyfile(stranger.file, file)
        front.reset()
        await eventually(lambda: "unable to get local issuer" in daemon.get("/readyz")[1])
        assert daemon.get("/livez")[0] == 200
        await secured.admin.execute("INSERT INTO outbox (event_type, payload) VALUES ('ok.x', '1')")
        shutil.copyfile(secured.authority.file, file)
        await eventually(lambda: daemon.metric("relay_rows_sent_total") == 1, 20)
        assert await daemon.stop() == 0
    refused = [event for event in daemon.events() if event["event"] == "broker_refused"]
    assert len(refused) == 1, "one line per change of state, however often it is tried"
    assert "unable to get local issuer certificate" in refused[0]["error"]


async def test_case_42_resets_in_the_middle_of_it(site: Site, rabbit_server: RabbitServer, tmp_path: Path) -> None:
    """Encrypted megabytes cut off five times: reconnects, delivers everything, each key in order."""
    authority = Authority(tmp_path)
    ids = await site.insert_many(2000, keys=20)
    await site.database.execute("UPDATE outbox SET payload = to_json(repeat('x', 5000))")
    async with TlsProxy.start(rabbit_server.port, authority.server_context("127.0.0.1")) as front:
        vhost = site.amqp_url.rpartition("/")[2]
        url = f"amqps://guest:guest@127.0.0.1:{front.port}/{vhost}?cafile={authority.file}"
        daemon = site.start(amqp_url=url)
        for cut in range(1, 6):
            await eventually(lambda cut=cut: daemon.metric("relay_published_total") > cut * 200, 20)  # type: ignore[misc]
            front.reset()
        await site.all_sent(30)
        assert daemon.metric("relay_reconnects_total") >= 1
        assert await daemon.stop() == 0
    found = [message.message_id for message in await drain(site.amqp_url, len(ids))]
    first = list(dict.fromkeys(found))
    assert set(first) == set(ids)
    for key in range(20):
        assert [id for id in first if int(str(id)[1:]) % 20 == key] == [id for id in ids if int(id[1:]) % 20 == key]


def test_a_broken_certificate_is_the_configurations_fault(tmp_path: Path) -> None:
    broken = tmp_path / "ca.pem"
    broken.write_text("not a certificate")
    settings = {
        "RELAY_DATABASE_URL": f"postgresql://relay:s3cretword@127.0.0.1/x?sslmode=verify-full&sslrootcert={broken}",
        "RELAY_AMQP_URL": f"amqps://relay:s3cretword@127.0.0.1/?cafile={tmp_path / 'gone'}",
    }
    done = command("run", settings=settings)
    assert done.returncode == 2
    assert f"has sslrootcert={broken}, which holds no certificate" in done.stderr
    assert f"has cafile={tmp_path / 'gone'}, which cannot be read" in done.stderr
    assert "s3cretword" not in done.stderr
