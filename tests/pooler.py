"""A private pgbouncer in transaction mode before a database: no session state, no LISTEN, no pid that means anything."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Final, Self
from urllib.parse import urlsplit, urlunsplit

from relay.servers import LOOPBACK, free_port

IS_INSTALLED: Final = shutil.which("pgbouncer") is not None
START_TIMEOUT_S: Final = 20.0


class Pooler:
    """Started by `with` or `start`. `pool_size` server sessions, shared by all clients of a database."""

    def __init__(self, database_url: str, *, pool_size: int = 2) -> None:
        server = urlsplit(database_url)
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self._directory = Path(tempfile.mkdtemp(prefix="relay-pooler-"))
        self._config = self._directory / "pgbouncer.ini"
        self._config.write_text(
            f"[databases]\n* = host={server.hostname} port={server.port} user={server.username or 'postgres'}\n"
            f"[pgbouncer]\nlisten_addr = {LOOPBACK}\nlisten_port = {self.port}\nunix_socket_dir =\nauth_type = any\n"
            f"pool_mode = transaction\ndefault_pool_size = {pool_size}\nlogfile = {self._directory / 'log'}\n"
        )
        # pgbouncer refuses to run as root.
        self._user = "postgres" if os.geteuid() == 0 else None
        if self._user is not None:
            for path in (self._directory, self._config):
                shutil.chown(path, self._user)
        self.url = urlunsplit(server._replace(netloc=f"postgres@{LOOPBACK}:{self.port}"))

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        shutil.rmtree(self._directory)

    def start(self) -> None:
        """Returns when it takes connections."""
        assert self._process is None, "runs already"
        self._process = subprocess.Popen(
            ["pgbouncer", "-q", str(self._config)],
            user=self._user,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                socket.create_connection((LOOPBACK, self.port), 1.0).close()
                return
            except OSError:
                assert self._process.poll() is None, (self._directory / "log").read_text()
                assert time.monotonic() < deadline, "pgbouncer does not listen"
                time.sleep(0.01)

    def kill(self) -> None:
        """SIGKILL: clients and server sessions are cut."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
