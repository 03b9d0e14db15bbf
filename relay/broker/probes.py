"""Suspects, tried one at a time on a channel of their own.

Behind each probe goes a `confirm.select`. A channel looks at its methods one after the other, and selecting confirms
again changes nothing (RabbitMQ, `rabbit_channel:handle_method`), so the `select-ok` says: what came before was looked
at, and the broker did not close over it. That answer costs a round trip; the confirm itself may wait for disks.

    none --probe wanted--> opening --> open --the broker closes--> none
                              '--no answer--> none, after a second's pause

The channel is opened when it is first needed, and stays.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from aiormq import Connection
from aiormq.exceptions import AMQPError

from relay.broker.encode import Encoder
from relay.broker.refusals import Refusal, read
from relay.broker.wire import Wire
from relay.core.window import ProtocolViolation, Settled, Window
from relay.message import Row

ANSWER_TIMEOUT_S: Final = 10.0
_PAUSE_S: Final = 1.0
# AMQP 0-9-1, class 85, method 10, `nowait` false; frame type, channel and size before it.
_SELECT: Final = b"\x00\x55\x00\x0a\x00"


class ProbesListener(Protocol):
    """The link."""

    def on_probe_open(self) -> None:
        """Probes may be published now."""
        ...

    def on_probe_passed(self, row: Row) -> None: ...
    def on_probes_acked(self, settled: Settled) -> None: ...
    def on_probes_nacked(self, settled: Settled) -> None: ...
    def on_probes_closed(self, error: str, refusal: Refusal | None) -> None:
        """The broker closed the channel; `drain` gives what was on it."""
        ...


class Probes:
    """The probes' channel of one connection; implements `relay.broker.wire.ChannelListener`."""

    def __init__(
        self, connection: Connection, wire: Wire, encoder: Callable[[int], Encoder], listener: ProbesListener
    ) -> None:
        self._connection = connection
        self._wire = wire
        self._make_encoder = encoder
        self._listener = listener
        self._opening: asyncio.Task[None] | None = None
        self._encoder: Encoder | None = None
        self._select = b""
        self._window = Window()
        self._probed: Row | None = None
        self._selects = 0
        """Sent and not answered."""

    @property
    def probed(self) -> Row | None:
        """In flight, and not yet taken in."""
        return self._probed

    def __len__(self) -> int:
        """Probes without an outcome."""
        return len(self._window)

    def is_in_flight(self, message_id: str) -> bool:
        return self._window.is_in_flight(message_id)

    @property
    def encoder(self) -> Encoder | None:
        """For the channel; `None` while there is none: it is being opened then, and `on_probe_open` follows."""
        if self._encoder is None and self._opening is None:
            self._opening = asyncio.get_running_loop().create_task(self._open())
        return self._encoder

    def publish(self, row: Row, frames: bytes) -> bytes:
        """The bytes to write for this probe, which is in flight from now on."""
        assert self._probed is None, "one at a time"
        self._window.add((row,))
        self._probed = row
        self._selects += 1
        return frames + self._select

    def drain(self) -> tuple[Row | None, Sequence[Row]]:
        """The channel is gone: the row that was being tried, and the passed ones without an outcome."""
        probed, self._probed = self._probed, None
        return probed, [row for row in self._window.drain() if row is not probed]

    def close(self) -> None:
        """Open no more."""
        if self._opening is not None:
            self._opening.cancel()

    async def _open(self) -> None:
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                number = (await self._connection.channel(publisher_confirms=True)).number
        except (AMQPError, OSError, TimeoutError, RuntimeError):
            # The connection went, which the link is told by itself, or the broker is blocked or slow.
            await asyncio.sleep(_PAUSE_S)
        else:
            self._window = Window()
            self._selects = 0
            self._encoder = self._make_encoder(number)
            self._select = b"\x01" + number.to_bytes(2, "big") + len(_SELECT).to_bytes(4, "big") + _SELECT + b"\xce"
            self._wire.listen_beside(self, number)
        self._opening = None
        self._listener.on_probe_open()

    # ------------------------------------------------------------ ChannelListener

    def on_ack(self, tag: int, multiple: bool) -> None:
        settled = self._window.ack(tag, multiple)
        self._pass_if_settled()
        self._listener.on_probes_acked(settled)

    def on_nack(self, tag: int, multiple: bool) -> None:
        settled = self._window.nack(tag, multiple)
        self._pass_if_settled()
        self._listener.on_probes_nacked(settled)

    def on_return(self, message_id: str, error: str, exchange: str, routing_key: str) -> None:
        self._window.mark_returned(message_id, error, exchange, routing_key)

    def on_selected(self) -> None:
        if self._selects == 0:
            raise ProtocolViolation("the broker answered a confirm.select that was not sent")
        self._selects -= 1
        # Not the answer to an earlier one, whose confirm came first.
        if self._selects == 0 and self._probed is not None:
            self._pass(self._probed)

    def on_close(self, code: int, text: str) -> None:
        self._encoder = None
        self._listener.on_probes_closed(f"{code} {text}", read(code, text))

    def _pass_if_settled(self) -> None:
        row = self._probed
        if row is not None and not self._window.is_in_flight(row.id):
            self._pass(row)

    def _pass(self, row: Row) -> None:
        self._probed = None
        self._listener.on_probe_passed(row)
