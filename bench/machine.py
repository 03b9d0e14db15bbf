"""On what was measured: the machine, and the versions of everything."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("asyncpg", "aio-pika", "aiormq", "uvloop", "orjson", "prometheus-client")
ROOT = Path(__file__).parent.parent


def machine() -> dict[str, Any]:
    """Enough to judge the figures by; no host name."""
    cpuinfo = Path("/proc/cpuinfo").read_text()
    model = next((line.split(":", 1)[1].strip() for line in cpuinfo.splitlines() if line.startswith("model name")), "")
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": model or platform.machine(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "kernel": platform.release(),
        "load_1m_at_end": os.getloadavg()[0],
    }


def versions() -> dict[str, str]:
    return {
        "relay": _commit(),
        "python": platform.python_version(),
        **{package: metadata.version(package) for package in PACKAGES},
    }


def _commit() -> str:
    """The commit measured, with a `+` when the tree differed from it; `unknown` outside a repository."""
    try:
        commit = _git("rev-parse", "--short=12", "HEAD")
        return commit + ("+" if _git("status", "--porcelain", "--", "relay", "sql", "bench") else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10.0).stdout.strip()
