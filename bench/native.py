"""The C programs beside this module: compiled when first needed, run as processes of their own.

Owns the cache of compiled programs (one file per source text, in the temporary directory of this user). A machine without
compiler or library gets `Unavailable`, whose text says what to install; everything else that goes wrong is an error.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from bench.errors import BenchFailed, Unavailable
from bench.load import patience_s

PROGRAMS = ("ceiling", "collect", "consume")
HERE = Path(__file__).parent
COMPILE_TIMEOUT_S = 60.0
FLAGS = ("-std=gnu11", "-O2", "-Wall", "-Wextra")
INSTALL = "install a C compiler and librabbitmq (Debian: apt-get install gcc libc6-dev librabbitmq-dev)"


def compiled(name: str) -> Path:
    """The program made of `bench/<name>.c`. Raises Unavailable."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise Unavailable(f"no C compiler: {INSTALL}")
    source = HERE / f"{name}.c"
    text = source.read_bytes() + (HERE / "rabbit.h").read_bytes() + " ".join((compiler, *FLAGS)).encode()
    cache = Path(tempfile.gettempdir()) / f"outbox-relay-bench-{os.getuid()}"
    cache.mkdir(mode=0o700, exist_ok=True)
    if cache.stat().st_uid != os.getuid():
        raise Unavailable(f"{cache} belongs to somebody else: remove it or set TMPDIR")
    program = cache / f"{name}-{hashlib.sha256(text).hexdigest()[:16]}"
    if not program.exists():
        # Under another name first: two benchmarks at once never run half a program.
        unfinished = program.with_suffix(f".{os.getpid()}")
        command = [compiler, *FLAGS, "-o", str(unfinished), str(source), "-lrabbitmq"]
        outcome = subprocess.run(
            command,
            check=False,
            capture_output=True,
            text=True,
            timeout=COMPILE_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
        )
        if outcome.returncode != 0:
            raise Unavailable(f"{source.name} does not compile: {INSTALL}\n{outcome.stderr.strip()}")
        unfinished.replace(program)
    return program


def is_available() -> bool:
    """Whether the programs can be compiled here."""
    try:
        return all(compiled(name).exists() for name in PROGRAMS)
    except Unavailable:
        return False


def publish(
    amqp_url: str, exchange: str, messages: int, body: Path, keys: int, window: int, writes: str
) -> dict[str, Any]:
    """Run `ceiling.c`; returns its line, with `messages`, `seconds`, `msgs_per_s`, `cpu_s`, `acked`, `nacked`, `returned` ….

    Raises Unavailable, and BenchFailed also when a message was nacked or returned: then it was no ceiling.
    """
    arguments = (exchange, str(messages), str(body), str(keys), str(window), writes)
    with _ran("ceiling", amqp_url, *arguments, messages=messages) as output:
        line: dict[str, Any] = json.loads(output.read())
    if line["acked"] != messages or line["returned"]:
        raise BenchFailed(f"the broker did not take every message of the C publisher: {line}")
    return line


def collect(amqp_url: str, queue: str, messages: int) -> Iterator[str]:
    """Empty a queue of about so many messages; their ids in the order of delivery. Raises Unavailable, BenchFailed."""
    with _ran("collect", amqp_url, queue, messages=messages) as output:
        for line in output:
            yield line.rstrip("\n")


@contextmanager
def _ran(name: str, amqp_url: str, *arguments: str, messages: int) -> Iterator[IO[str]]:
    """What the program has printed, at its end, in a file: of ten million messages that is 370 MB."""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as output:
        outcome = subprocess.run(
            [str(compiled(name)), *arguments],
            check=False,
            env={"BENCH_AMQP_URL": amqp_url},
            stdout=output,
            stderr=subprocess.PIPE,
            text=True,
            timeout=patience_s(messages),
            stdin=subprocess.DEVNULL,
        )
        if outcome.returncode != 0:
            raise BenchFailed(f"{name}: {outcome.stderr.strip() or f'exit {outcome.returncode}'}")
        output.seek(0)
        yield output
