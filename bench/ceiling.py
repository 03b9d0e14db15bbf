"""One run of the C publisher (`ceiling.c`): what the broker takes at most."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bench import native
from bench.errors import BenchFailed
from bench.load import Load
from bench.procfs import us_per_message
from bench.proof import expect_no_complaints
from bench.rig import EXCHANGE, Rig


@dataclass(frozen=True, slots=True)
class Ceiling:
    """`window` bounds the unconfirmed messages, `writes` is `buffer` or `library` (ceiling.c); of the load's first rows."""

    load: Load
    window: int
    writes: str = "library"
    queue: str = "quorum"
    messages: int | None = None


def run_ceiling(rig: Rig, ceiling: Ceiling) -> dict[str, Any]:
    """As many messages as the backlog has rows, into a fresh queue; one entry of the document's `runs`.

    Raises Unavailable, BenchFailed.
    """
    native.compiled("ceiling")
    messages, load = ceiling.messages or ceiling.load.rows, ceiling.load
    body = rig.backlog(load).body
    with rig.fresh_queue(ceiling.queue):
        rig.wait_until_quiet()
        before = rig.cpu()
        line = native.publish(rig.amqp_url, EXCHANGE, messages, body, load.keys, ceiling.window, ceiling.writes)
        used = rig.cpu() - before
        first = rig.take_first()
        if first.held != messages:
            raise BenchFailed(f"{messages} messages of the C publisher are confirmed, the queue holds {first.held}")
    expect_no_complaints(rig)
    return {
        **line,
        "cpu_us_per_msg": {
            "publisher": us_per_message(line["cpu_s"], messages),
            "rabbitmq": us_per_message(used.rabbitmq_s, messages),
        },
        "shape": first.shape,
    }
