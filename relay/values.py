"""The values of settings: texts into durations, sizes, table names, addresses, templates.

Pure functions; each raises `ValueError` with a few words that say what is wrong with the text. They never repeat
the text itself: who reports the problem shows it, redacted.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from relay.route import Template

N = TypeVar("N", int, float)
E = TypeVar("E", bound=StrEnum)

_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h|d)")
_DURATION_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_SIZE = re.compile(r"([0-9]+)(B|KiB|MiB|GiB)?")
_SIZE_UNITS = {None: 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}

DURATION_S_MAX = 36_500 * 86400.0
"""A hundred years: far from where PostgreSQL's intervals or a float's milliseconds end."""

SIZE_BYTES_MAX = 2**50
"""A PiB, far beyond any memory."""

RATE_MAX = 1_000_000_000

IDENTIFIER_BYTES_MAX = 63
"""PostgreSQL cuts longer names silently (NAMEDATALEN - 1), and two objects become one."""

DERIVED_SUFFIX_BYTES = 20
"""Room kept for what is derived from a table's name: indexes, companion tables, functions, triggers."""

SHORT_STRING_BYTES_MAX = 255
"""AMQP 0-9-1 section 4.2.5.3: exchange names and routing keys are short strings, their length is one octet."""


# ---------------------------------------------------------------- numbers


def duration(text: str) -> float:
    """`250ms 5s 2m 1h 7d` as seconds. One number, one unit; a bare number is refused: its unit would be a guess."""
    match = _DURATION.fullmatch(text)
    if match is None:
        raise ValueError("not a duration")
    seconds = float(match[1]) * _DURATION_UNITS[match[2]]
    if seconds > DURATION_S_MAX:
        raise ValueError("more than a hundred years")
    return seconds


def duration_between(minimum_s: float, maximum_s: float = DURATION_S_MAX) -> Callable[[str], float]:
    """A parser for durations within bounds, both included."""

    def parse(text: str) -> float:
        return _within(duration(text), minimum_s, maximum_s)

    return parse


def duration_list(text: str) -> tuple[float, ...]:
    """`1s,5s,30s` as seconds; 1 to 32 of them, each above zero."""
    parts = [part.strip() for part in text.split(",")]
    if len(parts) > 32:
        raise ValueError("more than 32 delays")
    delays = tuple(duration(part) for part in parts)
    if min(delays) <= 0:
        raise ValueError("a delay of zero")
    return delays


def size(text: str) -> int:
    """`64KiB 1MiB 2GiB` or plain bytes, as bytes; 1 to `SIZE_BYTES_MAX`."""
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ValueError("not a size")
    return _within(_whole(match[1]) * _SIZE_UNITS[match[2]], 1, SIZE_BYTES_MAX)


def integer_between(minimum: int, maximum: int) -> Callable[[str], int]:
    """A parser for decimal integers within bounds, both included."""

    def parse(text: str) -> int:
        if re.fullmatch(r"[0-9]+", text) is None:
            raise ValueError("not a whole number")
        return _within(_whole(text), minimum, maximum)

    return parse


def rate(text: str) -> float:
    """Messages a second: a decimal number, 0.01 to `RATE_MAX`."""
    if re.fullmatch(r"[0-9]+(\.[0-9]+)?", text) is None:
        raise ValueError("not a number")
    return _within(float(text), 0.01, float(RATE_MAX))


def _whole(digits: str) -> int:
    """Python reads no more than 4,300 digits; no bound of ours has 20."""
    return int(digits) if len(digits) < 4000 else 10**20


def _within(value: N, minimum: N, maximum: N) -> N:
    if value < minimum:
        raise ValueError("too small")
    if value > maximum:
        raise ValueError("too large")
    return value


# ---------------------------------------------------------------- words


def choice(members: type[E]) -> Callable[[str], E]:
    """A parser for one of an enumeration's values, in any case."""

    def parse(text: str) -> E:
        try:
            return members(text.lower())
        except ValueError:
            raise ValueError("unknown") from None

    return parse


def switch(text: str) -> bool:
    """`on` or `off`, in any case."""
    match text.lower():
        case "on":
            return True
        case "off":
            return False
        case _:
            raise ValueError("unknown")


def words(text: str) -> str:
    """Up to 100 printable characters: a name that shows in logs and in `status`."""
    if not text.isprintable():
        raise ValueError("has unprintable characters")
    if len(text) > 100:
        raise ValueError("longer than 100 characters")
    return text


def short_string(text: str) -> str:
    """What fits an AMQP short string: up to 255 bytes of UTF-8."""
    if len(text.encode("utf-8", "surrogatepass")) > SHORT_STRING_BYTES_MAX:
        raise ValueError("longer than 255 bytes")
    return line(text)


