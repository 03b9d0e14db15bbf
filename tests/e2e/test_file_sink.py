"""`RELAY_SINK=file`, end to end: without a broker, killed, with a full disk, to the standard output."""

from __future__ import annotations

import asyncio
import json
import resource
import signal
import subprocess
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from tests.conftest import eventually

from .conftest import COMMAND, Site, command, environment

AT_EXIT = """
import atexit, sys
atexit.register(lambda: print("LOADED", *sorted(sys.modules), file=sys.stderr))
"""


@pytest.fixture
async def lines(database_url: str, tmp_path: Path) -> AsyncIterator[Site]:
    """An outbox without a broker; the sink is `events.jsonl` in the site's directory."""
    settings = {
        "RELAY_DATABASE_URL": database_url,
        "RELAY_SINK": "file",
        "RELAY_SINK_PATH": str(tmp_path / "events.jsonl"),
    }
    done = await asyncio.to_thread(lambda: command("migrate", settings=settings))
    assert done.returncode == 0, done.stderr
    database = await asyncpg.connect(database_url)
    here = Site(settings, database_url, "", tmp_path, database, [])
    yield here
    for daemon in here.daemons:
        daemon.close()
    await database.close(timeout=5)


def documents(site: Site) -> list[dict[str, Any]]:
    """The file's lines; one that is no document fails the test."""
    text = Path(site.settings["RELAY_SINK_PATH"]).read_bytes()
    return [json.loads(line) for line in text.splitlines()]


def arrived(site: Site) -> list[str]:
    """The ids in the file, in order."""
    return [document["id"] for document in documents(site)]


def size(site: Site) -> int:
    path = Path(site.settings["RELAY_SINK_PATH"])
    return path.stat().st_size if path.exists() else 0


def is_larger(site: Site, bytes_min: int) -> bool:
    return size(site) > bytes_min


def tear(site: Site) -> None:
    """Leave half a line at the end, as a kill in the middle of a write does."""
    with Path(site.settings["RELAY_SINK_PATH"]).open("ab") as file:
        file.write(b'{"id":"torn')


async def test_without_a_broker_and_without_its_driver(lines: Site) -> None:
    done = await asyncio.to_thread(lambda: command("check", settings=lines.settings))
    assert done.returncode == 0, done.stdout
    daemon = await lines.start(prelude=AT_EXIT).ready()
    await lines.insert("01K0ORDERCREATED", "order.created", key="42", payload='{"order_id":"42"}')
    await lines.all_sent()
    (document,) = documents(lines)
    assert (document["id"], document["routing_key"]) == ("01K0ORDERCREATED", "order.created")
    assert document["body"] == {"order_id": "42"}
    assert daemon.metrics()['relay_connected{peer="broker"}'] == 1
    assert daemon.metrics()['relay_published_total{outcome="acked"}'] == 1
    assert await daemon.stop() == 0
    loaded = daemon.text().rpartition("LOADED")[2].split()
    assert "relay.broker.file" in loaded
    assert not {"aiormq", "aio_pika", "pamqp"} & set(loaded)


async def test_killed_in_the_middle_of_a_write(lines: Site) -> None:
    """SIGKILL again and again, half a line at the end each time: nothing lost, each key in order."""
    ids = await lines.insert_many(3000, keys=50)
    for life in (1, 2, 3):
        daemon = lines.start(max_in_flight="100", lease="1s")
        await eventually(partial(is_larger, lines, life * 50_000))
        await daemon.kill()
        tear(lines)
    await lines.start().ready()
    await lines.all_sent(30)
    found = arrived(lines)
    assert set(found) == set(ids)
    assert len(found) <= len(ids) + 3 * 100, "a kill repeats at most what was in flight"
    first = list(dict.fromkeys(found))
    for key in range(50):
        of_key = [id for id in ids if int(id[1:]) % 50 == key]
        assert [id for id in first if int(id[1:]) % 50 == key] == of_key


async def test_a_full_disk_is_waited_for(lines: Site) -> None:
    """No room half-way through a batch: not ready, blocked, no attempt used, nothing lost or torn once there is room."""
    daemon = await lines.start().ready()
    ids = [f"big{n}" for n in range(8)]
    await lines.insert(ids[0], payload=json.dumps("x" * 200_000))
    await lines.all_sent()
    # The kernel's limit on the size of a file stands in for the disk's: it too cuts a write short and then refuses.
    resource.prlimit(daemon.process.pid, resource.RLIMIT_FSIZE, (size(lines) + 300_000, resource.RLIM_INFINITY))
    for id in ids[1:]:
        await lines.insert(id, payload=json.dumps("x" * 200_000))
    await daemon.not_ready("blocked")
    assert daemon.metric("relay_backpressure_active") >= 1
    assert len(arrived(lines)) <= 2, "what does not fit is not there in part"
    resource.prlimit(daemon.process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    await lines.all_sent()
    assert sorted(arrived(lines)) == ids, "each once"
    assert await lines.database.fetchval("SELECT max(attempts) FROM outbox") == 0
    await daemon.ready()
    assert [event["event"] for event in daemon.events()].count("broker_blocked") == 1
    assert await daemon.stop() == 0


async def test_a_directory_that_comes_later_is_waited_for(lines: Site) -> None:
    path = lines.directory / "volume" / "events.jsonl"
    daemon = lines.start(sink_path=str(path))
    await lines.insert("m1")
    await daemon.not_ready("broker")
    done = await asyncio.to_thread(lambda: command("check", settings=lines.settings | {"RELAY_SINK_PATH": str(path)}))
    assert done.returncode == 4
    assert "existing directory" in done.stdout
    path.parent.mkdir()
    await lines.all_sent()
    assert len(path.read_text().splitlines()) == 1


async def test_to_the_standard_output(lines: Site) -> None:
    """Lines on the standard output, the log on the other one: `relay run | jq` works."""
    settings = lines.settings | {"RELAY_SINK_PATH": "-", "RELAY_LISTEN": ""}
    await lines.insert_many(20, keys=3)
    with (lines.directory / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *COMMAND, "run", env=environment(settings), stdout=subprocess.PIPE, stderr=log
        )
        assert process.stdout is not None
        async with asyncio.timeout(20):
            assert await process.stdout.readline() == b"\n", "whatever stood in the pipe before is ended"
            found = [json.loads(await process.stdout.readline())["id"] for _ in range(20)]
        assert sorted(found) == sorted(f"m{n}" for n in range(1, 21))
        await lines.all_sent()
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 20) == 0
        assert await process.stdout.read() == b""


def test_a_file_sink_without_a_path_is_one_clear_error() -> None:
    done = command("run", settings={"RELAY_DATABASE_URL": "postgresql://x@127.0.0.1/x", "RELAY_SINK": "file"})
    assert done.returncode == 2
    assert "RELAY_SINK_PATH: not set" in done.stderr
