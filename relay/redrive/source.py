"""Takes the messages of one queue in their order, and leaves what is not acknowledged until the end.

No message is seen twice, and all that stay go back together. Why by consumers: a quorum queue keeps the order of what *one*
consumer gives back, as it ends, and of up to 32 of them; it keeps none of many single `basic.get`s or `basic.nack`s
(rabbit_fifo, tried on 3.10). A consumer whose prefetch is full of left messages is followed by another one, with a larger
prefetch; memory holds the bodies that one of them was sent.

Publishing what stays to the queue's own end would keep the order of any number, but not of a run that is interrupted in the
middle; it would begin each message's retention anew, and need the right to write to every queue.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final

from aiormq import spec
from aiormq.abc import AbstractChannel, DeliveredMessage

from relay.broker.deliveries import Deliveries, Undecodable
from relay.broker.methods import consume, messages_ready
from relay.errors import BrokerUnavailable
from relay.redrive.choice import Taken
from relay.redrive.session import ANSWER_TIMEOUT_S, Session

PREFETCH: Final = 50
PREFETCH_MAX: Final = 1000
"""Doubled from one consumer to the next: 32 of them leave 28,000 messages in their order."""

QUIET_S: Final = 0.5
"""After so long without a message the queue is asked whether it is empty: others may have taken some."""


class Source:
    """`channel` has no consumer yet; `make_room` is awaited before each wait: it acknowledges what may be."""

    def __init__(
        self, session: Session, channel: AbstractChannel, queue: str, make_room: Callable[[], Awaitable[None]]
    ) -> None:
        self._session = session
        self._channel = channel
        self._queue = queue
        self._make_room = make_room
        self._arrived: deque[Taken] = deque()
        session.wire.deliver(Deliveries(channel, self._receive), channel.number)
        self._consumers = 0
        self._prefetch = 0
        self._left = 0
        """Of the latest consumer, more or less: those of earlier ones count for it when they fail late."""

    async def take(self) -> Taken | None:
        """The next message, None where the queue is empty. Raises BrokerUnavailable, BrokerRefused."""
        began = time.monotonic()
        while True:
            self._session.check()
            await self._make_room()
            if self._left >= self._prefetch:
                await self._consume()
            if self._arrived:
                return self._arrived.popleft()
            if await self._session.change(QUIET_S):
                continue
            if not await self._has_more():
                return None
            if time.monotonic() - began > ANSWER_TIMEOUT_S:
                why = "a single active consumer keeps them, or another policy of the queue"
                raise BrokerUnavailable(f"the queue {self._queue!r} has messages and gives none out: {why}")

    def leave(self) -> None:
        """One of those taken stays as it is until the end."""
        self._left += 1

    async def acknowledge(self, taken: Taken) -> None:
        """It is gone from the queue."""
        await self._session.answer(self._channel.basic_ack(taken.tag, wait=False), "an acknowledgement")

    async def close(self) -> None:
        """Give back what was left, in its order.

        Acknowledgements that the channel still holds back for a quorum queue (more than 32 are under way) die with it, and
        their originals would come back. A cancel waits for those under way; at the next question the channel sends the rest.
        """
        if self._channel.is_closed:
            return
        for number in range(1, self._consumers + 1):
            await self._channel.basic_cancel(_consumer_tag(number))
        await self._channel.basic_qos(prefetch_count=1)
        await self._channel.close()

    async def _consume(self) -> None:
        """One more consumer; those before it have their hands full."""
        self._left = 0
        self._prefetch = min(2 * self._prefetch, PREFETCH_MAX) if self._prefetch else PREFETCH
        self._consumers += 1
        await self._session.answer(self._channel.basic_qos(prefetch_count=self._prefetch), "a prefetch")
        consuming = consume(self._channel, self._queue, _consumer_tag(self._consumers))
        await self._session.answer(consuming, "a consumer")

    def _receive(self, message: DeliveredMessage) -> None:
        delivery = message.delivery
        assert isinstance(delivery, spec.Basic.Deliver), "of a consumer"
        route = (delivery.exchange or "", delivery.routing_key or "")
        fault = message.fault if isinstance(message, Undecodable) else None
        taken = Taken(delivery.delivery_tag or 0, *route, message.header.properties, message.body, fault)
        self._arrived.append(taken)
        self._session.tell()

    async def _has_more(self) -> bool:
        return await self._session.answer(messages_ready(self._channel, self._queue), "its messages") > 0


def _consumer_tag(number: int) -> str:
    """What consumers have is given back in the order of their tags."""
    return f"redrive-{number:06}"
