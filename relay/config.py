"""The configuration: from an environment to a checked `Config`, with its errors, its warnings and its page.

`load` is given the environment (only `cli` reads the real one) and reports every fault at once. The variables stand
in `relay/settings.py`; docs/configuration.md is printed from there by `python -m relay.config`.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import secrets
import socket
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from relay import urls
from relay.choices import Envelope, LogFormat, LogLevel, OnParked, SentRows, Sink
from relay.core.settings import Ordering, Unroutable
from relay.errors import BrokerUnavailable, ConfigError, DatabaseUnavailable, RelayError
from relay.redaction import Redactor, Secret, shown_url
from relay.settings import (
    COMMANDS,
    SETTINGS,
    SETTINGS_BY_VARIABLE,
    Setting,
    needed_by,
    used_by,
)
from relay.values import ListenAddress, TableName

__all__ = [
    "COMMANDS",
    "SETTINGS",
    "Config",
    "Envelope",
    "ListenAddress",
    "LogFormat",
    "LogLevel",
    "OnParked",
    "Ordering",
    "SentRows",
    "Sink",
    "TableName",
    "Unroutable",
    "load",
    "needed_by",
    "not_set",
    "page",
    "used_by",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """A configuration that was checked. Durations in seconds (`_s`), sizes in bytes (`_bytes`), None is unset.

    A `Secret` is read at each connect, so that rotated credentials work without a restart; `database`, `amqp_urls`
    and their inbox twins do that and check what they read. `redactor` knows every password that was ever read.
    """

    database_url: Secret | None
    amqp_url: Secret | None
    table: TableName
    name: str
    management_url: Secret | None
    sink: Sink
    sink_path: str | None
    exchange: str
    routing_key: str
    envelope: Envelope
    ordering: Ordering
    sent_rows: SentRows
    settle_commit: bool
    retention_s: float
    max_read_ahead: int
    max_in_flight: int
    max_bytes: int
    lease_s: float
    max_rate: float | None
    retry_delays_s: tuple[float, ...]
    max_age_s: float | None
    unroutable: Unroutable
    on_parked: OnParked
    parked_retention_s: float | None
    confirm_timeout_s: float
    poll_interval_s: float
    shutdown_grace_s: float
    listen: ListenAddress | None
    log_format: LogFormat
    log_level: LogLevel
    inbox_database_url: Secret | None
    inbox_amqp_url: Secret | None
    inbox_queue: str | None
    inbox_table: TableName
    inbox_prefetch: int
    inbox_retention_s: float
    inbox_listen: ListenAddress | None
    redactor: Redactor

    def database(self) -> urls.DatabaseTarget:
        """RELAY_DATABASE_URL, read anew. Raises ConfigError when it is unset.

        Raises DatabaseUnavailable when its file cannot be read or is wrong by now: it may be in the middle of a
        rotation, so that is waited for like the server itself.
        """
        return urls.database_target(_reread("RELAY_DATABASE_URL", self.database_url, DatabaseUnavailable))

    def amqp_urls(self) -> tuple[str, ...]:
        """RELAY_AMQP_URL, read anew: what to try in turn. Raises ConfigError when unset, else BrokerUnavailable."""
        return urls.amqp_urls(_reread("RELAY_AMQP_URL", self.amqp_url, BrokerUnavailable))

    def management(self) -> str | None:
        """RELAY_MANAGEMENT_URL, read anew; None where it is unset. Raises BrokerUnavailable as `amqp_urls` does."""
        if self.management_url is None:
            return None
        return urls.management_url(_reread("RELAY_MANAGEMENT_URL", self.management_url, BrokerUnavailable))

    def inbox_database(self) -> urls.DatabaseTarget:
        """RELAY_INBOX_DATABASE_URL, read anew. Raises as `database` does."""
        return urls.database_target(_reread("RELAY_INBOX_DATABASE_URL", self.inbox_database_url, DatabaseUnavailable))

    def inbox_amqp_urls(self) -> tuple[str, ...]:
        """RELAY_INBOX_AMQP_URL, read anew. Raises as `amqp_urls` does."""
        return urls.amqp_urls(_reread("RELAY_INBOX_AMQP_URL", self.inbox_amqp_url, BrokerUnavailable))


def _reread(variable: str, secret: Secret | None, unavailable: type[RelayError]) -> str:
    setting = SETTINGS_BY_VARIABLE[variable]
    if secret is None:
        raise ConfigError([not_set(setting)])
    try:
        text = secret.read()
        setting.parse(text)
    except ValueError as error:
        raise unavailable(f"{secret.source}: {error}", hint=f"allowed: {setting.allowed}") from None
    return text


# ---------------------------------------------------------------- loading

_KUBERNETES = re.compile(r"RELAY_(.+_)?(SERVICE_HOST|SERVICE_PORT(_.+)?|PORT(_\d+_(TCP|UDP)(_.+)?)?)", re.DOTALL)
"""What Kubernetes puts into the environment of every pod beside a service whose name begins with `relay`."""

_UNDECODED = re.compile("[\ud800-\udfff]")
"""What Python makes of bytes in the environment that are no UTF-8."""

_SHOWN_CHARACTERS_MAX = 80


def load(
    environ: Mapping[str, str], *, needs: frozenset[str] = frozenset(), uses: frozenset[str] | None = None
) -> tuple[Config, tuple[str, ...]]:
    """The configuration in an environment, and warnings, one line each.

    `needs` are the variables that must be set (`needed_by`), `uses` those that are looked at at all (`used_by`; None:
    all): the others keep their defaults. Raises ConfigError with all problems at once, each naming the variable,
    the value (never a secret) and what is allowed.
    """
    redactor = Redactor([each for name in SETTINGS_BY_VARIABLE for each in (name, f"{name}_FILE")])
    if password := environ.get("PGPASSWORD"):
        # The driver reads it by itself where the URL has none.
        redactor.learn(password)
    looked_at = {name: value for name, value in environ.items() if uses is None or name.removesuffix("_FILE") in uses}
    found: dict[str, Any] = {}
    problems: list[str] = []
    for setting in SETTINGS:
        found[setting.field] = None
        try:
            found[setting.field] = _value(setting, looked_at, redactor)
        except ConfigError as error:
            problems.extend(error.problems)
            continue
        if found[setting.field] is None and setting.variable in needs and not _is_spared(setting, environ):
            problems.append(not_set(setting))
    problems.extend(_contradictions(found, uses))
    unknown = tuple(_unknown(environ))
    if problems:
        # Here, with every password known: one setting's text may hold that of another, which was read later.
        hidden = [redactor.redact(each) for each in problems]
        # A misspelt name is the likeliest reason why another one is not set.
        raise ConfigError(hidden, hint="; ".join(unknown) or None)
    if found["name"] is None:
        found["name"] = f"{socket.gethostname()[:80]}-{secrets.token_hex(3)}"
    return Config(**found, redactor=redactor), (*unknown, *_idle(found, looked_at))


def _is_spared(setting: Setting, environ: Mapping[str, str]) -> bool:
    """Whether another setting makes a required one needless: a file sink has no broker."""
    sink = environ.get("RELAY_SINK", "").strip().lower()
    return setting.variable == "RELAY_AMQP_URL" and sink == Sink.FILE


def _value(setting: Setting, environ: Mapping[str, str], redactor: Redactor) -> Any:
    """One setting's value; None where it is unset and has no default. Raises ConfigError."""
    for name in (setting.variable, f"{setting.variable}_FILE"):
        if _UNDECODED.search(environ.get(name, "")):
            # No server takes such bytes for a name or a password, and no log takes them at all.
            raise ConfigError([f"{name}: is not UTF-8; allowed: {setting.allowed}"])
    text = environ.get(setting.variable)
    if text is not None:
        text = text.strip()
        if not text and not setting.empty_is_value:
            text = None
    if setting.is_secret:
        return _secret(setting, text, environ.get(f"{setting.variable}_FILE", "").strip() or None, redactor)
    if text is None:
        text = setting.default
    if text is None:
        return None
    try:
        return setting.parse(text)
    except ValueError as error:
        shown = redactor.redact(text)
        if len(shown) > _SHOWN_CHARACTERS_MAX:
            shown = shown[:_SHOWN_CHARACTERS_MAX] + "…"
        problem = f"{setting.variable}={shown!r}: {error}; allowed: {setting.allowed}"
        raise ConfigError([problem]) from None


