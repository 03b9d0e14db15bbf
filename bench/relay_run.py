"""One run of `relay run` over a full table, observed from outside: its `/metrics`, /proc, the table and the queue."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import native
from bench.procfs import Cpu, peak_rss_bytes, us_per_message
from bench.proof import check_queue, expect_no_complaints
from bench.rig import QUEUE, BenchFailed, Rig, relay_environment
from relay.servers import LOOPBACK, free_port

START_TIMEOUT_S = 60.0
STALL_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 20.0
FINE_S, COARSE_S = 0.010, 0.5
"""Between two looks at `/metrics`: near the start and the end, and at most. A look costs the relay some 2 ms of CPU."""


@dataclass(frozen=True, slots=True)
class Look:
    """One look at a running relay, by the monotonic clock. `has_begun` once it has read or published anything."""

    at: float
    cpu: Cpu
    has_begun: bool
    sent: int
    outcomes: Mapping[str, int]


def run_relay(rig: Rig, sent_rows: str, *, checks_ids: bool) -> dict[str, Any]:
    """Drain a fresh copy of the backlog into a fresh queue; one entry of the report's `runs`.

    `sent_rows` is the setting, `delete` or `mark`. Without `checks_ids` (no C compiler) messages are only counted. Raises
    BenchFailed.
    """
    with rig.fresh_database() as database, rig.fresh_queue():
        rig.wait_until_quiet()
        port = free_port()
        environment = relay_environment(
            RELAY_DATABASE_URL=rig.postgres.url(database),
            RELAY_AMQP_URL=rig.amqp_url,
            RELAY_SENT_ROWS=sent_rows,
            RELAY_LISTEN=f"{LOOPBACK}:{port}",
        )
        started = time.monotonic()
        with _relay(environment, rig.directory / "relay.log") as process:
            begin = _watch_start(rig, process, port)
            end = _watch_drain(rig, process, port, begin)
            peak = peak_rss_bytes(process.pid)
        total, pending = rig.count(database)
        if pending or total != (0 if sent_rows == "delete" else rig.rows):
            raise BenchFailed(
                f"the relay counts {end.sent} rows sent, the table holds {total}, {pending} of them pending"
            )
        first = rig.take_first()
        if first.held < rig.rows:
            raise BenchFailed(f"{rig.rows} rows are sent, the queue holds {first.held} messages")
        copies = first.held - rig.rows
        if checks_ids:
            copies = check_queue(rig, [first.message_id, *native.collect(rig.amqp_url, QUEUE)])
    expect_no_complaints(rig)
    seconds, used = end.at - begin.at, end.cpu - begin.cpu
    return {
        "publisher": "relay",
        "variant": sent_rows,
        "messages": rig.rows,
        "body_bytes": first.shape["body_bytes"],
        "seconds": round(seconds, 6),
        "msgs_per_s": round(rig.rows / seconds, 1),
        "seconds_from_process_start": round(end.at - started, 6),
        "outcomes": dict(end.outcomes),
        "copies": copies,
        "cpu_us_per_msg": {
            "publisher": us_per_message(used.relay_s, rig.rows),
            "publisher_with_start": us_per_message(end.cpu.relay_s, rig.rows),
            "postgres": us_per_message(used.postgres_s, rig.rows),
            "rabbitmq": us_per_message(used.rabbitmq_s, rig.rows),
        },
        "peak_rss_mb": round(peak / 1e6, 1),
        "shape": first.shape,
    }


@contextmanager
def _relay(environment: Mapping[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """`relay run` as a process; ends it with SIGTERM and expects a clean stop. Raises BenchFailed with the end of its log."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "relay", "run"],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
        )
    try:
        yield process
        process.send_signal(signal.SIGTERM)
        if (code := process.wait(STOP_TIMEOUT_S)) != 0:
            raise BenchFailed(f"relay run ended with {code}")
    except (BenchFailed, subprocess.TimeoutExpired) as failed:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        raise BenchFailed(f"{failed}; the relay's last words:\n{tail}") from failed
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def _watch_start(rig: Rig, process: subprocess.Popen[bytes], port: int) -> Look:
    """The last look at which nothing had been read or published: the clock starts no later than the first message."""
    deadline = time.monotonic() + START_TIMEOUT_S
    idle: Look | None = None
    while time.monotonic() < deadline:
        look = _look(rig, process, port)
        if look is None:
            # Not listening yet. Until it is, "now" is the last moment at which nothing had begun.
            idle = Look(time.monotonic(), rig.cpu(process.pid), False, 0, {})
        elif look.has_begun:
            assert idle is not None, "the relay was done before it was looked at"
            return idle
        else:
            idle = look
        time.sleep(FINE_S)
    raise BenchFailed(f"the relay published nothing within {START_TIMEOUT_S:.0f} s")


def _watch_drain(rig: Rig, process: subprocess.Popen[bytes], port: int, begin: Look) -> Look:
    """The first look at which every row is settled. Looks are few while much is left, dense towards the end."""
    last, progressed_at = begin, time.monotonic()
    pause = COARSE_S
    while True:
        time.sleep(pause)
        look = _look(rig, process, port)
        if look is None:
            raise BenchFailed("the relay stopped answering")
        if look.sent >= rig.rows:
            return look
        if look.sent > last.sent:
            progressed_at = look.at
        elif look.at - progressed_at > STALL_TIMEOUT_S:
            raise BenchFailed(f"no row settled for {STALL_TIMEOUT_S:.0f} s; {look.sent} of {rig.rows} are")
        last = look
        # Half of what is left at the rate so far: the last looks are as fine as the first.
        rate = look.sent / (look.at - begin.at)
        pause = min(COARSE_S, max(FINE_S, (rig.rows - look.sent) / rate / 2)) if rate else FINE_S


def _look(rig: Rig, process: subprocess.Popen[bytes], port: int) -> Look | None:
    """None while nobody listens. Raises BenchFailed when the process has ended."""
    if (code := process.poll()) is not None:
        raise BenchFailed(f"relay run ended early with {code}")
    at, cpu = time.monotonic(), rig.cpu(process.pid)
    try:
        with urllib.request.urlopen(f"http://{LOOPBACK}:{port}/metrics", timeout=5.0) as answer:
            text = answer.read().decode()
    except urllib.error.URLError:
        return None
    values = _samples(text)
    outcomes = {
        name.partition('outcome="')[2].removesuffix('"}'): int(value)
        for name, value in values.items()
        if name.startswith("relay_published_total{")
    }
    begun = ("relay_rows_read_total", "relay_in_flight_messages", "relay_rows_sent_total")
    has_begun = any(outcomes.values()) or any(values.get(name, 0.0) > 0 for name in begun)
    sent = int(values.get("relay_rows_sent_total", 0))
    # A start is dated by the moment before the question, an end by the moment after the answer.
    if sent >= rig.rows:
        at, cpu = time.monotonic(), rig.cpu(process.pid)
    return Look(at, cpu, has_begun, sent, outcomes)


def _samples(text: str) -> dict[str, float]:
    """Prometheus' text format, name with labels -> value."""
    pairs = (line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#"))
    return {name: float(value) for name, value in pairs}
