"""One run of the C publisher (`ceiling.c`): what the broker takes at most."""

from __future__ import annotations

from typing import Any

from bench import native
from bench.procfs import us_per_message
from bench.proof import expect_no_complaints
from bench.rig import EXCHANGE, BenchFailed, Rig


def run_ceiling(rig: Rig, window: int, writes: str) -> dict[str, Any]:
    """As many messages as the backlog has rows, into a fresh queue; one entry of the report's `runs`.

    `window` bounds the unconfirmed messages, `writes` is `buffer` or `library` (ceiling.c). Raises NativeUnavailable,
    NativeFailed, BenchFailed.
    """
    native.compiled("ceiling")
    with rig.fresh_queue():
        rig.wait_until_quiet()
        before = rig.cpu()
        line = native.publish(rig.amqp_url, EXCHANGE, rig.rows, rig.backlog.body, rig.keys, window, writes)
        used = rig.cpu() - before
        first = rig.take_first()
        if first.held != rig.rows:
            raise BenchFailed(f"{rig.rows} messages of the C publisher are confirmed, the queue holds {first.held}")
    expect_no_complaints(rig)
    return {
        "publisher": "c",
        "variant": f"{writes} {window}",
        **line,
        "cpu_us_per_msg": {
            "publisher": us_per_message(line["cpu_s"], rig.rows),
            "rabbitmq": us_per_message(used.rabbitmq_s, rig.rows),
        },
        "shape": first.shape,
    }
