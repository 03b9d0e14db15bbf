"""Python time a message on the broker's side: encoding, the window, the way of a confirm. `pytest bench/micro`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from pamqp import commands, frame

from relay.broker.encode import Encoder
from relay.broker.wire import Wire
from relay.core.window import Window
from relay.message import PayloadType, Row
from relay.route import Router

Benchmark = Callable[..., Any]

COUNT = 1000
PAYLOAD = b'{"order_id":"42","note":"' + b"y" * 222 + b'"}'
RARE = {
    "correlation_id": "7f0a2c1e-3f64-4a5b-9b57-0b8e7f6a1c11",
    "traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
    "producer": "orders",
}


def rows(rare: dict[str, Any] | None = None, headers: str | None = None) -> list[Row]:
    return [
        Row(
            0,
            seq,
            f"01K0ORDERCREATED{seq:010d}",
            "order.created",
            aggregate_type="order",
            aggregate_id=str(seq % 5000),
            payload=PAYLOAD,
            occurred_at=1_764_439_200.123456 + seq / 1000,
            rare=rare,
            headers=headers,
        )
        for seq in range(COUNT)
    ]


@pytest.mark.parametrize(
    ("rare", "headers"),
    [(None, None), (RARE, None), (None, '{"tenant":"a","attempt":1}')],
    ids=["ordinary", "traced", "headers"],
)
def test_encode_1000(benchmark: Benchmark, rare: dict[str, Any] | None, headers: str | None) -> None:
    encoder = Encoder(Router("events", "{event_type}"), channel=1, frame_max=131_072, payload_type=PayloadType.JSON)
    batch = rows(rare, headers)

    def encode() -> None:
        for row in batch:
            encoder.encode(row, float)

    benchmark(encode)


@pytest.mark.parametrize("multiple", [True, False], ids=["multiple", "single"])
def test_confirm_1000(benchmark: Benchmark, multiple: bool) -> None:
    """From the socket's bytes to the rows: the wire's split and the window, adding included."""
    batch = rows()
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
        for row in batch:
            listener.window.add(row)
        wire.data_received(acks)

    benchmark(confirm)
    loop.close()
