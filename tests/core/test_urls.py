"""URLs of both servers: what the drivers make of them, and what they would misread is refused."""

from __future__ import annotations

import asyncio
import inspect
from pathlib import Path
from urllib.parse import quote

import aiormq
import pytest
from asyncpg import connect_utils
from cryptography.hazmat.primitives import serialization

from relay import urls
from relay.database import connect, mapped_errors
from relay.errors import DatabaseRefused, DatabaseUnavailable
from tests.authority import Authority

HARD_PASSWORD = "p@ss/w#rd:%2F +x"
HARD_ENCODED = quote(HARD_PASSWORD, safe="")


def driver_view(target: urls.DatabaseTarget) -> tuple[object, ...]:
    """What asyncpg makes of it: addresses, user, password, database, settings."""
    arguments = inspect.signature(connect_utils._parse_connect_dsn_and_args).parameters
    nothing = dict.fromkeys(arguments.keys() - {"dsn"})
    addresses, parameters = connect_utils._parse_connect_dsn_and_args(dsn=target.dsn, **nothing)
    return addresses, parameters.user, parameters.password, parameters.database, parameters.server_settings


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("postgresql://u:p@h/d", ([("h", 5432)], "u", "p", "d", None)),
        ("postgres://u:p@h:6432/d", ([("h", 6432)], "u", "p", "d", None)),
        ("postgresql://u:p@h1:1,h2:2/d", ([("h1", 1), ("h2", 2)], "u", "p", "d", None)),
        ("postgresql://u:p@[::1]:7/d", ([("::1", 7)], "u", "p", "d", None)),
        ("postgresql://u:p@%2Frun%2Fpg:7/d", (["/run/pg/.s.PGSQL.7"], "u", "p", "d", None)),
        ("postgresql://u:p@/d?host=/run/pg&port=7", (["/run/pg/.s.PGSQL.7"], "u", "p", "d", None)),
        (f"postgresql://u:{HARD_ENCODED}@h/d", ([("h", 5432)], "u", HARD_PASSWORD, "d", None)),
        ("postgresql://h/d?user=u&password=a+b%2Bc", ([("h", 5432)], "u", "a+b+c", "d", None)),
        (
            "postgresql://u:p@h/d?application_name=a%20b&connect_timeout=3",
            ([("h", 5432)], "u", "p", "d", None),
        ),
        (
            "postgresql://u:p@h/d?fallback_application_name=x&gssencmode=disable",
            ([("h", 5432)], "u", "p", "d", None),
        ),
        ("postgresql://u:p@my_db.b%C3%BCcher.de./d", ([("my_db.bücher.de.", 5432)], "u", "p", "d", None)),
        (f"postgresql://u:p@/d?host=/{'x' * 64}", ([f"/{'x' * 64}/.s.PGSQL.5432"], "u", "p", "d", None)),
        ("postgresql://u:p@h/d%20%2Fe?keepalives=1", ([("h", 5432)], "u", "p", "d /e", None)),
    ],
)
def test_the_driver_reads_a_database_url_as_meant(url: str, expected: tuple[object, ...]) -> None:
    assert driver_view(urls.database_target(url)) == expected


def test_an_application_name_is_left_out_and_named() -> None:
    """The relay's own would have won over it without a word."""
    both = urls.database_target("postgresql://h/d?fallback_application_name=x&application_name=y&search_path=s")
    assert both.overruled == ("application_name", "fallback_application_name")
    assert driver_view(both)[-1] == {"search_path": "s"}
    assert urls.database_target("postgresql://h/d").overruled == ()


def test_connect_timeout_is_translated() -> None:
    assert urls.database_target("postgresql://h/d?connect_timeout=3").connect_timeout_s == 3
    assert urls.database_target("postgresql://h/d?connect_timeout=0").connect_timeout_s is None
    assert urls.database_target("postgresql://h/d").connect_timeout_s is None


