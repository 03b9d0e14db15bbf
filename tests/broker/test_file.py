"""A file of JSON lines: what a line says, torn lines, a full disk, rotation, pipes."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import select
from pathlib import Path
from typing import Any

import pytest

from relay.broker import appender as appender_module
from relay.broker.appender import Appender, Tail
from relay.broker.file import FileBroker, FileLink
from relay.broker.lines import LineEncoder
from relay.core.ports.broker import Closed
from relay.errors import BrokerRefused, BrokerUnavailable, MessageInvalid
from relay.message import PayloadType
from relay.route import Router
from tests.conftest import eventually

from .disk import Disk
from .places import NOW, body_of
from .recorder import Recorder, make_row, make_rows

ROUTER = Router("ev", "{event_type}")


def encoded(payload_type: PayloadType = PayloadType.JSON, *, envelope_name: str = "none", **columns: Any) -> bytes:
    encoder = LineEncoder(ROUTER, payload_type, envelope_name=envelope_name, source="relay")
    return encoder.encode(make_row(1, **columns), lambda: NOW)


def broker(path: Path) -> FileBroker:
    return FileBroker(str(path), ROUTER, database_now=lambda: NOW)


async def connect(path: Path, recorder: Recorder) -> FileLink:
    return await broker(path).connect(recorder, PayloadType.JSON)


def ids(path: Path) -> list[str]:
    return [json.loads(line)["id"] for line in path.read_bytes().splitlines()]


# ---------------------------------------------------------------- the line


def test_a_line_is_the_message_written_out() -> None:
    line = encoded(
        id="01K0ORDERCREATED",
        aggregate_type="order",
        aggregate_id="42",
        occurred_at=1_764_439_200.123456,
        headers='{"tenant": "é", "n": 123456789012345678901234567890, "f": 1.10, "aggregate_id": "overruled"}',
        rare={
            "aggregate_version": 7,
            "correlation_id": "c",
            "causation_id": "cause",
            "producer": "orders",
            "priority": 3,
            "expires_at": NOW + 60,
            "traceparent": "00-aa-bb-01",
        },
    )
    assert line == (
        b'{"id":"01K0ORDERCREATED","type":"ok.created","exchange":"ev","routing_key":"ok.created",'
        b'"properties":{"content_type":"application/json","delivery_mode":2,"priority":3,"correlation_id":"c",'
        b'"expiration":"60000","timestamp":1764439200,"app_id":"orders"},'
        b'"headers":{"tenant":"\xc3\xa9","n":123456789012345678901234567890,"f":1.10,"aggregate_id":"42",'
        b'"schema_version":1,"aggregate_version":7,"causation_id":"cause","traceparent":"00-aa-bb-01",'
        b'"aggregate_type":"order","occurred_at":"2025-11-29T18:00:00.123456Z"},"body":{"n":1}}\n'
    )


@pytest.mark.parametrize(
    ("payload_type", "payload", "member"),
    [
        (PayloadType.JSON, b'{"b":1, "a":2,"a":3,"n":1e400}', "body"),
        (PayloadType.JSON, b"null", "body"),
        (PayloadType.JSON, b'{\r\n"n":1}', "body_text"),
        (PayloadType.JSON, None, "body_text"),
        (PayloadType.TEXT, b'{"json":"by chance"}', "body_text"),
        (PayloadType.TEXT, "é\u2028\x1f".encode(), "body_text"),
        (PayloadType.BYTEA, b"text, by chance", "body_text"),
        (PayloadType.BYTEA, b"\xff\x00\n", "body_base64"),
    ],
)
def test_the_body_is_there_byte_for_byte(payload_type: PayloadType, payload: bytes | None, member: str) -> None:
    line = encoded(payload_type, payload=payload)
    document = json.loads(line)
    assert [name for name in document if name.startswith("body")] == [member]
    assert body_of(line) == (payload or b"")
    assert line.count(b"\n") == 1


def test_an_envelope_is_embedded() -> None:
    document = json.loads(encoded(PayloadType.TEXT, envelope_name="json", payload=b"hello"))
    assert document["body"]["data"] == "hello"
    assert document["properties"]["content_type"] == "application/json"


@pytest.mark.parametrize(
    ("columns", "failure"),
    [
        ({"headers": "[]"}, "invalid"),
        ({"headers": "5242889 bytes"}, "invalid"),
        ({"headers": '{"n": NaN}'}, "invalid"),
        ({"headers": '{"d": ' + "[" * 5000 + "]" * 5000 + "}"}, "invalid"),
        ({"occurred_at": float("inf")}, "invalid"),
        ({"rare": {"exchange": ""}}, "invalid"),
        ({"rare": {"expires_at": NOW}}, "expired"),
    ],
)
def test_what_no_line_can_hold(columns: dict[str, Any], failure: str) -> None:
    with pytest.raises(MessageInvalid) as caught:
        encoded(**columns)
    assert caught.value.failure_class == failure


# ---------------------------------------------------------------- what is found at the end of a file

WHOLE = encoded(id="whole")


@pytest.mark.parametrize(
    "torn",
    [b"", b"{", b'{"id"', b'{"id":"x","type":', b'{"id":"' + b"y" * 200_000, b'{"id":"x"\0\0\0\0', b"\0" * 5000],
    ids=["none", "a brace", "a name", "some", "long", "and zeros", "zeros"],
)
@pytest.mark.parametrize("before", [b"", WHOLE * 3], ids=["alone", "behind whole lines"])
async def test_a_torn_last_line_is_cut_off(tmp_path: Path, before: bytes, torn: bytes) -> None:
    """What a kill in the middle of a write leaves behind; it was never acknowledged."""
    path = tmp_path / "events.jsonl"
    path.write_bytes(before + torn)
    recorder = Recorder()
    link = await connect(path, recorder)
    assert path.read_bytes() == before
    link.publish([make_row(1)])
    await recorder.outcomes_of(1)
    assert ids(path) == ["whole"] * (len(before) // len(WHOLE)) + ["id-1"]
    await link.close()


@pytest.mark.parametrize("content", [b"root:x:0:0", b"a\nb", b"\n\n{x"])
async def test_a_file_of_somebody_elses_is_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "passwd"
    path.write_bytes(content)
    with pytest.raises(BrokerRefused, match="was not written by the relay"):
        await connect(path, Recorder())
    assert path.read_bytes() == content


async def test_one_writer_a_file(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    first = await connect(path, Recorder())
    with pytest.raises(BrokerUnavailable, match="being written by somebody else"):
        await connect(path, Recorder())
    await first.close()
    await (await connect(path, Recorder())).close()


async def test_a_path_that_cannot_be(tmp_path: Path) -> None:
    for path, said in ((tmp_path / "no" / "x", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(BrokerUnavailable, match=said):
            await connect(path, Recorder())


# ---------------------------------------------------------------- the disk


async def test_a_full_disk_blocks_and_costs_nobody_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(room=len(WHOLE) * 2)
    monkeypatch.setattr(appender_module, "os", disk)
    path = tmp_path / "events.jsonl"
    recorder = Recorder()
    link = await connect(path, recorder)
    rows = make_rows(10)
    link.publish(rows)
    await recorder.until(lambda: recorder.events)
    assert recorder.events == [("blocked", f"{path}: No space left on device")], "told once, however often it is tried"
    assert path.read_bytes() == b"", "half a batch is no line for a reader"
    assert link.publish([make_row(11)]).taken == 0
    assert link.in_flight == 10
    disk.room = 10**9
    await recorder.outcomes_of(10)
    assert recorder.events[1:] == [("unblocked",), ("acked", [row.seq for row in rows])]
    assert ids(path) == [row.id for row in rows]
    await link.close()


async def test_a_full_disk_does_not_hold_up_a_close(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(appender_module, "os", Disk(room=0))
    recorder = Recorder()
    link = await connect(tmp_path / "events.jsonl", recorder)
    link.publish(make_rows(3))
    await recorder.until(lambda: recorder.events)
    await link.close()
    assert recorder.outcomes["lost"] == [1, 2, 3]
    await (await connect(tmp_path / "events.jsonl", Recorder())).close()


async def test_nothing_is_acked_that_was_not_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed sync may have thrown the written pages away: what it covered is cut off and written again."""
    disk = Disk(room=10**9)
    monkeypatch.setattr(appender_module, "os", disk)
    path = tmp_path / "events.jsonl"
    recorder = Recorder()
    link = await connect(path, recorder)
    link.publish([make_row(1)])
    await recorder.outcomes_of(1)
    assert disk.syncs == 1
    disk.sync_error = errno.EIO
    link.publish([make_row(2)])
    await recorder.until(lambda: recorder.closed)
    assert recorder.closed == (Closed.CONNECTION, f"{path} cannot be written: Input/output error")
    assert (recorder.outcomes["acked"], recorder.outcomes["lost"]) == ([1], [2])
    assert ids(path) == ["id-1"]


