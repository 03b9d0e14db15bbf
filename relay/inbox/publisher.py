"""Publishes copies of failed messages: mandatory, and done only when confirmed.

Owns: a connection apart from the one that consumes (a broker in alarm stops reading from connections that publish, and
the acknowledgements with them), opened at the first copy, and one channel for each worker: a worker has one copy in
flight at a time, so that a return, which carries no delivery tag, can only be its own.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, Final

import aio_pika
import aiormq
from aiormq.abc import AbstractChannel

from relay import tls
from relay.broker.losses import CONNECTION_ERRORS, named
from relay.broker.wire import Wire, WireFactory
from relay.errors import BrokerUnavailable, RelayError
from relay.inbox.copies import Copy
from relay.urls import amqp_address

CONFIRM_TIMEOUT_S: Final = 30.0
"""Without a confirm for so long (an alarm, a queue without majority) the copy counts as not made and is made again."""

FRAME_OVERHEAD_BYTES: Final = 8 + 12
"""Of a frame, and of a content header before its properties."""

_IMPOSSIBLE: Final = (311, 406, 501, 502)
"""Content too large (406 where the broker has a size limit), frame or syntax error: no repetition mends it."""


class Connection(aio_pika.Connection):
    """aio-pika's, over a wire of ours: see `relay.broker.wire`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # The driver takes no such argument, but hands these on to the one below it.
        self.kwargs["transport_factory"] = self._factory = WireFactory()

    @property
    def wire(self) -> Wire:
        """Of the connection, once it is open."""
        assert self._factory.wire is not None, "not connected"
        return self._factory.wire


class CopyUnavailable(RelayError):
    """The copy was returned, refused or not confirmed: the original stays where it is, try again."""


class CopyImpossible(RelayError):
    """There cannot be a copy of this message."""


class Publisher:
    """Shared by a consumer's workers; each of them takes `lane`s."""

    def __init__(self, connect: Callable[[], Awaitable[Connection]]) -> None:
        self._connect = connect
        self._connection: Connection | None = None
        self._lock = asyncio.Lock()

    def lane(self) -> Lane:
        """A way to publish, one copy at a time."""
        return Lane(self._channel)

    async def close(self) -> None:
        """End the connection; safe to repeat."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(*CONNECTION_ERRORS):
                await asyncio.wait_for(named(connection.close()), 5.0)

    async def _channel(self) -> AbstractChannel:
        async with self._lock:
            if self._connection is None or self._connection.is_closed:
                self._connection = await self._connect()
            connection = self._connection
        channel = await connection.channel(publisher_confirms=True, on_return_raises=True)
        return await channel.get_underlay_channel()


class Lane:
    """One channel, opened when needed and left behind after any failure."""

    def __init__(self, open_channel: Callable[[], Awaitable[AbstractChannel]]) -> None:
        self._open_channel = open_channel
        self._channel: AbstractChannel | None = None

    async def publish(self, copy: Copy) -> None:
        """Returns when the broker has it in a queue. Raises CopyUnavailable, CopyImpossible."""
        try:
            header_bytes = len(copy.properties.marshal())
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise CopyImpossible(f"a copy cannot be encoded: {error}") from error
        try:
            async with asyncio.timeout(CONFIRM_TIMEOUT_S):
                await named(self._publish(copy, header_bytes))
        except aiormq.exceptions.PublishError as error:
            raise CopyUnavailable(f"no queue takes {copy.routing_key} from exchange {copy.exchange!r}") from error
        except aiormq.DeliveryError as error:
            await self._leave()
            raise CopyUnavailable(f"the broker refused the copy for {copy.routing_key}") from error
        except (*CONNECTION_ERRORS, BrokerUnavailable) as error:
            await self._leave()
            code = getattr(error, "code", None) or (error.args[0] if error.args else None)
            if code in _IMPOSSIBLE:
                raise CopyImpossible(f"the broker refuses the copy: {error}") from error
            raise CopyUnavailable(
                f"no confirm for the copy to {copy.routing_key}: {str(error) or 'timeout'}"
            ) from error

    async def _publish(self, copy: Copy, header_bytes: int) -> None:
        if self._channel is None or self._channel.is_closed:
            self._channel = await self._open_channel()
        # A header is one frame (AMQP 0-9-1, 4.2.6); a larger one would cost everybody the connection.
        if header_bytes + FRAME_OVERHEAD_BYTES > (frame_max := self._channel.connection.connection_tune.frame_max) > 0:
            raise CopyImpossible(
                f"the headers of a copy have {header_bytes} bytes, the broker takes {frame_max} a frame"
            )
        await self._channel.basic_publish(
            copy.body,
            exchange=copy.exchange,
            routing_key=copy.routing_key,
            properties=copy.properties,
            mandatory=True,
        )

    async def _leave(self) -> None:
        """Whatever is still said about it concerns a copy that is made anew."""
        channel, self._channel = self._channel, None
        if channel is not None and not channel.is_closed:
            with contextlib.suppress(*CONNECTION_ERRORS):
                await asyncio.wait_for(named(channel.close()), 2.0)


async def connect(urls: tuple[str, ...], name: str, timeout_s: float) -> Connection:
    """A connection to the first of `urls` that answers. Raises BrokerUnavailable with each one's reason."""
    failures: list[str] = []
    last: BaseException | None = None
    for url in urls:
        try:
            async with asyncio.timeout(timeout_s):
                return await named(
                    aio_pika.connect(url, client_properties={"connection_name": name}, connection_class=Connection)
                )
        except CONNECTION_ERRORS as error:
            last = error
            failures.append(f"{amqp_address(url)}: {_said(error)}")
    assert last is not None, "no URL"
    raise BrokerUnavailable(f"RabbitMQ cannot be reached: {'; '.join(failures)}") from last


def _said(error: BaseException) -> str:
    if (failure := tls.cause(error)) is not None:
        return tls.said(failure)
    return str(error) or type(error).__name__
