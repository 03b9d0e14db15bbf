"""Scenario `peers`: the relay that is written in an afternoon (`bench/naive.py`), on the same servers in the same turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from bench import naive
from bench.children import run_module
from bench.errors import BenchFailed
from bench.load import Load
from bench.procfs import us_per_message
from bench.proof import expect_no_complaints, prove_queue
from bench.rig import Rig
from bench.step import Form, Run, Step

TIMEOUT_S: Final = 600.0


def steps(form: Form) -> Sequence[Step]:
    load = Load(form.rows(30_000, 60_000))
    rows = {"one": form.rows(1_000, 6_000), "gathered": load.rows}
    return [
        Step("peers", variant, 2.0 + many / rate, lambda rig, v=variant, n=many: _measure(rig, load, v, n))  # type: ignore[misc]
        for (variant, many), rate in zip(rows.items(), (1_000, 5_000), strict=True)
    ]


def _measure(rig: Rig, load: Load, variant: str, rows: int) -> Sequence[Run]:
    with rig.fresh_database(load) as database, rig.fresh_queue():
        rig.sql(naive.INDEX, database)
        rig.wait_until_quiet()
        before = rig.cpu()
        line = run_module(
            "bench.naive",
            variant,
            str(rows),
            timeout_s=TIMEOUT_S,
            RELAY_DATABASE_URL=rig.postgres.url(database),
            RELAY_AMQP_URL=rig.amqp_url,
        )
        used = rig.cpu() - before
        pending = rig.count(database, load.rows)[1]
        if pending != load.rows - rows:
            raise BenchFailed(f"{pending} rows are pending where {load.rows - rows} should be")
        proof = prove_queue(rig, load, rows)
    expect_no_complaints(rig)
    return [
        {
            "variant": variant,
            "messages": rows,
            "body_bytes": load.body_bytes,
            "seconds": round(line["seconds"], 6),
            "msgs_per_s": round(rows / line["seconds"], 1),
            "loop": line["loop"],
            "cpu_us_per_msg": {
                "publisher": us_per_message(line["cpu_s"], rows),
                "postgres": us_per_message(used.postgres_s, rows),
                "rabbitmq": us_per_message(used.rabbitmq_s, rows),
            },
            **proof,
        }
    ]
