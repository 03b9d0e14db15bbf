"""Throwaway private PostgreSQL and RabbitMQ servers for `relay demo`, the tests and the benchmark.

Owns: the processes that it starts, their ports (20,000-32,000 on 127.0.0.1) and their private directories. It
finds installed programs and installs nothing; no other server on the machine is looked at, used or stopped.

States of a server: running, frozen (SIGSTOP), stopped; `restart` leads from each of them to running, with the
data kept. `close` ends it for good and removes the directory if the server made it. Every server is closed on
leaving its `with` block and at exit; a guard process ends it when this process is killed with SIGKILL.

All calls are blocking; from a running event loop use `asyncio.to_thread`.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pwd
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self
from urllib.parse import quote

from relay.errors import RelayError

LOOPBACK = "127.0.0.1"
# Below Linux's ephemeral range (32768 and up), so that no outgoing connection takes a port first.
PORTS = range(20_000, 32_000)
# Where Debian installs them, outside of the PATH.
POSTGRES_HOME = Path("/usr/lib/postgresql")
RABBITMQ_HOME = Path("/usr/lib/rabbitmq/bin")
ERLANG_HOME = Path("/usr/lib/erlang")
START_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 30.0

_handed_out: set[int] = set()
_running: set[_Server] = set()


class ServersUnavailable(RelayError):
    """A server's programs are not installed here; the hint says what to install."""


