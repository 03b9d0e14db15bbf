"""Secrets: where they come from, and how they are kept out of every text.

Owns: `Secret`, a setting that is read anew at every connect (credentials rotate), and `Redactor`, which knows each
password that was ever read and removes it from texts, as written, percent-decoded and percent-encoded.
Invariant: a password is taught to the redactor before the text that holds it is handed out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus, unquote

MASK = "***"

SECRET_FILE_BYTES_MAX = 64 * 1024

_URL_USER = re.compile(r"(?<=[A-Za-z0-9+.-])://[^\s:/@]*:(?=\S)")
"""Of a URL what stands before its password, which is anything up to the at-sign: whoever writes a raw / or ? there is covered too."""

_PLACEHOLDER = ("PASSWORD", "HOST:PORT")
"""Around the at-sign of the URLs in our own errors: no password."""

_SCHEME = r"[A-Za-z0-9+.-]*"
"""Lenient: a faulty one is what an error is about. Anything more before `://` may hold a password."""

_SECRET_PARAMETER = re.compile(r"((?:password|passwd|sslpassword)\s*=\s*)[^\s&,;]+", re.IGNORECASE)
"""`?password=`, `&sslpassword=`, and libpq's `password=` words."""

_SHORT = 4
"""Shorter passwords are masked only where they stand alone; else `a` would make every log unreadable."""


class Redactor:
    """Removes the passwords it was taught from texts. Learning and redacting are safe from several threads.

    `names` are words of ours that are no secret, and stay whole where a password is a part of one: the settings' names,
    without which an error would not say which setting it means.
    """

    __slots__ = ("_forms", "_names", "_pattern")

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._names = sorted(names, key=len, reverse=True)
        self._forms: frozenset[str] = frozenset()
        self._pattern: re.Pattern[str] | None = None

    def learn(self, *passwords: str) -> None:
        """Each password as it is written where it came from: raw or percent-encoded."""
        forms = {form for password in passwords for form in _forms(password)} - self._forms
        if not forms:
            return
        self._forms = self._forms | forms
        # The longest first: a password may begin with another one.
        ordered = sorted(self._forms, key=lambda form: (-len(form), form))
        within = [form for form in ordered if any(form in name for name in self._names)]
        others = [form for form in ordered if form not in within]
        names = [rf"(?P<name>\b(?:{'|'.join(map(re.escape, self._names))})\b)"] if within else []
        self._pattern = re.compile("|".join([*map(_alternative, others), *names, *map(_alternative, within)]))

    def learn_url(self, text: str) -> None:
        """Every password in a URL, or in several separated by commas."""
        self.learn(*passwords_of(text))

    def redact(self, text: str) -> str:
        """The text with `***` in place of every password, known or plain to see in a URL."""
        if self._pattern is not None:
            text = self._pattern.sub(lambda found: found.groupdict().get("name") or MASK, text)
        return mask_urls(text)


def redacted(document: Any, redact: Callable[[str], str]) -> Any:
    """A JSON document with each of its texts redacted. Keys and numbers stay: they are ours, and `1234` or `relays` may hold
    somebody's password.
    """
    match document:
        case str():
            return redact(document)
        case Mapping():
            return {key: redacted(value, redact) for key, value in document.items()}
        case list() | tuple():
            return [redacted(value, redact) for value in document]
        case _:
            return document


_UNDECODED = "surrogateescape"
"""PGPASSWORD may hold bytes that are no UTF-8: Python keeps them so, and they are redacted all the same."""


def mask_urls(text: str) -> str:
    """The text with what can only be a password in a URL replaced by `***`."""
    if "@" in text and "://" in text:
        # Part by part, so that the time grows with the length alone: anybody's words come here, of a megabyte and more.
        *parts, rest = text.split("@")
        nexts = [*parts[1:], rest]
        text = "@".join([*(_without_password(part, after) for part, after in zip(parts, nexts, strict=True)), rest])
    return _SECRET_PARAMETER.sub(rf"\1{MASK}", text)


def _without_password(part: str, after: str) -> str:
    """What stands between two at-signs, or before the first."""
    if not part or part[-1].isspace():
        return part
    begin = len(part) - len(part.rsplit(None, 1)[-1])
    user = _URL_USER.search(part, begin)
    if user is None or (part[user.end() :] == _PLACEHOLDER[0] and re.match(rf"{_PLACEHOLDER[1]}\b", after)):
        return part
    return part[: user.end()] + MASK


