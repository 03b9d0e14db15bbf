"""The URLs of PostgreSQL, RabbitMQ and its management API, checked before a driver sees them.

The drivers are lenient where a mistake hurts later: asyncpg sends a parameter that it does not know to the server as
a setting, aiormq ignores one. So what they would misread is translated or refused here, by name. Every function
raises `ValueError` with a few words that never repeat a part of the URL that may be secret.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from urllib.parse import SplitResult, quote, unquote, urlsplit

from relay import tls
from relay.values import host_name

_PERCENT_HINT = (
    "special characters of a user or password are written percent-encoded: @ %40, : %3A, / %2F, ? %3F, # %23"
)


def hosts_and_parameters(url: str) -> tuple[tuple[str, ...], Mapping[str, str]]:
    """Of a URL that was checked: its hosts (a socket's directory is one; a database's may name none), and the parameters
    behind its `?`.
    """
    parts = urlsplit(url)
    parameters = dict(_pairs(parts.query))
    if "host" in parameters:
        return tuple(parameters["host"].split(",")), parameters
    return tuple(host for host, _ in _hosts(parts.netloc, several=True)), parameters


def _split(text: str, schemes: tuple[str, ...]) -> SplitResult:
    if any(ord(character) < 33 and character != " " for character in text):
        raise ValueError("has control characters")
    if "%00" in text:
        # It ends a string in PostgreSQL's start-up packet, and a part of a login at RabbitMQ.
        raise ValueError("has %00, a NUL, which neither server takes")
    scheme, separator, _ = text.partition("://")
    if not separator or scheme not in schemes:
        raise ValueError(f"does not begin with {' or '.join(f'{known}://' for known in schemes)}")
    try:
        parts = urlsplit(text)
    except ValueError:
        raise ValueError(f"not a URL; {_PERCENT_HINT}") from None
    if "#" in text:
        raise ValueError(f"has a raw #; {_PERCENT_HINT}")
    if parts.netloc.count("@") > 1 or ("@" not in parts.netloc and "@" in parts.path):
        raise ValueError(f"has a raw @, / or ? before its host; {_PERCENT_HINT}")
    return parts


def _hosts(netloc: str, *, several: bool) -> tuple[tuple[str, int | None], ...]:
    """(host, port) of every host after the user, none of none where `several` may be; raises where one is empty or a port
    is none.
    """
    hostspecs = netloc.rpartition("@")[2]
    if several and not hostspecs:
        return ()
    if "," in hostspecs and not several:
        raise ValueError("names several hosts; several brokers are several whole URLs, separated by commas")
    found = []
    for hostspec in hostspecs.split(","):
        match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.%\w]+)\]|([^\[\]:\s]+))(?::([0-9]{1,5}))?", hostspec)
        if match is None:
            raise ValueError(f"has a host or port that is none; {_PERCENT_HINT}")
        found.append((_host(match[1] or unquote(match[2])), _port(match[3]) if match[3] else None))
    return tuple(found)


def _host(text: str) -> str:
    """A name, an address, or a socket's directory."""
    return text if text.startswith("/") else host_name(text)


def _port(text: str) -> int:
    if re.fullmatch("[0-9]{1,5}", text) is None or not 1 <= int(text) <= 65535:
        raise ValueError("has a port outside 1 to 65535")
    return int(text)


def _pairs(query: str) -> list[tuple[str, str]]:
    """libpq's and RabbitMQ's reading of a query: percent-encoding only, a plus is a plus."""
    pairs = []
    for part in filter(None, query.split("&")):
        name, separator, value = part.partition("=")
        if not separator or not name:
            raise ValueError("has a parameter without a value")
        pairs.append((unquote(name), unquote(value)))
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"has the parameter {name} twice")
    return pairs


def _one_of(name: str, value: str, allowed: Iterable[str]) -> None:
    if value not in (allowed := tuple(allowed)):
        raise ValueError(f"has {name}={value}; allowed are {', '.join(allowed)}")


def _whole(name: str, value: str, minimum: int, maximum: int) -> int:
    if re.fullmatch("-?[0-9]{1,9}", value) is None or not minimum <= int(value) <= maximum:
        raise ValueError(f"has {name}={value}; allowed is a whole number of seconds from {minimum} to {maximum}")
    return int(value)


# ---------------------------------------------------------------- PostgreSQL


