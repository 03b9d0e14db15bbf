"""A daemon's life, whatever its work: signals, grace, heartbeat, HTTP server, exit code.

The first SIGTERM or SIGINT drains, within RELAY_SHUTDOWN_GRACE; a second one ends the process at once. Whatever hangs
meanwhile (a half-open socket, a wedged loop), the process is gone soon after its grace: a thread sees to that. It takes the signals
too, which a loop that is wedged already would not hear.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Final, Protocol

import uvloop
from prometheus_client.registry import Collector

from relay.errors import DrainIncomplete, RelayError
from relay.http import Heartbeat, HttpServer, Readiness
from relay.logs import Log
from relay.metrics import Metrics
from relay.values import ListenAddress

BEAT_INTERVAL_S: Final = 1.0

WEDGED_AFTER_S: Final = 1.0
"""So long after the grace, or a second signal, a process that is still there is ended from outside its event loop."""

SWITCH_S: Final = 0.0005
"""A thread that answers a scrape keeps the loop waiting for no longer than this at a time (by itself Python says 5 ms): a confirm
waits meanwhile, and with it its key's next message."""

_STOPS: Final = frozenset((signal.SIGTERM, signal.SIGINT))


class Work(Protocol):
    """What a daemon does until it is told to stop."""

    @property
    def unsettled(self) -> int:
        """How much would have to be done again if the process ended now."""
        ...

    async def run(self) -> None:
        """Until `stop` and the drain after it. Raises RelayError."""
        ...

    def stop(self) -> None:
        """Begin to drain."""
        ...


def hold_signals() -> None:
    """From now on SIGTERM and SIGINT wait until a Lifecycle takes them. A process that is PID 1, as in a container, would not even
    get one for which it had no handler yet (signal(7)). Threads that start later hold them too."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)


def run(log: Log, main: Callable[[], Coroutine[None, None, None]]) -> int:
    """Run `main` to its end and return the exit code: 0, or a RelayError's. What is none is a fault of ours: logged,
    and raised.
    """
    hold_signals()
    sys.setswitchinterval(SWITCH_S)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
            loop.run(main())
    except RelayError as error:
        log.error("exited", error=error, hint=error.hint, exit_code=error.exit_code)
        return error.exit_code
    except BaseException as error:
        log.error("exited", error=error, exit_code=1)
        raise
    log.info("exited", exit_code=0)
    return 0


class Lifecycle:
    """One run of some work, in its event loop. `grace_s` is what a drain may take."""

    def __init__(self, work: Work, log: Log, heartbeat: Heartbeat, grace_s: float) -> None:
        self._work = work
        self._log = log
        self._heartbeat = heartbeat
        self._grace_s = grace_s
        self._grace = asyncio.Event()

    async def live(self) -> None:
        """Until the work ends, or the grace does. Raises what the work raises, DrainIncomplete."""
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._take_signals, args=(loop,), name="signals", daemon=True).start()
        beating = asyncio.create_task(self._beat())
        work = asyncio.create_task(self._work.run())
        grace = asyncio.create_task(self._run_out_of_grace())
        try:
            await asyncio.wait((work, grace), return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                return work.result()
            unsettled = self._work.unsettled
            if unsettled:
                raise DrainIncomplete(
                    f"the grace of {self._grace_s:g} s ran out with {unsettled} rows unsettled",
                    hint="they are published again; a longer RELAY_SHUTDOWN_GRACE drains more",
                )
        finally:
            beating.cancel()
            grace.cancel()
            work.cancel()
            # Bounded by the thread of `_take_signals`, should a session refuse to end.
            with contextlib.suppress(asyncio.CancelledError, RelayError):
                await work

    async def _run_out_of_grace(self) -> None:
        await self._grace.wait()
        await asyncio.sleep(self._grace_s)

    def _take_signals(self, loop: asyncio.AbstractEventLoop) -> None:
        """In a thread of its own."""
        number = signal.Signals(signal.sigwait(_STOPS))
        last_moment = threading.Timer(self._grace_s + WEDGED_AFTER_S, self._end_wedged)
        last_moment.daemon = True
        last_moment.start()
        # (A loop that is closed has come to its end.)
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(self._drain, number)
            number = signal.Signals(signal.sigwait(_STOPS))
            loop.call_soon_threadsafe(self._end, number)
            time.sleep(WEDGED_AFTER_S)
            self._end_wedged()

    def _drain(self, number: signal.Signals) -> None:
        self._log.info("stopping", signal=number.name, grace_s=self._grace_s, unsettled=self._work.unsettled)
        self._grace.set()
        self._work.stop()

    def _end(self, number: signal.Signals) -> None:
        unsettled = self._work.unsettled
        self._log.warning("second_signal", signal=number.name, unsettled=unsettled)
        os._exit(DrainIncomplete.exit_code if unsettled else 0)

    def _end_wedged(self) -> None:
        """From a thread: neither work nor loop have come to an end."""
        code = DrainIncomplete.exit_code
        # What hangs may be the log: a pipe that nobody empties.
        unheard = threading.Timer(WEDGED_AFTER_S, os._exit, (code,))
        unheard.daemon = True
        unheard.start()
        self._log.error("exited", error="the grace ran out, and something still hung", exit_code=code)
        os._exit(code)

    async def _beat(self) -> None:
        while True:
            self._heartbeat.beat()
            await asyncio.sleep(BEAT_INTERVAL_S)


@contextlib.contextmanager
def serving(
    listen: ListenAddress | None,
    numbers: Metrics | Collector,
    readiness: Readiness,
    heartbeat: Heartbeat,
    redact: Callable[[str], str],
    variable: str = "RELAY_LISTEN",
) -> Iterator[int | None]:
    """The HTTP server during the block; its port, None where there is no address. Raises ListenFailed."""
    if listen is None:
        yield None
        return
    server = HttpServer(listen, numbers, readiness, heartbeat, redact=redact, variable=variable)
    server.start()
    try:
        yield server.port
    finally:
        server.close()
