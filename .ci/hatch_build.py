"""Compiling the hot path while the wheel is built (hatchling's build hook): docs/decisions/0021.

    OUTBOX_RELAY_BUILD=compiled python -m hatchling build -t wheel     with mypyc, for this platform and Python
    python -m hatchling build -t wheel                                 the same sources, pure: the default

Where a compiler, Python's headers or mypyc are missing the wheel is pure, and that is said. Editable installs and sdists
are always pure. The sources stay in a compiled wheel beside what was made of them: tracebacks quote them.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

VARIABLE = "OUTBOX_RELAY_BUILD"
TOOLS = ["mypy>=2.4,<3", "setuptools>=77"]
"""Installed by a build in isolation; another one must have them. `constraints.txt` has the versions that were tried."""

COMPILED = [
    *(
        f"relay/core/{name}.py"
        for name in (
            "backoff",
            "chain",
            "chains",
            "held_keys",
            "holding",
            "pace",
            "ports/broker",
            "ports/clock",
            "ports/outbox",
            "reading",
            "ready",
            "settings",
            "window",
        )
    ),
    *(f"relay/broker/{name}.py" for name in ("encode", "fields")),
    *(f"relay/{name}.py" for name in ("arrays", "engine", "message", "publisher", "rows", "settler", "settling")),
]
"""What runs once a row or once a batch and gains by it, chosen by profile."""

OPTIMIZATION = "1"
"""Of the C compiler. 2 and 3 take a third longer, and twice as long, to compile, and no µs less to run."""

GROUP = "outbox_relay"
"""All of it is one library, `outbox_relay__mypyc`, so that calls from one module to another are calls in C."""


class CompilingHook(BuildHookInterface):  # type: ignore[type-arg]
    """Adds the libraries to a wheel where `OUTBOX_RELAY_BUILD` asks for them."""

    PLUGIN_NAME = "custom"

    def dependencies(self) -> list[str]:
        return TOOLS if self.target_name == "wheel" and is_asked_for() else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel" or version != "standard" or not is_asked_for():
            return
        if lacking := what_is_lacking():
            self.app.display_warning(f"outbox-relay: the wheel is PURE, not compiled: {lacking}")
            return
        self._directory = tempfile.mkdtemp(prefix="outbox-relay-build-")
        stage = Path(self._directory)
        shutil.copytree(Path(self.root, "relay"), stage / "relay", ignore=shutil.ignore_patterns("_sql", "__pycache__"))
        subprocess.run([sys.executable, Path(__file__).resolve()], cwd=stage, check=True)
        made = [path.relative_to(stage) for path in sorted(stage.glob("made/**/*.so"))]
        assert len(made) == len(COMPILED) + 1, made
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
        build_data["force_include"].update({str(stage / path): str(path.relative_to("made")) for path in made})

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if directory := getattr(self, "_directory", None):
            shutil.rmtree(directory)


def is_asked_for() -> bool:
    """Raises ValueError for a build that there is not."""
    build = os.environ.get(VARIABLE, "pure")
    if build not in ("compiled", "pure"):
        raise ValueError(f"{VARIABLE} is {build!r}; there are `compiled` and `pure`")
    return build == "compiled"


def what_is_lacking() -> str | None:
    """What stands against compiling here, in words."""
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")[0]
    if shutil.which(compiler) is None:
        return f"there is no C compiler ({compiler})"
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        return "Python's headers are not installed (Debian: python3-dev)"
    missing = [name for name in ("mypyc", "setuptools") if importlib.util.find_spec(name) is None]
    return f"not installed: {', '.join(missing)}" if missing else None


def compile_here() -> None:
    """In a process of its own: the sources below the working directory become libraries under `made/`."""
    from mypyc.build import mypycify
    from setuptools import Distribution

    # The sources alone: what they import need not be installed, and is taken as it comes.
    options = ["--explicit-package-bases", "--ignore-missing-imports", "--cache-dir", "mypy-cache"]
    extensions = mypycify(
        [*options, *COMPILED], opt_level=OPTIMIZATION, debug_level="0", group_name=GROUP, target_dir="c"
    )
    command = Distribution({"name": "outbox-relay", "ext_modules": extensions}).get_command_obj("build_ext")
    command.build_lib, command.build_temp = "made", "c"
    command.ensure_finalized()
    command.run()


if __name__ == "__main__":
    compile_here()