@dataclass(frozen=True, slots=True, repr=False)
class DatabaseTarget:
    """A database as asyncpg takes it: `asyncpg.connect(dsn=…, timeout=connect_timeout_s or own default)`.

    `dsn` is secret. `address` is for people: hosts, ports and database without credentials. `overruled` are the URL's
    parameters for which the relay has a value of its own.
    """

    dsn: str
    address: str
    connect_timeout_s: float | None = None
    overruled: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"DatabaseTarget({self.address})"


_SSLMODES = ("disable", "allow", "prefer", "require", "verify-ca", "verify-full")
_SESSION_ATTRS = ("any", "primary", "standby", "read-write", "read-only", "prefer-standby")
_STRICT_SSLMODES = ("require", "verify-ca", "verify-full")
_TLS_VERSIONS = ("TLSv1", "TLSv1.1", "TLSv1.2", "TLSv1.3")

# asyncpg/connect_utils.py (0.30-0.32), `_parse_connect_dsn_and_args`: what it takes out of a query. Everything else
# becomes a setting that the server is asked for at the start of the session.
_DRIVER_CHOICES: Mapping[str, tuple[str, ...] | None] = {
    "host": None,
    "port": None,
    "dbname": None,
    "database": None,
    "user": None,
    "password": None,
    "passfile": None,
    "service": None,
    "krbsrvname": None,
    "gsslib": ("gssapi", "sspi"),
    "sslpassword": None,
    "sslcert": None,
    "sslkey": None,
    "sslrootcert": None,
    "sslcrl": None,
    "sslmode": _SSLMODES,
    "sslnegotiation": ("postgres", "direct"),
    "ssl_min_protocol_version": _TLS_VERSIONS,
    "ssl_max_protocol_version": _TLS_VERSIONS,
    "target_session_attrs": _SESSION_ATTRS,
}

# What the driver does anyway, under libpq's names: these values are dropped, any other is refused.
_HARMLESS = {
    "channel_binding": ("disable", "prefer"),
    "gssencmode": ("disable", "prefer"),
    "gssdelegation": ("0",),
    "sslcompression": ("0",),
    "sslsni": ("1",),
    "sslcertmode": ("allow",),
    "load_balance_hosts": ("disable",),
    "keepalives": ("1",),
    "client_encoding": ("UTF8", "utf8", "UTF-8", "utf-8", "auto"),
}

# libpq parameters with an effect that the driver cannot give.
_REFUSED = (
    "hostaddr",
    "keepalives_idle",
    "keepalives_interval",
    "keepalives_count",
    "tcp_user_timeout",
    "replication",
    "require_auth",
    "requirepeer",
    "requiressl",
    "sslcrldir",
    "sslkeylogfile",
    "krblogin",
    "min_protocol_version",
    "max_protocol_version",
    "scram_client_key",
    "scram_server_key",
    "servicefile",
    "oauth_issuer",
    "oauth_client_id",
    "oauth_client_secret",
    "oauth_scope",
)

_TRANSLATED = ("connect_timeout",)

_OVERRULED = ("application_name", "fallback_application_name")
"""Platforms hand out URLs that have them, so they are no error."""

_LIBPQ = (*_DRIVER_CHOICES, *_HARMLESS, *_REFUSED, *_TRANSLATED, *_OVERRULED, "options")


def database_target(text: str) -> DatabaseTarget:
    """A `postgresql://` URL for asyncpg. Several hosts, `[::1]`, sockets as `%2Frun%2Fpostgresql` or `?host=/run/…`.

    `connect_timeout` is translated, `application_name` and `fallback_application_name` are left out (`overruled`); libpq's
    other parameters go to the driver where it knows them, are dropped where it does the same anyway, and are refused by
    name otherwise.
    """
    parts = _split(text, ("postgresql", "postgres"))
    pairs = dict(_pairs(parts.query))
    hosts = _database_hosts(parts, pairs)
    _refuse_twice(parts, pairs)
    timeout_s: float | None = None
    kept: dict[str, str] = {}
    for name, value in pairs.items():
        if name == "connect_timeout":
            # libpq: zero or less waits for ever; no wait of the relay does, so it means the relay's own bound.
            seconds = _whole(name, value, -1, 3600)
            timeout_s = float(seconds) if seconds > 0 else None
        elif name not in _OVERRULED and _is_kept(name, value):
            kept[name] = value
    if kept.get("sslnegotiation") == "direct" and kept.get("sslmode") not in _STRICT_SSLMODES:
        raise ValueError(f"has sslnegotiation=direct, which needs sslmode={' or '.join(_STRICT_SSLMODES)}")
    _check_database_files(kept)
    query = "&".join(f"{quote(name, safe='')}={quote(value, safe='/,')}" for name, value in kept.items())
    dsn = f"{parts.scheme}://{parts.netloc}{parts.path}" + (f"?{query}" if query else "")
    database = pairs.get("dbname") or pairs.get("database") or unquote(parts.path[1:])
    addresses = ",".join(_address(host, port) for host, port in hosts)
    overruled = tuple(name for name in _OVERRULED if name in pairs)
    return DatabaseTarget(dsn, f"{addresses}/{database}", timeout_s, overruled)


