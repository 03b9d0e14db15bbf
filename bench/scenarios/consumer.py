"""Scenario `consumer`: a consumer of `relay.inbox` by its defaults, against asyncpg alone with the same statements.

Each message is one transaction with the claim and one business row, on as many connections. The consumer has the queue, the
reading of messages and their acknowledgements on top.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from bench import handling, native
from bench.children import run_command, run_module
from bench.errors import BenchFailed
from bench.load import Load
from bench.procfs import us_per_message
from bench.proof import expect_no_complaints
from bench.rig import EXCHANGE, QUEUE, Rig
from bench.step import Form, Run, Step
from relay.inbox import RetryPolicy
from relay.topology import names

WINDOW: Final = 1_000
DATABASE: Final = "consumer_run"
TIMEOUT_S: Final = 600.0


def steps(form: Form) -> Sequence[Step]:
    load = Load(form.rows(2_000, 30_000))
    estimate_s = 3.0 + load.rows / 2_000 + load.rows / 1_000
    return [Step("consumer", "pair", estimate_s, lambda rig: pair(rig, load), is_once=not form.is_long)]


def pair(rig: Rig, load: Load) -> Sequence[Run]:
    """Both, one right after the other. Raises Unavailable, BenchFailed."""
    return [run for variant in ("alone", "consumer") for run in measure(rig, variant, load)]


def measure(rig: Rig, variant: str, load: Load) -> Sequence[Run]:
    """`alone` or `consumer`. The C publisher fills the queue. Raises Unavailable, BenchFailed."""
    rig.postgres.drop_database(DATABASE)
    url = rig.postgres.create_database(DATABASE)
    expected = [*(names.retry_queue(QUEUE, delay_s) for delay_s in RetryPolicy().delays_s), names.parking_queue(QUEUE)]
    try:
        run_command("relay", "inbox", "migrate", timeout_s=60.0, RELAY_INBOX_DATABASE_URL=url)
        rig.sql(handling.SCHEMA, DATABASE)
        with rig.fresh_queue("quorum", *expected):
            if variant == "consumer":
                native.publish(rig.amqp_url, EXCHANGE, load.rows, rig.backlog(load).body, load.keys, WINDOW, "library")
            rig.sql("checkpoint", DATABASE)
            rig.wait_until_quiet()
            before = rig.cpu()
            line = run_module(
                "bench.handling",
                variant,
                str(load.rows),
                timeout_s=TIMEOUT_S,
                RELAY_INBOX_DATABASE_URL=url,
                RELAY_INBOX_AMQP_URL=rig.amqp_url,
            )
            used = rig.cpu() - before
        found = rig.sql("select (select count(*) from effect), (select count(*) from processed_messages)", DATABASE)
    finally:
        rig.postgres.drop_database(DATABASE)
    if found.strip() != f"{load.rows}|{load.rows}":
        raise BenchFailed(f"{found.strip()} effects and inbox rows where {load.rows} of each should be")
    expect_no_complaints(rig)
    return [
        {
            "variant": variant,
            "messages": load.rows,
            "seconds": round(line["seconds"], 6),
            "msgs_per_s": round(load.rows / line["seconds"], 1),
            "cpu_us_per_msg": {
                "consumer": us_per_message(line["cpu_s"], load.rows),
                "postgres": us_per_message(used.postgres_s, load.rows),
                "rabbitmq": us_per_message(used.rabbitmq_s, load.rows),
            },
        }
    ]
