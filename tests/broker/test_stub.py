"""The link on a stub broker: each thing that a broker can say, and each way in which it can fall silent."""

from __future__ import annotations

import asyncio
import contextlib
import tracemalloc
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from pamqp import commands
from pamqp.body import ContentBody
from pamqp.header import ContentHeader

from relay.broker import exchanges
from relay.broker.amqp import AmqpBroker
from relay.broker.link import SIZE_LIMIT_AGE_S, AmqpLink
from relay.broker.refusals import read
from relay.broker.wire import WRITE_BUFFER_BYTES
from relay.core.ports.broker import Closed
from relay.message import PayloadType

from .recorder import Recorder, make_broker, make_row, make_rows
from .stub import Peer, Published, StubBroker, frames


@contextlib.asynccontextmanager
async def connected(stub: StubBroker, exchange: str = "ev") -> AsyncIterator[tuple[AmqpLink, Recorder, Peer]]:
    recorder = Recorder()
    link = await make_broker(stub.url, exchange=exchange).connect(recorder, PayloadType.JSON)
    try:
        yield link, recorder, await stub.peer()
    finally:
        await link.close()


async def test_a_publish_is_confirmed(stub: StubBroker) -> None:
    async with connected(stub) as (link, recorder, peer):
        assert (link.publish(make_rows(1)).taken, link.in_flight) == (1, 1)
        assert link.is_in_flight("id-1")
        (message,) = await peer.published(1)
        assert (message.exchange, message.routing_key, message.is_mandatory) == ("ev", "ok.created", True)
        peer.ack(1)
        assert (await recorder.outcomes_of(1))["acked"] == [1]
        assert link.in_flight == 0
        assert not link.is_in_flight("id-1")


async def test_the_client_says_who_it_is(stub: StubBroker) -> None:
    async with connected(stub) as (_, _, peer):
        assert peer.client_properties["connection_name"] == "outbox-relay"
        assert peer.client_properties["product"] == "outbox-relay"


async def test_outcomes_of_one_read_are_told_together(stub: StubBroker) -> None:
    async with connected(stub) as (link, recorder, peer):
        link.publish(make_rows(100))
        await peer.published(100)
        for tag in range(1, 101):
            peer.ack(tag)
        await recorder.outcomes_of(100)
        assert len(recorder.events) < 10
        assert recorder.outcomes["acked"] == list(range(1, 101))


async def test_kinds_are_told_in_the_brokers_order(stub: StubBroker) -> None:
    async with connected(stub) as (link, recorder, peer):
        link.publish(make_rows(6))
        messages = await peer.published(6)
        channel = peer.publish_channel
        peer.write(b"".join([_ack(1, channel), _ack(2, channel), _nack(3, channel)]))
        peer.give_back(messages[3])
        peer.ack(4)
        peer.ack(6, multiple=True)
        await recorder.outcomes_of(6)
        assert recorder.events == [
            ("acked", [1, 2]),
            ("nacked", [3]),
            ("returned", [4]),
            ("acked", [5, 6]),
        ]


async def test_case_05_acks_and_a_cut(stub: StubBroker) -> None:
    """Acks 4 of 6, then cuts: exactly row 4; all others are lost, each once."""
    async with connected(stub) as (link, recorder, peer):
        link.publish(make_rows(6))
        await peer.published(6)
        peer.ack(4)
        await recorder.outcomes_of(1)
        peer.cut()
        outcomes = await recorder.outcomes_of(6)
        assert outcomes == {"acked": [4], "nacked": [], "returned": [], "lost": [1, 2, 3, 5, 6]}
        assert recorder.closed is not None
        assert recorder.closed[0] is Closed.CONNECTION


async def test_case_05_a_multiple_ack_and_a_cut(stub: StubBroker) -> None:
    """Acks 3 `multiple`, then cuts: exactly rows 1-3."""
    async with connected(stub) as (link, recorder, peer):
        link.publish(make_rows(6))
        await peer.published(6)
        peer.ack(3, multiple=True)
        peer.hang_up()
        outcomes = await recorder.outcomes_of(6)
        assert outcomes == {"acked": [1, 2, 3], "nacked": [], "returned": [], "lost": [4, 5, 6]}


