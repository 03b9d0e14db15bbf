"""Logs: one line an event, a stable name with fields, as JSON or text, without secrets.

Owns: the formatters and the set-up of the standard library's logging. The libraries' own loggers come through at
WARNING, redacted like everything else. Never logs a payload: bytes show as their length, long texts are cut.
Times are UTC. An exception shows as its type and text; its traceback only at level debug.
"""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from enum import Enum
from typing import Any, TextIO

import orjson

from relay.choices import LogFormat, LogLevel
from relay.redaction import Redactor

TEXT_CHARACTERS_MAX = 4096
ITEMS_MAX = 100
_RESERVED = frozenset({"time", "level", "event"})
_LOGGER = "relay"


class Log:
    """Writes events. A field may be anything; an exception shows as `Type: text`, None as null.

    `bind` gives a log that adds fields to every event.
    """

    __slots__ = ("_fields", "_logger")

    def __init__(self, logger: logging.Logger, fields: Mapping[str, object] | None = None) -> None:
        self._logger = logger
        self._fields = dict(fields or {})

    def bind(self, **fields: object) -> Log:
        """A log whose every event carries these fields too."""
        return Log(self._logger, {**self._fields, **fields})

    def debug(self, event: str, **fields: object) -> None:
        """What only somebody who looks for a fault wants to see."""
        self._write(logging.DEBUG, event, fields)

    def info(self, event: str, **fields: object) -> None:
        """A change of state that is as it should be."""
        self._write(logging.INFO, event, fields)

    def warning(self, event: str, **fields: object) -> None:
        """A change of state that delays or costs something."""
        self._write(logging.WARNING, event, fields)

    def error(self, event: str, **fields: object) -> None:
        """Something that needs a person."""
        self._write(logging.ERROR, event, fields)

    def _write(self, level: int, event: str, fields: Mapping[str, object]) -> None:
        assert not _RESERVED & fields.keys(), "a field that hides the line's own"
        if self._logger.isEnabledFor(level):
            self._logger.log(level, event, extra={"fields": {**self._fields, **fields}})


def get_logger() -> Log:
    """The relay's log. Before `setup` only warnings show, as the standard library does it."""
    return Log(logging.getLogger(_LOGGER))


def setup(log_format: LogFormat, level: LogLevel, redactor: Redactor, *, stream: TextIO | None = None) -> None:
    """Send everything that is logged in this process to `stream` (default: standard error), replacing what was set.

    `level` is the relay's; the libraries' warnings always show.
    """
    shows_traceback = level is LogLevel.DEBUG
    handler = _Handler(stream or sys.stderr)
    match log_format:
        case LogFormat.JSON:
            handler.setFormatter(_JsonFormatter(redactor.redact, shows_traceback))
        case LogFormat.TEXT:
            handler.setFormatter(_TextFormatter(redactor.redact, shows_traceback))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger(_LOGGER).setLevel(level.upper())
    logging.captureWarnings(capture=True)


class _Handler(logging.StreamHandler[TextIO]):
    """A stream whose reader is gone must not end the relay, nor can it be told about it."""

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError | ValueError):
            super().handleError(record)


class _Formatter(logging.Formatter):
    def __init__(self, redact: Callable[[str], str], shows_traceback: bool) -> None:
        super().__init__()
        self._redact = redact
        self._shows_traceback = shows_traceback

    def event_of(self, record: logging.LogRecord) -> tuple[str, dict[str, Any]]:
        """The event's name and its fields, plain and redacted."""
        fields: dict[str, Any] | None = getattr(record, "fields", None)
        if fields is None:
            # A library's record: its text is the field, its logger says whose it is.
            event, fields = ("library", {"logger": record.name, "message": record.getMessage()})
            if record.exc_info and record.exc_info[1] is not None:
                fields["error"] = record.exc_info[1]
        else:
            event = record.getMessage()
        plain = {str(name): self._plain(value) for name, value in fields.items()}
        if self._shows_traceback:
            for name, value in fields.items():
                if isinstance(value, BaseException) and value.__traceback__ is not None:
                    plain[f"{name}_traceback"] = self._whole("".join(traceback.format_exception(value)))
        return event, plain

    def _plain(self, value: object) -> Any:
        match value:
            case None | bool():
                return value
            case Enum():
                return self._plain(value.value)
            case int():
                return value if -(2**63) <= value < 2**64 else str(value)
            case float():
                return round(value, 6)
            case str():
                return self._text(value)
            case BaseException():
                return self._text(f"{type(value).__name__}: {value}".removesuffix(": "))
            case bytes() | bytearray() | memoryview():
                return f"({len(value)} bytes)"
            case Mapping():
                items = list(value.items())[:ITEMS_MAX]
                return {self._text(str(name)): self._plain(item) for name, item in items}
            case list() | tuple() | set() | frozenset():
                ordered = sorted(value, key=str) if isinstance(value, set | frozenset) else value
                return [self._plain(item) for item in ordered[:ITEMS_MAX]]
            case _:
                return self._text(str(value))

    def _whole(self, text: str) -> str:
        """Lone surrogates are no UTF-8."""
        return self._redact(text).encode("utf-8", "backslashreplace").decode()

    def _text(self, text: str) -> str:
        # Redacted before it is cut: half a password is still one.
        text = self._whole(text)
        return text if len(text) <= TEXT_CHARACTERS_MAX else text[:TEXT_CHARACTERS_MAX] + "…"


class _JsonFormatter(_Formatter):
    def format(self, record: logging.LogRecord) -> str:
        event, fields = self.event_of(record)
        line = {"time": _time(record), "level": record.levelname.lower(), "event": event, **fields}
        return orjson.dumps(line).decode()


class _TextFormatter(_Formatter):
    def format(self, record: logging.LogRecord) -> str:
        event, fields = self.event_of(record)
        words = [f"{name}={_word(value)}" for name, value in fields.items()]
        return " ".join([_time(record), f"{record.levelname.lower():7}", event, *words])


def _time(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return moment.strftime("%Y-%m-%dT%H:%M:%S.") + f"{moment.microsecond // 1000:03}Z"


def _word(value: object) -> str:
    """A field's value in a text line: quoted where it holds anything that would end the word or the line."""
    if isinstance(value, str) and value.isprintable() and value and not set(value) & set(' "='):
        return value
    return orjson.dumps(value).decode()