async def test_a_file_that_somebody_emptied_is_not_filled_up_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cutting a failed batch off at where it began a while ago would leave a hole of zeros."""
    disk = Disk(room=10**9)
    monkeypatch.setattr(appender_module, "os", disk)
    path = tmp_path / "events.jsonl"
    recorder = Recorder()
    link = await connect(path, recorder)
    link.publish(make_rows(3))
    await recorder.outcomes_of(3)
    os.truncate(path, 0)
    disk.room = 10
    link.publish([make_row(4)])
    await recorder.until(lambda: ("blocked", f"{path}: No space left on device") in recorder.events)
    assert path.read_bytes() == b""
    disk.room = 10**9
    await recorder.outcomes_of(4)
    assert ids(path) == ["id-4"]
    await link.close()


async def test_a_rotated_file_is_let_go(tmp_path: Path) -> None:
    path, old = tmp_path / "events.jsonl", tmp_path / "events.jsonl.1"
    recorder = Recorder()
    link = await connect(path, recorder)
    link.publish([make_row(1)])
    await recorder.outcomes_of(1)
    path.rename(old)
    link.publish([make_row(2)])
    await recorder.outcomes_of(2)
    assert (ids(old), ids(path)) == (["id-1"], ["id-2"])
    await link.close()


# ---------------------------------------------------------------- pipes


async def test_a_pipe_is_written_to_while_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(BrokerUnavailable, match="has no reader"):
        await connect(path, Recorder())
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    recorder = Recorder()
    link = await connect(path, recorder)
    rows = make_rows(50, payload=b'"' + b"y" * 4000 + b'"')
    link.publish(rows)
    read = bytearray()
    # What is acknowledged is in the pipe, and need not be out of it.
    async with asyncio.timeout(60):
        while recorder.count() < 50 or read.count(b"\n") < 51:
            try:
                read += os.read(reader, 65536)
            except BlockingIOError:
                await asyncio.sleep(0)
    assert [json.loads(line)["id"] for line in bytes(read).split()] == [row.id for row in rows]
    os.close(reader)
    link.publish([make_row(51)])
    await recorder.until(lambda: recorder.closed)
    assert recorder.closed is not None
    assert "Broken pipe" in recorder.closed[1]
    assert recorder.outcomes["lost"] == [51]


async def test_a_reader_that_reads_no_more_holds_up_nothing(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    recorder = Recorder()
    link = await connect(path, recorder)
    link.publish([make_row(1, payload=b'"' + b"y" * 300_000 + b'"')])
    async with asyncio.timeout(60):
        await link.close()
    assert recorder.outcomes["lost"] == [1]
    os.close(reader)


def begun() -> Tail:
    """Of a stream in which the last line is whole."""
    tail = Tail()
    tail.is_torn = False
    return tail


def test_half_a_line_in_a_stream_gets_a_line_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    disk = Disk(room=10)
    monkeypatch.setattr(appender_module, "os", disk)
    stream = Appender.open(str(path), begun())
    with pytest.raises(OSError, match="No space"):
        stream.append(WHOLE, lambda: False)
    disk.room = 10**9
    stream.append(WHOLE, lambda: False)
    assert os.read(reader, 65536) == WHOLE[:10] + b"\n" + WHOLE
    stream.close()
    os.close(reader)


async def test_half_a_line_of_the_link_before_is_ended(tmp_path: Path) -> None:
    """The reader stands still, the silent link is built anew: the first line of the next one was glued to the torn half,
    acknowledged, and arrived never."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    sink, row = broker(path), make_row(1, payload=b'"' + b"y" * 300_000 + b'"')
    first, second = Recorder(), Recorder()
    link = await sink.connect(first, PayloadType.JSON)
    link.publish([row])
    await eventually(lambda: bool(select.select([reader], [], [], 0)[0]))
    await link.close()
    assert first.outcomes["lost"] == [1]
    link = await sink.connect(second, PayloadType.JSON)
    link.publish([row])
    read = bytearray()
    async with asyncio.timeout(60):
        while not second.count():
            with contextlib.suppress(BlockingIOError):
                read += os.read(reader, 65536)
            await asyncio.sleep(0)
    with contextlib.suppress(BlockingIOError):
        read += os.read(reader, 1_000_000)
    assert second.outcomes["acked"] == [1]
    assert json.loads(read.splitlines()[-1])["id"] == row.id
    await link.close()
    os.close(reader)