async def test_case_06_a_nack_out_of_order_then_a_covering_ack(stub: StubBroker) -> None:
    async with connected(stub) as (link, recorder, peer):
        link.publish(make_rows(3))
        await peer.published(3)
        peer.nack(2)
        peer.ack(3, multiple=True)
        outcomes = await recorder.outcomes_of(3)
        assert outcomes == {"acked": [1, 3], "nacked": [2], "returned": [], "lost": []}


@pytest.mark.parametrize("size", [0, 10, 9000])
async def test_a_return_before_its_ack_is_no_delivery(stub: StubBroker, size: int) -> None:
    """Also with an empty body, and one of several frames, among bystanders."""
    async with connected(stub) as (link, recorder, peer):
        rows = make_rows(3)
        rows[1] = make_row(2, event_type="nope.x", payload=b"x" * size, rare={"producer": "p", "priority": 3})
        rows[1].headers = '{"deep":{"a":[1,2.5,null]}}'
        link.publish(rows)
        messages = await peer.published(3)
        peer.give_back(messages[1])
        peer.ack(3, multiple=True)
        outcomes = await recorder.outcomes_of(3)
        assert outcomes == {"acked": [1, 3], "nacked": [], "returned": [2], "lost": []}
        (returned,) = recorder.returned
        assert (returned.error, returned.exchange, returned.routing_key) == ("312 NO_ROUTE", "ev", "nope.x")


async def test_frames_may_arrive_in_any_pieces(stub: StubBroker) -> None:
    """Everything one byte at a time: acks, a return with content, a heartbeat between."""
    async with connected(stub) as (link, recorder, peer):
        link.publish(make_rows(3))
        messages = await peer.published(3)
        channel = peer.publish_channel
        data = _ack(1, channel) + b"\x08\x00\x00\x00\x00\x00\x00\xce" + _given_back(messages[1], channel)
        for byte in data + _ack(3, channel, multiple=True):
            peer.write(bytes((byte,)))
            await peer.drained()
            await asyncio.sleep(0)
        outcomes = await recorder.outcomes_of(3)
        assert outcomes == {"acked": [1, 3], "nacked": [], "returned": [2], "lost": []}


async def test_a_cut_in_the_middle_of_a_frame(stub: StubBroker) -> None:
    async with connected(stub) as (link, recorder, peer):
        link.publish(make_rows(2))
        await peer.published(2)
        peer.write(_ack(1, peer.publish_channel) + _ack(2, peer.publish_channel)[:15])
        peer.hang_up()
        outcomes = await recorder.outcomes_of(2)
        assert (outcomes["acked"], outcomes["lost"]) == ([1], [2])


async def test_silence_is_no_outcome(stub: StubBroker) -> None:
    """A mute broker: nothing is told, nothing is lost, until the link is closed."""
    async with connected(stub) as (link, recorder, peer):
        link.publish(make_rows(5))
        await peer.published(5)
        peer.heartbeat()
        await peer.drained()
        assert recorder.events == []
        assert link.in_flight == 5
    assert recorder.outcomes["lost"] == [1, 2, 3, 4, 5]
    assert recorder.closed == (Closed.CONNECTION, "closed by the relay")


async def test_a_close_with_nothing_in_flight_is_told_too(stub: StubBroker) -> None:
    """Who decides to close may find everything confirmed by then, and waits for the last word all the same."""
    async with connected(stub) as (_, recorder, peer):
        pass
    assert recorder.events == [("closed", [])]
    await peer.gone()


@pytest.mark.parametrize(("query", "seconds"), [("", 10), ("?heartbeat=7", 7)])
async def test_a_dead_peer_is_looked_for_unless_its_url_says_how(stub: StubBroker, query: str, seconds: int) -> None:
    """The bound that docs/guarantees.md has for a silent loss is three of these."""
    link = await make_broker(f"{stub.url}{query}").connect(Recorder(), PayloadType.JSON)
    assert (await stub.peer()).heartbeat_s == seconds
    await link.close()


async def test_a_dead_peer_is_noticed_by_its_silence(stub: StubBroker) -> None:
    """Heartbeat of 1 s, and a broker that reads but never says a word: aiormq gives up after three."""
    recorder = Recorder()
    link = await make_broker(f"{stub.url}?heartbeat=1").connect(recorder, PayloadType.JSON)
    link.publish(make_rows(1))
    await recorder.outcomes_of(1, timeout=20)
    assert recorder.outcomes["lost"] == [1]
    assert recorder.closed is not None
    assert "nothing was heard for" in recorder.closed[1]
    await link.close()


