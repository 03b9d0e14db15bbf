"""A connection's opening, the relay's and the consumer's, against a broker of the test's own that says anything: what is
refused, cut, mute or no AMQP.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Awaitable, Callable

import aiormq
import pytest
from pamqp import commands

from relay import tls
from relay.broker.survey import survey
from relay.errors import BrokerError, BrokerRefused, BrokerUnavailable, ExchangeMissing
from relay.inbox import publisher
from relay.message import PayloadType
from tests.losses import BY_ANY_LOSS, losing

from .recorder import Recorder, make_broker
from .stub import StubBroker, frames


async def test_a_missing_constant_exchange_refuses_the_connection(stub: StubBroker) -> None:
    stub.missing.add("ev")
    with pytest.raises(ExchangeMissing, match=r"'ev'.*404 NOT_FOUND") as caught:
        await make_broker(stub.url).connect(Recorder(), PayloadType.JSON)
    assert caught.value.reply_code == 404
    assert caught.value.hint is not None
    peer = await stub.peer()
    await peer.gone()


async def test_the_brokers_refusal_of_a_connection_is_said_in_its_words(stub: StubBroker) -> None:
    stub.refusal = (530, "NOT_ALLOWED - vhost x not found")
    with pytest.raises(BrokerRefused, match="530 NOT_ALLOWED - vhost x not found"):
        await make_broker(stub.url).connect(Recorder(), PayloadType.JSON)


async def test_urls_are_tried_in_turn(stub: StubBroker) -> None:
    nobody = await asyncio.start_server(lambda _r, _w: None, "127.0.0.1", 0)
    dead = f"amqp://guest:guest@127.0.0.1:{nobody.sockets[0].getsockname()[1]}/"
    nobody.close()
    await nobody.wait_closed()
    link = await make_broker(dead, stub.url).connect(Recorder(), PayloadType.JSON)
    await link.close()
    with pytest.raises(BrokerUnavailable, match=r"127\.0\.0\.1.*; .*127\.0\.0\.1"):
        await make_broker(dead, dead).connect(Recorder(), PayloadType.JSON)


async def test_a_server_that_never_answers_is_given_up(stub: StubBroker) -> None:
    writers: list[asyncio.StreamWriter] = []
    async with await asyncio.start_server(lambda _r, w: writers.append(w), "127.0.0.1", 0) as mute:
        url = f"amqp://guest:guest@127.0.0.1:{mute.sockets[0].getsockname()[1]}/?timeout=1"
        with pytest.raises(BrokerUnavailable, match="did not answer within 1 s"):
            await make_broker(url).connect(Recorder(), PayloadType.JSON)
        for writer in writers:
            writer.close()


STAGES = ["StartOk", "TuneOk", "Open", "Declare", "Select"]


@pytest.mark.parametrize("stage", STAGES)
async def test_a_connection_that_is_cut_while_it_opens(stub: StubBroker, stage: str) -> None:
    stub.cut_at = stage
    with pytest.raises(BrokerUnavailable):
        await make_broker(stub.url).connect(Recorder(), PayloadType.JSON)
    stub.cut_at = None
    link = await make_broker(stub.url).connect(Recorder(), PayloadType.JSON)
    await link.close()


@pytest.mark.parametrize("stage", STAGES)
async def test_a_connect_may_be_cancelled_at_any_stage(stub: StubBroker, stage: str) -> None:
    stub.mute_at = stage
    connecting = asyncio.ensure_future(make_broker(stub.url).connect(Recorder(), PayloadType.JSON))
    await stub.stopped.wait()
    connecting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await connecting
    await (await stub.peer()).gone()


Connect = Callable[[str], Awaitable[object]]


def by_relay(url: str) -> Awaitable[object]:
    """The link of `relay run`."""
    return make_broker(url).connect(Recorder(), PayloadType.JSON)


def by_consumer(url: str) -> Awaitable[object]:
    """`relay inbox run`, and the library."""
    return publisher.connect((url,), "test", 5.0)


BY_ALL = pytest.mark.parametrize("connect", [by_relay, by_consumer])

_START = frames([commands.Connection.Start(server_properties={}, mechanisms="PLAIN")], 0)
_TUNE = frames([commands.Connection.Tune(2047, 131_072, 60)], 0)
_CUT_SHORT = b"\x01\x00\x00\x00\x00\x00\x04\x00\x0a\x00\x0a\xce"
"""A Connection.Start without its arguments, in a frame that is whole."""


@pytest.mark.parametrize(
    "said",
    [b"", _START, _START + _TUNE, _CUT_SHORT, _START + _CUT_SHORT, _START[:-1] + b"\x00", _START + _TUNE[:9], _TUNE],
    ids=["nothing", "start", "tune", "no arguments", "again", "no end", "half a frame", "out of order"],
)
@BY_ALL
async def test_a_server_that_ends_or_raves_amid_the_handshake(said: bytes, connect: Connect) -> None:
    """A node that goes down is in no state to say goodbye: whatever the driver makes of it, it is an outage."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(8)
        writer.write(said)
        writer.write_eof()
        with contextlib.suppress(ConnectionError):
            await reader.read()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        url = f"amqp://guest:guest@127.0.0.1:{server.sockets[0].getsockname()[1]}/?timeout=5"
        with pytest.raises(BrokerError):
            await connect(url)


@pytest.mark.parametrize("resets", [False, True])
@BY_ALL
async def test_somebody_who_accepts_and_hangs_up(resets: bool, connect: Connect) -> None:
    """As a proxy does before a broker that is down. The end is there before the driver has begun to read."""

    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if resets:
            writer.transport.abort()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        url = f"amqp://guest:guest@127.0.0.1:{server.sockets[0].getsockname()[1]}/?timeout=5"
        for _ in range(50):  # who is first is a matter of the loop's turn
            with pytest.raises(BrokerUnavailable):
                await connect(url)


@BY_ANY_LOSS
@BY_ALL
async def test_whatever_the_driver_raises_in_a_handshake_is_an_outage(
    stub: StubBroker, loss: BaseException, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relay, and a consumer, behind a proxy ended with a traceback when its broker went down: StopAsyncIteration, if the
    end came before the driver had begun to read."""
    monkeypatch.setattr(aiormq.Connection, "connect", losing(loss))
    with pytest.raises(BrokerUnavailable):
        await connect(stub.url)


@BY_ANY_LOSS
@pytest.mark.parametrize("asked", ["connect", "channel"])
async def test_whatever_the_driver_raises_ends_no_check(
    stub: StubBroker, loss: BaseException, asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`relay check` ended with the driver's CancelledError where a broker went down in the middle of its questions."""
    monkeypatch.setattr(aiormq.Connection, asked, losing(loss))
    found = await survey(stub.url, 1000)
    assert found is None if asked == "connect" else found is not None and not found.is_size_known


def test_a_chain_of_exceptions_may_be_a_circle() -> None:
    """Looking for a TLS error along such a chain never ended, and the event loop stood still."""
    error, context = OSError("reset"), RuntimeError("closed")
    error.__context__, context.__context__ = context, error
    assert tls.cause(error) is None
    context.__cause__ = failure = ssl.SSLError("alert")
    assert tls.cause(error) is failure


async def test_a_server_of_another_protocol_is_named(stub: StubBroker) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(8)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        url = f"amqp://guest:guest@127.0.0.1:{server.sockets[0].getsockname()[1]}/"
        with pytest.raises(BrokerRefused, match="does not speak AMQP"):
            await make_broker(url).connect(Recorder(), PayloadType.JSON)