def utf8(text: str) -> str:
    """Any text that UTF-8 has bytes for and that PostgreSQL stores: no half of a surrogate pair, no zero byte."""
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError("not UTF-8")
    if "\0" in text:
        raise ValueError("has a zero byte")
    return text


def line(text: str) -> str:
    """Any text without control characters."""
    if any(ord(character) < 32 or ord(character) == 127 for character in text):
        raise ValueError("has control characters")
    return text


# ---------------------------------------------------------------- table names


@dataclass(frozen=True, slots=True)
class TableName:
    """A table, and what is named after it. Both parts are the real names, unquoted.

    `schema` is None where the connection's `search_path` decides.
    """

    schema: str | None
    name: str

    @property
    def quoted(self) -> str:
        """For SQL text: every part in double quotes."""
        return self.derived("")

    def derived(self, suffix: str) -> str:
        """The quoted name of an object in the same schema whose name is the table's and `suffix`."""
        assert len((self.name + suffix).encode()) <= IDENTIFIER_BYTES_MAX, "a derived name that PostgreSQL would cut"
        quoted = quote_identifier(self.name + suffix)
        return quoted if self.schema is None else f"{quote_identifier(self.schema)}.{quoted}"

    def __str__(self) -> str:
        return self.name if self.schema is None else f"{self.schema}.{self.name}"


def quote_identifier(name: str) -> str:
    """One identifier for SQL text, in double quotes, whatever it holds."""
    assert name, "an empty identifier"
    assert "\0" not in name, "an identifier with a zero byte"
    return '"' + name.replace('"', '""') + '"'


def table_name(text: str) -> TableName:
    """`outbox`, `sales.outbox`, `"My Schema"."Outbox"`, as SQL reads them: without quotes in lower case."""
    parts = _identifiers(text)
    if len(parts) > 2:
        raise ValueError("more than schema and table")
    *schema, name = parts
    if any(len(part.encode()) > IDENTIFIER_BYTES_MAX for part in schema):
        raise ValueError("the schema's name is longer than 63 bytes")
    if len(name.encode()) > IDENTIFIER_BYTES_MAX - DERIVED_SUFFIX_BYTES:
        raise ValueError(
            f"the table's name is longer than {IDENTIFIER_BYTES_MAX - DERIVED_SUFFIX_BYTES} bytes, "
            "what is named after it would be cut"
        )
    return TableName(schema[0] if schema else None, name)


_IDENTIFIER = re.compile(r'"((?:[^"\0]|"")+)"|([^\W\d][\w$]*)')


def _identifiers(text: str) -> list[str]:
    parts, at = [], 0
    while True:
        match = _IDENTIFIER.match(text, at)
        if match is None:
            raise ValueError("not a table's name")
        quoted, plain = match[1], match[2]
        # PostgreSQL folds ASCII only where the encoding has several bytes a character; so do we.
        parts.append(quoted.replace('""', '"') if quoted else _lower_ascii(plain))
        at = match.end()
        if at == len(text):
            return parts
        if text[at] != ".":
            raise ValueError("not a table's name")
        at += 1


def _lower_ascii(text: str) -> str:
    return "".join(chr(ord(character) + 32) if "A" <= character <= "Z" else character for character in text)


# ---------------------------------------------------------------- templates


def template(text: str) -> str:
    """A template of an exchange or routing key: text, `{column}` of `relay.route.FIELDS`, `{{` and `}}` for braces."""
    line(text)
    literal = "".join(words for words, _ in Template.parse(text).parts)
    if len(literal.encode("utf-8", "surrogatepass")) > SHORT_STRING_BYTES_MAX:
        raise ValueError("longer than 255 bytes")
    return text


# ---------------------------------------------------------------- addresses


@dataclass(frozen=True, slots=True)
class ListenAddress:
    """Where to listen. `host` is a name or a bare IP address; `port` 0 takes a free one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


_LISTEN = re.compile(r"(?:\[([0-9A-Fa-f:.%\w]+)\]|([^\s:\[\]/@]*)):([0-9]{1,5})")


def listen_address(text: str) -> ListenAddress | None:
    """`0.0.0.0:9761`, `[::]:9761`, `localhost:9761`, `:9761` (every IPv4 address); the empty text is None."""
    if not text:
        return None
    match = _LISTEN.fullmatch(text)
    if match is None:
        raise ValueError("not an address with a port")
    port = int(match[3])
    if port > 65535:
        raise ValueError("no such port")
    return ListenAddress(host_name(match[1] or match[2] or "0.0.0.0"), port)


def host_name(text: str) -> str:
    """A host's name or address that can be looked up: `db..svc` and a part of more than 63 characters cannot."""
    try:
        text.encode("idna")
    except UnicodeError:
        raise ValueError("names a host with a part that is empty or longer than 63 characters") from None
    return text
