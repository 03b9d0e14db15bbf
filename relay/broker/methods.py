"""Methods of AMQP on a channel of aiormq's, for queues and exchanges of any name.

RabbitMQ takes every short string of UTF-8; pamqp's own check refuses most characters, and exchanges of more than 127 of them,
with a ValueError.
"""

from __future__ import annotations

from typing import cast

from aiormq import spec
from aiormq.abc import AbstractChannel
from aiormq.channel import Channel

from relay.broker.deliveries import not_by_the_driver


class _OfAnyName:
    def validate(self) -> None:
        """Nothing: the encoder has seen to the length."""


class _ExchangeDeclare(_OfAnyName, spec.Exchange.Declare):
    pass


class _QueueDeclare(_OfAnyName, spec.Queue.Declare):
    pass


class _Consume(_OfAnyName, spec.Basic.Consume):
    pass


async def verify_exchange(channel: AbstractChannel, exchange: str) -> None:
    """A passive declare. Raises ChannelClosed where there is no such exchange, and the channel is gone."""
    await cast(Channel, channel).rpc(_ExchangeDeclare(exchange=exchange, passive=True))


async def messages_ready(channel: AbstractChannel, queue: str) -> int:
    """A passive declare. Raises ChannelClosed where there is no such queue, and the channel is gone."""
    answer = await cast(Channel, channel).rpc(_QueueDeclare(queue=queue, passive=True))
    return answer.message_count or 0


async def consume(channel: AbstractChannel, queue: str, tag: str) -> None:
    """The deliveries are for the wire (`relay.broker.deliveries`), which knows of the channel already."""
    # As the driver's own does: it answers the broker's cancel only for a consumer that it knows.
    cast(Channel, channel).consumers[tag] = not_by_the_driver
    await cast(Channel, channel).rpc(_Consume(queue=queue, consumer_tag=tag))
