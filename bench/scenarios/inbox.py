"""Scenario `inbox`: the consumer's sidecar, `relay inbox run`: a full queue into the inbox table, once per message id."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from bench import native
from bench.children import run_command
from bench.errors import BenchFailed
from bench.load import Load
from bench.process import Relay
from bench.procfs import peak_rss_bytes, us_per_message
from bench.proof import expect_no_complaints
from bench.rig import EXCHANGE, QUEUE, Rig
from bench.step import Form, Run, Step
from relay.topology.names import parking_queue

WINDOW: Final = 1_000
DATABASE: Final = "inbox_run"
STALL_TIMEOUT_S: Final = 30.0
LOOK_S: Final = 0.02
ROWS_MIN: Final = 2_000
"""Fewer may all be taken before the first look, whatever the scale."""


def steps(form: Form) -> Sequence[Step]:
    load = Load(max(ROWS_MIN, form.rows(6_000, 100_000)))
    return [Step("inbox", "sidecar", 4.0 + load.rows / 3_000, lambda rig: sidecar(rig, load), is_once=not form.is_long)]


def sidecar(rig: Rig, load: Load) -> Sequence[Run]:
    """The C publisher fills the queue. From ready to the last row committed. Raises Unavailable, BenchFailed."""
    rig.postgres.drop_database(DATABASE)
    url = rig.postgres.create_database(DATABASE)
    try:
        run_command("relay", "inbox", "migrate", timeout_s=60.0, RELAY_INBOX_DATABASE_URL=url)
        with rig.fresh_queue("quorum", parking_queue(QUEUE)):
            native.publish(rig.amqp_url, EXCHANGE, load.rows, rig.backlog(load).body, load.keys, WINDOW, "library")
            rig.wait_until_quiet()
            figures = _drained(rig, load.rows, url)
    finally:
        rig.postgres.drop_database(DATABASE)
    expect_no_complaints(rig)
    return [{"variant": "sidecar", **figures}]


def _drained(rig: Rig, rows: int, url: str) -> Run:
    settings = {"RELAY_INBOX_DATABASE_URL": url, "RELAY_INBOX_AMQP_URL": rig.amqp_url, "RELAY_INBOX_QUEUE": QUEUE}
    program = ("-m", "relay", "inbox", "run")
    with Relay(rig, DATABASE, settings=settings, program=program, listen="RELAY_INBOX_LISTEN") as consumer:
        consumer.wait_until_ready()
        before, began = rig.cpu(consumer.pid), time.monotonic()
        written = at_first = _count(rig)
        progressed_at = began
        while written < rows:
            if (found := _count(rig)) > written:
                written, progressed_at = found, time.monotonic()
            elif time.monotonic() - progressed_at > STALL_TIMEOUT_S:
                raise consumer.failed(f"no message was taken for {STALL_TIMEOUT_S:.0f} s; {written} of {rows} are")
            time.sleep(LOOK_S)
        seconds, used = time.monotonic() - began, rig.cpu(consumer.pid) - before
        peak = peak_rss_bytes(consumer.pid)
    if (found := _count(rig)) != rows:
        raise BenchFailed(f"the inbox holds {found} rows of {rows} messages")
    taken = rows - at_first
    if not taken:
        raise BenchFailed(f"all {rows} messages were taken before the first look: nothing was measured")
    return {
        "messages": taken,
        "seconds": round(seconds, 6),
        "msgs_per_s": round(taken / seconds, 1),
        "cpu_us_per_msg": {
            "consumer": us_per_message(used.relay_s, taken),
            "postgres": us_per_message(used.postgres_s, taken),
            "rabbitmq": us_per_message(used.rabbitmq_s, taken),
        },
        "peak_rss_mb": round(peak / 1e6, 1),
    }


def _count(rig: Rig) -> int:
    return int(rig.sql("select count(*) from inbox", DATABASE))
