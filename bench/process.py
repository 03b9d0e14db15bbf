"""`relay run` as a process, observed from outside: its endpoints and /proc."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Self

from bench.compiled import build_in_use
from bench.environment import relay_environment
from bench.errors import BenchFailed
from bench.rig import Rig
from relay.core.ports.outbox import SHARDS
from relay.scrape import OPENER
from relay.servers import LOOPBACK, free_port

LOG_LOOK_S: Final = 0.1
READY_TIMEOUT_S: Final = 60.0
STOP_TIMEOUT_S: Final = 20.0
READY_LOOK_S: Final = 0.005
SHARED_LOOK_S: Final = 0.05


class Relay:
    """One life of `relay run`, in a `with` block: a clean block ends it by SIGTERM and expects a clean stop.

    `program` is what Python runs (the relay, one with stopwatches, the consumer's), `listen` the variable that gives it its
    port. Raises BenchFailed with the end of its log
    where it ends otherwise than asked.
    """

    def __init__(
        self,
        rig: Rig,
        database: str,
        *,
        settings: dict[str, str] | None = None,
        program: Sequence[str] = ("-m", "relay", "run"),
        listen: str = "RELAY_LISTEN",
    ) -> None:
        self.port = free_port()
        self._log = rig.directory / f"relay-{self.port}.log"
        own = {
            "RELAY_DATABASE_URL": rig.postgres.url(database),
            "RELAY_AMQP_URL": rig.amqp_url,
            listen: f"{LOOPBACK}:{self.port}",
        }
        with self._log.open("wb") as out:
            self.started_at = time.monotonic()
            self._process = subprocess.Popen(
                [sys.executable, *program],
                env=relay_environment(**(own | (settings or {}))),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                cwd=Path(__file__).parent.parent,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._process.send_signal(signal.SIGTERM)
                if (code := self._process.wait(STOP_TIMEOUT_S)) != 0:
                    raise self.failed(f"relay run ended with {code}")
                self._expect_build()
        except subprocess.TimeoutExpired:
            raise self.failed(f"relay run did not end within {STOP_TIMEOUT_S:.0f} s of SIGTERM") from None
        finally:
            if self._process.poll() is None:
                self._process.kill()
                self._process.wait()

    def failed(self, why: str) -> BenchFailed:
        """The error to raise, with the end of the log."""
        tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-15:])
        return BenchFailed(f"{why}; the relay's last words:\n{tail}")

    def _expect_build(self) -> None:
        """That it was the build under whose name it is reported: where the compiled tree is gone, Python finds the sources.
        Of the consumer's program that is not known. Raises BenchFailed."""
        lines = (line for line in self._log.read_text(errors="replace").splitlines() if line.startswith("{"))
        for event in map(json.loads, lines):
            if event["event"] == "started" and event.get("build", build_in_use()) != build_in_use():
                raise self.failed(f"the relay was the {event['build']} build, and {build_in_use()} is to be measured")

    def wait_until_ready(self) -> float:
        """Seconds from the start of the process to the first 200 of /readyz. Raises BenchFailed."""
        deadline = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < deadline:
            if self._get("/readyz") is not None:
                return time.monotonic() - self.started_at
            time.sleep(READY_LOOK_S)
        raise self.failed(f"the relay was not ready within {READY_TIMEOUT_S:.0f} s")

    def wait_until_logged(self, event: str, timeout_s: float) -> None:
        """Raises BenchFailed."""
        deadline = time.monotonic() + timeout_s
        while f'"{event}"' not in self._log.read_text(errors="replace"):
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise self.failed(f"the relay did not log {event} within {timeout_s:.0f} s")
            time.sleep(LOG_LOOK_S)

    def metrics(self) -> dict[str, float] | None:
        """Every sample of /metrics, name with labels -> value; None while nobody listens. Raises BenchFailed."""
        text = self._get("/metrics")
        if text is None:
            return None
        pairs = (line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    def _get(self, path: str) -> str | None:
        if (code := self._process.poll()) is not None:
            raise self.failed(f"relay run ended early with {code}")
        try:
            with OPENER.open(f"http://{LOOPBACK}:{self.port}{path}", timeout=5.0) as answer:
                return str(answer.read().decode())
        except OSError:  # also what urllib makes of a 503
            return None


def wait_until_shared(relays: Sequence[Relay]) -> None:
    """Until all are ready and each has its part of the shards. Raises BenchFailed."""
    deadline = time.monotonic() + READY_TIMEOUT_S
    for relay in relays:
        relay.wait_until_ready()
        while (relay.metrics() or {}).get("relay_shards_owned", 0) < SHARDS // len(relays):
            if time.monotonic() > deadline:
                raise relay.failed(f"the relay had not its part of the shards within {READY_TIMEOUT_S:.0f} s")
            time.sleep(SHARED_LOOK_S)