@pytest.mark.parametrize(
    ("url", "names"),
    [
        ("postgresql://u:p@h/d?hostaddr=1.2.3.4", "hostaddr"),
        ("postgresql://u:p@h/d?tcp_user_timeout=5", "tcp_user_timeout"),
        ("postgresql://u:p@h/d?channel_binding=require", "channel_binding"),
        ("postgresql://u:p@h/d?connect_timeout=soon", "connect_timeout"),
        ("postgresql://u:p@h/d?sslmod=require", "sslmode"),
        ("postgresql://u:p@h/d?sslmode=always", "verify-full"),
        ("postgresql://u:p@h/d?sslnegotiation=direct", "sslmode=require or verify-ca"),
        ("postgresql://u:p@h/d?sslnegotiation=direct&sslmode=prefer", "sslmode=require or verify-ca"),
        ("postgresql://u:p@h/d?gsslib=mit", "allowed are gssapi, sspi"),
        ("postgresql://u:p@h/d?search_path=a%00b", "NUL"),
        ("postgresql://u%00:p@h/d", "NUL"),
        ("postgresql://u:p@h/d?sslrootcert=/nonexistent", "sslrootcert=/nonexistent"),
        ("postgresql://u:p@h/d?host=other", "host twice"),
        ("postgresql://u:p@h/d?user=other", "user twice"),
        ("postgresql://u:p@h/d?x", "without a value"),
        ("postgresql://u:p@h/d?a=1&a=2", "twice"),
        ("postgresql://u:p@h:0/d", "port"),
        ("postgresql://u:p@h:70000/d", "port"),
        ("postgresql://u:p@h1,,h2/d", "host"),
        ("postgresql://u:p@db..svc:5432/d", "a host with a part that is empty"),
        ("postgresql://u:p@.example.com/d", "a host with a part that is empty"),
        ("postgresql://u:p@good,b..d/d", "a host with a part that is empty"),
        (f"postgresql://u:p@{'x' * 64}.com/d", "longer than 63"),
        ("postgresql://u:p@/d?host=good,b..d", "a host with a part that is empty"),
        ("postgresql://u:p@[::1/d", "percent-encoded"),
        ("postgresql://u:p@::1/d", "host or port"),
        ("postgresql://u:p@ss@h/d", "percent-encoded"),
        ("postgresql://u:p#ss@h/d", "percent-encoded"),
        ("postgresql://u:p/ss@h/d", "percent-encoded"),
        ("postgresql://u:p\n@h/d", "control"),
        ("jdbc:postgresql://h/d", "postgresql://"),
        ("host=h user=u", "postgresql://"),
    ],
)
def test_a_database_url_that_the_driver_would_misread_is_refused(url: str, names: str) -> None:
    with pytest.raises(ValueError, match=names):
        urls.database_target(url)


def test_a_connection_that_ends_without_a_word_is_named() -> None:
    """`PostgreSQL cannot be reached: ` it said, and no more, of a server without TLS that was greeted with it."""
    with pytest.raises(DatabaseUnavailable, match=r"reached: ConnectionResetError$"), mapped_errors(connecting=True):
        raise ConnectionResetError


@pytest.mark.parametrize("vhost", ["/", "a/b", "vh ü", "orders", "a%b", "a+b", "?x"])
@pytest.mark.parametrize("password", ["guest", HARD_PASSWORD])
async def test_the_driver_reads_an_amqp_url_as_meant(vhost: str, password: str) -> None:
    (url,) = urls.amqp_urls(f"amqp://u:{quote(password, safe='')}@h:7/{quote(vhost, safe='')}?heartbeat=7")
    connection = aiormq.Connection(url, loop=asyncio.get_running_loop())
    assert (connection.vhost, connection.url.password, connection.url.host) == (vhost, password, "h")
    assert (connection.url.port, connection.heartbeat_timeout) == (7, 7)


def test_several_amqp_urls_in_turn() -> None:
    text = "amqp://u:a%2Cb@h1/, amqps://[::1]:5671/x"
    assert urls.amqp_urls(text) == ("amqp://u:a%2Cb@h1/", "amqps://[::1]:5671/x")
    assert [urls.amqp_address(url) for url in urls.amqp_urls(text)] == ["h1/%2F", "[::1]:5671/x"]


@pytest.mark.parametrize(
    ("url", "names"),
    [
        ("amqp://u:p@h/?heartbeet=3", "heartbeat"),
        ("amqps://u:p@h/?cacertfile=/x", "cafile"),
        ("amqps://u:p@h/?verify=verify_none", "no_verify_ssl"),
        ("amqp://u:p@h/?cafile=/x", "amqps"),
        ("amqps://u:p@h/?cafile=/nonexistent", "cannot be read"),
        ("amqp://u:p@h/?heartbeat=often", "heartbeat"),
        ("amqp://u:p@h/?auth=magic", "external"),
        ("amqp://u:p@h/..", "vhost"),
        ("amqp://u:p@h/" + "v" * 256, "vhost"),
        ("amqp://u:p@/x", "host"),
        ("amqp://u:p@a..b/x", "a host with a part that is empty"),
        ("amqp://u:p@h1,h2/x", "several whole URLs, separated by commas"),
        ("amqp://h1/,http://h2/", "URL 2"),
        ("mq.example", "amqp://"),
    ],
)
def test_an_amqp_url_that_the_driver_would_misread_is_refused(url: str, names: str) -> None:
    with pytest.raises(ValueError, match=names):
        urls.amqp_urls(url)