def shown_url(text: str) -> str | None:
    """A faulty URL, or several, fit for an error: without user and password; None where they could be anywhere."""
    shown = []
    for url in _split_urls(text):
        scheme, separator, rest = url.partition("://")
        address, question, query = rest.partition("?")
        authority = address.partition("/")[0]
        if (
            not separator
            or not re.fullmatch(_SCHEME, scheme)
            or "@" in query
            or address.count("@") > 1
            or ("@" in address) != ("@" in authority)
        ):
            return None
        if "@" in authority:
            address = MASK + address[address.index("@") :]
        elif not re.fullmatch(r"(\[[^\]]*\]|[^:\[\]]*)(:[0-9]{0,5})?", authority):
            # What looks like a port may be a password whose host was forgotten.
            return None
        shown.append(mask_urls(f"{scheme}://{address}{question}{query}"))
    return ",".join(shown)


def _split_urls(text: str) -> list[str]:
    return re.split(r",\s*(?=[A-Za-z][A-Za-z0-9+.-]*://)", text)


def passwords_of(text: str) -> Iterable[str]:
    """The passwords in one URL or several separated by commas, as written there.

    Lenient on purpose: of a URL that no driver would accept, whatever may be the password.
    """
    for url in _split_urls(text):
        _, separator, rest = url.partition("://")
        if not separator:
            continue
        authority = re.split(r"[/?#]", rest, maxsplit=1)[0]
        # A raw / ? # or @ inside a password ends it early for a parser; so also all up to the last at-sign.
        for userinfo in {authority.partition("@")[0], authority.rpartition("@")[0], rest.rpartition("@")[0]}:
            _, colon, password = userinfo.partition(":")
            if colon and password and "@" in rest:
                yield password
        for name, value in re.findall(r"[?&]([^=&]+)=([^&#]*)", rest):
            if unquote(name).lower() in ("password", "passwd", "sslpassword") and value:
                yield value
    # What is no URL for us may have been meant as one more: `…?heartbeat=5,am:://u:password@h`.
    for piece in re.split(r"[,\s]", text):
        before = piece.rpartition("@")[0]
        for colon in re.finditer(":", before):
            password = before[colon.end() :]
            if password and password[0] not in ":/":
                yield password


def _quoted(text: str, safe: str = "/") -> str:
    return quote(text, safe=safe, errors=_UNDECODED)


def _forms(written: str) -> set[str]:
    """The shapes in which a password can turn up in somebody's error text."""
    decoded = unquote(written)
    shapes = {written, decoded, _quoted(decoded, safe=""), _quoted(decoded), quote_plus(decoded, errors=_UNDECODED)}
    # yarl and urllib leave different characters as they are; lower-case hex is as valid as upper-case.
    shapes |= {_quoted(decoded, safe="!$&'()*+,;=-._~"), _quoted(decoded, safe="!$&'()*+,;=:-._~")}
    shapes |= {re.sub("%[0-9A-F]{2}", lambda hexes: hexes[0].lower(), shape) for shape in shapes}
    shapes |= {repr(shape)[1:-1] for shape in (written, decoded)}
    shapes |= {
        json.dumps(shape, ensure_ascii=ascii_only)[1:-1] for shape in (written, decoded) for ascii_only in (False, True)
    }
    return {shape for shape in shapes if shape}


def _alternative(form: str) -> str:
    escaped = re.escape(form)
    return rf"(?<!\w){escaped}(?!\w)" if len(form) < _SHORT else escaped


class Secret:
    """A secret setting: a value from the environment, or a file that is read each time it is asked for.

    Its representation never shows the value.
    """

    __slots__ = ("_path", "_redactor", "_value", "name")

    def __init__(self, name: str, redactor: Redactor, *, value: str | None = None, path: str | None = None) -> None:
        assert (value is None) != (path is None), "a secret has one source"
        self.name = name
        self._redactor = redactor
        self._value = value
        self._path = path

    def read(self) -> str:
        """The secret as it is now. Raises ValueError with a few words when its file cannot be read."""
        text = self._value if self._path is None else _read_file(self._path)
        assert text is not None, "a secret without a source"
        self._redactor.learn_url(text)
        return text

    @property
    def source(self) -> str:
        """The variable that names it, for messages."""
        return self.name if self._path is None else f"{self.name}_FILE"

    def __repr__(self) -> str:
        return f"Secret({self.source})"


def _read_file(path: str) -> str:
    try:
        with Path(path).open("rb") as file:
            data = file.read(SECRET_FILE_BYTES_MAX + 1)
        text = data.decode("utf-8-sig").strip("\r\n")
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError("is not UTF-8") from None
    if len(data) > SECRET_FILE_BYTES_MAX:
        raise ValueError("is larger than 64 KiB")
    if not text.strip():
        raise ValueError("is empty")
    return text.strip()
