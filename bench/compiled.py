"""The compiled build, for programs of this package and for tests: built once for a state of the sources, then kept in `.venv`."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Final

from bench.errors import Unavailable

ROOT: Final = Path(__file__).parent.parent
KEPT: Final = Path(sys.prefix, "compiled")
TIMEOUT_S: Final = 600.0
"""A minute on two quiet cores, most of it the C compiler's."""

SOURCES: Final = ("relay/**/*.py", "sql/**/*.sql", ".ci/hatch_build.py", "pyproject.toml", "constraints.txt")


_held: list[int] = []
"""Open folders of trees that this process uses, each locked until it ends."""


def compiled_tree() -> Path:
    """A folder with the compiled package and nothing else, the unpacked wheel: there as long as this process is.

    Raises Unavailable where it cannot be made.
    """
    digest = hashlib.sha256(sys.version.encode())
    for path in sorted(path for pattern in SOURCES for path in ROOT.glob(pattern)):
        digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    tree = KEPT / digest.hexdigest()[:16]
    KEPT.mkdir(exist_ok=True)
    with open(KEPT / "lock", "w") as lock:
        # Whoever else wants one waits: making it takes a core for a minute.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not tree.exists():
            _make(tree)
        _held.append(os.open(tree, os.O_RDONLY))
        fcntl.flock(_held[-1], fcntl.LOCK_SH)
    return tree


def _make(tree: Path) -> None:
    """In place of those of other states of the sources that nobody uses."""
    for other in KEPT.iterdir():
        if other.is_dir() and not _is_held(other):
            shutil.rmtree(other, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=KEPT, prefix="making-") as directory:
        made = Path(directory, "tree")
        with zipfile.ZipFile(_wheel(Path(directory))) as archive:
            archive.extractall(made)
        made.rename(tree)


def _is_held(tree: Path) -> bool:
    folder = os.open(tree, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(folder)
    return False


def _wheel(directory: Path) -> Path:
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(directory)],
        cwd=ROOT,
        env=os.environ | {"OUTBOX_RELAY_BUILD": "compiled"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    said = (done.stdout + done.stderr).strip()
    if done.returncode != 0:
        raise Unavailable(f"the compiled build failed: {said[-1500:]}")
    (wheel,) = directory.glob("*.whl")
    if wheel.name.endswith("-none-any.whl"):
        why = next((line for line in said.splitlines() if "PURE" in line), said[-500:])
        raise Unavailable(f"no compiled build: {why}")
    return wheel


def environment(tree: Path) -> dict[str, str]:
    """With these variables Python takes `relay` from the tree, whatever the working directory, and all else from here."""
    return {"PYTHONSAFEPATH": "1", "PYTHONPATH": f"{tree}{os.pathsep}{ROOT}"}


def build_in_use() -> str:
    """Of the relay in programs that are started with this process's environment: `compiled` or `pure`."""
    return "compiled" if str(KEPT) in os.environ.get("PYTHONPATH", "") else "pure"
