"""The relay's encoder and link alone: rows made in memory, written to a broker as fast as it acknowledges.

    python -m bench.encoder ROWS WINDOW

reads `BENCH_AMQP_URL` and ends with one JSON line: seconds, and CPU seconds of this process.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import uvloop

from bench.made_rows import made_rows
from bench.rig import EXCHANGE
from relay.broker.amqp import AmqpBroker
from relay.core.ports.broker import Link
from relay.message import PayloadType, Row
from relay.route import Router

TURN_ROWS = 256
TIMEOUT_S = 120.0


class _Listener:
    """Publishes while the window has room; anything but an ack ends it."""

    def __init__(self, rows: Sequence[Row], window: int) -> None:
        self._rows, self._window = rows, window
        self._sent = self._acked = 0
        self.link: Link | None = None
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def go_on(self) -> None:
        assert self.link is not None
        while self._sent < len(self._rows):
            room = min(TURN_ROWS, self._window - self.link.in_flight)
            if room <= 0:
                return
            taken = self.link.publish(self._rows[self._sent : self._sent + room]).taken
            self._sent += taken
            if not taken:
                return

    def on_acked(self, rows: Sequence[Row]) -> None:
        self._acked += len(rows)
        if self._acked == len(self._rows):
            self.done.set_result(None)

    def on_writable(self) -> None:
        self.go_on()

    def __getattr__(self, name: str) -> Any:
        def unexpected(*_: object, **__: object) -> None:
            if not self.done.done():
                self.done.set_exception(RuntimeError(name))

        return unexpected


async def measure(url: str, count: int, window: int) -> dict[str, float]:
    """Raises RuntimeError where the broker does anything but acknowledge, TimeoutError."""
    listener = _Listener(made_rows(count), window)
    broker = AmqpBroker(lambda: [url], Router(EXCHANGE, "{event_type}"), database_now=time.time)
    listener.link = link = await broker.connect(listener, PayloadType.JSON)
    began, cpu = time.monotonic(), time.process_time()
    listener.go_on()
    async with asyncio.timeout(TIMEOUT_S):
        await listener.done
    found = {"seconds": time.monotonic() - began, "cpu_s": time.process_time() - cpu}
    await link.close()
    return found


def main(arguments: Sequence[str]) -> int:
    rows, window = map(int, arguments)
    print(json.dumps(uvloop.run(measure(os.environ["BENCH_AMQP_URL"], rows, window))))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