def _secret(setting: Setting, text: str | None, path: str | None, redactor: Redactor) -> Secret | None:
    if text is not None and path is not None:
        raise ConfigError(
            [f"{setting.variable}: set twice, by {setting.variable} and {setting.variable}_FILE; allowed: one"]
        )
    if text is None and path is None:
        return None
    secret = Secret(setting.variable, redactor, value=text, path=path)
    try:
        setting.parse(secret.read())
    except ValueError as error:
        given = text or path or ""
        # A URL, or what is left of one, that was given for the file's name is as secret as in its own place.
        is_path = text is None and not any(sign in given for sign in ("://", "@", "="))
        value = given if is_path else shown_url(given)
        if not is_path:
            redactor.learn_url(given)
        if value is None:
            # Where its password stands is anybody's guess: none of it may show in another variable's problem.
            redactor.learn(given)
        shown = secret.source if value is None else f"{secret.source}={value!r}"
        raise ConfigError([_wrong(setting, shown, str(error))]) from None
    return secret


def _wrong(setting: Setting, shown: str, problem: str) -> str:
    return f"{shown}: {problem}; allowed: {setting.allowed}"


def not_set(setting: Setting) -> str:
    """The problem of a setting that a command needs and does not find."""
    by_file = f", or its file in {setting.variable}_FILE" if setting.is_secret else ""
    return f"{setting.variable}: not set; allowed: {setting.allowed}{by_file}"


