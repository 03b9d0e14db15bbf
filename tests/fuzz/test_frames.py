"""Whatever a broker sends, each row gets its one outcome and the link ends by a documented error; nothing hangs.

A seed decides what comes: bytes at random, frames of other channels and classes, methods that answer nothing, spoiled
copies of what a broker may say, torn off anywhere.
"""

from __future__ import annotations

import asyncio
import random
import struct
from typing import Any

import pytest
from pamqp import commands
from pamqp.heartbeat import Heartbeat

from relay.errors import BrokerError
from relay.message import PayloadType
from tests.broker.recorder import Recorder, make_broker, make_row, make_rows
from tests.broker.stub import Peer, StubBroker, frames

SEEDS = 60
LONG_SEEDS = 3000
ROWS = 5
DEADLINE_S = 20.0


def _frame(rng: random.Random) -> bytes:
    """A frame that is none: its type, channel, size and end may each be wrong."""
    payload = rng.randbytes(rng.choice([0, 1, 4, 13, 21, 300]))
    size = rng.choice([len(payload)] * 4 + [0, len(payload) + 1, 0x7FFFFFFF, 0xFFFFFFFF])
    head = struct.pack(">BHI", rng.choice([1, 1, 1, 2, 3, 8, 0, 255]), rng.choice([0, 1, 1, 2, 65535]), size)
    return head + payload + rng.choice([b"\xce", b"\xce", b"\xce", b"\x00", b""])


def _method(rng: random.Random) -> Any:
    """A method that a broker can say, with numbers and texts out of place."""
    tag = rng.choice([0, 1, 2, ROWS, ROWS + 1, 2**63 - 1])
    text = rng.choice(["", "x", "é" * 100, "NOT_FOUND - no exchange 'ev' in vhost '/'"])
    code = rng.choice([0, 200, 312, 320, 404, 406, 501, 504, 540, 541, 65535])
    return rng.choice(
        [
            commands.Basic.Ack(tag, rng.random() < 0.5),
            commands.Basic.Nack(tag, rng.random() < 0.5, requeue=False),
            commands.Basic.Return(code, text, "ev", "ok.created"),
            commands.Basic.Deliver("c", 1, False, "ev", "k"),
            commands.Basic.ConsumeOk("c"),
            commands.Basic.GetEmpty(),
            commands.Basic.Cancel("c", True),
            commands.Confirm.SelectOk(),
            commands.Channel.OpenOk(),
            commands.Channel.Flow(rng.random() < 0.5),
            commands.Channel.CloseOk(),
            commands.Channel.Close(code, text, 60, 40),
            commands.Exchange.DeclareOk(),
            commands.Queue.DeclareOk("q", 1, 1),
            commands.Tx.CommitOk(),
            commands.Connection.Blocked(text),
            commands.Connection.Unblocked(),
            commands.Connection.Close(code, text, 0, 0),
            commands.Connection.OpenOk(),
            commands.Connection.Tune(0, 0, 0),
            Heartbeat(),
        ]
    )


def nonsense(rng: random.Random, channel: int) -> bytes:
    kind = rng.random()
    if kind < 0.15:
        return rng.randbytes(rng.randint(1, 200))
    if kind < 0.35:
        return _frame(rng)
    data = frames([_method(rng)], rng.choice([channel, channel, channel, 0, 7]))
    if kind < 0.75:
        return data
    spoiled = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        spoiled[rng.randrange(len(spoiled))] = rng.randrange(256)
    return bytes(spoiled[: rng.randint(1, len(spoiled))]) if kind < 0.9 else bytes(spoiled)


class Errors:
    """What the loop was told that nobody took notice of."""

    def __init__(self) -> None:
        self.found: list[str] = []
        asyncio.get_running_loop().set_exception_handler(self._take)

    def _take(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.found.append(f"{context.get('message')}: {context.get('exception')!r}")


async def _speaks_nonsense(seed: int, stub: StubBroker) -> None:
    """After the link was opened, rows in flight."""
    rng = random.Random(seed)
    recorder = Recorder()
    link = await make_broker(stub.url).connect(recorder, PayloadType.JSON)
    peer = await stub.peer()
    rows = make_rows(ROWS)
    assert link.publish(rows).taken == ROWS
    await peer.published(ROWS)
    for _ in range(rng.randint(1, 4)):
        peer.write(nonsense(rng, peer.publish_channel))
        await asyncio.sleep(0)
    if rng.random() < 0.3:
        peer.ack(ROWS, multiple=True)
    peer.hang_up()
    await recorder.until(lambda: recorder.closed is not None, DEADLINE_S)
    outcomes = await recorder.outcomes_of(ROWS, DEADLINE_S)
    assert sum(len(seqs) for seqs in outcomes.values()) == ROWS
    assert recorder.closed is not None
    assert recorder.closed[1], "the end has a reason"
    assert link.publish([make_row(99)]).taken == 0
    await link.close()


async def _greets_with_nonsense(seed: int) -> None:
    """Instead of an answer amid the handshake."""
    rng = random.Random(seed)
    stage = rng.choice(["StartOk", "Open", "Channel.Open", "Select", "Declare"])
    broker = _Nonsense(rng, stage)
    async with broker:
        try:
            link = await make_broker(broker.url).connect(Recorder(), PayloadType.JSON)
        except BrokerError as error:
            assert error.message  # noqa: PT017 - either way is fine, a link or a documented error
        else:
            await link.close()


class _Nonsense(StubBroker):
    """Says nonsense when a method of that name comes, then hangs up."""

    def __init__(self, rng: random.Random, stage: str) -> None:
        super().__init__()
        self._rng = rng
        self._stage = stage

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = _NonsensePeer(self, reader, writer)
        peer.rng, peer.stage = self._rng, self._stage
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._peers.put_nowait(peer)
        await peer.run()


class _NonsensePeer(Peer):
    rng: random.Random
    stage: str

    def _answer(self, channel: int, frame: Any) -> None:
        if frame.name.endswith(self.stage):
            for _ in range(self.rng.randint(1, 3)):
                self.write(nonsense(self.rng, channel))
            self.hang_up()
            return
        super()._answer(channel, frame)


async def _play(seeds: range) -> None:
    errors = Errors()
    async with StubBroker() as stub:
        for seed in seeds:
            try:
                async with asyncio.timeout(DEADLINE_S):
                    await _speaks_nonsense(seed, stub)
                    await _greets_with_nonsense(seed)
            except Exception as error:
                raise AssertionError(f"seed {seed}") from error
            assert errors.found == [], f"seed {seed}"


async def test_nonsense_ends_the_link() -> None:
    await _play(range(SEEDS))


@pytest.mark.long
async def test_nonsense_ends_the_link_at_length() -> None:
    await _play(range(SEEDS, LONG_SEEDS))
