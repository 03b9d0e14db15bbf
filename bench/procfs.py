"""CPU time and memory of processes, read from /proc (Linux), without touching the processes."""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Cpu:
    """CPU seconds, user and system, since each process began; the clock's tick (10 ms) is the resolution."""

    relay_s: float
    postgres_s: float
    rabbitmq_s: float

    def __sub__(self, other: Cpu) -> Cpu:
        return Cpu(
            self.relay_s - other.relay_s,
            self.postgres_s - other.postgres_s,
            self.rabbitmq_s - other.rabbitmq_s,
        )


def us_per_message(cpu_s: float, messages: int) -> float:
    """Microseconds, to the hundredth."""
    return round(cpu_s / messages * 1e6, 2)


def process_cpu_s(pid: int) -> float:
    """One process, all its threads; its children not. Raises OSError when it is gone."""
    fields = _stat(pid)
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def run_time_s(pid: int) -> float:
    """The time that a process' first thread has run, to the nanosecond: for what takes less than many ticks."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


def family_cpu_s(pid: int) -> float:
    """A process, its live children, and those that it has waited for.

    Exact for a PostgreSQL server: every backend is a child of the postmaster, which waits for each.
    """
    fields = _stat(pid)
    total = sum(int(fields[i]) for i in (11, 12, 13, 14)) / _TICKS_PER_S
    for child in children(pid):
        try:
            total += process_cpu_s(child)
        except (FileNotFoundError, ProcessLookupError):
            continue  # ended meanwhile; the next look finds it in the parent's sum
    return total


def peak_rss_bytes(pid: int) -> int:
    """The most memory that the process has had resident (VmHWM)."""
    return _status_bytes(pid, "VmHWM:")


def rss_bytes(pid: int) -> int:
    """What the process has resident now (VmRSS)."""
    return _status_bytes(pid, "VmRSS:")


def bind(pid: int, cores: Collection[int]) -> None:
    """Let all threads of a process run on these cores only, and what they start from now on. Those that end meanwhile are left out."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread.name), cores)


def children(pid: int) -> list[int]:
    """Live children of the process' first thread."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _status_bytes(pid: int, name: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise ProcessLookupError(f"process {pid} has ended")


def _stat(pid: int) -> list[str]:
    # The second field, the command's name in parentheses, may hold blanks and parentheses: what follows it counts from "state".
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
