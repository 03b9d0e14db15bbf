"""`relay bench`: a drain and a trickle against the configured servers, on a table, an exchange and a queue of its own.

    plan -> own table, exchange, queue -> relay run -> backlog drained -> rows at a rate, consumed -> figures -> all gone

The relay is `relay run` as configured but for table, route and port: its settings are what is measured. Everything is taken
away at the end, also on Ctrl-C, SIGTERM and SIGHUP.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from relay import __version__
from relay.benchmark.figures import Drain, Outcome, Plan, Trickle
from relay.benchmark.ground import Ground, prepared
from relay.benchmark.load import Written, consuming, filled, trickle
from relay.benchmark.looks import LOOK_MIN_S, disturbance, pause_s, published
from relay.config import Config
from relay.demo.process import RelayProcess
from relay.errors import CheckFailed
from relay.servers import free_port

__all__ = ["Outcome", "Plan", "run"]

STALL_S: Final = 30.0
"""No row settled, or none arrived, for so long: it will not end."""

Say = Callable[[str], None]


async def run(config: Config, environ: Mapping[str, str], plan: Plan, step: Say, gauge: Say) -> Outcome:
    """Measure. `environ` is what the relay's process gets beside its own table and route.

    Raises RelayError: a server that refuses, a relay that ends, CheckFailed where rows stop moving or something
    could not be taken away.
    """
    step("making a table, an exchange and a queue")
    async with prepared(config, plan.queue) as ground:
        with tempfile.TemporaryDirectory(prefix="relay-bench-") as directory:
            relay = RelayProcess(_settings(environ, ground), free_port(), Path(directory) / "relay.log")
            try:
                await relay.start()
                outcome = await _measure(config, ground, relay, plan, step, gauge)
                await relay.stop()
            finally:
                await relay.close()
    return outcome


def _settings(environ: Mapping[str, str], ground: Ground) -> dict[str, str]:
    """The caller's settings, and what the driver goes by (`.pgpass` is in HOME); then what makes the relay this benchmark's."""
    families = ("RELAY_", "PG", "SSL_CERT")
    kept = {name: value for name, value in environ.items() if name == "HOME" or name.startswith(families)}
    own = {
        "RELAY_TABLE": ground.table.quoted,
        "RELAY_EXCHANGE": ground.queue,
        "RELAY_ROUTING_KEY": "bench",
        "RELAY_SINK": "amqp",
        "RELAY_LOG_LEVEL": "warning",
    }
    return {name: value for name, value in kept.items() if name != "RELAY_SINK_PATH"} | own


async def _measure(config: Config, ground: Ground, relay: RelayProcess, plan: Plan, step: Say, gauge: Say) -> Outcome:
    step(f"writing {plan.rows:,} rows")
    async with ground.kept():
        async with filled(ground, plan):
            before = await relay.metrics()
            began = asyncio.get_running_loop().time()
        step("draining them")
        ended, after = await _drained(relay, plan.rows, gauge)
    _expect_undisturbed(before, after, plan.rows)
    drain = Drain(
        rows=plan.rows,
        seconds=ended - began,
        cpu_s=_difference(before, after, "process_cpu_seconds_total"),
        read_s=_difference(before, after, "relay_claim_seconds_sum") or 0.0,
        read_calls=round(_difference(before, after, "relay_claim_seconds_count") or 0),
        settle_s=_difference(before, after, "relay_settle_seconds_sum") or 0.0,
        settle_calls=round(_difference(before, after, "relay_settle_seconds_count") or 0),
        confirm_s=_difference(before, after, "relay_confirm_seconds_sum") or 0.0,
        rate_s=_difference(before, after, 'relay_backpressure_seconds_total{reason="rate"}') or 0.0,
        in_flight_max=config.max_in_flight,
        database_rtt_s=await ground.database_round_trip_s(),
        broker_rtt_s=await ground.broker_round_trip_s(),
        is_direct=await ground.is_direct(),
    )
    await ground.empty_queue()
    step(f"{plan.rate_per_s} rows a second for {plan.seconds} s")
    before = await relay.metrics()
    async with consuming(ground) as arrived:
        written = await trickle(ground, config, plan)
        await _arrived(relay, arrived, written)
    after = await relay.metrics()
    _expect_undisturbed(before, after, len(written))
    cpu_s = _difference(before, after, "process_cpu_seconds_total")
    return Outcome(plan, __version__, drain, _trickle(plan, written, arrived, cpu_s))


async def _drained(relay: RelayProcess, rows: int, gauge: Say) -> tuple[float, Mapping[str, float]]:
    """When the last row was settled, and the metrics then. Raises CheckFailed, RelayFailed."""
    loop = asyncio.get_running_loop()
    began = looked_at = progressed_at = loop.time()
    sent, pause = 0, LOOK_MIN_S
    while True:
        await asyncio.sleep(pause)
        relay.expect_alive()
        found, now = await relay.metrics(), loop.time()
        gained = int(found.get("relay_rows_sent_total", sent)) - sent
        if gained:
            progressed_at = now
        sent += gained
        gauge(f"        {sent:,.0f} of {rows:,} rows sent")
        if sent >= rows:
            return now, found
        if now - progressed_at > STALL_S:
            raise CheckFailed(f"no row was sent for {STALL_S:.0f} s; {sent:,.0f} of {rows:,} are", hint=_hint(found))
        pause = pause_s(rows - sent, gained, now - looked_at, now - began)
        looked_at = now


async def _arrived(relay: RelayProcess, arrived: Mapping[str, float], written: list[Written]) -> None:
    """Every row has reached the consumer. Raises CheckFailed, RelayFailed."""
    loop = asyncio.get_running_loop()
    count, progressed_at = 0, loop.time()
    while len(arrived) < len(written):
        relay.expect_alive()
        if len(arrived) > count:
            count, progressed_at = len(arrived), loop.time()
        elif loop.time() - progressed_at > STALL_S:
            raise CheckFailed(
                f"no message arrived for {STALL_S:.0f} s; {len(arrived):,} of {len(written):,} rows did",
                hint=_hint(await relay.metrics()),
            )
        await asyncio.sleep(LOOK_MIN_S)


def _trickle(plan: Plan, written: list[Written], arrived: Mapping[str, float], cpu_s: float | None) -> Trickle:
    return Trickle(
        rate_per_s=plan.rate_per_s,
        seconds=plan.seconds,
        # A row may arrive before its writer hears of the commit.
        from_commit_s=[max(0.0, arrived[row.id] - row.committed_at) for row in written],
        from_due_s=[max(0.0, arrived[row.id] - row.due_at) for row in written],
        cpu_s=cpu_s,
    )


def _expect_undisturbed(before: Mapping[str, float], after: Mapping[str, float], rows: int) -> None:
    """Raises CheckFailed: what was published twice, returned, nacked or lost makes no figure."""
    earlier = published(before)
    if found := disturbance({name: count - earlier.get(name, 0) for name, count in published(after).items()}, rows):
        raise CheckFailed(found, hint="run it again when both servers are well")


def _difference(before: Mapping[str, float], after: Mapping[str, float], name: str) -> float | None:
    """How far a counter went; None where the relay has no such metric (CPU time outside of Linux)."""
    return after[name] - before.get(name, 0.0) if name in after else None


def _hint(metrics: Mapping[str, float]) -> str:
    """What the relay itself says holds it back."""
    prefix = "relay_backpressure_active{"
    active = [
        name.partition('="')[2].removesuffix('"}') for name, on in metrics.items() if name.startswith(prefix) and on
    ]
    return f"it waits for: {', '.join(active)}" if active else "`relay check` may say why"
