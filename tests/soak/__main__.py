"""`python -m tests.soak --hours 1`: two relays on private servers at half of what they can do, with random faults.

Writes FILE.json and, with matplotlib (extra `bench`), FILE.png. Ends with 1 where anything was lost or overtaken, a relay
ended by itself or with a traceback, or memory or descriptors grew out of their bounds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

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
SAMPLES = 720
"""About so many points in the picture, however long it takes."""

RSS_BYTES_MAX = 256 * 2**20
DESCRIPTORS_MAX = 64
DRAIN_S = 180.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--hours", type=float, default=1.0)
    parser.add_argument("--rows-s", type=float, help="rows a second, instead of half of what a drain shows")
    parser.add_argument("--pause", type=float, default=60.0, help="seconds between faults, on average")
    parser.add_argument("--seed", type=int, default=0, help="which faults happen")
    parser.add_argument("--result", type=Path, default=Path("bench/results/soak.json"))
    options = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    document = {"commit": commit} | asyncio.run(_soak(options))
    options.result.parent.mkdir(parents=True, exist_ok=True)
    options.result.write_text(json.dumps(document, indent=1) + "\n")
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
        await stack.enter_async_context(consuming(rabbit.amqp_url(), ledger))
        posts = []
        for number in (1, 2):
            broker = await stack.enter_async_context(Proxy(rabbit.amqp_url()))
            database = await stack.enter_async_context(Proxy(database_url))
            # What is sent goes soon: the table stays small however long it takes.
            settings = {"name": f"relay-{number}", "retention": "60s"}
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
        writer.rows_s = options.rows_s or await _half_the_ceiling(writer, ledger)
        faults = Faults(site, posts, rabbit, postgres, options.seed)
        document = await _watch(options, writer, ledger, posts, faults)
        writer.is_stopped = True
        await writing
        await _drain(ledger)
        exits = [await post.relay.stop() for post in posts]
        texts = [daemon.text() for daemon in site.daemons]
        return document | _verdict(ledger, document, exits, texts)


async def _half_the_ceiling(writer: Writer, ledger: Ledger) -> float:
    """Half of the rate at which a pile of rows arrives."""
    writer.rows_s = CALIBRATION_ROWS
    await eventually(lambda: ledger.rows >= CALIBRATION_ROWS, CALIBRATION_S_MAX)
    writer.rows_s = 0.0
    began, arrived = time.monotonic(), ledger.arrived
    await eventually(lambda: ledger.arrived >= ledger.rows, CALIBRATION_S_MAX)
    seconds = time.monotonic() - began
    # Where nothing was left to drain, the writer was the slower one.
    return (ledger.rows - arrived) / seconds / 2 if ledger.rows - arrived > 5000 else 1000.0


async def _watch(
    options: argparse.Namespace, writer: Writer, ledger: Ledger, posts: list[Post], faults: Faults
) -> dict[str, Any]:
    seconds = options.hours * 3600
    sample_s = max(SAMPLE_S_MIN, seconds / SAMPLES)
    began = time.monotonic()
    samples: list[dict[str, Any]] = []
    happened: list[dict[str, Any]] = []

    async def disturb() -> None:
        while True:
            await asyncio.sleep(faults.pause_s(options.pause))
            at_s = time.monotonic() - began
            name = await faults.one()
            happened.append({"s": round(at_s, 1), "fault": name, "lasted_s": round(time.monotonic() - began - at_s, 1)})

    disturbing = asyncio.create_task(disturb())
    try:
        while time.monotonic() - began < seconds:
            await asyncio.sleep(sample_s)
            assert not disturbing.done(), disturbing.exception()
            samples.append(_sample(time.monotonic() - began, ledger, posts))
            if sys.stderr.isatty():
                print(
                    f"\r{samples[-1]['s']:.0f} s, {ledger.arrived} rows, {len(happened)} faults",
                    end="",
                    file=sys.stderr,
                )
    finally:
        disturbing.cancel()
        await asyncio.gather(disturbing, return_exceptions=True)
    # A fault that was cancelled midway: everything runs again.
    await faults.mend()
    return {
        "hours": options.hours,
        "rows_s": round(writer.rows_s, 1),
        "samples": samples,
        "faults": happened,
    }


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
        "relays": relays,
    }


async def _drain(ledger: Ledger) -> None:
    """A transaction whose answer was lost may arrive beside what is owed."""
    try:
        await eventually(lambda: ledger.lost() == 0, DRAIN_S, interval_s=1.0)
    except AssertionError:
        # The verdict counts what is missing.
        return


def _verdict(ledger: Ledger, document: dict[str, Any], exits: list[int], texts: list[str]) -> dict[str, Any]:
    relays = [each for sample in document["samples"] for each in sample["relays"]]
    found = {
        "rows": ledger.rows,
        "lost": ledger.lost(),
        "out_of_order": ledger.out_of_order,
        "copies": ledger.copies,
        "exits": exits,
        "tracebacks": sum("Traceback" in text for text in texts),
        "rss_bytes_max": max(each["rss_bytes"] for each in relays),
        "descriptors_max": max(each["descriptors"] for each in relays),
    }
    is_sound = (
        found["lost"] == found["out_of_order"] == found["tracebacks"] == 0
        and exits == [0] * len(exits)
        and found["rss_bytes_max"] <= RSS_BYTES_MAX
        and found["descriptors_max"] <= DESCRIPTORS_MAX
    )
    return found | {"is_sound": is_sound}


if __name__ == "__main__":
    raise SystemExit(main())
