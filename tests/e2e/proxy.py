"""A TCP proxy for tests: it can swallow what the server says, and cut both sides with a reset."""

from __future__ import annotations

import asyncio
import socket
import struct
from types import TracebackType


class Proxy:
    """Forwards 127.0.0.1:`port` to 127.0.0.1:`target_port`. While `is_deaf`, the server's bytes vanish."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._server: asyncio.Server | None = None
        self._pairs: set[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.is_deaf = False
        self.port = 0

    async def __aenter__(self) -> Proxy:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        self.reset()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def reset(self) -> None:
        """Cut every connection with RST on both sides; what was swallowed is lost."""
        for pair in self._pairs:
            for writer in pair:
                if writer.transport.is_closing():
                    continue
                raw = writer.get_extra_info("socket")
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                writer.transport.abort()
        self._pairs.clear()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
        except OSError:
            writer.transport.abort()
            return
        self._pairs.add((writer, far_writer))
        for source, sink, is_answer in ((reader, far_writer, False), (far_reader, writer, True)):
            task = asyncio.get_running_loop().create_task(self._pump(source, sink, is_answer))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, is_answer: bool) -> None:
        try:
            while data := await source.read(65536):
                if is_answer and self.is_deaf:
                    continue
                sink.write(data)
                await sink.drain()
        except OSError:
            pass
        sink.transport.abort()
