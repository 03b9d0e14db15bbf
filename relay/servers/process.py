"""One private server's processes: starting, guarding, freezing and ending them; ports, signals, /proc."""

from __future__ import annotations

import atexit
import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self

from relay.errors import RelayError

START_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 30.0

_running: set[Server] = set()


class ServerFailed(RelayError):
    """A private server did not start, stop or answer; the text ends with the last lines of its log."""


class Server(ABC):
    """What both servers share: one child process that leads a process group of its own, a log, a guard."""

    kind: str

    def __init__(self, directory: Path | None) -> None:
        self._made_directory = directory is None
        self.directory = Path(tempfile.mkdtemp(prefix=f"relay-{self.kind}-")) if directory is None else directory
        self.directory.mkdir(parents=True, exist_ok=True)
        self.log = self.directory / "server.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._guards: list[subprocess.Popen[bytes]] = []
        self._frozen: list[int] = []
        _running.add(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """The process that this object started (PostgreSQL's postmaster, RabbitMQ's start script)."""
        if self._process is None:
            raise ServerFailed(f"the private {self.kind} server is stopped")
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def restart(self) -> None:
        """Stop if running, start on the same port with the same data; returns when it accepts connections."""
        self.stop()
        self._launch()

    def freeze(self) -> None:
        """SIGSTOP every process of the server: connections stay open and nothing answers."""
        assert not self._frozen, "frozen already"
        self._frozen = self._processes()
        send_signal(self._frozen, signal.SIGSTOP)

    def thaw(self) -> None:
        """Undo `freeze`; harmless on a server that is not frozen."""
        send_signal(self._frozen, signal.SIGCONT)
        self._frozen = []

    def close(self) -> None:
        """End the server as fast as may be and remove what it made; may be called again."""
        try:
            self._end()
        finally:
            _running.discard(self)
            if self._made_directory:
                shutil.rmtree(self.directory, ignore_errors=True)

    @abstractmethod
    def stop(self) -> None:
        """End it in good order; `restart` brings it back with its data."""

    @abstractmethod
    def _launch(self) -> None:
        """Start the processes and wait until they answer."""

    @abstractmethod
    def _end(self) -> None:
        """End them at once, in whatever state they are."""

    @abstractmethod
    def _processes(self) -> list[int]:
        """Every live process of the server, the one that forks first."""

    def _spawn(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        user: str | None = None,
        death: signal.Signals,
    ) -> subprocess.Popen[bytes]:
        """A child in a session of its own; its group gets the signal `death` should this process vanish."""
        # -1: Python leaves the supplementary groups alone. A changed user must lose root's.
        identity = {} if user is None else {"user": user, "group": pwd.getpwnam(user).pw_gid, "extra_groups": []}
        with self.log.open("ab") as log:
            child: subprocess.Popen[bytes] = subprocess.Popen(  # type: ignore[call-overload]
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.directory,
                env=dict(environment),
                start_new_session=True,
                **identity,
            )
        # The guard reads a pipe whose other end only this process holds: a line means "stand down", its end
        # means that this process died without a word. (dash's kill knows no "--".)
        script = f"read line || kill -{death.value} -{child.pid}"
        guard = subprocess.Popen(
            ["/bin/sh", "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._guards.append(guard)
        return child

    def _dismiss_guards(self) -> None:
        for guard in self._guards:
            with contextlib.suppress(BrokenPipeError):
                guard.communicate(b"stand down\n", timeout=STOP_TIMEOUT_S)
        self._guards = []

    def _await_ready(self, is_ready: Callable[[], bool]) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not is_ready():
            if not self.is_running:
                raise ServerFailed(f"the private {self.kind} server ended at its start: {self._log_tail()}")
            if time.monotonic() > deadline:
                raise ServerFailed(f"the private {self.kind} server is not up after {START_TIMEOUT_S:.0f} s")
            time.sleep(0.02)

    def _await_exit(self) -> None:
        """Wait for the child that was told to end; what does not end in time is killed with its group."""
        if self._process is None:
            return
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            send_signal(self._processes(), signal.SIGKILL)
            self._process.wait(STOP_TIMEOUT_S)
        self._process = None
        self._frozen = []

    def _log_tail(self) -> str:
        try:
            return " / ".join(self.log.read_text(errors="replace").splitlines()[-6:])
        except OSError as error:
            return str(error)


def child_environment(**variables: str) -> dict[str, str]:
    """What a server's program gets to see: the PATH, a locale, and `variables`; nothing else of this process."""
    return {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C.UTF-8", **variables}


def run(
    command: Sequence[str], environment: Mapping[str, str], stdin: str = "", timeout_s: float = START_TIMEOUT_S
) -> str:
    """Run to the end and return what it printed. Raises ServerFailed with what it complained about."""
    try:
        done = subprocess.run(
            command,
            check=False,
            input=stdin,
            env=dict(environment),
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        raise ServerFailed(f"{Path(command[0]).name} gave no answer in {timeout_s:g} s") from None
    if done.returncode != 0:
        raise ServerFailed(f"{Path(command[0]).name} failed: {(done.stderr or done.stdout).strip()}")
    return done.stdout


def _stat_fields(pid: int) -> list[str]:
    """Fields 3 and on of /proc/PID/stat (state, parent, group ...); empty when the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def _all_pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def children(pid: int) -> list[int]:
    """The processes whose parent is `pid`."""
    return [other for other in _all_pids() if _stat_fields(other)[1:2] == [str(pid)]]


def group_members(pgid: int) -> list[int]:
    """The processes of the group `pgid` but for its leader."""
    return [other for other in _all_pids() if _stat_fields(other)[2:3] == [str(pgid)] and other != pgid]


def send_signal(pids: Sequence[int], number: signal.Signals) -> None:
    """Signal each process in turn; one that has ended meanwhile is passed over."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def await_end(pids: Iterable[int]) -> None:
    """Until each has ended, as a zombie has that nobody reaps; for at most `STOP_TIMEOUT_S` in all."""
    deadline = time.monotonic() + STOP_TIMEOUT_S
    for pid in pids:
        while _is_alive(pid) and time.monotonic() < deadline:
            time.sleep(0.005)


def _is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state not in "ZX"


@contextlib.contextmanager
def closed_on_failure(server: Server) -> Iterator[None]:
    """Close the server when its start does not come to its end, whatever ended it."""
    try:
        yield
    except BaseException:
        server.close()
        raise


@atexit.register
def _close_all() -> None:
    for server in list(_running):
        server.close()
