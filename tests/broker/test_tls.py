"""`amqps://`: an authority of one's own, client certificates and EXTERNAL, and what is said of a certificate that is wrong."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import asyncpg
import pytest

from relay.errors import BrokerError, BrokerRefused, BrokerUnavailable
from relay.message import PayloadType
from relay.servers import RabbitServer, free_port
from tests.authority import Authority
from tests.conftest import eventually
from tests.e2e.conftest import Daemon, command
from tests.tls_proxy import TlsProxy

from .recorder import Recorder, make_broker, make_rows


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


async def attempt(url: str) -> BrokerError | None:
    """What comes of connecting; None where it works."""
    try:
        link = await make_broker(url, exchange="amq.topic").connect(Recorder(), PayloadType.JSON)
    except BrokerError as error:
        return error
    await link.close()
    return None


# ---------------------------------------------------------------- the server's certificate


async def test_an_authority_of_ones_own(amqp_url: str, rabbit_server: RabbitServer, authority: Authority) -> None:
    path = amqp_url.rpartition("/")[2]
    async with TlsProxy.start(rabbit_server.port, authority.server_context("127.0.0.1")) as proxy:
        url = f"amqps://guest:guest@127.0.0.1:{proxy.port}/{path}?cafile={quote(str(authority.file))}"
        recorder = Recorder()
        link = await make_broker(url, exchange="amq.topic").connect(recorder, PayloadType.JSON)
        rows = make_rows(500, payload=b"x" * 10_000, rare={"mandatory": False})
        await recorder.publish_all(link, rows)
        assert sorted((await recorder.outcomes_of(500))["acked"]) == [row.seq for row in rows]
        await link.close()


@pytest.mark.parametrize(
    ("hosts", "has_expired", "is_stranger", "said"),
    [
        (("127.0.0.1",), True, False, "certificate has expired"),
        (
            ("127.0.0.2", "elsewhere.test"),
            False,
            False,
            "IP address mismatch, certificate is not valid for '127.0.0.1'",
        ),
        (("127.0.0.1",), False, True, "unable to get local issuer certificate|self-signed certificate"),
    ],
    ids=["expired", "another host's", "another authority's"],
)
async def test_a_certificate_that_is_wrong_is_one_clear_line(
    rabbit_server: RabbitServer,
    authority: Authority,
    tmp_path: Path,
    hosts: tuple[str, ...],
    has_expired: bool,
    is_stranger: bool,
    said: str,
) -> None:
    signer = Authority(tmp_path, "stranger") if is_stranger else authority
    async with TlsProxy.start(rabbit_server.port, signer.server_context(*hosts, has_expired=has_expired)) as proxy:
        url = f"amqps://guest:guest@127.0.0.1:{proxy.port}/?cafile={quote(str(authority.file))}"
        error = await attempt(url)
        assert isinstance(error, BrokerRefused), "nothing that a moment's wait would mend"
        with pytest.raises(BrokerRefused, match=said):
            raise error
        assert "\n" not in error.message
        assert error.hint is not None
        assert "cafile" in error.hint
        assert await attempt(f"{url}&no_verify_ssl=1") is None


async def test_a_port_without_tls(rabbit_server: RabbitServer, authority: Authority) -> None:
    url = f"amqps://guest:guest@127.0.0.1:{rabbit_server.port}/?cafile={quote(str(authority.file))}"
    error = await attempt(url)
    assert isinstance(error, BrokerError)
    assert "TLS" in error.message
    assert "amqps://" in (error.hint or "")


# ---------------------------------------------------------------- the client's certificate


@dataclass(frozen=True, slots=True)
class Mutual:
    """A node that wants a certificate of its authority from every client."""

    server: RabbitServer
    authority: Authority
    port: int

    def url(self, name: str = "", *, signer: Authority | None = None, user: str = "", auth: str = "") -> str:
        """`name` is the common name of the client's certificate; without it there is none."""
        url = f"amqps://{user}{'@' if user else ''}localhost:{self.port}/?cafile={quote(str(self.authority.file))}"
        if name:
            certificate, key = (signer or self.authority).sign(name=name)
            url += f"&certfile={quote(str(certificate))}&keyfile={quote(str(key))}"
        return url + (f"&auth={auth}" if auth else "")


@pytest.fixture(scope="module")
def mutual(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mutual]:
    authority = Authority(tmp_path_factory.mktemp("authority"))
    certificate, key = authority.sign("localhost")
    port = free_port()
    config = f"""
        listeners.ssl.1 = 127.0.0.1:{port}
        ssl_options.cacertfile = {authority.file}
        ssl_options.certfile = {certificate}
        ssl_options.keyfile = {key}
        ssl_options.verify = verify_peer
        ssl_options.fail_if_no_peer_cert = true
        ssl_cert_login_from = common_name
        auth_mechanisms.1 = PLAIN
        auth_mechanisms.2 = EXTERNAL
    """
    with RabbitServer.start(plugins=("rabbitmq_auth_mechanism_ssl",), extra_config=config) as server:
        server.eval(
            'rabbit_auth_backend_internal:add_user(<<"relay client">>, <<"unguessable">>, <<"test">>), '
            'rabbit_auth_backend_internal:set_permissions(<<"relay client">>, <<"/">>, '
            '<<"^$">>, <<"^amq[.]topic$">>, <<"^$">>, <<"test">>)'
        )
        # The plain listener is there first.
        server.ctl("await_startup")
        yield Mutual(server, authority, port)


