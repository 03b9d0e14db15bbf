"""Scenario `peers`: the relay beside the one that is written in an afternoon (`naive.py`), and the ceiling above both."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any, Final

from bench import naive, native
from bench.ceiling import run_ceiling
from bench.procfs import us_per_message
from bench.proof import check_queue, compare_shapes, expect_no_complaints
from bench.relay_run import run_relay
from bench.report import Report, summarise, summary_table
from bench.rig import QUEUE, BenchFailed, Rig, relay_environment

TIMEOUT_S = 600.0
SHARE_OF_ONE: Final = 10
"""One by one is so slow that it gets a tenth of the backlog; it has no start-up worth speaking of."""


def run(*, rows: int, keys: int, repeats: int, say: Callable[[str], None]) -> Report:
    """As `drain.run`; all relays mark. Raises NativeUnavailable: without the C programs nothing would be proven here."""
    runs: list[dict[str, Any]] = []
    with Rig(rows, keys) as rig:
        for turn in range(1, repeats + 1):
            turns: tuple[Callable[[], dict[str, Any]], ...] = (
                lambda: run_ceiling(rig, 1000, "buffer"),
                lambda: _run_naive(rig, "one", max(1, rows // SHARE_OF_ONE)),
                lambda: _run_naive(rig, "gathered", rows),
                lambda: run_relay(rig, "mark", checks_ids=True),
            )
            for measure in turns:
                runs.append({"turn": turn, **measure()})
                say(f"turn {turn}: {runs[-1]['publisher']} {runs[-1]['variant']}: {runs[-1]['msgs_per_s']:,.0f} msg/s")
        compare_shapes(runs)
        settings, versions = rig.settings() | {"repeats": repeats}, rig.versions()
    summary = summarise(runs)
    return Report("peers", settings, versions, runs, summary, text=summary_table(summary))


def _run_naive(rig: Rig, variant: str, rows: int) -> dict[str, Any]:
    with rig.fresh_database() as database, rig.fresh_queue():
        rig.postgres.sql(naive.INDEX, database)
        rig.wait_until_quiet()
        before = rig.cpu()
        outcome = subprocess.run(
            [sys.executable, "-m", "bench.naive", variant, str(rows)],
            check=False,
            env=relay_environment(RELAY_DATABASE_URL=rig.postgres.url(database), RELAY_AMQP_URL=rig.amqp_url),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            stdin=subprocess.DEVNULL,
        )
        if outcome.returncode != 0:
            raise BenchFailed(f"bench.naive: exit {outcome.returncode}\n{outcome.stderr.strip()}")
        used = rig.cpu() - before
        line: dict[str, float] = json.loads(outcome.stdout)
        pending = rig.count(database)[1]
        if pending != rig.rows - rows:
            raise BenchFailed(f"{pending} rows are pending where {rig.rows - rows} should be")
        first = rig.take_first()
        copies = check_queue(rig, [first.message_id, *native.collect(rig.amqp_url, QUEUE)], rows)
    expect_no_complaints(rig)
    return {
        "publisher": "naive",
        "variant": variant,
        "messages": rows,
        "body_bytes": first.shape["body_bytes"],
        "seconds": round(line["seconds"], 6),
        "msgs_per_s": round(rows / line["seconds"], 1),
        "copies": copies,
        "cpu_us_per_msg": {
            "publisher": us_per_message(line["cpu_s"], rows),
            "postgres": us_per_message(used.postgres_s, rows),
            "rabbitmq": us_per_message(used.rabbitmq_s, rows),
        },
        "shape": first.shape,
    }
