"""The configuration: every variable, every fault at once, no secret in any text."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay import config
from relay.config import Config, Ordering, SentRows, load, needed_by, used_by
from relay.errors import BrokerUnavailable, ConfigError, DatabaseUnavailable
from relay.redaction import Redactor, shown_url
from relay.route import FIELDS
from relay.settings import SETTINGS, SETTINGS_BY_VARIABLE
from tests.core.test_urls import HARD_ENCODED, HARD_PASSWORD

DATABASE = "postgresql://relay:sesame@db:5432/shop"
AMQP = "amqp://relay:parsley@mq:5672/"
ENVIRON = {"RELAY_DATABASE_URL": DATABASE, "RELAY_AMQP_URL": AMQP}


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


@pytest.mark.parametrize(
    ("variable", "value", "bound"),
    [
        ("RELAY_MAX_BYTES", "2000000GiB", "1048576GiB"),
        ("RELAY_MAX_BYTES", "9" * 5000, "1048576GiB"),
        ("RELAY_MAX_BYTES", "0", "1 to"),
        ("RELAY_MAX_RATE", "1000000001", "1000000000"),
        ("RELAY_MAX_RATE", "0.001", "0.01"),
        ("RELAY_MAX_AGE", "0.5ms", "1ms"),
        ("RELAY_PARKED_RETENTION", "0.5ms", "1ms"),
        ("RELAY_RETENTION", "36501d", "36500d"),
        ("RELAY_INBOX_RETENTION", "36501d", "36500d"),
        ("RELAY_RETRY_DELAYS", "1s,36501d", "36500d"),
        ("RELAY_LEASE", "2h", "1h"),
        ("RELAY_MAX_IN_FLIGHT", "1" + "0" * 30, "1 to 1000000"),
        ("RELAY_INBOX_PREFETCH", "9" * 5000, "65535"),
        ("RELAY_LISTEN", ":65536", "65535"),
    ],
)
def test_the_bound_that_refuses_a_value_is_named(variable: str, value: str, bound: str) -> None:
    """`too large; allowed: 64KiB 1MiB 2GiB, or plain bytes`: nobody could tell what was."""
    command = "inbox run" if "INBOX" in variable else "run"
    (line,) = (line for line in problems({**ENVIRON, variable: value}, command) if line.startswith(f"{variable}="))
    words, _, allowed = line.partition("; allowed: ")
    assert bound in allowed
    assert words.endswith(("too large", "too small", "more than a hundred years", "no such port"))


def test_the_inboxs_retention_is_refused_with_all_other_faults() -> None:
    """It was refused after loading, beside nothing else, and held against the first of the two only."""
    environ = {
        "RELAY_INBOX_DATABASE_URL": "postgresql://h/d",
        "RELAY_INBOX_AMQP_URL": "amqp://h",
        "RELAY_INBOX_RETENTION": "5d",
        "RELAY_PARKED_RETENTION": "90d",
        "RELAY_INBOX_PREFETCH": "0",
    }
    with pytest.raises(ConfigError) as caught:
        load(environ, needs=needed_by("inbox run"), uses=used_by("inbox run"))
    assert [problem.partition(":")[0] for problem in caught.value.problems] == [
        *("RELAY_INBOX_QUEUE", "RELAY_INBOX_PREFETCH='0'", "RELAY_INBOX_RETENTION", "RELAY_INBOX_RETENTION")
    ]
    first, second = caught.value.problems[2:]
    assert "432000 s is not longer than RELAY_RETENTION, 604800 s" in first
    assert "432000 s is not longer than RELAY_PARKED_RETENTION, 7776000 s" in second
    # A relay has no inbox; one that cannot be read contradicts nothing.
    del environ["RELAY_INBOX_PREFETCH"]
    load({**ENVIRON, **environ}, needs=needed_by("run"), uses=used_by("run"))
    environ |= {"RELAY_INBOX_QUEUE": "q", "RELAY_INBOX_RETENTION": "soon"}
    (line,) = problems(environ, "inbox run")
    assert line.startswith("RELAY_INBOX_RETENTION='soon'")


def test_the_allowed_fields_of_a_template_are_named() -> None:
    (line,) = problems({**ENVIRON, "RELAY_ROUTING_KEY": "{tenant}.{event_type}"})
    assert "no such field: {tenant}" in line
    assert all(f"{{{field}}}" in line for field in FIELDS)


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


def test_a_read_ahead_below_what_may_be_in_flight_is_a_warning() -> None:
    """It caps what is in flight, and nothing said so where RELAY_MAX_IN_FLIGHT was the default."""
    (text,) = warnings(RELAY_MAX_READ_AHEAD="500")
    assert "RELAY_MAX_IN_FLIGHT=2000 is never reached: RELAY_MAX_READ_AHEAD=500 bounds all rows in memory" in text
    assert warnings(RELAY_MAX_READ_AHEAD="2000") == ()
    assert len(warnings(RELAY_MAX_IN_FLIGHT="5000")) == 1


@pytest.mark.parametrize("name", ["application_name", "fallback_application_name"])
def test_an_application_name_in_a_url_is_a_warning(name: str, tmp_path: Path) -> None:
    """It was ignored without a word. Platforms hand out such URLs, so it is no error, and the runbooks need the relay's own."""
    url = f"postgresql://u:s3cret@h/d?{name}=shop-api"
    expected = f"its {name} has no effect: the relay names its sessions itself"
    for found in (warnings(RELAY_DATABASE_URL=url), warnings(RELAY_INBOX_DATABASE_URL=url)):
        assert expected in found[0]
        assert "s3cret" not in found[0]
    file = tmp_path / "url"
    file.write_text(url)
    environ = {name: value for name, value in ENVIRON.items() if name != "RELAY_DATABASE_URL"}
    assert expected in load({**environ, "RELAY_DATABASE_URL_FILE": str(file)})[1][0]


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
    file.write_text(DATABASE.replace("db", "db..svc"))
    with pytest.raises(DatabaseUnavailable, match="RELAY_DATABASE_URL_FILE: names a host with a part that is empty"):
        found.database()
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


