"""A connection to RabbitMQ, opened: which URL, how long it may take, and what the broker's refusals mean.

For whoever needs a connection whose publishes he watches himself (`relay.broker.wire`). No retries here.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, TypeVar

from aiormq import Connection
from aiormq.exceptions import AuthenticationError, ProbableAuthenticationError
from yarl import URL

from relay import __version__, tls
from relay.broker.losses import CONNECTION_ERRORS, named
from relay.broker.wire import Wire, WireFactory
from relay.errors import BrokerError, BrokerRefused, BrokerUnavailable, ExchangeMissing

T = TypeVar("T")

CONNECT_TIMEOUT_S: Final = 10.0
"""For one URL, from the name's lookup to the verified exchange; a `timeout` in the URL changes it."""

HEARTBEAT_S: Final = 10
"""aiormq gives up after three missed ones; RabbitMQ's own suggestion is 5 to 20. A `heartbeat` in the URL
changes it.
"""

_HANG_UP_HINT: Final = (
    "the broker's log says why; one that refuses a client's certificate may hang up like this, "
    "and so does what is no RabbitMQ: check the port of its URL"
)

_AWAY_HINT: Final = "is it up, and are host and port of its URL right?"

_NO_TLS: Final = frozenset(("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST"))
"""OpenSSL's reasons (1.1.1, 3.0, 3.2) where the answer was no TLS record at all."""

# Every failure that aiormq logs, some with a traceback, is raised or told to the listener as well: one line
# per change of state is the runner's to write.
logging.getLogger("aiormq").setLevel(logging.CRITICAL)


async def first_of(urls: Sequence[str], open_one: Callable[[str], Awaitable[T]]) -> T:
    """What `open_one` makes of the first URL that works.

    Raises BrokerRefused when every URL was refused (of the last one's class), and BrokerUnavailable otherwise.
    """
    failures: list[BrokerError] = []
    for url in urls:
        try:
            return await open_one(url)
        except BrokerError as error:
            failures.append(error)
    assert failures, "the configuration has a URL"
    last = failures[-1]
    if len(failures) == 1:
        raise last
    text = "; ".join(error.message for error in failures)
    if all(isinstance(error, BrokerRefused) for error in failures):
        assert isinstance(last, BrokerRefused)
        raise type(last)(text, reply_code=last.reply_code, hint=last.hint) from last
    raise BrokerUnavailable(text, hint=last.hint) from last


async def opened(address_url: str, name: str, finish: Callable[[Connection, Wire], Awaitable[T]]) -> T:
    """What `finish` makes of a connection to one URL, all within the URL's time; on failure nothing stays behind.

    `name` is what the broker's operators see, unless the URL has one. Raises BrokerUnavailable, BrokerRefused, and what
    `finish` raises of them.
    """
    url = URL(address_url)
    address = f"{url.host}:{url.port or (5671 if url.scheme == 'amqps' else 5672)}"
    factory = WireFactory()
    connection = _connection(url, factory)
    timeout_s = float(url.query.get("timeout", CONNECT_TIMEOUT_S))
    properties = {"product": "outbox-relay", "version": __version__, "connection_name": url.query.get("name", name)}
    is_open = False
    try:
        async with asyncio.timeout(timeout_s):
            await shake_hands(connection, properties)
            assert factory.wire is not None, "connected"
            found = await named(finish(connection, factory.wire))
            is_open = True
            return found
    except TimeoutError as error:
        raise BrokerUnavailable(f"{address} did not answer within {timeout_s:g} s") from error
    except CONNECTION_ERRORS as error:
        raise _mapped(error, address, factory.wire) from error
    finally:
        if not is_open:
            await _discard(connection, factory)


async def shake_hands(connection: Connection, properties: dict[str, Any] | None = None) -> None:
    """aiormq's connect. Raises CONNECTION_ERRORS."""
    await named(connection.connect(properties))


def _connection(url: URL, factory: WireFactory) -> Connection:
    if "heartbeat" not in url.query:
        url = url.update_query(heartbeat=str(HEARTBEAT_S))
    return Connection(url, transport_factory=factory)


def _mapped(error: Exception, address: str, wire: Wire | None) -> BrokerError:
    """A driver's failure to connect, as one of ours; the wire knows what was said on it."""
    if (failure := tls.cause(error)) is not None:
        return _refused_tls(failure, address)
    refused = wire.refused if wire is not None else None
    match error:
        case ExchangeMissing():
            return error
        case AuthenticationError() | ProbableAuthenticationError():
            text = error.args[0] if isinstance(error, ProbableAuthenticationError) else error.reason % error.args
            hint = "check user and password in RELAY_AMQP_URL, and that the user may log in from here"
            return BrokerRefused(f"{address} refused the login: {text}", reply_code=403, hint=hint)
        case _ if refused is not None and refused[0] in (403, 530):
            return BrokerRefused(
                f"{address} refused the connection: {refused[0]} {refused[1]}",
                reply_code=refused[0],
                hint="check the vhost in RELAY_AMQP_URL, the user's permissions for it, and both their limits",
            )
        case _ if refused is not None:
            return BrokerUnavailable(f"{address} closed the connection: {refused[0]} {refused[1]}")
        case _ if wire is not None and not wire.is_amqp:
            hint = "check host, port and scheme of RELAY_AMQP_URL: amqp:// or, with TLS, amqps://"
            return BrokerRefused(f"{address} does not speak AMQP 0-9-1", hint=hint)
        case _:
            # Of an OSError the number is left out.
            words = [str(part) for part in error.args if part is not None and not isinstance(part, int)]
            text = " ".join(words) or type(error).__name__
            if wire is None:
                return BrokerUnavailable(f"RabbitMQ at {address} cannot be reached: {text}", hint=_AWAY_HINT)
            return BrokerUnavailable(f"{address}: {text}", hint=_HANG_UP_HINT)


def _refused_tls(failure: ssl.SSLError, address: str) -> BrokerError:
    said = tls.said(failure)
    if isinstance(failure, ssl.SSLCertVerificationError):
        return BrokerRefused(f"{address}: {said}", hint="check the certificate, and host and cafile of RELAY_AMQP_URL")
    if "alert" in said:
        hint = "check certfile and keyfile of RELAY_AMQP_URL: the broker must know their authority"
        return BrokerRefused(f"{address} refused the TLS connection: {said}", hint=hint)
    if failure.reason in _NO_TLS:
        hint = "check port and scheme of RELAY_AMQP_URL: amqp:// or, with TLS, amqps://"
        return BrokerRefused(f"{address} does not speak TLS", hint=hint)
    return BrokerUnavailable(f"{address}: {said}")


async def _discard(connection: Connection, factory: WireFactory) -> None:
    """Leave nothing behind of a connection that came to nothing."""
    try:
        async with asyncio.timeout(1.0):
            await named(connection.close())
    except CONNECTION_ERRORS:
        # Why it failed is being raised already.
        pass
    finally:
        if factory.wire is not None and factory.wire.transport is not None:
            factory.wire.transport.abort()
