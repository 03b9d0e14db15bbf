"""RabbitMQ: from URLs to a link that publishes.

Owns: how a connection is opened (which URL, how long it may take, what must exist) and what the broker's
refusals mean. No retries here: the runner decides when to connect again. URLs are read anew for each connect,
so that rotated credentials take effect.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable, Sequence
from typing import Final

from aiormq import Connection
from aiormq.exceptions import (
    AMQPError,
    AuthenticationError,
    ProbableAuthenticationError,
)
from yarl import URL

from relay import __version__, tls
from relay.broker.encode import Encoder
from relay.broker.exchanges import Exchanges, Forbidden
from relay.broker.link import AmqpLink
from relay.broker.wire import Wire, WireFactory
from relay.core.ports import LinkListener
from relay.errors import BrokerError, BrokerRefused, BrokerUnavailable, ExchangeMissing
from relay.message import PayloadType
from relay.route import Router

CONNECT_TIMEOUT_S: Final = 10.0
"""For one URL, from the name's lookup to the verified exchange; a `timeout` in the URL changes it."""

HEARTBEAT_S: Final = 10
"""aiormq gives up after three missed ones; RabbitMQ's own suggestion is 5 to 20. A `heartbeat` in the URL
changes it.
"""

_SIZE_LIMIT_AGE_S: Final = 60.0
"""How long a size that the broker refused is held against rows, should its configuration change meanwhile."""

_NO_TLS: Final = frozenset(("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST"))
"""OpenSSL's reasons (1.1.1, 3.0, 3.2) where the answer was no TLS record at all."""

# Every failure that aiormq logs, some with a traceback, is raised or told to the listener as well: one line
# per change of state is the runner's to write.
logging.getLogger("aiormq").setLevel(logging.CRITICAL)


