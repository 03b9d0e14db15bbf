"""Carries messages from one queue to other places: an original is acknowledged only when its own copy was confirmed.

    taken --carry--> in flight --SENT--> the original is acknowledged
      |                  |--any other verdict--> it is left
      '-----leave--------'--> left: `close` gives it back, to its place in the queue

Owns: one connection with two channels, one that takes and one that publishes. Whatever ends the connection before an
acknowledgement costs a second copy at most, never a message.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from aiormq import Connection, spec
from aiormq.abc import AbstractChannel
from aiormq.exceptions import ChannelClosed

from relay.broker.exchanges import refusal
from relay.broker.losses import CONNECTION_ERRORS, named
from relay.broker.methods import messages_ready
from relay.broker.opening import first_of, opened
from relay.broker.wire import Wire
from relay.errors import BrokerRefused
from relay.redrive.choice import Route, Taken
from relay.redrive.sender import Carried, Sender, Verdict
from relay.redrive.session import Session
from relay.redrive.source import Source
from relay.urls import amqp_user

_CLOSE_TIMEOUT_S: Final = 10.0


class Carrier:
    """Made by `Carrier.open`."""

    def __init__(self, session: Session, channel: AbstractChannel, queue: str, ready: int) -> None:
        self.ready = ready
        """Messages that were ready when it was opened."""
        self.user = amqp_user(str(session.connection.url))
        self._session = session
        self._source = Source(session, channel, queue, self._acknowledge)
        self._sender = Sender(session)
        self._told: list[Carried] = []

    @classmethod
    async def open(cls, urls: Sequence[str], queue: str, name: str) -> Carrier:
        """Over the first URL that works. Raises BrokerUnavailable, BrokerRefused (also: there is no such queue)."""

        async def finish(connection: Connection, wire: Wire) -> Carrier:
            channel = await connection.channel(publisher_confirms=False)
            try:
                ready = await messages_ready(channel, queue)
            except ChannelClosed as error:
                hint = "the queue's name, or the vhost at the end of RELAY_AMQP_URL? rabbitmqctl list_queues -p VHOST"
                raise BrokerRefused(f"the queue {queue!r} cannot be used: {refusal(error)}", hint=hint) from error
            carrier = cls(Session(connection, wire), channel, queue, ready)
            await carrier._sender.open()
            return carrier

        return await first_of(urls, lambda url: opened(url, name, finish))

    async def take(self) -> Taken | None:
        """The next message of the queue, None where it is empty. Raises BrokerUnavailable, BrokerRefused."""
        return await self._source.take()

    def leave(self) -> None:
        """The one taken last is not carried."""
        self._source.leave()

    async def carry(self, taken: Taken, route: Route, properties: spec.Basic.Properties) -> None:
        """See `Sender.carry`."""
        await self._sender.carry(taken, route, properties)

    async def carried(self) -> list[Carried]:
        """What has a verdict and was not told yet; the originals of those that were sent are acknowledged by now."""
        await self._acknowledge()
        found, self._told = self._told, []
        return found

    async def rest(self, wait_s: float) -> None:
        """Until a copy has its verdict, or for so long."""
        if not self._sender.carried:
            await self._session.change(wait_s)

    async def settle(self) -> None:
        """Wait until every copy has its verdict. Raises BrokerUnavailable, BrokerRefused."""
        await self._sender.settle()

    async def close(self) -> None:
        """Give back what was taken and not acknowledged, in its order, and end the connection."""
        self._sender.close()
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await named(self._source.close())
                await named(self._session.connection.close())
        except CONNECTION_ERRORS:
            # The broker gives everything back by itself when the connection goes.
            if self._session.wire.transport is not None:
                self._session.wire.transport.abort()

    async def _acknowledge(self) -> None:
        while self._sender.carried:
            one = self._sender.carried[0]
            if one.verdict is Verdict.SENT:
                await self._source.acknowledge(one.taken)
            else:
                self._source.leave()
            self._told.append(self._sender.carried.popleft())
