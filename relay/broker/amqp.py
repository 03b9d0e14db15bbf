"""RabbitMQ: from URLs to a link that publishes.

Owns: what must exist for a link, and what is remembered from one link to the next. No retries here: the runner decides
when to connect again. URLs are read anew for each connect, so that rotated credentials take effect.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from aiormq import Connection

from relay.broker.encode import Encoder
from relay.broker.exchanges import Exchanges, Forbidden
from relay.broker.link import SIZE_LIMIT_AGE_S, AmqpLink
from relay.broker.opening import first_of, opened
from relay.broker.wire import Wire
from relay.core.ports.broker import LinkListener
from relay.errors import BrokerUnavailable, ExchangeMissing
from relay.message import PayloadType
from relay.route import Router


class AmqpBroker:
    """Implements `relay.core.ports.broker.Broker`.

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
        self._size_limit = ("", 0, 0.0)
        """Of the URL whose broker refused a body last: the largest that it takes, and until when that is believed."""
        self._forbidden = Forbidden()

    async def connect(self, listener: LinkListener, payload_type: PayloadType) -> AmqpLink:
        """A link over the first URL that works.

        Raises BrokerRefused when every URL was refused (ExchangeMissing when the last one lacks the
        exchange), and BrokerUnavailable otherwise; also what `urls` raises.
        """
        return await first_of(self._urls(), lambda url: self._open(url, listener, payload_type))

    async def _open(self, url: str, listener: LinkListener, payload_type: PayloadType) -> AmqpLink:
        """One URL, within its time. Raises BrokerUnavailable, BrokerRefused, ExchangeMissing."""

        async def finish(connection: Connection, wire: Wire) -> AmqpLink:
            await self._verify_exchange(connection)
            return await self._link(url, connection, wire, listener, payload_type)

        return await opened(url, self._connection_name, finish)

    async def _verify_exchange(self, connection: Connection) -> None:
        """The configured exchange, if it is one for all rows, must exist. Raises ExchangeMissing."""
        name = self._router.constant_exchange
        if name is None:
            return
        refused = await Exchanges(connection, _nobody).check(name)
        if refused is not None:
            raise ExchangeMissing(
                f"the exchange {name!r} cannot be used: {refused}",
                reply_code=int(code) if (code := refused.split()[0]).isdecimal() else None,
                hint="declare it at the broker, or name another one in RELAY_EXCHANGE",
            )

    async def _link(
        self, url: str, connection: Connection, wire: Wire, listener: LinkListener, payload_type: PayloadType
    ) -> AmqpLink:
        channel = (await connection.channel(publisher_confirms=True)).number
        if wire.lost is not None:
            raise BrokerUnavailable(wire.lost)

        loop = asyncio.get_running_loop()

        def encoder(number: int) -> Encoder:
            made = Encoder(
                self._router,
                channel=number,
                frame_max=connection.connection_tune.frame_max,
                payload_type=payload_type,
                envelope_name=self._envelope_name,
                source=self._source,
                is_mandatory=self._is_mandatory,
            )
            of_url, limit, until = self._size_limit
            if of_url == url and loop.time() < until:
                made.limit_body(limit)
                loop.call_at(until, made.limit_body, None)
            return made

        def learn_size_limit(limit_bytes: int) -> None:
            self._size_limit = (url, limit_bytes, loop.time() + SIZE_LIMIT_AGE_S)

        return AmqpLink(
            connection,
            wire,
            encoder,
            listener,
            channel=channel,
            constant_exchange=self._router.constant_exchange,
            forbidden=self._forbidden,
            database_now=self._database_now,
            on_size_limit=learn_size_limit,
        )


def _nobody(exchange: str) -> None:
    """Nobody waits for an answer here."""