@pytest.mark.parametrize("name", ["q" * 248, "ü" * 124, "a\nb"])
def test_a_queue_that_cannot_be_consumed_is_refused(name: str) -> None:
    """The driver's ValueError came only later, with the question for its parking queue or for itself."""
    environ = {"RELAY_INBOX_DATABASE_URL": DATABASE, "RELAY_INBOX_AMQP_URL": AMQP, "RELAY_INBOX_QUEUE": name}
    (line,) = problems(environ, "inbox run")
    assert line.startswith("RELAY_INBOX_QUEUE=") and "up to 247 bytes" in line
    assert loaded(RELAY_INBOX_QUEUE="bestände (tot)|1" + "q" * 230).inbox_queue is not None


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


@pytest.mark.parametrize("variable", ["RELAY_AMQP_URL", "RELAY_AMQP_URL_FILE"])
def test_one_settings_password_is_hidden_in_what_is_said_of_another(variable: str) -> None:
    """It was read first, and its text made, before the password was known; or that stood where a file's name belongs."""
    found = problems({"RELAY_DATABASE_URL": "://sesame9", variable: "postgresql://u:sesame9@h/d"})
    assert len(found) == 2
    assert "sesame9" not in "\n".join(found)


@pytest.mark.parametrize("url", ["mysql://h/d", "postgresql://h/d?sslmode=sometimes", "://h"])
def test_a_faulty_url_without_a_password_is_shown_as_it_is(url: str) -> None:
    (problem,) = problems({"RELAY_DATABASE_URL": url, "RELAY_AMQP_URL": "amqp://h/"})
    assert problem.startswith(f"RELAY_DATABASE_URL={url!r}: ")


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


@pytest.mark.parametrize("password", ["RELA", "DATABASE", "RELAY_DATABASE_URL", "_URL"])
def test_a_settings_name_stays_readable_whatever_the_password(password: str) -> None:
    """The error said `***Y_DATABASE_URL: does not begin with…`: nobody knew which setting."""
    for environ in ({"RELAY_DATABASE_URL": password}, {"PGPASSWORD": password, "RELAY_DATABASE_URL": "x"}):
        found = problems({**environ, "RELAY_PORT": password})
        assert any(each.startswith("RELAY_DATABASE_URL: ") for each in found)
        assert any("RELAY_AMQP_URL_FILE" in each for each in found)


def test_a_password_that_begins_with_a_name_is_removed_whole() -> None:
    redactor = Redactor(["RELAY_NAME"])
    redactor.learn("RELAY_NAME-x", "RELAY", "pw-RELAY_NAME")
    assert (
        redactor.redact("RELAY_NAME: RELAY_NAME-x pw-RELAY_NAME RELAY RELAY_NAMES")
        == "RELAY_NAME: *** *** *** ***_NAMES"
    )


@pytest.mark.parametrize("second", ["am:://u:sesame@h/", "u:sesame@h", "amqp:/u:ses:ame@h?x=1", "u:ses,u:ame@h"])
def test_a_password_where_no_url_could_be_told_is_removed(second: str) -> None:
    """The error about a parameter quoted its value, and that was another URL with a slip in its scheme."""
    (problem,) = problems({**ENVIRON, "RELAY_AMQP_URL": f"{AMQP}?heartbeat=5,{second}"})
    assert problem.startswith("RELAY_AMQP_URL: has heartbeat=5")
    assert "ame" not in problem.partition("; allowed is")[0]


def test_a_short_password_is_removed_as_a_word_only() -> None:
    redactor = Redactor()
    redactor.learn("a")
    assert redactor.redact("a cat, password a") == "*** cat, password ***"


def test_urls_nobody_knows_are_masked_too() -> None:
    redactor = Redactor()
    assert redactor.redact("see http://me:letmein@host/x") == "see http://me:***@host/x"
    assert redactor.redact("dsn host=h password=letmein user=u") == "dsn host=h password=*** user=u"


@pytest.mark.parametrize(
    "url", ["x", "amqp://u:p?q@h/", "amqp://u:secret", "postgres://h/d?a=u:p@h", "a://b@c@d", "u:p@h?amqp://h/"]
)
def test_shown_url_hides_what_it_cannot_tell_apart(url: str) -> None:
    assert shown_url(url) is None


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


@pytest.mark.parametrize("url", [DATABASE, "relay:sesame@", "sesame@db:5432/shop", "db/shop?password=sesame"])
def test_a_url_given_for_its_files_name_stays_secret(url: str) -> None:
    (problem,) = problems({"RELAY_AMQP_URL": AMQP, "RELAY_DATABASE_URL_FILE": url})
    assert "sesame" not in problem
    assert problem.startswith("RELAY_DATABASE_URL_FILE")
