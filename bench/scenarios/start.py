"""Scenario `start`: from the start of the process to ready, and what an idle relay keeps in memory."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from bench.process import Relay
from bench.procfs import process_cpu_s, rss_bytes
from bench.proof import expect_no_complaints
from bench.rig import Rig
from bench.step import Form, Run, Step

IDLE_S: Final = 2.0


def steps(form: Form) -> Sequence[Step]:
    return [Step("start", "idle", 2.5 + IDLE_S, _measure)]


def _measure(rig: Rig) -> Sequence[Run]:
    with rig.fresh_database() as database, rig.fresh_queue():
        rig.wait_until_quiet()
        with Relay(rig, database) as relay:
            ready_s = relay.wait_until_ready()
            before, since = rig.cpu(relay.pid), time.monotonic()
            time.sleep(IDLE_S)
            used, seconds = rig.cpu(relay.pid) - before, time.monotonic() - since
            idle = {
                "variant": "idle",
                "start_to_ready_s": round(ready_s, 3),
                "start_cpu_s": round(process_cpu_s(relay.pid) - used.relay_s, 2),
                "idle_rss_mb": round(rss_bytes(relay.pid) / 1e6, 1),
                "idle_cpu_share": round(used.relay_s / seconds, 4),
                "idle_postgres_cpu_share": round(used.postgres_s / seconds, 4),
            }
    expect_no_complaints(rig)
    return [idle]
