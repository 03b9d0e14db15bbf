"""The settings that are a choice of words; the engine's own two are in `relay.core.settings`."""

from __future__ import annotations

from enum import StrEnum


class Sink(StrEnum):
    """Where messages go."""

    AMQP = "amqp"
    FILE = "file"


class Envelope(StrEnum):
    """What a message's body is."""

    NONE = "none"
    JSON = "json"
    CLOUDEVENTS = "cloudevents"


class SentRows(StrEnum):
    """What becomes of a row that was sent."""

    MARK = "mark"
    DELETE = "delete"


class OnParked(StrEnum):
    """What becomes of a key's later rows when one is parked."""

    HOLD = "hold"
    CONTINUE = "continue"


class LogFormat(StrEnum):
    """How a log line looks."""

    JSON = "json"
    TEXT = "text"


class LogLevel(StrEnum):
    """The least severe event that is logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"
