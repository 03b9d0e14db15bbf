"""The preflight's look at encryption: from the URLs alone, as they would be used. Nothing is asked of a server.

A connection that leaves the machine is wanted encrypted, and its server's certificate checked: without the check
whoever stands between can show one of his own, and has the password.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator

from relay.choices import Sink
from relay.config import Config
from relay.errors import RelayError
from relay.preflight.finding import Finding, not_checked, ok, warning
from relay.urls import amqp_address, hosts_and_parameters

CHECK = "encryption"

_MEND = "docs/security.md has the parameters"


def check(config: Config) -> list[Finding]:
    """A warning for each URL that is not encrypted, or checks nothing; else one line that all is well."""
    found = list(_warnings(config))
    return found or [ok(CHECK, "every connection stays on this machine, or is encrypted and checked")]


def _warnings(config: Config) -> Iterator[Finding]:
    try:
        target = config.database()
        yield from _database(target.dsn, target.address)
        if config.sink is Sink.AMQP:
            for url in config.amqp_urls():
                yield from _broker(url)
    except RelayError as failure:
        yield not_checked(CHECK, failure.message, failure.hint)


def _database(dsn: str, address: str) -> Iterator[Finding]:
    hosts, parameters = hosts_and_parameters(dsn)
    mode = parameters.get("sslmode", "prefer")
    if mode == "verify-full":
        return
    if not hosts:
        said = "names no host, so PGHOST or a service file may; without them it is a socket of this machine"
        yield not_checked(CHECK, f"{address}: RELAY_DATABASE_URL {said}", "name the host in RELAY_DATABASE_URL")
    elif all(map(_is_local, hosts)):
        return
    elif mode in ("disable", "allow", "prefer"):
        yield warning(CHECK, f"{address}: sslmode={mode}, so it may go unencrypted", f"sslmode=verify-full; {_MEND}")
    else:
        said = "the name in the server's certificate is not checked"
        yield warning(CHECK, f"{address}: sslmode={mode}, so {said}", f"sslmode=verify-full; {_MEND}")


def _broker(url: str) -> Iterator[Finding]:
    hosts, parameters = hosts_and_parameters(url)
    if all(map(_is_local, hosts)):
        return
    address = amqp_address(url)
    if url.startswith("amqp:"):
        yield warning(CHECK, f"{address}: not encrypted", f"amqps://; {_MEND}")
    elif parameters.get("no_verify_ssl") == "1":
        yield warning(CHECK, f"{address}: no_verify_ssl=1, so any certificate will do", f"cafile=…; {_MEND}")


def _is_local(host: str) -> bool:
    """A socket's directory, or an address of this machine's own."""
    if host.startswith("/") or host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
