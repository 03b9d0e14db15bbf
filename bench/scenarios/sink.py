"""Scenario `sink`: the relay's own limit, apart from the broker's: into a broker that acknowledges and keeps nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from bench.children import run_module, running_module
from bench.load import Load
from bench.procfs import us_per_message
from bench.relay_run import Drain, run_relay
from bench.rig import Rig
from bench.step import Form, Run, Step
from relay.servers import LOOPBACK, free_port

WINDOW: Final = 2_000
TIMEOUT_S: Final = 150.0
ROWS: Final = 200_000
"""More than a second's, where no broker limits."""


def steps(form: Form) -> Sequence[Step]:
    load = Load(form.rows(ROWS))
    return [
        Step("sink", "relay", 13.0, lambda rig: _relay(rig, load), is_once=not form.is_long),
        Step("sink", "encoder", 6.0, lambda rig: _encoder(load.rows), is_once=not form.is_long),
    ]


def _relay(rig: Rig, load: Load) -> Sequence[Run]:
    """The whole relay with its database, `delete`."""
    port = free_port()
    with running_module("bench.sink", str(port)):
        return [{"variant": "relay", **run_relay(rig, Drain(load, amqp_url=_url(port)))}]


def _encoder(rows: int) -> Sequence[Run]:
    """Rows made in memory: encoding, the window, one write a turn, the acks."""
    port = free_port()
    with running_module("bench.sink", str(port)):
        line = run_module("bench.encoder", str(rows), str(WINDOW), timeout_s=TIMEOUT_S, BENCH_AMQP_URL=_url(port))
    return [
        {
            "variant": "encoder",
            "messages": rows,
            "seconds": round(line["seconds"], 6),
            "msgs_per_s": round(rows / line["seconds"], 1),
            "cpu_us_per_msg": {"publisher": us_per_message(line["cpu_s"], rows)},
        }
    ]


def _url(port: int) -> str:
    return f"amqp://guest:guest@{LOOPBACK}:{port}/"