async def test_heartbeats_go_on_while_only_confirms_come(stub: StubBroker) -> None:
    """aiormq sees none of the confirms, and a busy RabbitMQ sends no heartbeats: neither side may give up."""
    recorder = Recorder()
    link = await make_broker(f"{stub.url}?heartbeat=1").connect(recorder, PayloadType.JSON)
    peer = await stub.peer()
    for seq in range(1, 29):  # 7 s, more than the 6 s after which aiormq gives up
        link.publish([make_row(seq)])
        await peer.published(seq)
        peer.ack(seq)
        await recorder.outcomes_of(seq)
        await asyncio.sleep(0.25)  # not a wait for anything: the time that passes is what is tested
    assert recorder.closed is None
    assert peer.heartbeats > 3
    await link.close()


@pytest.mark.parametrize(
    ("code", "text", "closed"),
    [
        (404, "NOT_FOUND - no exchange 'x' in vhost '/'", Closed.REFUSED),
        (403, "ACCESS_REFUSED - cannot publish to internal exchange", Closed.REFUSED),
        (406, "PRECONDITION_FAILED - message size 9 is larger than configured max size 8", Closed.REFUSED),
        (541, "INTERNAL_ERROR", Closed.CONNECTION),
    ],
)
async def test_the_broker_closes_the_channel(stub: StubBroker, code: int, text: str, closed: Closed) -> None:
    async with connected(stub) as (link, recorder, peer):
        link.publish(make_rows(3))
        await peer.published(3)
        peer.ack(1)
        peer.close_channel(code, text)
        outcomes = await recorder.outcomes_of(3)
        assert outcomes["acked"] == [1]
        # A size is found by comparing; anything else that is refused leaves suspects, for nobody here matches the text.
        is_suspected = closed is Closed.REFUSED and code != 406
        assert outcomes["suspected" if is_suspected else "lost"] == [2, 3]
        assert not recorder.is_alone
        assert recorder.closed == (closed, f"{code} {text}")
        assert link.publish([make_row(4)]).taken == 0
        await peer.gone()


@pytest.mark.parametrize(
    ("code", "text", "closed"),
    [
        (501, "FRAME_ERROR - type 2, all octets = <<>>: {frame_too_large,1,2}", Closed.REFUSED),
        (504, "CHANNEL_ERROR - expected 'channel.open'", Closed.REFUSED),
        (
            320,
            "CONNECTION_FORCED - broker forced connection closure with reason 'shutdown'",
            Closed.CONNECTION,
        ),
    ],
)
async def test_the_broker_closes_the_connection(stub: StubBroker, code: int, text: str, closed: Closed) -> None:
    async with connected(stub) as (link, recorder, peer):
        link.publish(make_rows(2))
        await peer.published(2)
        peer.close_connection(code, text)
        outcomes = await recorder.outcomes_of(2)
        assert outcomes["suspected" if closed is Closed.REFUSED else "lost"] == [1, 2]
        assert recorder.is_alone == (closed is Closed.REFUSED)
        assert recorder.closed == (closed, f"{code} {text}")
        await peer.gone()


async def refused_a_size(stub: StubBroker) -> AmqpBroker:
    """Whose last link was closed over a body of 100 bytes: 99 may go."""
    broker = make_broker(stub.url)
    recorder = Recorder()
    link = await broker.connect(recorder, PayloadType.JSON)
    peer = await stub.peer()
    link.publish([make_row(1, payload=b"x" * 100)])
    await peer.published(1)
    peer.close_channel(406, "PRECONDITION_FAILED - message size 100 is larger than configured max size 99")
    await recorder.outcomes_of(1)
    await link.close()
    return broker


async def test_a_refused_size_is_remembered(stub: StubBroker) -> None:
    """The next link of the same broker rejects what the last one was closed over, before it is sent."""
    broker = await refused_a_size(stub)
    again = await broker.connect(Recorder(), PayloadType.JSON)
    publication = again.publish([make_row(1, payload=b"x" * 100), make_row(2, payload=b"x" * 99)])
    assert publication.taken == 2
    assert [(each.row.seq, each.reason) for each in publication.rejected] == [(1, "too_large")]
    await again.close()


