"""A TLS front before a server that speaks in the clear: its certificate is the test's to choose, and it can be reset."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import struct
from collections.abc import AsyncIterator


class TlsProxy:
    """`port` speaks TLS and leads to 127.0.0.1:`target_port`."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._inner: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0

    @classmethod
    @contextlib.asynccontextmanager
    async def start(cls, target_port: int, context: ssl.SSLContext) -> AsyncIterator[TlsProxy]:
        proxy = cls(target_port)
        # A client that refuses the certificate is the test's purpose, not an error of the loop's.
        server = await asyncio.start_server(proxy._serve, "127.0.0.1", 0, ssl=context)
        proxy.port = server.sockets[0].getsockname()[1]
        try:
            yield proxy
        finally:
            server.close()
            proxy.reset()
            await asyncio.gather(*proxy._tasks, return_exceptions=True)

    def reset(self) -> None:
        """Cut every connection with RST, in the middle of a TLS record if one is on its way."""
        for writer in self._inner:
            if writer.is_closing():
                continue
            raw = writer.get_extra_info("socket")
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        self._inner.clear()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
        self._inner |= {writer, far_writer}
        for source, target in ((reader, far_writer), (far_reader, writer)):
            task = asyncio.get_running_loop().create_task(self._pump(source, target))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(65536):
                target.write(data)
                await target.drain()
        target.transport.abort()