class AmqpBroker:
    """Implements `relay.core.ports.Broker`.

    `urls` gives the URLs to try in turn. `database_now` gives the database's time in epoch seconds, from
    which the time that a message has left is counted. `is_mandatory` is for rows whose `mandatory` is null.
    `envelope_name` and `source` as in `relay.envelope`.
    """

    def __init__(
        self,
        urls: Callable[[], Sequence[str]],
        router: Router,
        *,
        database_now: Callable[[], float],
        envelope_name: str = "none",
        source: str = "",
        is_mandatory: bool = True,
        connection_name: str = "outbox-relay",
    ) -> None:
        self._urls = urls
        self._router = router
        self._database_now = database_now
        self._envelope_name = envelope_name
        self._source = source
        self._is_mandatory = is_mandatory
        self._connection_name = connection_name
        self._size_limit: tuple[int, float] | None = None
        self._forbidden = Forbidden()

    async def connect(self, listener: LinkListener, payload_type: PayloadType) -> AmqpLink:
        """A link over the first URL that works.

        Raises BrokerRefused when every URL was refused (ExchangeMissing when the last one lacks the
        exchange), and BrokerUnavailable otherwise; also what `urls` raises.
        """
        failures: list[BrokerError] = []
        for url in self._urls():
            try:
                return await self._open(URL(url), listener, payload_type)
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

    async def _open(self, url: URL, listener: LinkListener, payload_type: PayloadType) -> AmqpLink:
        """One URL, within its time. Raises BrokerUnavailable, BrokerRefused, ExchangeMissing."""
        address = f"{url.host}:{url.port or (5671 if url.scheme == 'amqps' else 5672)}"
        factory = WireFactory()
        connection = self._connection(url, factory)
        timeout_s = float(url.query.get("timeout", CONNECT_TIMEOUT_S))
        link: AmqpLink | None = None
        try:
            async with asyncio.timeout(timeout_s):
                await connection.connect(self._client_properties(url))
                await self._verify_exchange(connection)
                link = await self._link(connection, factory, listener, payload_type)
        except TimeoutError as error:
            raise BrokerUnavailable(f"{address} did not answer within {timeout_s:g} s") from error
        except (AMQPError, OSError, ValueError, RuntimeError) as error:
            raise _mapped(error, address, factory.wire) from error
        except asyncio.CancelledError as error:
            # aiormq cancels those who wait for an answer when their connection goes.
            if _is_being_cancelled():
                raise
            raise BrokerUnavailable(f"{address}: connection closed while it was being opened") from error
        finally:
            if link is None:
                await _discard(connection, factory)
        return link

    def _connection(self, url: URL, factory: WireFactory) -> Connection:
        if "heartbeat" not in url.query:
            url = url.update_query(heartbeat=str(HEARTBEAT_S))
        return Connection(url, transport_factory=factory)

    def _client_properties(self, url: URL) -> dict[str, object]:
        name = url.query.get("name", self._connection_name)
        return {"product": "outbox-relay", "version": __version__, "connection_name": name}

    async def _verify_exchange(self, connection: Connection) -> None:
        """The configured exchange, if it is one for all rows, must exist. Raises ExchangeMissing."""
        name = self._router.constant_exchange
        if name is None:
            return
        refused = await Exchanges(connection, _nobody).check(name)
        if refused is not None:
            raise ExchangeMissing(
                f"the exchange {name!r} cannot be used: {refused}",
                reply_code=int(refused.split()[0]),
                hint="declare it at the broker, or name another one in RELAY_EXCHANGE",
            )

    async def _link(
        self, connection: Connection, factory: WireFactory, listener: LinkListener, payload_type: PayloadType
    ) -> AmqpLink:
        channel = (await connection.channel(publisher_confirms=True)).number
        wire = factory.wire
        assert wire is not None, "connected"
        if wire.lost is not None:
            raise BrokerUnavailable(wire.lost)

        def encoder(number: int) -> Encoder:
            return Encoder(
                self._router,
                channel=number,
                frame_max=connection.connection_tune.frame_max,
                payload_type=payload_type,
                envelope_name=self._envelope_name,
                source=self._source,
                is_mandatory=self._is_mandatory,
                body_bytes_max=self._body_bytes_max(),
            )

        return AmqpLink(
            connection,
            wire,
            encoder,
            listener,
            channel=channel,
            constant_exchange=self._router.constant_exchange,
            forbidden=self._forbidden,
            database_now=self._database_now,
            on_size_limit=self._learn_size_limit,
        )

    def _learn_size_limit(self, limit_bytes: int) -> None:
        self._size_limit = (limit_bytes, asyncio.get_running_loop().time() + _SIZE_LIMIT_AGE_S)

    def _body_bytes_max(self) -> int | None:
        if self._size_limit is None or asyncio.get_running_loop().time() > self._size_limit[1]:
            return None
        return self._size_limit[0]


def _nobody() -> None:
    """Nobody waits for an answer here."""


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
                hint="check the vhost in RELAY_AMQP_URL and the user's permissions for it",
            )
        case _ if refused is not None:
            return BrokerUnavailable(f"{address} closed the connection: {refused[0]} {refused[1]}")
        case _ if wire is not None and not wire.is_amqp:
            hint = "check host, port and scheme of RELAY_AMQP_URL: amqp:// or, with TLS, amqps://"
            return BrokerRefused(f"{address} does not speak AMQP 0-9-1", hint=hint)
        case _:
            text = " ".join(str(part) for part in error.args if part is not None) or type(error).__name__
            return BrokerUnavailable(f"{address}: {text}")


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


def _is_being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def _discard(connection: Connection, factory: WireFactory) -> None:
    """Leave nothing behind of a connection that came to nothing."""
    try:
        async with asyncio.timeout(1.0):
            await connection.close()
    except (AMQPError, OSError, TimeoutError, asyncio.InvalidStateError):
        # Why it failed is being raised already.
        pass
    except asyncio.CancelledError:
        if _is_being_cancelled():
            raise
    finally:
        if factory.wire is not None and factory.wire.transport is not None:
            factory.wire.transport.abort()
