"""The consumer beside a run (`consume.c`): when each message reached a client of the queue."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from bench import native
from bench.errors import BenchFailed
from bench.rig import QUEUE, Rig

STOP_TIMEOUT_S: Final = 20.0


@dataclass(slots=True)
class Arrivals:
    """Unix time of each message's first arrival, by id, and how many further copies came; filled when the block ends."""

    first: dict[str, float] = field(default_factory=dict)
    copies: int = 0


@contextmanager
def consuming(rig: Rig) -> Iterator[Arrivals]:
    """Consume the queue during the block. Raises Unavailable, BenchFailed."""
    program, arrivals = native.compiled("consume"), Arrivals()
    output = rig.directory / "consumed"
    with output.open("wb") as out:
        process = subprocess.Popen(
            [str(program), QUEUE],
            env={"BENCH_AMQP_URL": rig.amqp_url},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.PIPE,
        )
    try:
        yield arrivals
        process.terminate()
        _, complaint = process.communicate(timeout=STOP_TIMEOUT_S)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    if process.returncode != 0:
        raise BenchFailed(f"consume: {complaint.decode().strip() or f'exit {process.returncode}'}")
    for line in output.read_text().splitlines()[1:]:
        message_id, _, at = line.rpartition(" ")
        if message_id in arrivals.first:
            arrivals.copies += 1
        else:
            arrivals.first[message_id] = float(at)