async def test_a_refused_size_is_believed_for_a_while(stub: StubBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Links live for months: all that was parked since went back there, though the broker had long been told to take it."""
    expiries = spied_expiries(monkeypatch)
    broker = await refused_a_size(stub)
    expiries.clear()
    again = await broker.connect(Recorder(), PayloadType.JSON)
    assert again.publish([make_row(2, payload=b"x" * 100)]).rejected
    assert expiries, "on its way"
    for forget in expiries:
        forget()
    assert not again.publish([make_row(3, payload=b"x" * 100)]).rejected
    await again.close()


async def test_so_it_is_by_the_link_that_learned_it(stub: StubBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe was refused for its size: that closes the probes' channel alone."""
    expiries = spied_expiries(monkeypatch)
    async with connected(stub) as (link, _, _):
        refusal = read(406, "PRECONDITION_FAILED - message size 100 is larger than configured max size 99")
        assert refusal is not None
        link._learn(refusal)
        assert link.publish([make_row(1, payload=b"x" * 100)]).rejected
        for forget in expiries:
            forget()
        assert not link.publish([make_row(2, payload=b"x" * 100)]).rejected


def spied_expiries(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], object]]:
    """The ends of size limits, as the loop is asked for them: within a minute or so."""
    loop, found = asyncio.get_running_loop(), list[Callable[[], object]]()
    call_at = loop.call_at

    def spied(when: float, callback: Callable[..., object], *args: object, **options: Any) -> asyncio.TimerHandle:
        if getattr(callback, "__name__", "") == "limit_body":
            assert loop.time() < when <= loop.time() + SIZE_LIMIT_AGE_S
            found.append(lambda: callback(*args))
        return call_at(when, callback, *args, **options)

    monkeypatch.setattr(loop, "call_at", spied)
    return found


async def test_a_large_message_is_not_copied_beside_small_ones(stub: StubBroker) -> None:
    """Its frames are as large as itself, and stay until they are sent."""
    async with connected(stub) as (link, recorder, peer):
        rows = [make_row(1), make_row(2, payload=b"x" * (8 << 20)), make_row(3)]
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            tracemalloc.reset_peak()
            assert link.publish(rows).taken == 2, "what waits in the socket is bounded"
            grown = tracemalloc.get_traced_memory()[1] - before
        finally:
            tracemalloc.stop()
        # asyncio's own transport copies what it cannot send at once.
        copies = 1 if type(asyncio.get_running_loop()).__module__.startswith("uvloop") else 3
        assert grown < (copies + 0.5) * (8 << 20)
        await peer.published(2)
        peer.ack(2, multiple=True)
        await recorder.outcomes_of(2)


async def test_nothing_is_written_while_blocked(stub: StubBroker) -> None:
    async with connected(stub) as (link, recorder, peer):
        link.publish(make_rows(1))
        await peer.published(1)
        peer.block("low on memory")
        await recorder.until(lambda: ("blocked", "low on memory") in recorder.events)
        assert link.publish([make_row(2)]).taken == 0
        peer.ack(1)
        await recorder.outcomes_of(1)
        seen = recorder.writable
        peer.unblock()
        await recorder.until(lambda: ("unblocked",) in recorder.events)
        await recorder.until(lambda: recorder.writable > seen)
        assert link.publish([make_row(2)]).taken == 1
        assert len(await peer.published(2)) == 2


@pytest.mark.parametrize("tag", [0, 2, 7])
@pytest.mark.parametrize("multiple", [False, True])
async def test_a_broker_that_confirms_what_was_not_sent_is_not_believed(
    stub: StubBroker, tag: int, multiple: bool
) -> None:
    async with connected(stub) as (link, recorder, peer):
        link.publish(make_rows(3))
        await peer.published(3)
        peer.ack(2, multiple=True)
        if tag == 0 and multiple:
            tag = 9  # zero means all so far, which is fine
        peer.ack(tag, multiple)
        outcomes = await recorder.outcomes_of(3)
        assert (outcomes["acked"], outcomes["lost"]) == ([1, 2], [3])
        assert recorder.closed is not None
        assert recorder.closed[0] is Closed.CONNECTION
        assert "confirmed" in recorder.closed[1]
        await peer.gone()


