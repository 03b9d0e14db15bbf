"""The compiled build: the wheel is built, unpacked into a folder of its own, and does what the sources do (decision 0021)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.compiled import ROOT, compiled_tree
from bench.compiled import environment as of_tree
from bench.errors import Unavailable
from relay import __version__
from relay.build import BUILD

from .conftest import Site, command, site  # noqa: F401 - a fixture

BUILD_AND_TEST = """
from relay.build import BUILD
assert BUILD == "compiled", "the sources are tested, not the build"
import pytest
raise SystemExit(pytest.main(["-q", "-n", "0", "tests/core", "-o", "pythonpath="]))
"""


@pytest.fixture(scope="module")
def tree() -> Path:
    """Skips where compiler or headers are missing; a build that fails beside them is a fault."""
    try:
        return compiled_tree()
    except Unavailable as missing:
        if str(missing).startswith("no compiled build"):
            pytest.skip(str(missing))
        raise


def run(tree: Path, *arguments: str, timeout_s: float = 300.0) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=os.environ | of_tree(tree),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout


def test_it_decides_as_the_sources_do(tree: Path) -> None:
    """What mypyc makes of a statement may differ from Python: every test of the core passes."""
    assert " passed" in run(tree, "-c", BUILD_AND_TEST)


def test_its_histories_hold(tree: Path) -> None:
    assert "60 histories, 0 failed" in run(tree, "-m", "tests.sim", "--seeds", "60")


@pytest.mark.long
def test_its_histories_hold_for_long(tree: Path) -> None:
    assert "500 histories, 0 failed" in run(tree, "-m", "tests.sim", "--seeds", "500", timeout_s=900.0)


async def test_it_relays_and_says_what_it_is(tree: Path, site: Site) -> None:  # noqa: F811
    site.settings.update(of_tree(tree))
    assert command("--version", settings=site.settings).stdout == f"relay {__version__} (compiled)\n"
    daemon = await site.start().ready()
    await site.insert("m")
    await site.all_sent(20)
    assert await daemon.stop() == 0
    (started,) = [event for event in daemon.events() if event["event"] == "started"]
    assert started["build"] == "compiled"


def build(directory: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(directory)],
        cwd=ROOT,
        env=os.environ | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60.0,
        check=False,
    )


def test_without_a_compiler_the_wheel_is_pure_and_that_is_said(tmp_path: Path) -> None:
    done = build(tmp_path, OUTBOX_RELAY_BUILD="compiled", CC="no-such-compiler -O1")
    assert done.returncode == 0, done.stderr
    assert "PURE, not compiled: there is no C compiler (no-such-compiler)" in done.stdout + done.stderr
    assert [path.name.endswith("-py3-none-any.whl") for path in tmp_path.iterdir()] == [True]


def test_a_build_that_there_is_not_is_refused(tmp_path: Path) -> None:
    done = build(tmp_path, OUTBOX_RELAY_BUILD="fast")
    assert done.returncode != 0
    assert "OUTBOX_RELAY_BUILD is 'fast'; there are `compiled` and `pure`" in done.stdout + done.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_sources_say_that_they_are_pure() -> None:
    assert BUILD == "pure", "editable installs are: planted bugs are edits of the sources"
