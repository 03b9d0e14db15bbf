"""A broker that takes every message and keeps none: what is left of a drain is the relay's own limit.

    python -m bench.sink PORT

opens, declares and selects like a broker, then counts publishes by their frames' headers and acknowledges each read of the
socket with one `multiple` ack. Ends on SIGTERM.
"""

from __future__ import annotations

import asyncio
import signal
import struct
import sys
from collections.abc import Sequence
from typing import Any, Final, cast

import pamqp.frame
import uvloop
from pamqp import commands

from relay.servers import LOOPBACK

_HEAD: Final = struct.Struct(">BHI")
_METHOD, _PUBLISH = 1, struct.pack(">HH", 60, 40)
_GREETING: Final = b"AMQP\x00\x00\x09\x01"
_PROPERTIES: Final[dict[str, Any]] = {
    "product": "sink",
    "capabilities": {"publisher_confirms": True, "basic.nack": True, "connection.blocked": True},
}


class Sink(asyncio.Protocol):
    """One connection."""

    def __init__(self) -> None:
        self._rest = b""
        self._has_greeted = False
        self._taken = 0
        self._publishing = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are none of asyncio's by inheritance.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        data = self._rest + data
        at, taken = 0, self._taken
        if not self._has_greeted:
            if len(data) < len(_GREETING):
                self._rest = data
                return
            self._has_greeted, at = True, len(_GREETING)
            self._say(0, commands.Connection.Start(server_properties=_PROPERTIES, mechanisms="PLAIN"))
        end, unpack = len(data), _HEAD.unpack_from
        while end - at >= 8:
            kind, channel, length = unpack(data, at)
            after = at + length + 8
            if after > end:
                break
            if kind == _METHOD:
                if data[at + 7 : at + 11] == _PUBLISH:
                    self._taken += 1
                    self._publishing = channel
                else:
                    self._answer(channel, pamqp.frame.unmarshal(data[at:after])[2])
            at = after
        self._rest = data[at:]
        # The last message may still lack its body; it is in the socket, and nothing here can refuse it.
        if self._taken > taken:
            self._say(self._publishing, commands.Basic.Ack(self._taken, True))

    def _answer(self, channel: int, method: Any) -> None:
        match method:
            case commands.Connection.StartOk():
                self._say(0, commands.Connection.Tune(2047, 131_072, 60))
            case commands.Connection.Open():
                self._say(0, commands.Connection.OpenOk())
            case commands.Connection.Close():
                self._say(0, commands.Connection.CloseOk())
            case commands.Channel.Open():
                self._say(channel, commands.Channel.OpenOk())
            case commands.Channel.Close():
                self._say(channel, commands.Channel.CloseOk())
            case commands.Confirm.Select():
                self._say(channel, commands.Confirm.SelectOk())
            case commands.Exchange.Declare():
                self._say(channel, commands.Exchange.DeclareOk())
            case _:
                pass  # Connection.TuneOk, Channel.CloseOk …: nothing is expected

    def _say(self, channel: int, method: Any) -> None:
        self._transport.write(pamqp.frame.marshal(method, channel))


async def serve(port: int) -> None:
    """Until SIGTERM."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, ended.set)
    server = await loop.create_server(Sink, LOOPBACK, port)
    print("ready", flush=True)
    await ended.wait()
    server.close()


def main(arguments: Sequence[str]) -> int:
    (port,) = arguments
    uvloop.run(serve(int(port)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