def _contradictions(found: Mapping[str, Any], uses: frozenset[str] | None) -> Iterable[str]:
    """Settings that are each allowed and make no sense together. One that is wrong by itself is None here."""
    if found["sink"] == Sink.FILE and found["sink_path"] is None:
        yield "RELAY_SINK_PATH: not set, RELAY_SINK=file needs it; allowed: a path, or - for the standard output"
    if uses is None or "RELAY_INBOX_RETENTION" in uses:
        yield from _forgotten_too_soon(found)


def _forgotten_too_soon(found: Mapping[str, Any]) -> Iterable[str]:
    """What the inbox forgets while a copy can still come would take effect twice."""
    kept_s = found["inbox_retention_s"]
    for variable in ("RELAY_RETENTION", "RELAY_PARKED_RETENTION"):
        replayed_s = found[SETTINGS_BY_VARIABLE[variable].field]
        if kept_s is not None and replayed_s is not None and kept_s <= replayed_s:
            yield (
                f"RELAY_INBOX_RETENTION: {kept_s:.12g} s is not longer than {variable}, {replayed_s:.12g} s;"
                " allowed: longer than any replay, so that nothing takes effect twice"
            )


def _idle(found: Mapping[str, Any], environ: Mapping[str, str]) -> Iterable[str]:
    """Warnings about settings that have no effect beside the others."""
    if environ.get("RELAY_SINK_PATH") and found["sink"] is Sink.AMQP:
        yield "RELAY_SINK_PATH has no effect: RELAY_SINK is amqp"
    if environ.get("RELAY_RETENTION") and found["sent_rows"] is SentRows.DELETE:
        yield "RELAY_RETENTION has no effect: RELAY_SENT_ROWS is delete"
    if environ.get("RELAY_ON_PARKED") and found["ordering"] is Ordering.NONE:
        yield "RELAY_ON_PARKED has no effect: RELAY_ORDERING is none, no row waits for another"
    if found["max_in_flight"] > found["max_read_ahead"]:
        yield (
            f"RELAY_MAX_IN_FLIGHT={found['max_in_flight']} is never reached: RELAY_MAX_READ_AHEAD={found['max_read_ahead']}"
            " bounds all rows in memory, and those in flight are among them"
        )
    for variable in ("RELAY_DATABASE_URL", "RELAY_INBOX_DATABASE_URL"):
        for name in _overruled(found[SETTINGS_BY_VARIABLE[variable].field]):
            yield f"{variable}: its {name} has no effect: the relay names its sessions itself, outbox-relay and what each is for"
    if list(found["retry_delays_s"]) != sorted(found["retry_delays_s"]):
        yield "RELAY_RETRY_DELAYS falls: a row that failed more often is tried again sooner"
    if found["max_age_s"] is not None and found["max_age_s"] < found["retry_delays_s"][0]:
        yield "RELAY_MAX_AGE is below the first of RELAY_RETRY_DELAYS: no row is ever retried"


