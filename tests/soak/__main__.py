"""`python -m tests.soak --hours 1`: two relays on private servers at half of what they can do, with random faults.

Writes FILE.json and, with matplotlib (extra `bench`), FILE.png. Ends with 1 where anything was lost or overtaken, more was
repeated than G4 allows, something stalled for minutes, a relay ended by itself or with a traceback, or memory or
descriptors grew. The times are reported and not judged: they are as much the machine's.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import importlib.util
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.machine import machine, versions
from bench.procfs import rss_bytes
from relay.servers import PostgresServer, RabbitServer
from tests.conftest import eventually
from tests.faults.stage import Post, site_at
from tests.proxy import Proxy

from .faults import Faults
from .traffic import Ledger, Writer, consuming

CALIBRATION_ROWS = 30_000
CALIBRATION_S_MAX = 120.0
SAMPLE_S_MIN = 1.0
SAMPLES = 360
"""About so many points in the picture, however long it takes."""

RSS_BYTES_MAX = 256 * 2**20
RSS_GROWTH_BYTES_MAX = 16 * 2**20
"""Of a process that lives through everything: its median in the last quarter over that in the second."""
DESCRIPTORS_MAX = 64
IN_FLIGHT = 2000
"""`RELAY_MAX_IN_FLIGHT`, the default: what one relay may repeat for one fault (G4)."""
STALL_S = 180.0
"""What is committed by the end of a fault arrives within; no row takes longer."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--hours", type=float, default=1.0)
    parser.add_argument("--rows-s", type=float, help="rows a second, instead of half of what a drain shows")
    parser.add_argument("--pause", type=float, default=60.0, help="seconds between faults, on average")
    parser.add_argument("--seed", type=int, default=0, help="which faults happen")
    parser.add_argument("--result", type=Path, default=Path("bench/results/soak.json"))
    options = parser.parse_args()
    document = asyncio.run(_soak(options))
    options.result.parent.mkdir(parents=True, exist_ok=True)
    options.result.write_text(_json(document))
    if importlib.util.find_spec("matplotlib") is not None:
        from .plot import draw

        draw(document, options.result.with_suffix(".png"))
    print(json.dumps({name: value for name, value in document.items() if name not in ("samples", "faults")}, indent=2))
    return 0 if document["is_sound"] else 1


async def _soak(options: argparse.Namespace) -> dict[str, Any]:
    async with contextlib.AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="relay-soak-")))
        postgres = stack.enter_context(PostgresServer.start(durable=True))
        rabbit = stack.enter_context(RabbitServer.start())
        database_url = postgres.create_database("soak")
        site = await stack.enter_async_context(site_at(database_url, rabbit.amqp_url(), directory, {}))
        ledger = Ledger()
        consumer = await stack.enter_async_context(consuming(rabbit.amqp_url(), ledger))
        posts = []
        for number in (1, 2):
            broker = await stack.enter_async_context(Proxy(rabbit.amqp_url()))
            database = await stack.enter_async_context(Proxy(database_url))
            # What is sent goes soon: the table stays small however long it takes.
            settings = {"name": f"relay-{number}", "retention": "60s", "max_in_flight": str(IN_FLIGHT)}
            posts.append(
                Post(
                    f"relay-{number}",
                    broker,
                    database,
                    {**settings, "amqp_url": broker.url, "database_url": database.url},
                )
            )
        for post in posts:
            post.daemon = site.start(**post.settings)
            await post.relay.ready(60)
        writer = Writer(database_url, ledger)
        writing = asyncio.create_task(writer.run())
        rows_s = options.rows_s or await _half_the_ceiling(writer, ledger)
        writer.rows_s = rows_s
        faults = Faults(site, posts, rabbit, postgres, options.seed)
        document = {
            "hours": options.hours,
            "rows_s": round(rows_s, 1),
            "server_versions": {
                "postgresql": postgres.sql("SHOW server_version").split()[0],
                "rabbitmq": _broker_version(rabbit),
            },
        }
        document |= await _watch(options, ledger, posts, faults, (consumer, writing))
        writer.is_stopped = True
        document["writer_held_back_s"] = round(writer.held_back_s, 1)
        await asyncio.gather(writing, return_exceptions=True)
        await _drain(ledger)
        exits = [await post.relay.stop() for post in posts]
        texts = [daemon.text() for daemon in site.daemons]
        return {
            **_verdict(ledger, document, exits, texts, faults),
            "machine": machine(),
            "versions": versions(),
            **document,
        }


def _broker_version(rabbit: RabbitServer) -> str:
    return rabbit.eval("element(3, lists:keyfind(rabbit, 1, application:loaded_applications()))").strip('"')


async def _half_the_ceiling(writer: Writer, ledger: Ledger) -> float:
    """Half of the rate at which a pile of rows arrives."""
    writer.rows_s = CALIBRATION_ROWS
    await eventually(lambda: ledger.rows >= CALIBRATION_ROWS, CALIBRATION_S_MAX)
    writer.rows_s = 0.0
    began, arrived = time.monotonic(), ledger.arrived
    await eventually(lambda: ledger.arrived >= ledger.rows, CALIBRATION_S_MAX)
    seconds = time.monotonic() - began
    ledger.latencies_ms()  # the pile's
    # Where nothing was left to drain, the writer was the slower one.
    return (ledger.rows - arrived) / seconds / 2 if ledger.rows - arrived > 5000 else 1000.0


