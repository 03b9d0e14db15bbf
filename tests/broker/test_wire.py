"""What `relay/broker/wire.py` relies on in aiormq: these tests fail when an upgrade changes it."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import pytest
from aiormq import Connection
from aiormq.connection import TransportFactory
from hypothesis import given
from hypothesis import strategies as st
from pamqp import commands, frame
from pamqp.header import ContentHeader

from relay.broker.wire import Wire, message_id
from relay.core.ports.broker import Broker, Link
from relay.core.window import ProtocolViolation
from relay.message import PayloadType

from .recorder import Recorder, make_broker, make_row
from .stub import StubBroker, frames


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Every single `write` on the client's side: ours to the transport, aiormq's through its stream writer."""
    calls: list[bytes] = []
    made, write = Wire.connection_made, asyncio.StreamWriter.write

    class Spy:
        def __init__(self, transport: Any) -> None:
            self._transport = transport

        def __getattr__(self, name: str) -> Any:
            return getattr(self._transport, name)

        def write(self, data: bytes) -> None:
            calls.append(bytes(data))
            self._transport.write(data)

    def spied(wire: Wire, transport: Any) -> None:
        made(wire, Spy(transport))  # type: ignore[arg-type]

    def spied_write(writer: asyncio.StreamWriter, data: bytes) -> None:
        if isinstance(writer.transport.get_protocol(), Wire):
            calls.append(bytes(data))
        write(writer, data)

    monkeypatch.setattr(Wire, "connection_made", spied)
    monkeypatch.setattr(asyncio.StreamWriter, "write", spied_write)
    return calls


def test_aiormq_takes_its_transport_from_a_factory() -> None:
    assert "transport_factory" in inspect.signature(Connection).parameters
    create = inspect.signature(TransportFactory.create)
    assert list(create.parameters) == ["self", "url", "kwargs"]


async def test_every_write_is_whole_frames(writes: list[bytes]) -> None:
    """Opening, channels, declares, publishes of ours and the close: no frame is torn over two writes."""
    async with StubBroker(frame_max=4096) as stub:
        recorder = Recorder()
        link = await make_broker(stub.url).connect(recorder, PayloadType.JSON)
        peer = await stub.peer()
        rows = [make_row(seq, payload=b"x" * 10_000) for seq in range(1, 4)]
        rows += [make_row(4, rare={"exchange": "other"})]
        await recorder.publish_all(link, rows)
        await peer.published(4)
        peer.ack(4, multiple=True)
        await recorder.outcomes_of(4)
        await link.close()
    assert [data for data in writes if data.startswith(b"AMQP")] == writes[:1]
    assert len(writes) > 6
    for data in writes[1:]:
        left = data
        while left:
            assert len(left) >= 8, "a frame's end is missing"
            size, _, _ = frame.unmarshal(left)
            left = left[size:]


async def test_the_library_hears_nothing_of_our_outcomes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Acks, nacks and returns end in the wire: that is where the speed comes from."""
    forwarded: list[bytes] = []
    forward = Wire._forward

    def spied(wire: Wire, data: bytes) -> None:
        forwarded.append(data)
        forward(wire, data)

    monkeypatch.setattr(Wire, "_forward", spied)
    async with StubBroker() as stub:
        recorder = Recorder()
        link = await make_broker(stub.url).connect(recorder, PayloadType.JSON)
        peer = await stub.peer()
        seen = len(forwarded)
        assert seen > 3, "the opening goes through"
        link.publish([make_row(seq) for seq in range(1, 4)])
        messages = await peer.published(3)
        peer.give_back(messages[0])
        peer.ack(1)
        peer.nack(2)
        peer.ack(3, multiple=True)
        await recorder.outcomes_of(3)
        heartbeat = b"\x08\x00\x00\x00\x00\x00\x00\xce"
        assert [data for data in forwarded[seen:] if data != heartbeat] == []
        await link.close()


@pytest.mark.parametrize("frame_max", [0, 64 << 20])
async def test_a_returned_body_comes_in_one_frame_as_large_as_was_negotiated(frame_max: int) -> None:
    """Of 16 MiB and more it was no AMQP: the link ended, and the same row went again, for ever."""
    async with StubBroker(frame_max=frame_max) as stub:
        recorder = Recorder()
        link = await make_broker(stub.url).connect(recorder, PayloadType.JSON)
        peer = await stub.peer()
        row = make_row(1, payload=b"x" * (17 << 20))
        link.publish([row])
        (message,) = await peer.published(1)
        peer.give_back(message)
        peer.ack(1)
        await recorder.outcomes_of(1)
        assert recorder.returned[0].row is row
        await link.close()


def test_a_large_frame_is_joined_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes in hundreds of pieces; joined with each of them the time grew with the square."""
    loop = asyncio.new_event_loop()
    wire = Wire(asyncio.StreamReader(loop=loop), loop)
    split: list[int] = []
    deal = wire._split

    def spied(data: bytes) -> None:
        split.append(len(data))
        deal(data)

    monkeypatch.setattr(wire, "_split", spied)
    content = b"\x03\x00\x01" + (1 << 20).to_bytes(4, "big") + bytes(1 << 20) + b"\xce"
    for at in range(0, len(content), 4096):
        wire.data_received(content[at : at + 4096])
    assert split == [4096, len(content)]
    loop.close()


async def test_the_adapter_is_what_the_engine_expects() -> None:
    async with StubBroker() as stub:
        broker: Broker = make_broker(stub.url)
        link: Link = await broker.connect(Recorder(), PayloadType.JSON)
        assert link.in_flight == 0
        await link.close()
        await link.close()


short = st.none() | st.text(max_size=40).filter(lambda text: len(text.encode()) < 256)
properties = st.builds(
    commands.Basic.Properties,
    content_type=short,
    content_encoding=short,
    headers=st.none() | st.dictionaries(st.text(max_size=10), st.text(max_size=20), max_size=3),
    delivery_mode=st.sampled_from([None, 1, 2]),
    priority=st.none() | st.integers(0, 255),
    correlation_id=short,
    reply_to=short,
    expiration=short,
    message_id=st.text(min_size=1, max_size=60).filter(lambda text: len(text.encode()) < 256),
    message_type=short,
    app_id=short,
)


@given(properties, st.binary(max_size=9))
def test_the_message_id_of_any_returned_header(values: commands.Basic.Properties, before: bytes) -> None:
    payload = frames([ContentHeader(0, 5, values)], 1)[7:-1]
    found = message_id(before + payload + b"\xce", len(before), len(before) + len(payload))
    assert found == values.message_id


def test_a_returned_header_without_an_id() -> None:
    """Whose it is, only somebody with one message in flight knows; a window knows none of that id."""
    header = ContentHeader(0, 5, commands.Basic.Properties(content_type="x"))
    payload = frames([header], 1)[7:-1]
    assert message_id(payload, 0, len(payload)) == ""


def test_a_returned_header_that_is_cut_off() -> None:
    payload = frames([ContentHeader(0, 5, commands.Basic.Properties(message_id="id-1"))], 1)[7:-5]
    with pytest.raises(ProtocolViolation):
        message_id(payload, 0, len(payload))