class ServerFailed(RelayError):
    """A private server did not start, stop or answer; the text ends with the last lines of its log."""


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody listens on and that this process has not handed out before."""
    for port in random.sample(PORTS, len(PORTS)):
        if port in _handed_out:
            continue
        with socket.socket() as probe:
            # As the servers do: a port whose last connections linger in TIME_WAIT is free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((LOOPBACK, port))
            except OSError:
                continue
        _handed_out.add(port)
        return port
    raise ServerFailed(f"no free port in {PORTS.start}-{PORTS.stop} on {LOOPBACK}")


class _Server:
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
        _signal(self._frozen, signal.SIGSTOP)

    def thaw(self) -> None:
        """Undo `freeze`; harmless on a server that is not frozen."""
        _signal(self._frozen, signal.SIGCONT)
        self._frozen = []

    def close(self) -> None:
        """End the server as fast as may be and remove what it made; may be called again."""
        try:
            self._end()
        finally:
            _running.discard(self)
            if self._made_directory:
                shutil.rmtree(self.directory, ignore_errors=True)

    def stop(self) -> None:
        raise NotImplementedError

    def _launch(self) -> None:
        raise NotImplementedError

    def _end(self) -> None:
        raise NotImplementedError

    def _processes(self) -> list[int]:
        """Every live process of the server, the one that forks first."""
        raise NotImplementedError

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
            _signal(self._processes(), signal.SIGKILL)
            self._process.wait(STOP_TIMEOUT_S)
        self._process = None
        self._frozen = []

    def _log_tail(self) -> str:
        try:
            return " / ".join(self.log.read_text(errors="replace").splitlines()[-6:])
        except OSError as error:
            return str(error)


class PostgresServer(_Server):
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
        with _closed_on_failure(server):
            server._initialise()
            server._launch()
        return server

    @property
    def data(self) -> Path:
        return self.directory / "data"

    def url(self, dbname: str = "postgres", user: str = "postgres") -> str:
        return f"postgresql://{quote(user, safe='')}@{LOOPBACK}:{self.port}/{quote(dbname, safe='')}"

    def sql(self, statement: str, dbname: str = "postgres") -> str:
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
        return _run(command, {"PATH": os.environ["PATH"], "PGCLIENTENCODING": "UTF8", "LC_ALL": "C.UTF-8"})

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
            _signal(self._processes(), signal.SIGKILL)
        self._await_exit()

    def _initialise(self) -> None:
        if self._user is not None:
            _check_reachable(self.directory, self._user)
            shutil.chown(self.directory, self._user)
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
        initdb = self._spawn(
            [*command, "--locale=C.UTF-8", "--no-sync"],
            environment={"PATH": os.environ["PATH"]},
            user=self._user,
            death=signal.SIGKILL,
        )
        try:
            if initdb.wait(START_TIMEOUT_S) != 0:
                raise ServerFailed(f"initdb failed: {self._log_tail()}")
        finally:
            self._dismiss_guards()

    def _launch(self) -> None:
        settings = [part for name, value in self._options.items() for part in ("-c", f"{name}={value}")]
        self._process = self._spawn(
            [str(self._programs / "postgres"), "-D", str(self.data), *settings],
            environment={"PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8"},
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
        return len(lines) >= 8 and lines[0] == str(self.pid) and lines[7].strip() == "ready"

    def _end(self) -> None:
        self.stop("immediate")

    def _processes(self) -> list[int]:
        return [self.pid, *_children(self.pid)]


class RabbitServer(_Server):
    """A private RabbitMQ node with an epmd of its own; the only user is `guest`, password `guest`."""

    kind = "rabbitmq"

    def __init__(self, directory: Path | None, *, plugins: Sequence[str], extra_config: str) -> None:
        self._programs = find_rabbitmq()
        super().__init__(directory)
        self.port, self._epmd_port, distribution_port = free_port(), free_port(), free_port()
        self.management_port = free_port() if "rabbitmq_management" in plugins else None
        self.node = f"relay{self.port}@localhost"
        self._epmd: subprocess.Popen[bytes] | None = None
        self._write_files(plugins, extra_config)
        d = self.directory
        self._environment = {
            "PATH": os.environ["PATH"],
            "LC_ALL": "C.UTF-8",
            "HOME": str(d / "home"),
            "RABBITMQ_NODENAME": self.node,
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_NODE_IP_ADDRESS": LOOPBACK,
            "RABBITMQ_DIST_PORT": str(distribution_port),
            "RABBITMQ_MNESIA_BASE": str(d / "data"),
            "RABBITMQ_LOG_BASE": str(d / "log"),
            "RABBITMQ_LOGS": str(d / "log" / "rabbit.log"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(d / "enabled_plugins"),
            "RABBITMQ_CONFIG_FILE": str(d / "rabbitmq.conf"),
            "RABBITMQ_CONF_ENV_FILE": "/dev/null",
            "RABBITMQ_PID_FILE": str(d / "pid"),
            "RABBITMQ_GENERATED_CONFIG_DIR": str(d / "gen"),
            "ERL_EPMD_PORT": str(self._epmd_port),
            "ERL_EPMD_ADDRESS": LOOPBACK,
            # No busy waiting: the machine's few cores belong to what is being tested.
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "+S 2:2 +sbwt none +sbwtdcpu none +sbwtdio none "
            "-kernel inet_dist_use_interface {127,0,0,1}",
            "RABBITMQ_CTL_ERL_ARGS": "+S 1:1",
        }

    @classmethod
    def start(
        cls,
        directory: Path | None = None,
        *,
        plugins: Sequence[str] = ("rabbitmq_management", "rabbitmq_consistent_hash_exchange"),
        extra_config: str = "",
    ) -> RabbitServer:
        """Start a new node in `directory` (None: a private one, removed at `close`); takes 4-7 s.

        `extra_config` is appended to rabbitmq.conf. Raises ServersUnavailable, ServerFailed.
        """
        server = cls(directory, plugins=plugins, extra_config=extra_config)
        with _closed_on_failure(server):
            server._launch()
        return server

    @property
    def management_url(self) -> str:
        assert self.management_port is not None, "the node runs without rabbitmq_management"
        return f"http://guest:guest@{LOOPBACK}:{self.management_port}"

    @property
    def broker_pid(self) -> int:
        """The Erlang VM's process id."""
        return int((self.directory / "pid").read_text())

    def amqp_url(self, vhost: str = "/", user: str = "guest", password: str = "guest") -> str:
        who = f"{quote(user, safe='')}:{quote(password, safe='')}"
        return f"amqp://{who}@{LOOPBACK}:{self.port}/{quote(vhost, safe='')}"

    def ctl(self, *arguments: str) -> str:
        """`rabbitmqctl` with the node's environment, about 1 s a call; returns what it prints."""
        return _run([str(self._programs / "rabbitmqctl"), "--quiet", *arguments], self._environment)

    def eval(self, expressions: str) -> str:
        """Evaluate Erlang in the node (10 ms) and return the term's text: `eval("rabbit_vhost:list_names()")`."""
        command = [_erl_call(), "-n", self.node, "-c", self._cookie, "-e"]
        answer = _run(command, self._environment, stdin=f"{expressions}.\n")
        if not answer.startswith("{ok,"):
            raise ServerFailed(f"RabbitMQ answered {answer.strip()} to {expressions}")
        return answer.strip().removeprefix("{ok,").removesuffix("}").strip()

    def add_vhost(self, name: str, user: str = "guest") -> str:
        """Create a vhost where `user` may do anything; returns its URL."""
        vhost, who = _binary(name), _binary(user)
        everything = ", ".join([_binary(".*")] * 3)
        self.eval(
            f"rabbit_vhost:add({vhost}, {who}), "
            f"rabbit_auth_backend_internal:set_permissions({who}, {vhost}, {everything}, {who})"
        )
        return self.amqp_url(name)

    def delete_vhost(self, name: str) -> None:
        """Delete a vhost with all that it holds; its connections are closed by the node."""
        self.eval(f"rabbit_vhost:delete({_binary(name)}, {_binary('guest')})")

    def memory_alarm(self, on: bool) -> None:
        """Raise or clear the memory alarm: publishing connections are blocked (`connection.blocked`)."""
        self.eval(f"vm_memory_monitor:set_vm_memory_high_watermark({'{absolute, 1}' if on else '0.4'})")

    def stop(self) -> None:
        """SIGTERM: the node closes its connections and ends, in 1 s, or 6 s with the management plugin."""
        self.thaw()
        if self.is_running:
            _signal([self.broker_pid], signal.SIGTERM)
            self._await_exit()
        self._end()

    def kill(self) -> None:
        """SIGKILL the node's whole process group: a crash."""
        self._end()

    def _launch(self) -> None:
        # In the foreground, as a child: the daemon that a node starts by itself would outlive it.
        command = [_epmd(), "-address", LOOPBACK, "-port", str(self._epmd_port)]
        self._epmd = self._spawn(command, environment=self._environment, death=signal.SIGKILL)
        (self.directory / "pid").unlink(missing_ok=True)
        self._process = self._spawn(
            [str(self._programs / "rabbitmq-server")], environment=self._environment, death=signal.SIGKILL
        )
        self._await_ready(self._speaks_amqp)

    def _speaks_amqp(self) -> bool:
        try:
            with socket.create_connection((LOOPBACK, self.port), timeout=2.0) as probe:
                probe.sendall(b"AMQP\x00\x00\x09\x01")
                return probe.recv(1) == b"\x01"
        except OSError:
            return False

    def _end(self) -> None:
        self._dismiss_guards()
        for process in (self._process, self._epmd):
            if process is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait(STOP_TIMEOUT_S)
        self._process = self._epmd = None
        self._frozen = []

    def _processes(self) -> list[int]:
        return [self.pid, *_group(self.pid)]

    def _write_files(self, plugins: Sequence[str], extra_config: str) -> None:
        for name in ("home", "data", "log", "gen"):
            (self.directory / name).mkdir(exist_ok=True)
        cookie = self.directory / "home" / ".erlang.cookie"
        self._cookie = f"RELAY{random.getrandbits(64):016X}"
        cookie.write_text(self._cookie)
        cookie.chmod(0o400)
        (self.directory / "enabled_plugins").write_text(f"[{','.join(plugins)}].\n")
        lines = [
            f"listeners.tcp.1 = {LOOPBACK}:{self.port}",
            "loopback_users = none",
            "disk_free_limit.absolute = 50MB",
        ]
        if self.management_port is not None:
            lines += [f"management.tcp.ip = {LOOPBACK}", f"management.tcp.port = {self.management_port}"]
        (self.directory / "rabbitmq.conf").write_text("\n".join([*lines, extra_config, ""]))