def test_who_logs_in() -> None:
    """With auth=external nobody here knows: not `guest`, whose rights `relay check` judged and whose messages
    `relay redrive` took for its own."""
    assert urls.amqp_user("amqp://us%40er:p@h/") == "us@er"
    assert urls.amqp_user("amqp://h/") == "guest"
    assert urls.amqp_user("amqps://h/?certfile=/c&auth=EXTERNAL") is None


async def test_a_host_of_the_environment_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """PGHOST is the driver's own to read: what it cannot look up is refused, and no fault of ours."""
    for name, value in (("PGHOST", "db..svc"), ("PGPORT", "soon")):
        with monkeypatch.context() as environment:
            environment.setenv(name, value)
            with pytest.raises(DatabaseRefused) as caught:
                await connect(urls.database_target("postgresql://u:p@/d"))
            assert "PGHOST" in (caught.value.hint or "")


def test_client_certificates_go_to_the_drivers(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    certificate, key = authority.sign(name="relay")
    text = f"amqps://h/?cafile={authority.file}&certfile={certificate}&keyfile={key}&auth=external"
    assert urls.amqp_urls(text) == (text,)
    dsn = f"postgresql://u@h/d?sslmode=verify-full&sslrootcert={authority.file}&sslcert={certificate}&sslkey={key}"
    assert urls.database_target(dsn).dsn == dsn


def test_certificates_that_no_driver_could_use(tmp_path: Path) -> None:
    """Found before a driver does: one clear error at the start instead of OpenSSL's words at every connect."""
    authority = Authority(tmp_path)
    (certificate, key), (_, other_key) = authority.sign(name="relay"), authority.sign(name="other")
    broken = tmp_path / "broken.pem"
    broken.write_text("-----BEGIN CERTIFICATE-----\nbm9uZQ==\n-----END CERTIFICATE-----\n")
    secret = serialization.BestAvailableEncryption(b"horse")
    encrypted = tmp_path / "encrypted.key"
    loaded = serialization.load_pem_private_key(key.read_bytes(), None)
    encrypted.write_bytes(loaded.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, secret))
    amqp, database = "amqps://h/?", "postgresql://u@h/d?sslmode=verify-full&"
    cases = {
        f"{amqp}cafile={broken}": "holds no certificate",
        f"{amqp}cafile={key}": "holds no certificate",
        f"{amqp}cafile={tmp_path}": "holds no certificate",
        f"{amqp}cadata=bm9uZQ==": "cadata that is no certificate",
        f"{amqp}certfile={certificate}": "are no certificate and key",
        f"{amqp}certfile={certificate}&keyfile={other_key}": "belong together",
        f"{amqp}certfile={certificate}&keyfile={encrypted}": "needs its password",
        f"{amqp}certfile={certificate}&keyfile={tmp_path / 'gone'}": "cannot be read",
        f"{amqp}keyfile={key}": "without a certfile",
        f"{amqp}auth=external": "without a certfile",
        f"{database}sslrootcert={broken}": "holds no certificate",
        f"{database}sslcrl={broken}": "holds no certificate",
        f"{database}sslcert={certificate}&sslkey={other_key}": "belong together",
        f"{database}sslcert={certificate}&sslkey={encrypted}&sslpassword=pony": "needs its password",
        f"{database}sslkey={tmp_path / 'gone'}": "cannot be read",
    }
    for url, said in cases.items():
        with pytest.raises(ValueError, match=said):
            (urls.amqp_urls if url.startswith("amqps") else urls.database_target)(url)
    urls.database_target(f"{database}sslcert={certificate}&sslkey={encrypted}&sslpassword=horse")


def test_asyncpg_takes_the_parameters_that_are_kept_for_it() -> None:
    """A parameter that an upgrade of asyncpg no longer takes out of the URL would reach the server as a setting."""
    source = Path(connect_utils.__file__).read_text()
    for name in urls._DRIVER_CHOICES:
        assert f"query.pop('{name}')" in source or f"'{name}'\n" in source, name
