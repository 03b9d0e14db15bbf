"""A private PostgreSQL."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

from relay.servers.ports import free_port
from relay.servers.process import (
    START_TIMEOUT_S,
    Server,
    ServerFailed,
    await_end,
    child_environment,
    children,
    closed_on_failure,
    run,
    send_signal,
)
from relay.servers.programs import LOOPBACK, ServersUnavailable, find_postgres


class PostgresServer(Server):
    """A private PostgreSQL. As root it runs as the user `postgres` (PostgreSQL refuses root)."""

    kind = "postgres"

    def __init__(self, directory: Path | None, *, durable: bool, options: Mapping[str, str]) -> None:
        self._programs = find_postgres()
        self._user = _unprivileged_user()
        super().__init__(directory)
        self.port = free_port()
        self._options = {
            "listen_addresses": LOOPBACK,
            "port": str(self.port),
            # A socket's path may have 107 bytes; everybody here connects by TCP anyway.
            "unix_socket_directories": "",
            "max_connections": "200",
            # Segments in the data directory: a crash leaves nothing behind in /dev/shm.
            "dynamic_shared_memory_type": "mmap",
            **({} if durable else {"fsync": "off", "full_page_writes": "off"}),
            **options,
        }

    @classmethod
    def start(
        cls, directory: Path | None = None, *, durable: bool = True, options: Mapping[str, str] | None = None
    ) -> PostgresServer:
        """Start a new server in `directory` (None: a private one, removed at `close`).

        `durable=False` turns fsync off: faster, and commits still survive `crash`, as the machine stays up.
        `options` are settings of postgresql.conf. Raises ServersUnavailable, ServerFailed.
        """
        server = cls(directory, durable=durable, options=options or {})
        with closed_on_failure(server):
            server._initialise()
            server._launch()
        return server

    @classmethod
    def standby(cls, primary: PostgresServer) -> PostgresServer:
        """A streaming standby of `primary`, in a directory of its own; `promote` makes it a primary."""
        server = cls(None, durable=True, options={})
        with closed_on_failure(server):
            server._copy_of(primary)
            server._launch()
        return server

    def promote(self) -> None:
        """Returns when it takes writes."""
        self.sql(f"SELECT pg_promote(true, {START_TIMEOUT_S:.0f})")

    @property
    def data(self) -> Path:
        return self.directory / "data"

    def url(self, dbname: str = "postgres", user: str = "postgres") -> str:
        return f"postgresql://{quote(user, safe='')}@{LOOPBACK}:{self.port}/{quote(dbname, safe='')}"

    def sql(self, statement: str, dbname: str = "postgres", timeout_s: float = START_TIMEOUT_S) -> str:
        """Run SQL through psql as the superuser; the rows come back as lines, columns separated by `|`."""
        command = [
            str(self._programs / "psql"),
            "-XqAt",
            "-v",
            "ON_ERROR_STOP=1",
            "-d",
            self.url(dbname),
            "-c",
            statement,
        ]
        return run(command, child_environment(PGCLIENTENCODING="UTF8"), timeout_s=timeout_s)

    def create_database(self, name: str, template: str | None = None) -> str:
        """Create a database, as a copy of `template` (to which nobody may be connected); returns its URL."""
        source = "" if template is None else f" template {_identifier(template)}"
        self.sql(f"create database {_identifier(name)}{source}")
        return self.url(name)

    def drop_database(self, name: str) -> None:
        """Drop a database and end its sessions."""
        self.sql(f"drop database if exists {_identifier(name)} with (force)")

    def stop(self, mode: str = "fast") -> None:
        """Shut down: `smart` awaits the clients, `fast` ends their sessions, `immediate` skips the checkpoint."""
        signals = {"smart": signal.SIGTERM, "fast": signal.SIGINT, "immediate": signal.SIGQUIT}
        self.thaw()
        self._dismiss_guards()
        if self.is_running:
            os.kill(self.pid, signals[mode])
        self._await_exit()

    def crash(self) -> None:
        """SIGKILL every process of the server at once; `restart` then recovers from the write-ahead log."""
        self._dismiss_guards()
        if self.is_running:
            os.kill(self.pid, signal.SIGSTOP)  # or it would start new children meanwhile
            killed = self._processes()
            send_signal(killed, signal.SIGKILL)
            # While a child is still about to end, its shared memory is in use, and the next start refuses.
            await_end(pid for pid in killed if pid != self.pid)
        self._await_exit()

    def _initialise(self) -> None:
        command = [
            str(self._programs / "initdb"),
            "-D",
            str(self.data),
            "-U",
            "postgres",
            "-A",
            "trust",
            "-E",
            "UTF8",
        ]
        self._make_data([*command, "--locale=C.UTF-8", "--no-sync"])

    def _copy_of(self, primary: PostgresServer) -> None:
        program = str(self._programs / "pg_basebackup")
        self._make_data([program, "-D", str(self.data), "-R", "--no-sync", "-c", "fast", "-d", primary.url()])

    def _make_data(self, command: Sequence[str]) -> None:
        """Run the program that fills the data directory, as the server's user."""
        if self._user is not None:
            _check_reachable(self.directory, self._user)
            shutil.chown(self.directory, self._user)
        maker = self._spawn(command, environment=child_environment(), user=self._user, death=signal.SIGKILL)
        try:
            if maker.wait(START_TIMEOUT_S) != 0:
                raise ServerFailed(f"{Path(command[0]).name} failed: {self._log_tail()}")
        finally:
            self._dismiss_guards()

    def _launch(self) -> None:
        settings = [part for name, value in self._options.items() for part in ("-c", f"{name}={value}")]
        self._process = self._spawn(
            [str(self._programs / "postgres"), "-D", str(self.data), *settings],
            environment=child_environment(),
            user=self._user,
            # Immediate shutdown: the postmaster ends its children, which lead groups of their own.
            death=signal.SIGQUIT,
        )
        self._await_ready(self._accepts_connections)

    def _accepts_connections(self) -> bool:
        # postmaster.pid: line 1 the pid (a crash leaves the old one's file), line 8 the state.
        try:
            lines = (self.data / "postmaster.pid").read_text().splitlines()
        except FileNotFoundError:
            return False
        return len(lines) >= 8 and lines[0] == str(self.pid) and lines[7].strip() in ("ready", "standby")

    def _end(self) -> None:
        self.stop("immediate")

    def _processes(self) -> list[int]:
        return [self.pid, *children(self.pid)]


def _unprivileged_user() -> str | None:
    """Who runs PostgreSQL: None for this user, `postgres` where that is root. Raises ServersUnavailable."""
    if os.geteuid() != 0:
        return None
    try:
        return pwd.getpwnam("postgres").pw_name
    except KeyError:
        raise ServersUnavailable(
            "PostgreSQL does not run as root, and there is no user `postgres`", hint="run as an ordinary user"
        ) from None


def _check_reachable(directory: Path, user: str) -> None:
    closed = [str(parent) for parent in directory.resolve().parents if not parent.stat().st_mode & 0o001]
    if closed:
        raise ServerFailed(f"the user {user} cannot enter {closed[0]}", hint="give a directory that anyone can reach")


def _identifier(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