def find_postgres() -> Path:
    """The folder of `postgres`, `initdb` and `psql`: Debian's newest, else the PATH's.

    Raises ServersUnavailable.
    """
    versions = sorted(POSTGRES_HOME.glob("*/bin/postgres"), key=lambda p: float(p.parts[-3]), reverse=True)
    on_path = shutil.which("postgres")
    for program in [*versions, *([Path(on_path).resolve()] if on_path else [])]:
        if all((program.parent / name).exists() for name in ("initdb", "psql")):
            return program.parent
    raise ServersUnavailable(
        "PostgreSQL's programs (postgres, initdb, psql) are not installed",
        hint="install PostgreSQL 14 or newer (Debian: apt-get install postgresql), or run `make setup`",
    )


def find_rabbitmq() -> Path:
    """The folder of `rabbitmq-server` and `rabbitmqctl`. Raises ServersUnavailable.

    Debian's own folder first: the scripts of the same name in /usr/sbin insist on the user `rabbitmq`.
    """
    on_path = shutil.which("rabbitmq-server")
    for folder in [RABBITMQ_HOME, *([Path(on_path).parent] if on_path else [])]:
        if (folder / "rabbitmq-server").exists() and (folder / "rabbitmqctl").exists():
            _erl_call()
            return folder
    raise ServersUnavailable(
        "RabbitMQ (rabbitmq-server) is not installed",
        hint="install RabbitMQ 3.10 or newer (Debian: apt-get install rabbitmq-server), or run `make setup`",
    )