def test_a_stream_has_one_writer_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link that is closed may be in the middle of a line: the next one's would come into it."""
    monkeypatch.setattr(appender_module, "_HAND_OVER_S", 0.01)
    path, tail = tmp_path / "pipe", begun()
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    first = Appender.open(str(path), tail)
    with pytest.raises(BrokerUnavailable, match="still being written to"):
        Appender.open(str(path), tail)
    first.close()
    Appender.open(str(path), tail).close()
    os.close(reader)


def test_a_line_begins_anew_where_a_killed_relay_may_have_left_half_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A supervisor's pipe, or a file that the shell appends to, is there before the relay; a new file has no past."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    stream = Appender.open(str(path), Tail())
    stream.append(WHOLE, lambda: False)
    stream.append(WHOLE, lambda: False)
    assert os.read(reader, 65536) == b"\n" + WHOLE + WHOLE
    stream.close()
    os.close(reader)
    for before, found in ((b"", WHOLE), (WHOLE[:10], WHOLE[:10] + b"\n" + WHOLE)):
        (tmp_path / "out").write_bytes(before)
        with (tmp_path / "out").open("ab") as out:
            monkeypatch.setattr(appender_module, "_descriptor", lambda _, out=out: os.dup(out.fileno()))
            stream = Appender.open("-", Tail())
            stream.append(WHOLE, lambda: False)
            stream.close()
        assert (tmp_path / "out").read_bytes() == found


def test_half_a_line_that_could_not_be_cut_off_is_before_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system that needs room to make a file shorter: the next try wrote behind the half line, and its row was lost."""
    path = tmp_path / "events"
    appender = Appender.open(str(path), Tail())
    appender.append(b'{"id":"0"}\n', lambda: False)
    pieces = iter([5])

    def write(descriptor: int, data: memoryview, written: Any = os.write) -> int:
        if (size := next(pieces, None)) is None:
            raise OSError(errno.ENOSPC, "No space left on device")
        return int(written(descriptor, data[:size]))

    def truncate(descriptor: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(os, "write", write)
        full.setattr(os, "ftruncate", truncate)
        for _ in range(2):
            with pytest.raises(OSError, match="No space"):
                appender.append(b'{"id":"1"}\n', lambda: False)
    assert path.read_bytes() == b'{"id":"0"}\n{"id"'
    appender.append(b'{"id":"1"}\n', lambda: False)
    assert ids(path) == ["0", "1"]
    appender.close()
