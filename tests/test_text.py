"""Text for people: nothing in it commands a terminal, and columns stand below each other."""

from __future__ import annotations

import io
import json
import re
import subprocess
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.cli import console
from relay.errors import BrokerUnavailable, ConfigError, RelayError
from relay.redaction import Redactor, mask_urls
from relay.text import columns, cut, many, printable, printable_json, seconds, shell_words

ERASES = "order\x1b[2J\r\n\x9b31mpaid"


@given(st.text())
def test_what_is_printed_stands_on_one_line_and_says_what_there_was(text: str) -> None:
    shown = printable(text)
    assert shown.isprintable()
    assert printable(shown) == shown
    if text.isprintable():
        assert shown == text


@given(st.text(), st.booleans())
def test_a_document_commands_no_terminal_and_says_the_same(text: str, is_ascii: bool) -> None:
    shown = printable_json(json.dumps({text: [text]}, indent=2, ensure_ascii=is_ascii))
    assert shown.replace("\n", "").isprintable()
    assert json.loads(shown) == {text: [text]}


def test_a_command_with_any_words_is_the_same_after_a_terminal_and_a_shell() -> None:
    """`printable` made other words of what `shlex` had quoted."""
    words = ["", "a b", "it's", ERASES, "\u202egnp", "\x7f\\'0", "\U000e0001f", "é$(x)", "line\nline"]
    line = shell_words(["printf", "%s\\0", *words])
    assert line.isprintable()
    done = subprocess.run(["bash", "-c", line], stdout=subprocess.PIPE, timeout=30, check=True)
    assert done.stdout.decode().split("\0") == [*words, ""]


_URL_PASSWORD = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://[^\s:/@]*:)(?!PASSWORD@HOST:PORT\b)[^\s@]+@")
"""What a URL's password is, in one pattern: its time grows with the square of the text."""


@given(st.lists(st.sampled_from([*"ab:/@ \n", "://", "a://u:", "PASSWORD@HOST:PORT", "PASSWORD"])).map("".join))
def test_a_password_in_a_url_is_masked(text: str) -> None:
    assert mask_urls(text) == _URL_PASSWORD.sub(r"\1***@", text)


@pytest.mark.parametrize("part", ["a", "a://b:", "3f2a9c", "a@", "a://b:c@"])
def test_a_long_text_is_masked_in_time(part: str) -> None:
    """The whole relay, its /livez too, stood still for 18 s over an id of 100 kB that a log line had."""
    text = part * (1_000_000 // len(part))
    began = time.process_time()
    assert mask_urls(text) == text.replace("b:c@", "b:***@")
    assert time.process_time() - began < 20.0, "with the square it were hours"


def test_a_character_that_cannot_be_shown_is_named() -> None:
    assert printable(ERASES) == r"order\x1b[2J\r\n\x9b31mpaid"
    assert printable("\u2028\U000e0001") == r"\u2028\U000e0001"


def test_columns_are_as_wide_as_what_is_shown() -> None:
    assert columns([("A", "B", "C"), ("\x1b", "bb", "")]) == ["A     B   C", r"\x1b  bb"]
    assert columns([]) == []


def test_durations_are_read_at_a_glance() -> None:
    """`relay status` said of a row that is scheduled for 2030: next due in 97430600.6 s."""
    shown = [seconds(value) for value in (0.0002, 0.004, 0.25, 61.0, 600.0, 9000.0, 97_430_600.6)]
    assert shown == ["200 µs", "4.0 ms", "250 ms", "61.0 s", "10 min", "2.5 h", "1,128 d"]


def test_counted_nouns_and_cut_texts() -> None:
    assert (many(1, "row"), many(0, "row"), many(2000, "row")) == ("1 row", "0 rows", "2,000 rows")
    assert (cut("abcd", 4), cut("abcde", 4)) == ("abcd", "abcd…")


def test_a_password_that_is_a_word_or_a_number_spoils_no_document(capsys: pytest.CaptureFixture[str]) -> None:
    """Keys became `***s`, and numbers no JSON."""
    document = {"relays": [{"name": "relay-1", "port": 1234, "is_up": True, "tags": ("relay", None, 1.5)}]}
    redactor = Redactor()
    redactor.learn("relay", "1234", "12", "true", "name")
    shown = console.Console({})
    shown.redact = redactor.redact
    console.print_json(document, shown)
    found = json.loads(capsys.readouterr().out)
    assert found == {"relays": [{"name": "***-1", "port": 1234, "is_up": True, "tags": ["***", None, 1.5]}]}


@pytest.mark.parametrize("error", [RelayError(ERASES, hint=ERASES), BrokerUnavailable(ERASES), ConfigError([ERASES])])
def test_no_error_commands_a_terminal(error: RelayError, capsys: pytest.CaptureFixture[str]) -> None:
    """Whoever may insert a row, or run a server, would write on the operator's terminal."""
    shown = console.Console({})
    shown.complain(error)
    shown.note(ERASES)
    console.print_lines([ERASES], shown)
    console.print_columns([(ERASES, ERASES)], shown)
    printed = capsys.readouterr()
    for stream in (printed.out, printed.err):
        assert all(line.isprintable() for line in io.StringIO(stream).read().split("\n")), stream