def _erl_call() -> str:
    return _erlang_program("erl_call", "lib/erl_interface-*/bin/erl_call")


def _epmd() -> str:
    return _erlang_program("epmd", "erts-*/bin/epmd")


def _erlang_program(name: str, pattern: str) -> str:
    found = shutil.which(name) or next((str(path) for path in ERLANG_HOME.glob(pattern)), None)
    if found is None:
        raise ServersUnavailable(
            f"Erlang's {name} is not installed",
            hint="install Erlang's interface programs (Debian: apt-get install erlang-base)",
        )
    return found


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


def _run(command: Sequence[str], environment: Mapping[str, str], stdin: str = "") -> str:
    """Run to the end and return what it printed. Raises ServerFailed with what it complained about."""
    try:
        done = subprocess.run(
            command,
            check=False,
            input=stdin,
            env=dict(environment),
            capture_output=True,
            text=True,
            timeout=START_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        raise ServerFailed(f"{Path(command[0]).name} gave no answer in {START_TIMEOUT_S:.0f} s") from None
    if done.returncode != 0:
        raise ServerFailed(f"{Path(command[0]).name} failed: {(done.stderr or done.stdout).strip()}")
    return done.stdout


def _identifier(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _binary(text: str) -> str:
    """An Erlang binary by its bytes, so that no character of a name needs quoting."""
    return f"<<{','.join(map(str, text.encode()))}>>"


def _stat_fields(pid: int) -> list[str]:
    """Fields 3 and on of /proc/PID/stat (state, parent, group ...); empty when the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def _all_pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _children(pid: int) -> list[int]:
    return [other for other in _all_pids() if _stat_fields(other)[1:2] == [str(pid)]]


def _group(pgid: int) -> list[int]:
    return [other for other in _all_pids() if _stat_fields(other)[2:3] == [str(pgid)] and other != pgid]


def _signal(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


@contextlib.contextmanager
def _closed_on_failure(server: _Server) -> Iterator[None]:
    try:
        yield
    except BaseException:
        server.close()
        raise


@atexit.register
def _close_all() -> None:
    for server in list(_running):
        server.close()
