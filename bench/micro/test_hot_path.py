"""Python time on the way of a message: encoding, the window, chains, settlements' arrays. `pytest bench/micro --benchmark-only`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from pamqp import commands, frame

from bench.made_rows import made_rows
from relay.broker.encode import Encoder
from relay.broker.wire import Wire
from relay.core.chains import Chains
from relay.core.ports.outbox import SHARDS, Settlement
from relay.core.settings import Ordering
from relay.core.window import Window
from relay.message import PayloadType, Row
from relay.route import Router
from relay.settling import SettlementWriter

Benchmark = Callable[..., Any]

COUNT = 1000
RARE = {
    "correlation_id": "7f0a2c1e-3f64-4a5b-9b57-0b8e7f6a1c11",
    "traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
    "producer": "orders",
}


@pytest.mark.parametrize(
    ("rare", "headers"),
    [(None, None), (RARE, None), (None, '{"tenant":"a","attempt":1}')],
    ids=["ordinary", "traced", "headers"],
)
def test_encode_1000(benchmark: Benchmark, rare: dict[str, Any] | None, headers: str | None) -> None:
    encoder = Encoder(Router("events", "{event_type}"), channel=1, frame_max=131_072, payload_type=PayloadType.JSON)
    batch = made_rows(COUNT, rare=rare, headers=headers)

    def encode() -> None:
        if encoder.encode_run(batch, 0, "events", 2**30, [])[0] == COUNT:
            return
        for row in batch:
            encoder.encode(row, float)

    benchmark(encode)


@pytest.mark.parametrize("multiple", [True, False], ids=["multiple", "single"])
def test_confirm_1000(benchmark: Benchmark, multiple: bool) -> None:
    """From the socket's bytes to the rows: the wire's split and the window, adding included."""
    batch = made_rows(COUNT)
    step = 50 if multiple else 1
    acks = b"".join(frame.marshal(commands.Basic.Ack(tag, multiple), 1) for tag in range(step, COUNT + 1, step))
    loop = asyncio.new_event_loop()

    class Listener:
        def __init__(self) -> None:
            self.window = Window()
            self.rows: list[Row] = []

        def on_ack(self, tag: int, multiple: bool) -> None:
            self.rows += self.window.ack(tag, multiple)[0]

        def on_read_end(self) -> None:
            assert len(self.rows) == COUNT

    def confirm() -> None:
        wire = Wire(asyncio.StreamReader(loop=loop), loop)
        listener = Listener()
        wire.listen(listener, 1)  # type: ignore[arg-type]
        listener.window.add(batch)
        wire.data_received(acks)

    try:
        benchmark(confirm)
    finally:
        loop.close()


@pytest.mark.parametrize("keys", [5_000, 50], ids=["5000_keys", "50_keys"])
@pytest.mark.parametrize("ordering", [Ordering.STRICT, Ordering.NONE])
def test_chains_1000(benchmark: Benchmark, ordering: Ordering, keys: int) -> None:
    """A row's way through memory: admitted, taken, confirmed, finished."""
    writable = [True] * SHARDS

    def pass_through(rows: list[Row]) -> None:
        chains = Chains(ordering)
        chains.admit(rows)
        done = 0
        while done < COUNT:
            batch = chains.take(256, 1 << 30, writable)
            confirmed = chains.on_confirmed(batch)
            chains.finish(confirmed)
            done += len(confirmed)

    benchmark.pedantic(pass_through, setup=lambda: ((made_rows(COUNT, keys),), {}), rounds=100, warmup_rounds=5)  # type: ignore[attr-defined]


def test_settle_1000(benchmark: Benchmark) -> None:
    """A settlement's arrays and answers; its session answers at once, as if every row was found."""
    rows = made_rows(COUNT)
    seqs = [row.seq for row in rows]
    writer = SettlementWriter("relay/1", "relay", "0", marks_sent=True)
    settlement = Settlement(fences=dict.fromkeys(range(SHARDS), 1), sent=rows)

    class Session:
        async def fetch(self, name: str, *arguments: object) -> list[Any]:
            raise AssertionError(name)

        async def fetch_one(self, name: str, *arguments: object) -> Any:
            return (list(range(SHARDS)),) if name == "fence" else (seqs,)

        async def execute(self, text: str) -> str:
            raise AssertionError(text)

    def settle() -> None:
        coroutine = writer.write(Session(), settlement)
        with pytest.raises(StopIteration) as ended:
            coroutine.send(None)
        assert len(ended.value.value.done) == COUNT

    benchmark(settle)
