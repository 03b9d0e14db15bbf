"""Any text in any variable is a configuration, or a ConfigError that names the variable and tells no secret."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from relay.config import load
from relay.errors import BrokerUnavailable, ConfigError, DatabaseUnavailable
from relay.settings import SETTINGS, SETTINGS_BY_VARIABLE, Setting

PASSWORD = "xyzzySesame"
SEEDS = [
    f"postgresql://u:{PASSWORD}@db:5432/shop?sslmode=verify-full&connect_timeout=3",
    f"postgresql:///shop?host=/run/pg&user=u&password={PASSWORD}",
    f"amqp://u:{PASSWORD}@mq:5672/%2F?heartbeat=5,amqps://u:{PASSWORD}@[::1]:5671/v?cafile=/x",
    f"https://u:{PASSWORD}@mq:15671/api",
    "1s,5s,30s,5m",
    "64KiB",
    "250ms",
    '"My Schema"."out.box"',
    "{aggregate_type}.{event_type}.v{schema_version}",
    "0.0.0.0:9761",
    "strict",
    "1000",
]
# An environment holds no NUL; bytes that are no UTF-8 come as lone surrogates.
characters = st.characters(exclude_characters="\0")
ARRANGEMENTS = [
    ":",
    "/",
    "@",
    "//",
    "%",
    "%2",
    "%zz",
    "[",
    "]",
    "]:",
    "?",
    "&",
    "=",
    ",",
    ",,",
    "'",
    '"',
    "{",
    "}",
    "{{",
]
ARRANGEMENTS += [
    "-",
    "+",
    "e9",
    "inf",
    "nan",
    "0",
    "99999999999999999999",
    "\udc80",
    "\u0660",
    "\ufeff",
    "\n",
    "ms",
    "KiB",
]


@st.composite
def spoiled(draw: st.DrawFn) -> str:
    """Something nearly right: a value of any setting with a few edits."""
    text = draw(st.sampled_from([*SEEDS, *(each.default for each in SETTINGS if each.default)]))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(text)))
        until = at + draw(st.integers(0, 3))
        text = text[:at] + draw(st.sampled_from(ARRANGEMENTS) | st.text(characters, max_size=3)) + text[until:]
    return text


variables = st.sampled_from([each.variable for each in SETTINGS])
files = st.sampled_from([f"{each.variable}_FILE" for each in SETTINGS if each.is_secret])
strangers = st.text(characters, max_size=12).map(lambda text: f"RELAY_{text}")
values = st.text(characters, max_size=60) | spoiled() | st.sampled_from(["/", "/dev/null", "/proc/self/mem", "."])


def look(environ: dict[str, str]) -> None:
    # In a variable that is no secret a password is the user's own affair.
    is_secret = all(SETTINGS_BY_VARIABLE[each].is_secret for each in environ if each in SETTINGS_BY_VARIABLE)
    problems: list[str] = []
    try:
        config, warnings = load(environ)
    except ConfigError as error:
        problems = list(error.problems)
    if problems:
        assert all(any(variable in problem for variable in SETTINGS_BY_VARIABLE) for problem in problems), problems
        # Not of a variable that nobody knows, which nobody reads.
        taken = [text for name, text in environ.items() if name.removesuffix("_FILE") in SETTINGS_BY_VARIABLE]
        is_in_place = any(f"u:{PASSWORD}@" in text or f"&password={PASSWORD}" in text for text in taken)
        assert not (is_secret and is_in_place) or not any(PASSWORD in problem for problem in problems)
        return
    assert not is_secret or not any(PASSWORD in text for text in (*warnings, repr(config)))
    # What was taken, the drivers' side can use: these read the secrets once more.
    for read in (config.database, config.amqp_urls, config.management, config.inbox_database, config.inbox_amqp_urls):
        with contextlib.suppress(ConfigError, DatabaseUnavailable, BrokerUnavailable):
            read()


environments = st.dictionaries(variables | files | strangers, values, max_size=6)


@given(environments)
@example({"RELAY_DATABASE_URL": "RELA"})
@example({"RELAY_AMQP_URL": f"amqp://u:x:yzzySesame@mq/?heartbeat=5,am:://u:{PASSWORD}@h/v"})
@settings(max_examples=400)
def test_any_environment(environ: dict[str, str]) -> None:
    look(environ)


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.variable)
def test_each_setting(setting: Setting) -> None:
    """Each parser has its own corners."""

    @given(values)
    @settings(max_examples=60, database=None)
    def any_text(text: str) -> None:
        look({setting.variable: text})

    any_text()


@pytest.mark.long
@given(environments)
@settings(max_examples=50_000)
def test_any_environment_at_length(environ: dict[str, str]) -> None:
    look(environ)