def _database_hosts(parts: SplitResult, pairs: Mapping[str, str]) -> tuple[tuple[str, int | None], ...]:
    in_authority = _hosts(parts.netloc, several=True)
    if "host" not in pairs:
        if "port" in pairs and not in_authority:
            raise ValueError("has a port parameter without a host")
        hosts = in_authority
    elif in_authority:
        raise ValueError("has its host twice, before the path and as a parameter")
    else:
        names = pairs["host"].split(",")
        if not all(names):
            raise ValueError("has an empty host")
        hosts = tuple((_host(name), None) for name in names)
    if "port" in pairs:
        ports = [_port(port) for port in pairs["port"].split(",")]
        if len(ports) not in (1, len(hosts)):
            raise ValueError("has another number of ports than of hosts")
        if any(port is not None for _, port in hosts):
            raise ValueError("has its port twice, before the path and as a parameter")
        hosts = tuple((host, ports[min(i, len(ports) - 1)]) for i, (host, _) in enumerate(hosts))
    return hosts


def _refuse_twice(parts: SplitResult, pairs: Mapping[str, str]) -> None:
    """asyncpg lets the first part of the URL win, libpq the parameter: the writer cannot have meant both."""
    userinfo = parts.netloc.rpartition("@")[0]
    user, _, password = userinfo.partition(":")
    database = parts.path.removeprefix("/")
    for name, first in (("user", user), ("password", password), ("dbname", database), ("database", database)):
        if first and name in pairs:
            raise ValueError(f"has its {name} twice, before the ? and as a parameter")


def _is_kept(name: str, value: str) -> bool:
    """Whether asyncpg gets the parameter. Raises for one that it would misread."""
    if name in _DRIVER_CHOICES:
        if (allowed := _DRIVER_CHOICES[name]) is not None:
            _one_of(name, value, allowed)
        return True
    if name in _HARMLESS:
        if value not in _HARMLESS[name]:
            raise ValueError(f"has {name}={value}, which the driver asyncpg cannot do; remove it")
        return False
    if name in _REFUSED:
        raise ValueError(f"has the parameter {name}, which the driver asyncpg does not know; remove it")
    if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.$]*", name) is None:
        raise ValueError("has a parameter whose name is none")
    near = difflib.get_close_matches(name, _LIBPQ, n=1, cutoff=0.8)
    if near and near[0] != name:
        raise ValueError(f"has the unknown parameter {name}; nearest: {near[0]}")
    # A setting of the server, such as search_path: handed on.
    return True


def _check_database_files(given: Mapping[str, str]) -> None:
    if given.get("sslmode") == "disable":
        return
    for name in ("sslrootcert", "sslcrl"):
        if name in given:
            tls.check_authorities(name, given[name])
    if "passfile" in given:
        tls.check_readable("passfile", given["passfile"])
    if "sslcert" in given:
        password = given.get("sslpassword", "")
        tls.check_identity("sslcert", given["sslcert"], "sslkey", given.get("sslkey"), password=password)
    elif "sslkey" in given:
        tls.check_readable("sslkey", given["sslkey"])


def _address(host: str, port: int | None) -> str:
    shown = f"[{host}]" if ":" in host else host
    return shown if port is None else f"{shown}:{port}"


# ---------------------------------------------------------------- RabbitMQ

_AMQP_TLS = ("cafile", "capath", "cadata", "certfile", "keyfile", "no_verify_ssl")

_MANAGEMENT_PARAMETERS = ("cafile", "capath", "certfile", "keyfile", "no_verify_ssl")

_AMQP_PARAMETERS = (*_AMQP_TLS, "auth", "heartbeat", "name", "timeout")

# RabbitMQ's own URI query names, which aiormq would ignore without a word: a CA left out, a check not made.
_AMQP_RENAMED = {
    "cacertfile": "cafile",
    "verify": "no_verify_ssl",
    "auth_mechanism": "auth",
    "connection_timeout": "timeout",
    "connection_name": "name",
}


