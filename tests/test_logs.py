"""Log lines: one an event, no secret, no payload, whatever the fields hold."""

from __future__ import annotations

import io
import json
import logging
import re
import warnings
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.config import LogFormat, LogLevel
from relay.logs import Log, get_logger, setup
from relay.redaction import Redactor


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.getLogger("relay").setLevel(logging.NOTSET)
    logging.captureWarnings(capture=False)


def started(
    log_format: LogFormat = LogFormat.JSON, level: LogLevel = LogLevel.INFO, password: str = "sesame/open"
) -> tuple[Log, io.StringIO]:
    stream = io.StringIO()
    redactor = Redactor()
    redactor.learn(password)
    setup(log_format, level, redactor, stream=stream)
    return get_logger(), stream


def test_a_line_has_time_level_event_and_fields() -> None:
    log, stream = started()
    log.info("broker_connected", host="mq", attempt=2, seconds=0.25, vhost=None, is_tls=True)
    line = json.loads(stream.getvalue())
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line.pop("time"))
    assert line == {
        "level": "info",
        "event": "broker_connected",
        "host": "mq",
        "attempt": 2,
        "seconds": 0.25,
        "vhost": None,
        "is_tls": True,
    }


def test_text_lines_are_one_line_each() -> None:
    log, stream = started(LogFormat.TEXT)
    log.bind(relay="left").warning("broker_refused", why="no\nroute to it", host="mq", empty="")
    assert stream.getvalue().count("\n") == 1
    assert stream.getvalue().endswith('Z warning broker_refused relay=left why="no\\nroute to it" host=mq empty=""\n')


@pytest.mark.parametrize("log_format", LogFormat)
def test_no_form_of_a_secret_is_written(log_format: LogFormat) -> None:
    log, stream = started(log_format, LogLevel.DEBUG)
    log.error(
        "failed",
        error=ValueError("at sesame/open"),
        url="amqp://u:sesame%2Fopen@h/",
        deep={"a": ["sesame/open"]},
    )
    log.info("other", url="postgresql://u:unknown-one@h/d")
    logging.getLogger("aio_pika.connection").warning("connecting to %s", "amqp://u:sesame%2fopen@h/")
    assert stream.getvalue().count("\n") == 3
    assert "sesame" not in stream.getvalue()
    assert "unknown-one" not in stream.getvalue()


def test_libraries_come_through_at_warning_without_tracebacks() -> None:
    _, stream = started()
    library = logging.getLogger("aio_pika.connection")
    library.info("chatter")
    try:
        raise ConnectionResetError("reset by peer")
    except ConnectionResetError:
        library.exception("Server connection closed")
    line = json.loads(stream.getvalue())
    assert (line["event"], line["logger"], line["level"]) == ("library", "aio_pika.connection", "error")
    assert line["error"] == "ConnectionResetError: reset by peer"
    assert "Traceback" not in stream.getvalue()


def test_warnings_come_through() -> None:
    _, stream = started()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(capture=True)
        warnings.warn("odd", UserWarning, stacklevel=1)
        logging.captureWarnings(capture=False)
    assert json.loads(stream.getvalue())["logger"] == "py.warnings"


@pytest.mark.parametrize("log_format", list(LogFormat))
def test_a_traceback_of_any_text_is_a_line_without_a_secret(log_format: LogFormat) -> None:
    """Half of a surrogate pair lost the line, and the logging module printed the record as it was."""
    log, stream = started(log_format, LogLevel.DEBUG, password="hunter2pass")
    try:
        raise RuntimeError("no \ud800 for hunter2pass")
    except RuntimeError as error:
        log.warning("failed", error=error)
    assert "failed" in stream.getvalue()
    assert "hunter2pass" not in stream.getvalue()


def test_a_traceback_shows_only_at_debug() -> None:
    def fail(log: Log) -> None:
        try:
            raise RuntimeError("broken")
        except RuntimeError as error:
            log.error("failed", error=error)

    log, stream = started()
    fail(log)
    assert json.loads(stream.getvalue())["error"] == "RuntimeError: broken"
    assert "error_traceback" not in stream.getvalue()
    log, stream = started(level=LogLevel.DEBUG)
    fail(log)
    assert "raise RuntimeError" in json.loads(stream.getvalue())["error_traceback"]


def test_bytes_show_as_their_length_and_texts_are_cut() -> None:
    log, stream = started()
    log.info("odd", body=b"personal data", text="x" * 10_000, many=list(range(1000)))
    line = json.loads(stream.getvalue())
    assert line["body"] == "(13 bytes)"
    assert len(line["text"]) < 5000
    assert len(line["many"]) == 100


def test_levels() -> None:
    log, stream = started(level=LogLevel.WARNING)
    log.debug("a")
    log.info("b")
    log.warning("c")
    log.error("d")
    assert [json.loads(line)["event"] for line in stream.getvalue().splitlines()] == ["c", "d"]


def test_a_reader_that_is_gone_ends_nothing() -> None:
    log, stream = started()
    stream.close()
    log.info("nobody_reads")


_anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.just(object()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text() | st.integers(), inner, max_size=3),
    max_leaves=6,
)


@given(_anything, st.sampled_from(LogFormat))
def test_any_field_can_be_written(value: object, log_format: LogFormat) -> None:
    log, stream = started(log_format)
    log.info("any", value=value, surrogate="\ud800", big=2**70)
    assert stream.getvalue().count("\n") == 1
    if log_format is LogFormat.JSON:
        json.loads(stream.getvalue())
