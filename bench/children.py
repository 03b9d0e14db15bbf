"""Programs of this package as processes of their own: so that their CPU is theirs, and their loop nobody else's."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from bench.environment import relay_environment
from bench.errors import BenchFailed

ROOT: Final = Path(__file__).parent.parent
END_TIMEOUT_S: Final = 20.0


def run_command(name: str, *arguments: str, timeout_s: float, **environment: str) -> str:
    """Run `python -m NAME` to its end, with these `RELAY_*` and no others; what it prints. Raises BenchFailed."""
    try:
        outcome = subprocess.run(
            [sys.executable, "-m", name, *arguments],
            check=False,
            env=relay_environment(**environment),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            stdin=subprocess.DEVNULL,
            cwd=ROOT,
        )
    except subprocess.TimeoutExpired:
        raise BenchFailed(f"{name} did not end within {timeout_s:.0f} s") from None
    if outcome.returncode != 0:
        raise BenchFailed(f"{name}: exit {outcome.returncode}\n{(outcome.stdout + outcome.stderr).strip()[-1500:]}")
    return outcome.stdout


def run_module(name: str, *arguments: str, timeout_s: float, **environment: str) -> dict[str, Any]:
    """The same of a module that prints one JSON line. Raises BenchFailed."""
    line: dict[str, Any] = json.loads(run_command(name, *arguments, timeout_s=timeout_s, **environment))
    return line


@contextmanager
def running_module(name: str, *arguments: str) -> Iterator[int]:
    """`python -m NAME` during the block, from the line that it prints when it is ready; yields its process id."""
    process = subprocess.Popen(
        [sys.executable, "-m", name, *arguments],
        env=relay_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        cwd=ROOT,
    )
    try:
        assert process.stdout is not None
        if not process.stdout.readline():
            raise BenchFailed(f"{name} ended at its start")
        yield process.pid
        process.terminate()
        if (code := process.wait(END_TIMEOUT_S)) != 0:
            raise BenchFailed(f"{name} ended with {code}")
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()