async def test_external_logs_in_by_the_certificates_name(mutual: Mutual) -> None:
    """No password anywhere: the common name is the user, who may configure and read nothing."""
    recorder = Recorder()
    broker = make_broker(mutual.url("relay client", auth="external"), exchange="amq.topic")
    link = await broker.connect(recorder, PayloadType.JSON)
    link.publish(make_rows(20, rare={"mandatory": False}))
    assert len((await recorder.outcomes_of(20))["acked"]) == 20
    users = mutual.server.eval("rabbit_networking:connection_info_all([user, auth_mechanism, ssl])")
    # Erlang shows a binary's bytes.
    assert ",".join(map(str, b"relay client")) in users, users
    await link.close()


async def test_the_whole_relay_without_a_password(mutual: Mutual, database_url: str, tmp_path: Path) -> None:
    """`relay run` as that user: its certificate is all that it has."""
    url = mutual.url("relay client", auth="external")
    settings = {"RELAY_DATABASE_URL": database_url, "RELAY_AMQP_URL": url, "RELAY_EXCHANGE": "amq.topic"}
    done = await asyncio.to_thread(command, "migrate", settings=settings)
    assert done.returncode == 0, done.stderr
    database = await asyncpg.connect(database_url)
    daemon = Daemon(settings, tmp_path / "relay.log")
    try:
        await daemon.ready()
        await database.execute("INSERT INTO outbox (event_type, payload, mandatory) VALUES ('ok.x', '1', false)")
        await eventually(lambda: daemon.metric("relay_rows_sent_total") == 1)
        assert await daemon.stop() == 0
    finally:
        daemon.close()
        await database.close()


async def test_a_password_beside_the_certificate(mutual: Mutual) -> None:
    assert await attempt(mutual.url("anybody", user="guest:guest")) is None


@pytest.mark.parametrize(
    ("name", "is_stranger", "said"),
    [
        ("", False, "certificate required|handshake failure"),
        ("relay client", True, "unknown ca|bad certificate"),
        ("nobody", False, "refused the login"),
    ],
    ids=["none", "another authority's", "of no user"],
)
async def test_a_client_certificate_that_is_wrong_is_one_clear_line(
    mutual: Mutual, tmp_path: Path, name: str, is_stranger: bool, said: str
) -> None:
    signer = Authority(tmp_path, "stranger") if is_stranger else None
    auth = "external" if name else ""
    error = await attempt(mutual.url(name, signer=signer, auth=auth, user="" if name else "guest:guest"))
    assert error is not None
    assert "\n" not in error.message
    if isinstance(error, BrokerUnavailable) and name != "nobody":
        # The broker says why and hangs up on what was sent meanwhile: whether its word is read in time is chance.
        assert "reset" in error.message or "closed" in error.message or "lost" in error.message
        assert "certificate" in (error.hint or "")
        return
    with pytest.raises(BrokerRefused, match=said):
        raise error
    assert error.hint


async def test_a_server_that_hangs_up_without_a_word(authority: Authority) -> None:
    """What is left of a refused client certificate when its alert is not read in time."""

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(8)
        writer.transport.abort()

    server = await asyncio.start_server(hang_up, "127.0.0.1", 0, ssl=authority.server_context("127.0.0.1"))
    async with server:
        port = server.sockets[0].getsockname()[1]
        error = await attempt(f"amqps://guest:guest@127.0.0.1:{port}/?cafile={quote(str(authority.file))}")
    assert isinstance(error, BrokerUnavailable), "it may be starting or stopping: tried again"
    assert "certificate" in (error.hint or "")


# ---------------------------------------------------------------- a cut in the middle


@pytest.fixture
async def encrypted(rabbit_server: RabbitServer, authority: Authority) -> AsyncIterator[TlsProxy]:
    async with TlsProxy.start(rabbit_server.port, authority.server_context("127.0.0.1")) as proxy:
        yield proxy


async def test_case_42_tls_reset_in_mid_write(encrypted: TlsProxy, authority: Authority, amqp_url: str) -> None:
    """A reset while megabytes wait in the encrypted socket: every row has its one outcome, the next link works."""
    path = amqp_url.rpartition("/")[2]
    url = f"amqps://guest:guest@127.0.0.1:{encrypted.port}/{path}?cafile={quote(str(authority.file))}"
    broker = make_broker(url, exchange="amq.topic")
    for _ in range(3):
        recorder = Recorder()
        link = await broker.connect(recorder, PayloadType.JSON)
        taken = link.publish(make_rows(40, payload=b"x" * 500_000, rare={"mandatory": False})).taken
        assert taken > 0
        await asyncio.sleep(0)
        encrypted.reset()
        await recorder.until(lambda recorder=recorder: recorder.closed)  # type: ignore[misc]
        outcomes = await recorder.outcomes_of(taken)
        assert outcomes["lost"], "cut before the broker could have everything"
        await link.close()
    assert await attempt(url) is None
    assert not isinstance(await attempt(url), BrokerUnavailable)