def _overruled(secret: Secret | None) -> tuple[str, ...]:
    try:
        return () if secret is None else urls.database_target(secret.read()).overruled
    except ValueError:
        # Its file has changed since it was checked: the next connect says so.
        return ()


def _unknown(environ: Mapping[str, str]) -> Iterable[str]:
    """A warning for each RELAY_ variable that means nothing here; the value is not shown, it may be a secret."""
    known = [setting.variable for setting in SETTINGS]
    known += [f"{setting.variable}_FILE" for setting in SETTINGS if setting.is_secret]
    for variable in sorted(environ):
        if not variable.startswith("RELAY_") or variable in known or variable.startswith("RELAY_TEST_"):
            continue
        if _KUBERNETES.fullmatch(variable):
            continue
        near = difflib.get_close_matches(variable, known, n=1, cutoff=0.0)
        shown = variable.encode(errors="backslashreplace").decode()
        yield f"{shown} is unknown and ignored; nearest: {near[0]}"


# ---------------------------------------------------------------- the page


def page() -> str:
    """The text of docs/configuration.md."""
    lines = [
        "# Configuration",
        "",
        "<!-- Printed from relay/settings.py by `python -m relay.config`; a test compares. -->",
        "",
        "Everything is set in the environment. A variable that is empty counts as unset, unless its row says otherwise.",
        "Each secret can be given as a file instead, by `NAME_FILE`; the file is read anew at every connect, so that",
        "rotated credentials work without a restart. All errors of a configuration are reported at once (exit code 2); a",
        "command looks only at the settings that it uses. An unknown `RELAY_` variable is a warning with the nearest name.",
        "",
        "| variable | default | meaning | allowed |",
        "| --- | --- | --- | --- |",
    ]
    for setting in SETTINGS:
        default = f"`{setting.default}`" if setting.default is not None else setting.shown_default
        secret = " (secret, also as `" + setting.variable + "_FILE`)" if setting.is_secret else ""
        allowed = setting.allowed.replace("|", "\\|")
        lines.append(f"| `{setting.variable}` | {default} | {setting.meaning}{secret} | {allowed} |")
    lines += [
        "",
        "Tracing is switched on by the standard `OTEL_` variables ([tracing.md](tracing.md)).",
        "",
        "## Required by",
        "",
        "| command | variables |",
        "| --- | --- |",
        *(f"| `relay {command}` | {_listed(needed_by(command))} |" for command in COMMANDS),
        "",
        "## URLs",
        "",
        "Special characters of a user, password or vhost are percent-encoded: `@` is `%40`, `/` is `%2F`, `%` is `%25`.",
        "",
        "PostgreSQL: several hosts (`h1:5432,h2:5432`), `[::1]`, sockets (`?host=/run/postgresql`). Parameters are those",
        "of asyncpg (`sslmode sslrootcert sslcert sslkey sslcrl sslpassword target_session_attrs` …) and settings of the",
        "server (`search_path` …). `connect_timeout` (whole seconds) bounds each connect. `application_name` and",
        "`fallback_application_name` have no effect, and a warning says so: the relay sets it, to `outbox-relay` and what the",
        "session is for, which is how the runbooks find its sessions. Parameters of libpq that the driver does not know are",
        "errors that name them, unless they ask for what it does anyway.",
        "",
        "RabbitMQ: the vhost is one path segment, `%2F` or nothing for `/`. Parameters are those of aiormq:",
        "`cafile capath cadata certfile keyfile no_verify_ssl` (with `amqps://`), `auth` (`plain`, `external`),",
        "`heartbeat` and `timeout` (whole seconds), `name`. The management URL takes the TLS ones, with `https://`.",
        "",
    ]
    return "\n".join(lines)


def _listed(variables: Iterable[str]) -> str:
    order = [setting.variable for setting in SETTINGS]
    return " ".join(f"`{variable}`" for variable in sorted(variables, key=order.index)) or "none"


assert {setting.field for setting in SETTINGS} == {field.name for field in dataclasses.fields(Config)} - {"redactor"}


if __name__ == "__main__":
    sys.stdout.write(page())