async def _watch(
    options: argparse.Namespace,
    ledger: Ledger,
    posts: list[Post],
    faults: Faults,
    others: tuple[asyncio.Task[None], ...],
) -> dict[str, Any]:
    """Samples and faults until the time is over, or something breaks: then `broke` says what."""
    seconds = options.hours * 3600
    sample_s = max(SAMPLE_S_MIN, seconds / SAMPLES)
    began = time.monotonic()
    samples: list[dict[str, Any]] = []
    happened: list[dict[str, Any]] = []
    disturbing = asyncio.create_task(_disturb(options.pause, ledger, faults, began, happened))
    tasks = (disturbing, *others)
    try:
        while time.monotonic() - began < seconds and not any(task.done() for task in tasks):
            await asyncio.wait(tasks, timeout=sample_s, return_when=asyncio.FIRST_COMPLETED)
            samples.append(_sample(time.monotonic() - began, ledger, posts))
            if sys.stderr.isatty():
                progress = f"{samples[-1]['s']:.0f} s, {ledger.arrived} rows, {len(happened)} faults"
                print(f"\r{progress}", end="", file=sys.stderr)
        broke = [repr(task.exception()) for task in tasks if task.done()]
    finally:
        disturbing.cancel()
        await asyncio.gather(disturbing, return_exceptions=True)
    # A fault that was cancelled midway: everything runs again.
    await faults.mend()
    return {"broke": broke, "faults": happened, "samples": samples}


async def _disturb(
    pause_s: float, ledger: Ledger, faults: Faults, began: float, happened: list[dict[str, Any]]
) -> None:
    """One fault after the other, each begun when what was committed during the one before has arrived."""
    while True:
        await asyncio.sleep(faults.pause_s(pause_s))
        at = time.monotonic()
        fault: dict[str, Any] = {"s": round(at - began, 1), "fault": faults.draw()}
        happened.append(fault)
        await faults.happen(fault["fault"])
        over = time.monotonic()
        fault["lasted_s"] = round(over - at, 1)
        await eventually(functools.partial(ledger.has_all, ledger.until), STALL_S, interval_s=0.2)
        fault["back_s"] = round(time.monotonic() - over, 1)


def _sample(at_s: float, ledger: Ledger, posts: list[Post]) -> dict[str, Any]:
    latencies = ledger.latencies_ms()
    relays = []
    for post in posts:
        try:
            pid = post.relay.process.pid
            relays.append({"rss_bytes": rss_bytes(pid), "descriptors": len(os.listdir(f"/proc/{pid}/fd"))})
        except OSError:
            # It was killed this moment.
            relays.append({"rss_bytes": 0, "descriptors": 0})
    return {
        "s": round(at_s, 1),
        "committed": ledger.rows,
        "arrived": ledger.arrived,
        "p50_ms": latencies[0] if latencies else None,
        "p99_ms": latencies[1] if latencies else None,
        "worst_ms": latencies[2] if latencies else None,
        "load_1m": round(os.getloadavg()[0], 1),
        "relays": relays,
    }


async def _drain(ledger: Ledger) -> None:
    """A transaction whose answer was lost may arrive beside what is owed."""
    try:
        await eventually(lambda: ledger.lost() == 0, STALL_S, interval_s=1.0)
    except AssertionError:
        # The verdict counts what is missing.
        return


def _verdict(
    ledger: Ledger, document: dict[str, Any], exits: list[int], texts: list[str], faults: Faults
) -> dict[str, Any]:
    samples, happened = document["samples"], document["faults"]
    relays = [each for sample in samples for each in sample["relays"]]
    found = {
        "rows": ledger.rows,
        "lost": ledger.lost(),
        "out_of_order": ledger.out_of_order,
        "copies": ledger.copies,
        "copies_max": IN_FLIGHT * sum(faults.kinds[fault["fault"]].windows for fault in happened),
        "redelivered": ledger.redelivered,
        "p50_ms": statistics.median(sample["p50_ms"] for sample in samples if sample["p50_ms"] is not None),
        "worst_ms": max(sample["worst_ms"] or 0.0 for sample in samples),
        "back_s_max": max((fault["back_s"] for fault in happened if "back_s" in fault), default=0.0),
        "exits": exits,
        "tracebacks": sum("Traceback" in text for text in texts),
        "log_lines": sum(len(text.splitlines()) for text in texts),
        "rss_bytes_max": max(each["rss_bytes"] for each in relays),
        "rss_growth_bytes": _growth([sample["relays"][-1]["rss_bytes"] for sample in samples]),
        "descriptors_max": max(each["descriptors"] for each in relays),
    }
    is_sound = (
        found["lost"] == found["out_of_order"] == found["tracebacks"] == 0
        and not document["broke"]
        and found["copies"] <= found["copies_max"]
        and found["worst_ms"] <= 1e3 * STALL_S
        and exits == [0] * len(exits)
        and found["rss_bytes_max"] <= RSS_BYTES_MAX
        and found["rss_growth_bytes"] <= RSS_GROWTH_BYTES_MAX
        and found["descriptors_max"] <= DESCRIPTORS_MAX
    )
    return {"is_sound": is_sound, "load_1m": statistics.median(each["load_1m"] for each in samples), **found}


def _growth(values: list[int]) -> int:
    """What the last quarter's median has over the second's."""
    quarter = len(values) // 4
    if quarter == 0:
        return 0
    return round(statistics.median(values[-quarter:]) - statistics.median(values[quarter : 2 * quarter]))


def _json(document: dict[str, Any]) -> str:
    """A line for each fault and sample."""
    lists = {
        name: "[\n  " + ",\n  ".join(json.dumps(each) for each in document[name]) + "\n ]"
        for name in ("faults", "samples")
    }
    text = json.dumps({name: f"@{name}" if name in lists else value for name, value in document.items()}, indent=1)
    for name, lines in lists.items():
        text = text.replace(f'"@{name}"', lines)
    return text + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
