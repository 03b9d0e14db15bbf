"""`relay demo`: the command as a whole, and that its verdict can say no."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import asyncpg
import pytest

from relay import migrate
from relay.demo import process, shop
from relay.demo.process import RelayFailed, RelayProcess
from relay.demo.verdict import Event, Evidence, judge, overtakings
from relay.http import Heartbeat, HttpServer, Readiness
from relay.metrics import Metrics
from relay.servers import LOOPBACK, free_port
from relay.values import ListenAddress
from tests.conftest import eventually, is_alive
from tests.e2e.conftest import COMMAND, command, environment

EVENTS = (Event("a1", "a", 1), Event("a2", "a", 2), Event("b1", "b", 1))
GOOD = Evidence(
    committed=EVENTS,
    acknowledged=frozenset({"a1", "a2", "b1"}),
    rolled_back=frozenset({"z"}),
    arrivals=["a1", "b1", "a2", "a1"],
    duplicates=1,
    retried=2,
    parked=1,
    redriven=1,
    left_parked=0,
    crashes=1,
    effects={"a": 2, "b": 1},
    marked_sent=3,
    kills=1,
    exit_code=0,
    elapsed_s=1.0,
)


def test_a_good_run_holds() -> None:
    verdict = judge(GOOD)
    assert verdict.holds
    values = {line.name: line.value for line in verdict.lines}
    assert values["duplicates (allowed, same id)"] == "1"


async def test_a_relay_that_is_never_ready_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ended in a bare TimeoutError; and a proxy of the environment's was asked for the relay's pages."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setattr(process, "READY_TIMEOUT_S", 0.3)
    monkeypatch.setattr(process, "_program", lambda: [sys.executable, "-c", "import time; time.sleep(60)"])
    (tmp_path / "log").write_text("its last words\n")
    port, readiness = free_port(), Readiness()
    readiness.add("broker", "connection refused")
    pages = HttpServer(ListenAddress(LOOPBACK, port), Metrics(), readiness, Heartbeat())
    pages.start()
    relay = RelayProcess({}, port, tmp_path / "log")
    try:
        with pytest.raises(
            RelayFailed, match=r"not ready within 0\.3 s: broker \(connection refused\): its last words"
        ):
            await relay.start()
        assert "relay_build_info" in str(await relay.metrics())
    finally:
        await relay.close()
        pages.close()


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"arrivals": ["a1", "a2"]}, "events lost"),
        ({"arrivals": ["a1", "a2", "b1", "z"]}, "rolled back, yet published"),
        ({"arrivals": ["a2", "a1", "b1"]}, "order violations per key"),
        ({"effects": {"a": 3, "b": 1}}, "effects missing or applied twice"),
        ({"effects": {"a": 2}}, "effects missing or applied twice"),
        ({"marked_sent": 2}, "rows marked sent"),
        ({"exit_code": 4}, "relay's exit code after SIGTERM"),
        ({"acknowledged": frozenset({"a1"})}, "events committed"),
        ({"kills": 0}, "relay killed with SIGKILL"),
        ({"left_parked": 1}, "left in the parking queue"),
        ({"retried": 0}, "retried by the consumer's ladder"),
        ({"duplicates": 0}, "known to the consumer's inbox already"),
    ],
)
def test_each_broken_guarantee_is_named(change: dict[str, object], line: str) -> None:
    verdict = judge(dataclasses.replace(GOOD, **change))  # type: ignore[arg-type]
    assert not verdict.holds
    assert line in verdict.summary


def test_only_first_copies_are_judged() -> None:
    assert overtakings(EVENTS, ["a1", "a2", "a1", "b1"]) == 0
    assert overtakings(EVENTS, ["a2", "b1", "a1"]) == 1


@pytest.fixture
def open_directory() -> Iterator[Path]:
    """A directory that the user `postgres` can reach, which pytest's own are not."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        directory.chmod(0o755)
        yield directory


@pytest.mark.usefixtures("server_programs")
def test_the_demo_holds() -> None:
    done = command("demo", timeout_s=180)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == "", "a pipe gets no progress"
    assert "FAILED" not in done.stdout
    assert "order violations per key" in done.stdout


@pytest.mark.usefixtures("server_programs")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_interrupt_cleans_everything_up(open_directory: Path, number: signal.Signals) -> None:
    process = await asyncio.create_subprocess_exec(
        *COMMAND,
        "demo",
        env=environment({"TMPDIR": str(open_directory)}),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    # Up: the relay's log is there, and so are both servers.
    await eventually(lambda: list(open_directory.glob("relay-demo-*/relay.log")), 60)
    children = _descendants(process.pid)
    assert children
    process.send_signal(number)
    output, _ = await process.communicate()
    assert process.returncode == 1
    assert b"Traceback" not in output
    await eventually(lambda: not [pid for pid in children if is_alive(pid)], 30)
    assert os.listdir(open_directory) == []


def _descendants(pid: int) -> list[int]:
    """Every process below `pid`, by the parents that /proc names."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents[int(entry.name)] = int(fields[1])
    found, level = [], [pid]
    while level:
        level = [child for child, parent in parents.items() if parent in level and child != os.getpid()]
        found += level
    return found


async def test_the_writers_go_on_until_the_scenes_are_over(database_url: str) -> None:
    """A machine so slow that the time is over before the relay is up: it still finds writers at work."""
    connection = await asyncpg.connect(database_url)
    await connection.execute(shop.SCHEMA)
    await migrate.migrate(connection)
    await connection.close()
    writers, is_enough = shop.Shop(database_url), asyncio.Event()
    trade = asyncio.create_task(writers.trade(0.0, is_enough))
    imported = shop.WRITERS * shop.IMPORTS * shop.ORDERS_PER_IMPORT * len(shop.LIFE)
    await eventually(lambda: trade.done() or len(writers.committed) > imported + 20)
    assert not trade.done()
    is_enough.set()
    await asyncio.wait_for(trade, 30)
