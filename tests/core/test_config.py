"""The configuration: every variable, every fault at once, no secret in any text."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import os
from pathlib import Path
from urllib.parse import quote

import aiormq
import pytest
from asyncpg import connect_utils
from cryptography.hazmat.primitives import serialization
from hypothesis import given
from hypothesis import strategies as st

from relay import config, urls, values
from relay.config import Config, Ordering, SentRows, load, needed_by, used_by
from relay.errors import BrokerUnavailable, ConfigError, DatabaseUnavailable
from relay.redaction import Redactor, shown_url
from relay.settings import SETTINGS, SETTINGS_BY_VARIABLE
from tests.authority import Authority

DATABASE = "postgresql://relay:sesame@db:5432/shop"
AMQP = "amqp://relay:parsley@mq:5672/"
ENVIRON = {"RELAY_DATABASE_URL": DATABASE, "RELAY_AMQP_URL": AMQP}

HARD_PASSWORD = "p@ss/w#rd:%2F +x"
HARD_ENCODED = quote(HARD_PASSWORD, safe="")


def loaded(**variables: str) -> Config:
    return load({**ENVIRON, **variables}, needs=needed_by("run"))[0]


def problems(environ: dict[str, str], command: str = "run") -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(environ, needs=needed_by(command), uses=used_by(command))
    assert caught.value.exit_code == 2
    return list(caught.value.problems)


def warnings(**variables: str) -> tuple[str, ...]:
    return load({**ENVIRON, **variables}, needs=needed_by("run"))[1]


# ---------------------------------------------------------------- the table


def test_defaults_are_the_contracts() -> None:
    found = loaded()
    assert (found.table.quoted, found.exchange, found.routing_key) == ('"outbox"', "events", "{event_type}")
    assert (found.ordering, found.sent_rows, found.settle_commit) == (Ordering.STRICT, SentRows.MARK, True)
    assert (found.retention_s, found.lease_s, found.poll_interval_s) == (7 * 86400, 5, 0.5)
    assert list(found.retry_delays_s) == [1, 5, 30, 300]
    assert (found.max_bytes, found.max_rate, found.max_age_s) == (64 * 2**20, None, None)
    assert (found.unroutable.value, found.on_parked.value, found.parked_retention_s) == ("retry", "hold", None)
    assert (found.confirm_timeout_s, found.shutdown_grace_s) == (30, 8)
    assert str(found.listen) == "0.0.0.0:9761"
    assert str(found.inbox_listen) == "0.0.0.0:9762"
    assert (found.log_format, found.log_level, found.envelope, found.sink) == ("json", "info", "none", "amqp")
    assert found.inbox_table.quoted == '"inbox"'


def test_the_contracts_variables_are_all_there() -> None:
    names = """DATABASE_URL AMQP_URL TABLE NAME MANAGEMENT_URL SINK SINK_PATH EXCHANGE ROUTING_KEY ENVELOPE ORDERING
    SENT_ROWS SETTLE_COMMIT RETENTION MAX_READ_AHEAD MAX_IN_FLIGHT MAX_BYTES LEASE MAX_RATE RETRY_DELAYS MAX_AGE
    UNROUTABLE ON_PARKED PARKED_RETENTION CONFIRM_TIMEOUT POLL_INTERVAL SHUTDOWN_GRACE LISTEN LOG_FORMAT LOG_LEVEL
    INBOX_DATABASE_URL INBOX_AMQP_URL INBOX_QUEUE INBOX_TABLE INBOX_PREFETCH INBOX_RETENTION INBOX_LISTEN"""
    assert set(SETTINGS_BY_VARIABLE) == {f"RELAY_{name}" for name in names.split()}


def test_every_setting_has_a_field_and_a_valid_default() -> None:
    assert {setting.field for setting in SETTINGS} == {field.name for field in dataclasses.fields(Config)} - {
        "redactor"
    }
    for setting in SETTINGS:
        assert setting.default is None or setting.parse(setting.default) is not None
        assert set(setting.required_by) <= set(setting.used_by) <= set(config.COMMANDS)


def test_two_relays_without_a_name_differ() -> None:
    assert loaded().name != loaded().name
    assert loaded(RELAY_NAME="left").name == "left"


def test_empty_is_unset_but_for_listen() -> None:
    found = loaded(RELAY_LEASE="", RELAY_TABLE=" ", RELAY_LISTEN="", RELAY_INBOX_LISTEN="", RELAY_MAX_RATE="")
    assert (found.lease_s, found.table.name, found.max_rate) == (5, "outbox", None)
    assert found.listen is None
    assert found.inbox_listen is None


# ---------------------------------------------------------------- faults


def test_all_faults_at_once_with_variable_value_and_what_is_allowed() -> None:
    faults = {
        "RELAY_LEASE": "5",
        "RELAY_MAX_BYTES": "64 MB",
        "RELAY_ORDERING": "strictly",
        "RELAY_SETTLE_COMMIT": "yes please",
        "RELAY_MAX_IN_FLIGHT": "0",
        "RELAY_RETRY_DELAYS": "1s,,5s",
        "RELAY_LISTEN": "9761",
        "RELAY_TABLE": "a.b.c",
        "RELAY_EXCHANGE": "{tenant}",
        "RELAY_SHUTDOWN_GRACE": "0s",
        "RELAY_POLL_INTERVAL": "-1s",
        "RELAY_MAX_RATE": "fast",
        "RELAY_LOG_LEVEL": "loud",
        "RELAY_RETENTION": "1e3s",
        "RELAY_INBOX_PREFETCH": "1.5",
    }
    with pytest.raises(ConfigError) as caught:
        load(faults, needs=needed_by("run"))
    found = caught.value.problems
    assert len(found) == len(faults) + 2
    for variable, value in faults.items():
        (line,) = [problem for problem in found if problem.startswith(f"{variable}=")]
        assert repr(value) in line
        assert f"; allowed: {SETTINGS_BY_VARIABLE[variable].allowed}" in line
    assert sum("not set" in problem for problem in found) == 2


def test_the_allowed_fields_of_a_template_are_named() -> None:
    (line,) = problems({**ENVIRON, "RELAY_ROUTING_KEY": "{tenant}.{event_type}"})
    assert "no such field: {tenant}" in line
    assert all(f"{{{field}}}" in line for field in values.TEMPLATE_FIELDS)


def test_a_long_value_is_cut() -> None:
    (line,) = problems({**ENVIRON, "RELAY_LEASE": "9" * 5000})
    assert len(line) < 300


@pytest.mark.parametrize(
    ("command", "missing"),
    [
        ("run", {"RELAY_DATABASE_URL", "RELAY_AMQP_URL"}),
        ("migrate", {"RELAY_DATABASE_URL"}),
        ("status", {"RELAY_DATABASE_URL"}),
        ("redrive", {"RELAY_AMQP_URL"}),
        ("inbox migrate", {"RELAY_INBOX_DATABASE_URL"}),
        ("inbox run", {"RELAY_INBOX_DATABASE_URL", "RELAY_INBOX_AMQP_URL", "RELAY_INBOX_QUEUE"}),
    ],
)
def test_a_command_requires_only_what_it_uses(command: str, missing: set[str]) -> None:
    found = problems({"RELAY_LOG_FORMAT": "text"}, command)
    assert {problem.split(":")[0] for problem in found} == missing


def test_a_command_does_not_mind_faults_in_what_it_does_not_use() -> None:
    environ = {"RELAY_DATABASE_URL": DATABASE, "RELAY_AMQP_URL_FILE": "/nonexistent", "RELAY_LEASE": "x"}
    found, _ = load(environ, needs=needed_by("migrate"), uses=used_by("migrate"))
    assert found.amqp_url is None
    assert len(problems(environ, "run")) == 2


def test_a_file_sink_needs_a_path_and_no_broker() -> None:
    found = problems({"RELAY_DATABASE_URL": DATABASE, "RELAY_SINK": "file"})
    assert any(problem.startswith("RELAY_SINK_PATH: not set") for problem in found)
    assert not any("RELAY_AMQP_URL" in problem for problem in found)


# ---------------------------------------------------------------- unknown variables


@pytest.mark.parametrize(
    ("typo", "nearest"),
    [
        ("RELAY_ORDERNG", "RELAY_ORDERING"),
        ("RELAY_DATABASE_URI", "RELAY_DATABASE_URL"),
        ("RELAY_AMQP_URL_FIEL", "RELAY_AMQP_URL_FILE"),
        ("RELAY_MAX_INFLIGHT", "RELAY_MAX_IN_FLIGHT"),
        ("RELAY_TABLE_FILE", "RELAY_TABLE"),
    ],
)
def test_an_unknown_variable_is_a_warning_with_the_nearest_name(typo: str, nearest: str) -> None:
    (line,) = warnings(**{typo: "postgresql://u:hidden@h/d"})
    assert typo in line
    assert nearest in line
    assert "hidden" not in line


def test_kubernetes_and_test_variables_are_ignored_silently() -> None:
    silent = {
        "RELAY_PORT": "tcp://10.0.0.1:9761",
        "RELAY_SERVICE_HOST": "10.0.0.1",
        "RELAY_SERVICE_PORT": "9761",
        "RELAY_SERVICE_PORT_METRICS": "9761",
        "RELAY_PORT_9761_TCP": "tcp://10.0.0.1:9761",
        "RELAY_PORT_9761_TCP_ADDR": "10.0.0.1",
        "RELAY_INBOX_PORT_9762_UDP_PROTO": "udp",
        "RELAY_METRICS_SERVICE_HOST": "10.0.0.1",
        "RELAY_TEST_DATABASE_URL": "postgresql://x",
        "PATH": "/bin",
        "OUTBOX_RELAY_X": "1",
    }
    assert warnings(**silent) == ()
    assert len(warnings(RELAY_PORTS="1", RELAY_PORT_X="1")) == 2


def test_settings_without_effect_are_warnings() -> None:
    assert "RELAY_SINK_PATH" in warnings(RELAY_SINK_PATH="-")[0]
    assert "RELAY_RETENTION" in warnings(RELAY_SENT_ROWS="delete", RELAY_RETENTION="1d")[0]
    assert "RELAY_MAX_AGE" in warnings(RELAY_MAX_AGE="500ms")[0]


# ---------------------------------------------------------------- secrets


def test_a_secret_from_a_file_loses_its_newline_and_is_read_anew(tmp_path: Path) -> None:
    file = tmp_path / "amqp"
    file.write_text("amqp://u:first@mq/\n")
    found, _ = load({"RELAY_DATABASE_URL": DATABASE, "RELAY_AMQP_URL_FILE": str(file)}, needs=needed_by("run"))
    assert found.amqp_urls() == ("amqp://u:first@mq/",)
    file.write_text("amqp://u:second@mq/\r\n")
    assert found.amqp_urls() == ("amqp://u:second@mq/",)
    assert found.redactor.redact("first and second") == "*** and ***"


def test_a_file_that_fails_later_is_waited_for(tmp_path: Path) -> None:
    file = tmp_path / "url"
    file.write_text(DATABASE)
    environ = {"RELAY_DATABASE_URL_FILE": str(file), "RELAY_AMQP_URL_FILE": str(file)}
    file.write_text(AMQP)
    found, _ = load({**environ, "RELAY_DATABASE_URL_FILE": ""}, needs=frozenset({"RELAY_AMQP_URL"}))
    file.write_text("http://rotated:badly@x")
    with pytest.raises(BrokerUnavailable, match="RELAY_AMQP_URL_FILE") as caught:
        found.amqp_urls()
    assert "badly" not in str(caught.value)
    file.write_text(DATABASE)
    found, _ = load({**environ, "RELAY_AMQP_URL_FILE": ""}, needs=frozenset({"RELAY_DATABASE_URL"}))
    file.unlink()
    with pytest.raises(DatabaseUnavailable, match="No such file"):
        found.database()


@pytest.mark.parametrize("content", [None, b"", b"\n", b"\xff\xfe", b"x" * 70_000, b"\0"])
def test_a_secret_file_that_cannot_be_used_is_named(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "secret"
    if content is not None:
        file.write_bytes(content)
    (line,) = problems({"RELAY_DATABASE_URL": DATABASE, "RELAY_AMQP_URL_FILE": str(file)})
    assert line.startswith(f"RELAY_AMQP_URL_FILE={str(file)!r}: ")


def test_a_directory_as_secret_file(tmp_path: Path) -> None:
    (line,) = problems({"RELAY_DATABASE_URL": DATABASE, "RELAY_AMQP_URL_FILE": str(tmp_path)})
    assert "Is a directory" in line


def test_both_a_value_and_a_file_is_an_error(tmp_path: Path) -> None:
    (line,) = problems({**ENVIRON, "RELAY_AMQP_URL_FILE": str(tmp_path / "x")})
    assert "RELAY_AMQP_URL_FILE" in line
    assert "set twice" in line
    loaded(RELAY_AMQP_URL_FILE="")


@pytest.mark.parametrize(
    "url",
    [
        f"postgresql://u:{HARD_PASSWORD}@h/d",
        f"postgresql://u:{HARD_ENCODED}@h/d?sslmode=sometimes",
        f"mysql://u:{HARD_ENCODED}@h/d",
        f"postgresql://u:{HARD_ENCODED}",
        f"postgresql://h/d?password={HARD_ENCODED}&sslmod=require",
        f"u:{HARD_PASSWORD}@h",
    ],
)
def test_a_faulty_url_shows_no_password(url: str) -> None:
    text = "\n".join(problems({"RELAY_DATABASE_URL": url, "RELAY_AMQP_URL": url, "RELAY_NAME": url * 9}))
    for fragment in (HARD_PASSWORD, HARD_ENCODED, "p@ss", "w#rd", "w%23rd", "%2F +x", "252F%20"):
        assert fragment not in text


def test_a_faulty_url_shows_what_is_no_secret() -> None:
    text = "\n".join(problems({"RELAY_DATABASE_URL": DATABASE, "RELAY_AMQP_URL": "http://u:pw123456@mq:5672/x"}))
    assert "http://***@mq:5672/x" in text


def test_no_representation_shows_a_secret() -> None:
    found = loaded()
    assert "sesame" not in repr(found) + str(found) + repr(found.database())
    assert "parsley" not in repr(found) + repr(found.amqp_url)
    assert found.database().dsn == DATABASE


@given(st.text(st.characters(min_codepoint=32, max_codepoint=0x2FF), min_size=4, max_size=20))
def test_redaction_removes_every_form(password: str) -> None:
    redactor = Redactor()
    redactor.learn_url(f"amqp://u:{quote(password, safe='')}@h/")
    for form in {password, quote(password, safe=""), quote(password), repr(password)[1:-1]}:
        rest = redactor.redact(f"[{form}]").replace("***", "")
        assert form not in rest or form in "[]"


def test_a_short_password_is_removed_as_a_word_only() -> None:
    redactor = Redactor()
    redactor.learn("a")
    assert redactor.redact("a cat, password a") == "*** cat, password ***"


def test_urls_nobody_knows_are_masked_too() -> None:
    redactor = Redactor()
    assert redactor.redact("see http://me:letmein@host/x") == "see http://me:***@host/x"
    assert redactor.redact("dsn host=h password=letmein user=u") == "dsn host=h password=*** user=u"


@pytest.mark.parametrize("url", ["x", "amqp://u:p?q@h/", "amqp://u:secret", "postgres://h/d?a=u:p@h", "a://b@c@d"])
def test_shown_url_hides_what_it_cannot_tell_apart(url: str) -> None:
    assert shown_url(url) is None


# ---------------------------------------------------------------- URLs


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
            ([("h", 5432)], "u", "p", "d", {"application_name": "a b"}),
        ),
        (
            "postgresql://u:p@h/d?fallback_application_name=x&gssencmode=disable",
            ([("h", 5432)], "u", "p", "d", {"application_name": "x"}),
        ),
        ("postgresql://u:p@h/d%20%2Fe?keepalives=1", ([("h", 5432)], "u", "p", "d /e", None)),
    ],
)
def test_the_driver_reads_a_database_url_as_meant(url: str, expected: tuple[object, ...]) -> None:
    assert driver_view(urls.database_target(url)) == expected


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
        ("postgresql://u:p@h/d?sslrootcert=/nonexistent", "sslrootcert=/nonexistent"),
        ("postgresql://u:p@h/d?host=other", "host twice"),
        ("postgresql://u:p@h/d?user=other", "user twice"),
        ("postgresql://u:p@h/d?x", "without a value"),
        ("postgresql://u:p@h/d?a=1&a=2", "twice"),
        ("postgresql://u:p@h:0/d", "port"),
        ("postgresql://u:p@h:70000/d", "port"),
        ("postgresql://u:p@h1,,h2/d", "host"),
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
        ("amqp://h1/,http://h2/", "URL 2"),
        ("mq.example", "amqp://"),
    ],
)
def test_an_amqp_url_that_the_driver_would_misread_is_refused(url: str, names: str) -> None:
    with pytest.raises(ValueError, match=names):
        urls.amqp_urls(url)


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


# ---------------------------------------------------------------- values


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("250ms", 0.25), ("5s", 5), ("2m", 120), ("1h", 3600), ("7d", 604800), ("1.5s", 1.5), ("0s", 0)],
)
def test_durations(text: str, seconds: float) -> None:
    assert values.duration(text) == seconds


@pytest.mark.parametrize("text", ["5", "5 s", "s", "-1s", "1h30m", "١s", "1e3s", "5S", "99999d", "inf", "nans"])
def test_no_durations(text: str) -> None:
    with pytest.raises(ValueError):
        values.duration(text)


@pytest.mark.parametrize(
    ("text", "size_bytes"), [("64KiB", 65536), ("1MiB", 2**20), ("2GiB", 2**31), ("250", 250), ("7B", 7)]
)
def test_sizes(text: str, size_bytes: int) -> None:
    assert values.size(text) == size_bytes


@pytest.mark.parametrize("text", ["64KB", "1 MiB", "0", "-1", "1.5MiB", "", "9999999999999GiB"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(ValueError):
        values.size(text)


@pytest.mark.parametrize(
    ("text", "quoted", "shard"),
    [
        ("outbox", '"outbox"', '"outbox_shard"'),
        ("Sales.Outbox", '"sales"."outbox"', '"sales"."outbox_shard"'),
        ('"My Schema"."Out""box"', '"My Schema"."Out""box"', '"My Schema"."Out""box_shard"'),
        ('"a.b".c', '"a.b"."c"', '"a.b"."c_shard"'),
        ("events_é$1", '"events_é$1"', '"events_é$1_shard"'),
    ],
)
def test_table_names_as_sql_reads_them(text: str, quoted: str, shard: str) -> None:
    name = values.table_name(text)
    assert (name.quoted, name.derived("_shard")) == (quoted, shard)


@pytest.mark.parametrize(
    "text",
    ["", "a b", "a;drop", "a.b.c", ".a", "a.", '"a', '""', "1a", "a-b", "x" * 44, "é" * 22, "x" * 64 + ".a"],
)
def test_no_table_names(text: str) -> None:
    with pytest.raises(ValueError):
        values.table_name(text)


@given(st.text(min_size=1, max_size=10).filter(lambda text: "\0" not in text))
def test_any_quoted_name_survives(name: str) -> None:
    quoted = '"' + name.replace('"', '""') + '"'
    assert values.table_name(quoted) == values.TableName(None, name)


@pytest.mark.parametrize(
    "text", ["events", "{aggregate_type}", "a.{event_type}.v{schema_version}", "{{x}}", "{id}{producer}"]
)
def test_templates(text: str) -> None:
    assert values.template(text) == text


@pytest.mark.parametrize(
    "text",
    [
        "{payload}",
        "{",
        "}",
        "{event_type",
        "{}",
        "{0}",
        "{event_type!r}",
        "{event_type:>5}",
        "{event_type.x}",
        "a\nb",
        "x" * 256,
    ],
)
def test_no_templates(text: str) -> None:
    with pytest.raises(ValueError):
        values.template(text)


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("0.0.0.0:9761", "0.0.0.0", 9761),
        (":9761", "0.0.0.0", 9761),
        ("[::]:0", "::", 0),
        ("[fe80::1%eth0]:1", "fe80::1%eth0", 1),
        ("localhost:80", "localhost", 80),
    ],
)
def test_listen_addresses(text: str, host: str, port: int) -> None:
    assert values.listen_address(text) == values.ListenAddress(host, port)


@pytest.mark.parametrize("text", ["9761", "host", "::1:80", "h:99999", "h:", "http://h:1", "a b:1", "h:1/"])
def test_no_listen_addresses(text: str) -> None:
    with pytest.raises(ValueError):
        values.listen_address(text)


def test_the_process_environment_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "RELAY_TABLE", "elsewhere")
    assert loaded().table.name == "outbox"


@pytest.mark.parametrize("variable", ["RELAY_DATABASE_URL", "RELAY_AMQP_URL", "RELAY_NAME", "RELAY_TABLE"])
def test_bytes_that_are_no_utf8_are_one_clear_error(variable: str) -> None:
    """Python hands them on as lone surrogates, on which the redaction, and later a driver, broke."""
    text = "postgresql://relay:ses\udc80ame@db/shop"
    (problem,) = problems({**ENVIRON, variable: text})
    assert problem.startswith(f"{variable}: is not UTF-8; allowed: ")
    _, (warning,) = load({**ENVIRON, "RELAY_\udc80": "x"})
    assert warning.isascii()


def test_an_undecodable_pgpassword_is_redacted() -> None:
    redactor = Redactor()
    redactor.learn("ses\udc80ame")
    assert redactor.redact("password ses\udc80ame, ses%80ame") == "password ***, ***"


def test_a_url_given_for_its_files_name_stays_secret() -> None:
    (problem,) = problems({"RELAY_AMQP_URL": AMQP, "RELAY_DATABASE_URL_FILE": DATABASE})
    assert "sesame" not in problem
    assert problem.startswith("RELAY_DATABASE_URL_FILE=")