@pytest.mark.parametrize(
    "data",
    [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x01" + b"\x00" * 30, b"\xff" * 40],
    ids=["http", "zeros", "ones"],
)
async def test_bytes_that_are_no_amqp_end_the_link(stub: StubBroker, data: bytes) -> None:
    async with connected(stub) as (link, recorder, peer):
        link.publish(make_rows(1))
        await peer.published(1)
        peer.write(data)
        assert (await recorder.outcomes_of(1))["lost"] == [1]


async def test_an_unencodable_row_harms_no_other(stub: StubBroker) -> None:
    async with connected(stub) as (link, recorder, peer):
        rows = make_rows(5)
        rows[1].headers = '{"CC":["q"]}'
        rows[3] = make_row(4, rare={"expires_at": 1.0})
        publication = link.publish(rows)
        assert publication.taken == 5
        assert [(each.row.seq, each.reason) for each in publication.rejected] == [
            (2, "invalid"),
            (4, "expired"),
        ]
        assert publication.rejected[0].exchange == "ev"
        assert [message.message_id for message in await peer.published(3)] == ["id-1", "id-3", "id-5"]
        peer.ack(3, multiple=True)
        assert (await recorder.outcomes_of(3))["acked"] == [1, 3, 5]


async def test_a_slow_reader_stops_the_writing_and_loses_nothing(stub: StubBroker) -> None:
    async with connected(stub) as (link, recorder, peer):
        peer.stop_reading()
        rows = make_rows(400, payload=b"x" * 50_000)
        first = link.publish(rows).taken
        assert first < 60, "about the write buffer's size, not all of it"
        done = first
        while True:  # until the sockets between are full too
            seen = recorder.writable
            taken = link.publish(rows[done:]).taken
            done += taken
            if not taken and link._transport.get_write_buffer_size() >= WRITE_BUFFER_BYTES:
                break
            with contextlib.suppress(TimeoutError):
                await recorder.until(lambda seen=seen: recorder.writable > seen, 0.3)  # type: ignore[misc]
        assert done < 400
        assert link._transport.get_write_buffer_size() < 2 * WRITE_BUFFER_BYTES
        peer.go_on_reading()
        await recorder.publish_all(link, rows[done:])
        messages = await peer.published(400)
        assert [message.message_id for message in messages] == [row.id for row in rows]
        peer.ack(400, multiple=True)
        await recorder.outcomes_of(400)


async def test_one_row_larger_than_the_buffer_passes(stub: StubBroker) -> None:
    async with connected(stub) as (link, recorder, peer):
        rows = [make_row(1), make_row(2, payload=b"x" * 3_000_000), make_row(3)]
        await recorder.publish_all(link, rows)
        messages = await peer.published(3)
        assert [len(message.body) for message in messages] == [7, 3_000_000, 7]


async def test_an_exchange_of_a_rows_own_is_asked_for_first(stub: StubBroker) -> None:
    async with connected(stub) as (link, recorder, peer):
        rows = [make_row(1), make_row(2, rare={"exchange": "other"}), make_row(3)]
        assert link.publish(rows).taken == 1
        await recorder.publish_all(link, rows[1:])
        messages = await peer.published(3)
        assert [message.exchange for message in messages] == ["ev", "other", "ev"]
        assert link.publish([make_row(4, rare={"exchange": "other"})]).taken == 1
        assert stub.asked == ["ev", "other"]


async def test_a_missing_exchange_of_a_rows_own_is_that_rows_fault(stub: StubBroker) -> None:
    stub.missing.add("gone")
    async with connected(stub) as (link, recorder, peer):
        rows = [make_row(1), make_row(2, rare={"exchange": "gone"}), make_row(3)]
        (rejection,) = await recorder.publish_all(link, rows)
        assert (rejection.row.seq, rejection.reason, rejection.exchange) == (2, "refused", "gone")
        assert rejection.error == "404 NOT_FOUND - no exchange 'gone' in vhost '/'"
        assert [message.message_id for message in await peer.published(2)] == ["id-1", "id-3"]
        peer.ack(2, multiple=True)
        assert (await recorder.outcomes_of(2))["acked"] == [1, 3]
        assert link.publish([make_row(4, rare={"exchange": "gone"})]).rejected, "remembered for a while"
        assert stub.asked == ["ev", "gone"]


async def test_an_exchange_that_cannot_be_asked_for_is_given_up_for_a_while(
    stub: StubBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RabbitMQ 4.3 can be asked for this name on a connection of its own only, and the user may have no more of them: the
    row was offered again and again, and nothing behind it went."""
    monkeypatch.setattr(exchanges, "_PAUSE_S", 0.01)
    async with connected(stub) as (link, recorder, _):
        stub.refusal = (530, "NOT_ALLOWED - connection refused for user 'guest': user connection limit (1) is reached")
        name = "é" * 120
        bad = make_row(1, rare={"exchange": name})
        for failures in (1, 2, 3):
            publication = link.publish([bad])
            assert (publication.taken, publication.unverified) == (0, name)
            await recorder.until(lambda failures=failures: recorder.verified == [name] * failures)  # type: ignore[misc]
        (rejection,) = link.publish([bad]).rejected
        assert (rejection.reason, rejection.exchange, rejection.is_final) == ("refused", name, False)
        assert "user connection limit (1) is reached" in rejection.error
        assert recorder.closed is None


async def test_exchanges_are_asked_for_one_after_the_other(stub: StubBroker) -> None:
    """Rows behind one whose exchange is unknown go on, and may name others: each question takes a channel of the user's."""
    async with connected(stub) as (link, recorder, _):
        stub.channels_max = 2
        names = [f"x{number}" for number in range(5)]
        for number, name in enumerate(names):
            assert link.publish([make_row(number, rare={"exchange": name})]).unverified == name
        await recorder.until(lambda: recorder.verified == names)
        assert recorder.closed is None


async def test_a_cut_while_an_exchange_is_asked_for(stub: StubBroker) -> None:
    async with connected(stub, exchange="{aggregate_type}") as (link, recorder, peer):
        stub.is_mute_about_exchanges = True
        assert link.publish([make_row(1, aggregate_type="x")]).taken == 0
        peer.cut()
        await recorder.until(lambda: recorder.closed)
        assert recorder.count() == 0
    assert stub.asked == []


@pytest.mark.parametrize("what", ["an exchange that is asked for", "the probes' channel"])
async def test_a_user_who_may_open_no_more_channels_is_no_rows_fault(stub: StubBroker, what: str) -> None:
    """The broker closes the connection over a channel, whoever is in flight: alone there, a row would be refused for certain."""
    async with connected(stub, exchange="{aggregate_type}") as (link, recorder, peer):
        assert link.publish([make_row(1, aggregate_type="known")]).taken == 0
        await recorder.until(lambda: recorder.writable)
        assert link.publish([make_row(1, aggregate_type="known")]).taken == 1
        await peer.published(1)
        stub.channels_max = 1
        row = make_row(2, aggregate_type="other")
        assert (link.probe(row) if what.startswith("the") else link.publish([row])).taken == 0
        await recorder.until(lambda: recorder.closed)
        assert recorder.outcomes == {"acked": [], "nacked": [], "returned": [], "lost": [1]}
        assert recorder.closed is not None
        assert recorder.closed[0] is Closed.CONNECTION
        assert "530 NOT_ALLOWED - number of channels" in recorder.closed[1]


async def test_the_engine_may_publish_and_close_from_within_an_event(stub: StubBroker) -> None:
    async with connected(stub) as (link, recorder, peer):
        rows = iter(make_rows(200))

        def publish_next() -> None:
            row = next(rows, None)
            if row is not None:
                link.publish([row])

        recorder.on_event = publish_next
        publish_next()
        for count in range(1, 201):
            await peer.published(count)
            peer.ack(count)
        assert (await recorder.outcomes_of(200))["acked"] == list(range(1, 201))

        closing: list[asyncio.Task[None]] = []
        recorder.on_event = lambda: closing.append(asyncio.ensure_future(link.close()))
        link.publish([make_row(201), make_row(202)])
        await peer.published(202)
        peer.ack(201)
        await recorder.until(lambda: closing)
        await asyncio.gather(*closing)
        assert recorder.outcomes["lost"] == [202]


def _ack(tag: int, channel: int, multiple: bool = False) -> bytes:
    return frames([commands.Basic.Ack(tag, multiple)], channel)


def _nack(tag: int, channel: int) -> bytes:
    return frames([commands.Basic.Nack(tag, multiple=False, requeue=False)], channel)


def _given_back(message: Published, channel: int) -> bytes:
    method = commands.Basic.Return(312, "NO_ROUTE", message.exchange, message.routing_key)
    header = ContentHeader(0, len(message.body), message.properties)
    return frames([method, header, ContentBody(message.body)], channel)
