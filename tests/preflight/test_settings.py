"""Settings that contradict each other are warnings of `relay check` and `relay run`."""

from __future__ import annotations

import pytest

from relay import cli, config
from relay.errors import ConfigError, UsageError
from relay.redaction import mask_urls


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"RELAY_ORDERING": "none", "RELAY_ON_PARKED": "continue"}, "RELAY_ON_PARKED has no effect"),
        ({"RELAY_MAX_IN_FLIGHT": "500", "RELAY_MAX_READ_AHEAD": "100"}, "RELAY_MAX_IN_FLIGHT=500 is never reached"),
        ({"RELAY_RETRY_DELAYS": "5s,1s"}, "RELAY_RETRY_DELAYS falls"),
        ({"RELAY_MAX_AGE": "10ms"}, "no row is ever retried"),
        ({"RELAY_SENT_ROWS": "delete", "RELAY_RETENTION": "1d"}, "RELAY_RETENTION has no effect"),
        ({"RELAY_SINK_PATH": "x"}, "RELAY_SINK_PATH has no effect"),
        ({"RELAY_EXCHNAGE": "x"}, "nearest: RELAY_EXCHANGE"),
    ],
)
def test_a_contradiction_is_a_warning(settings: dict[str, str], words: str) -> None:
    (warning,) = config.load(settings)[1]
    assert words in warning


@pytest.mark.parametrize("words", ["demo", "migrate --print", "inbox migrate --print", "topology plan nowhere.toml"])
def test_every_command_warns_of_an_unknown_variable(
    words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The demo and what prints SQL said nothing of a misspelt RELAY_TABEL, and went by the default."""

    def run(*_: object) -> None:
        raise UsageError("no demo here")

    monkeypatch.setattr("relay.demo.run", run)
    monkeypatch.setenv("RELAY_TABEL", "orders")
    cli.main(words.split())
    assert "warning: RELAY_TABEL is unknown and ignored; nearest: RELAY_TABLE" in capsys.readouterr().err


def test_a_command_is_not_warned_of_settings_that_it_does_not_use() -> None:
    settings = {"RELAY_SINK": "file", "RELAY_SINK_PATH": "-", "RELAY_RETENTION": "1d", "RELAY_SENT_ROWS": "delete"}
    assert config.load(settings, uses=config.used_by("migrate"))[1] == ()


def test_a_misspelt_name_is_said_beside_the_setting_that_is_missing() -> None:
    with pytest.raises(ConfigError) as raised:
        config.load({"RELAY_DATABSE_URL": "postgresql://u:p@h/d"}, needs=config.needed_by("status"))
    assert raised.value.hint == "RELAY_DATABSE_URL is unknown and ignored; nearest: RELAY_DATABASE_URL"


def test_the_placeholder_of_an_error_is_no_password() -> None:
    shape = "http://USER:PASSWORD@HOST:PORT or https://…"
    assert mask_urls(shape) == shape
    assert mask_urls("http://relay:PASSWORD@rabbit:15672") == "http://relay:***@rabbit:15672"


@pytest.mark.parametrize(
    ("words", "needs"),
    [
        (("status",), "This command needs RELAY_DATABASE_URL.\n"),
        (("parked", "list"), "This command needs RELAY_DATABASE_URL.\n"),
        (("inbox", "migrate"), "This command needs RELAY_INBOX_DATABASE_URL.\n"),
        (("redrive",), "This command needs RELAY_AMQP_URL.\n"),
    ],
)
def test_the_help_of_a_command_names_what_it_needs(
    words: tuple[str, ...], needs: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.main([*words, "--help"])
    assert needs in capsys.readouterr().out


def test_the_help_of_a_command_without_servers_names_none(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ((), ("demo",), ("inbox",)):
        with pytest.raises(SystemExit):
            cli.main([*words, "--help"])
    assert "needs" not in capsys.readouterr().out


def test_the_defaults_contradict_nothing() -> None:
    assert config.load({})[1] == ()
