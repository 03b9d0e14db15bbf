"""The demo's relay: `relay run` as a real process, to be killed and started again."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import subprocess
import sys
import urllib.error
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

from relay.errors import RelayError
from relay.scrape import OPENER

READY_TIMEOUT_S: Final = 30.0
STOP_TIMEOUT_S: Final = 20.0
OK: Final = 200


class RelayFailed(RelayError):
    """The relay did not come up, or ended by itself; the text ends with the last lines of its log."""


class Answer(NamedTuple):
    """A page of the relay's; `status` is 0 where nobody answered."""

    status: int
    body: str


def environment(settings: Mapping[str, str]) -> dict[str, str]:
    """A process's environment with these settings and nothing of our own caller's RELAY_ variables."""
    return {"PATH": os.defpath, "LC_ALL": "C.UTF-8", **settings}


async def command(settings: Mapping[str, str], *arguments: str) -> str:
    """Run `relay` with these arguments to its end. Raises RelayFailed when its exit code is not 0."""
    process = await asyncio.create_subprocess_exec(
        *_program(),
        *arguments,
        env=environment(settings),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        output, _ = await process.communicate()
    except asyncio.CancelledError:
        process.kill()
        raise
    if process.returncode != 0:
        raise RelayFailed(f"`relay {' '.join(arguments)}` failed: {output.decode(errors='replace').strip()}")
    return output.decode(errors="replace")


def _program() -> list[str]:
    return [sys.executable, "-m", "relay"]


class RelayProcess:
    """One life of `relay run`, in a session of its own (a Ctrl-C in the terminal is not for it).

    `listen` in the settings is a port of this machine. A guard ends it should this process vanish.
    """

    def __init__(self, settings: Mapping[str, str], port: int, log: Path) -> None:
        self._environment = environment({**settings, "RELAY_LISTEN": f"127.0.0.1:{port}"})
        self._port = port
        self._log = log
        self._process: asyncio.subprocess.Process | None = None
        self._guard: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        """Returns when /readyz says 200. Raises RelayFailed, with its reasons and the end of the log where it does not."""
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *_program(),
                "run",
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._guard = _guard(self._process.pid)
        why = "no answer"
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                while (answer := await self._ask("/readyz")).status != OK:
                    why = _reasons(answer.body) if answer.body else why
                    self.expect_alive()
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise RelayFailed(f"the relay was not ready within {READY_TIMEOUT_S:g} s: {why}: {self._tail()}") from None

    def expect_alive(self) -> None:
        """Raises RelayFailed when the process has ended by itself."""
        assert self._process is not None, "not started"
        if self._process.returncode is not None:
            raise RelayFailed(f"the relay ended by itself with exit code {self._process.returncode}: {self._tail()}")

    def _tail(self) -> str:
        return " / ".join(self._log.read_text(errors="replace").splitlines()[-5:])

    async def metric(self, name: str) -> float:
        """The sum of a metric's series; 0 while it cannot be read."""
        return sum(value for series, value in (await self.metrics()).items() if series.partition("{")[0] == name)

    async def metrics(self) -> dict[str, float]:
        """Every series as exposed; none while they cannot be read."""
        answer = await self._ask("/metrics")
        text = answer.body if answer.status == OK else ""
        lines = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
        return {series: float(value) for series, _, value in lines}

    async def kill(self) -> None:
        """SIGKILL: no warning, no clean-up."""
        assert self._process is not None, "not started"
        self._signal(signal.SIGKILL)
        await self._process.wait()
        self._dismiss_guard()

    async def stop(self) -> int:
        """SIGTERM and the exit code; SIGKILL when it takes too long."""
        assert self._process is not None, "not started"
        self._signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                return await self._process.wait()
        except TimeoutError:
            await self.kill()
            return -signal.SIGKILL
        finally:
            self._dismiss_guard()

    async def close(self) -> None:
        """Gone, whatever state it is in."""
        if self._process is not None:
            await self.kill()

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None, "not started"
        if self._process.returncode is None:
            self._process.send_signal(number)

    def _dismiss_guard(self) -> None:
        if self._guard is not None:
            self._guard.communicate(b"stand down\n")
            self._guard = None

    async def _ask(self, path: str) -> Answer:
        return await asyncio.to_thread(_ask, f"http://127.0.0.1:{self._port}{path}")


def _guard(pid: int) -> subprocess.Popen[bytes]:
    """A shell whose read ends when this process does, however it does; then it kills `pid`."""
    return subprocess.Popen(
        ["/bin/sh", "-c", f"read line || kill -9 {pid}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _ask(url: str) -> Answer:
    try:
        try:
            answer = OPENER.open(url, timeout=2.0)
        except urllib.error.HTTPError as refused:  # a 503 has a body, too
            answer = refused
        with answer:
            return Answer(answer.status, answer.read().decode())
    except (OSError, http.client.HTTPException):
        # Also of a relay that was killed in the middle of its answer.
        return Answer(0, "")


def _reasons(body: str) -> str:
    """What a /readyz says that is not ready."""
    return "; ".join(f"{each['reason']} ({each['detail']})" for each in json.loads(body)["reasons"])