def amqp_urls(text: str) -> tuple[str, ...]:
    """One `amqp://` or `amqps://` URL or several, separated by commas, in the order in which they are tried.

    The vhost is one percent-encoded path segment (`/` and nothing are the vhost `/`). Parameters are aiormq's:
    cafile, capath, cadata, certfile, keyfile, no_verify_ssl, auth, heartbeat (s), timeout (s), name.
    """
    urls = tuple(part.strip() for part in re.split(r",\s*(?=[A-Za-z][A-Za-z0-9+.-]*://)", text))
    for number, url in enumerate(urls, 1):
        try:
            _check_amqp_url(url)
        except ValueError as error:
            raise ValueError(f"URL {number} {error}" if len(urls) > 1 else str(error)) from None
    return urls


def amqp_address(url: str) -> str:
    """Host, port and vhost of a checked URL, without credentials, for people."""
    parts = urlsplit(url)
    ((host, port),) = _hosts(parts.netloc, several=False)
    return f"{_address(host, port)}/{quote(unquote(parts.path[1:]) or '/', safe='')}"


def amqp_user(url: str) -> str | None:
    """Who logs in by a checked URL; None where its certificate says it, by the broker's `ssl_cert_login_from`."""
    parts = urlsplit(url)
    is_external = dict(_pairs(parts.query)).get("auth", "").lower() == "external"
    return None if is_external else unquote(parts.username or "guest")


def _check_amqp_url(url: str) -> None:
    parts = _split(url, ("amqp", "amqps"))
    _hosts(parts.netloc, several=False)
    vhost = unquote(parts.path[1:])
    # yarl resolves dots as path segments, aiormq decodes %2F twice: both would silently reach another vhost.
    if {".", ".."} & set(vhost.split("/")) or "%2F" in vhost:
        raise ValueError("names a vhost that the driver aiormq cannot reach")
    if len(vhost.encode("utf-8", "surrogatepass")) > 255:
        raise ValueError("names a vhost longer than 255 bytes")
    given = dict(_pairs(parts.query))
    for name, value in given.items():
        if name not in _AMQP_PARAMETERS:
            near = _AMQP_RENAMED.get(name) or next(
                iter(difflib.get_close_matches(name, _AMQP_PARAMETERS, n=1, cutoff=0.5)), None
            )
            nearest = f"; nearest: {near}" if near else ""
            raise ValueError(f"has the unknown parameter {name}{nearest}; allowed are {', '.join(_AMQP_PARAMETERS)}")
        _check_amqp_parameter(name, value, is_tls=parts.scheme == "amqps")
    _check_identity(given)
    if given.get("auth", "").lower() == "external" and "certfile" not in given:
        raise ValueError("has auth=external without a certfile, whose name would be the user's")


def _check_amqp_parameter(name: str, value: str, *, is_tls: bool) -> None:
    if name in _AMQP_TLS and not is_tls:
        raise ValueError(f"has the parameter {name}, which needs TLS: amqps:// or https://")
    match name:
        case "cafile":
            tls.check_authorities(name, value)
        case "cadata":
            tls.check_authorities_data(name, value)
        case "capath":
            tls.check_readable(name, value)
        case "no_verify_ssl":
            _one_of(name, value, ("0", "1"))
        case "auth":
            _one_of(name, value.lower(), ("plain", "external"))
        case "heartbeat":
            _whole(name, value, 0, 65534)
        case "timeout":
            _whole(name, value, 1, 3600)
        case _:
            pass


def _check_identity(given: Mapping[str, str]) -> None:
    if "certfile" in given:
        tls.check_identity("certfile", given["certfile"], "keyfile", given.get("keyfile"))
    elif "keyfile" in given:
        raise ValueError("has a keyfile without a certfile")


def management_url(text: str) -> str:
    """An `http://` or `https://` URL of RabbitMQ's management API; TLS parameters as in an AMQP URL."""
    parts = _split(text, ("http", "https"))
    _hosts(parts.netloc, several=False)
    given = dict(_pairs(parts.query))
    for name, value in given.items():
        if name not in _MANAGEMENT_PARAMETERS:
            raise ValueError(f"has the unknown parameter {name}; allowed are {', '.join(_MANAGEMENT_PARAMETERS)}")
        _check_amqp_parameter(name, value, is_tls=parts.scheme == "https")
    _check_identity(given)
    return text
