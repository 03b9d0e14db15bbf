"""A reading of the Dockerfile, and its execution on this machine's own root file system, without a container engine.

A stage's base is an overlay over `/`: what its steps write stays in the overlay. It needs root, and a `python3` outside
of root's home with its venv module, which is what the Dockerfile asks of its base.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True, slots=True)
class Step:
    """One instruction, its lines joined."""

    instruction: str
    text: str


@dataclass(slots=True)
class Stage:
    """What stands between one FROM and the next."""

    base: str
    name: str
    steps: list[Step] = field(default_factory=list)

    def of(self, instruction: str) -> list[str]:
        return [step.text for step in self.steps if step.instruction == instruction]

    def document(self, instruction: str) -> Any:
        """The JSON form of ENTRYPOINT, CMD, HEALTHCHECK's command."""
        (text,) = self.of(instruction)
        return json.loads(text[text.index("[") :])


def read(path: Path) -> list[Stage]:
    """The stages, in order."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    stages: list[Stage] = []
    for text in re.sub(r"\\\n", "", "\n".join(lines)).splitlines():
        instruction, _, rest = text.strip().partition(" ")
        if instruction == "FROM":
            words = rest.split()
            stages.append(Stage(words[0], words[2] if len(words) > 1 else ""))
        elif stages and instruction:
            stages[-1].steps.append(Step(instruction, rest.strip()))
    return stages


class Root:
    """A stage's root file system: an overlay over `/`, in a mount namespace of each command's own."""

    def __init__(self, directory: Path) -> None:
        self.upper = directory / "upper"
        self._directory = directory
        self.environment = {"PATH": PATH, "LC_ALL": "C.UTF-8"}
        self.workdir = "/"
        self.user = ""
        for name in ("upper", "work", "root"):
            (directory / name).mkdir(parents=True)

    def command(self, *arguments: str, read_only: bool = False) -> list[str]:
        """The command that runs these arguments inside, as the stage's user."""
        root = self._directory / "root"
        options = f"lowerdir=/,upperdir={self.upper},workdir={self._directory / 'work'}"
        who = f"--userspec={self.user}" if self.user else "--userspec=0:0"
        script = [
            f"mount -t overlay overlay -o {options} {root}",
            f"mount --rbind /dev {root}/dev",
            f"mount -t proc proc {root}/proc",
            *([f"mount -o remount,ro,bind {root}", f"mount -o remount,ro {root}"] if read_only else []),
            f'exec chroot {who} {root} sh -c \'cd "$0" && exec "$@"\' {shlex.join([self.workdir, *arguments])}',
        ]
        return ["unshare", "--mount", "sh", "-ec", "\n".join(script)]

    def run(self, *arguments: str, timeout_s: float = 300.0) -> str:
        done = subprocess.run(
            self.command(*arguments),
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert done.returncode == 0, f"{arguments}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
        return done.stdout

    def start(self, *arguments: str, output: Path) -> subprocess.Popen[bytes]:
        """On a read-only root; the process is the command itself."""
        with output.open("wb") as log:
            return subprocess.Popen(
                self.command(*arguments, read_only=True),
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @staticmethod
    def proc(process: subprocess.Popen[bytes], name: str) -> str:
        """What the kernel says of it."""
        return (Path("/proc") / str(process.pid) / name).read_text()


def build(
    stages: list[Stage], context: Path, directory: Path, environment: Mapping[str, str], arguments: Mapping[str, str]
) -> Root:
    """Execute every step of every stage; returns the last one's root. `environment` is for RUN steps only."""
    built: dict[str, Root] = {}
    root = Root(directory / "0")
    for number, stage in enumerate(stages):
        root = built[stage.name] = Root(directory / f"stage{number}")
        values = dict(arguments)
        for step in stage.steps:
            match step.instruction:
                case "ARG":
                    name, _, default = step.text.partition("=")
                    values.setdefault(name, default)
                case "ENV":
                    for name, value in _pairs(step.text):
                        root.environment[name] = value.replace("$PATH", root.environment["PATH"])
                case "WORKDIR":
                    root.workdir = step.text
                    _inside(root, step.text).mkdir(parents=True, exist_ok=True)
                case "COPY":
                    _copy(step.text, context, root, built)
                case "RUN":
                    saved = dict(root.environment)
                    root.environment |= {**environment, **values}
                    root.run("/bin/sh", "-c", step.text)
                    root.environment = saved
                case "USER":
                    root.user = step.text
                case "LABEL" | "EXPOSE" | "STOPSIGNAL" | "HEALTHCHECK" | "ENTRYPOINT" | "CMD":
                    pass
                case other:
                    raise AssertionError(f"a step that this execution does not know: {other}")
    return root


def ignored(context: Path) -> Iterator[str]:
    """.dockerignore's exceptions: all that the context holds."""
    for line in (context / ".dockerignore").read_text().splitlines():
        if line.startswith("!"):
            yield line[1:]


def _pairs(text: str) -> Iterator[tuple[str, str]]:
    for word in shlex.split(text):
        name, _, value = word.partition("=")
        yield name, value


def _inside(root: Root, path: str) -> Path:
    return root.upper / os.path.join(root.workdir, path).lstrip("/")


def _copy(text: str, context: Path, root: Root, built: Mapping[str, Root]) -> None:
    *sources, target = text.split()
    origin = context
    if sources[0].startswith("--from="):
        origin = built[sources.pop(0).removeprefix("--from=")].upper
    for source in sources:
        found = origin / source.lstrip("/")
        assert origin is not context or source in ignored(context), f"{source} is not in the build's context"
        into = _inside(root, target)
        if found.is_dir():
            # As the builder does it: links inside stay links.
            shutil.copytree(found, into, symlinks=True, dirs_exist_ok=True)
        else:
            into.mkdir(parents=True, exist_ok=True)
            shutil.copy2(found, into)
