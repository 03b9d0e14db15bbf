"""A private RabbitMQ node."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import quote

from relay.servers.ports import free_port
from relay.servers.process import (
    STOP_TIMEOUT_S,
    Server,
    ServerFailed,
    child_environment,
    closed_on_failure,
    group_members,
    run,
    send_signal,
)
from relay.servers.programs import LOOPBACK, find_epmd, find_erl_call, find_rabbitmq

CONNECT_TIMEOUT_S = 15.0


class Epmd(Server):
    """A port mapper for several nodes, and the cookie that they share: what a cluster has in common."""

    kind = "epmd"

    def __init__(self) -> None:
        super().__init__(None)
        self.port = free_port()
        self.cookie = _new_cookie()

    @classmethod
    def start(cls) -> Epmd:
        server = cls()
        with closed_on_failure(server):
            server._launch()
        return server

    def stop(self) -> None:
        self._end()

    def _launch(self) -> None:
        # In the foreground, as a child: the daemon that a node starts by itself would outlive it.
        command = [find_epmd(), "-address", LOOPBACK, "-port", str(self.port)]
        self._process = self._spawn(command, environment=child_environment(), death=signal.SIGKILL)

    def _end(self) -> None:
        self._dismiss_guards()
        if self._process is not None:
            self._process.kill()
            self._process.wait(STOP_TIMEOUT_S)
            self._process = None

    def _processes(self) -> list[int]:
        return [self.pid]


class RabbitServer(Server):
    """A private RabbitMQ node; the only user is `guest`, password `guest`. Its epmd is its own, unless one is given."""

    kind = "rabbitmq"

    def __init__(
        self, directory: Path | None, *, plugins: Sequence[str], extra_config: str, epmd: Epmd | None = None
    ) -> None:
        self._programs = find_rabbitmq()
        super().__init__(directory)
        self.port, distribution_port = free_port(), free_port()
        self._has_own_epmd = epmd is None
        self._epmd_port = free_port() if epmd is None else epmd.port
        self._cookie = _new_cookie() if epmd is None else epmd.cookie
        self.management_port = free_port() if "rabbitmq_management" in plugins else None
        self.node = f"relay{self.port}@localhost"
        self._epmd: subprocess.Popen[bytes] | None = None
        self._write_files(plugins, extra_config)
        d = self.directory
        self._environment = {
            **child_environment(),
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
            # Unless they are named, those in /etc/rabbitmq are read as well.
            "RABBITMQ_CONFIG_FILES": str(d / "conf.d"),
            "RABBITMQ_ADVANCED_CONFIG_FILE": str(d / "advanced.config"),
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
        epmd: Epmd | None = None,
    ) -> RabbitServer:
        """Start a new node in `directory` (None: a private one, removed at `close`); takes 4-7 s.

        `extra_config` is appended to rabbitmq.conf. Raises ServersUnavailable, ServerFailed.
        """
        server = cls(directory, plugins=plugins, extra_config=extra_config, epmd=epmd)
        with closed_on_failure(server):
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

    @property
    def ctl_path(self) -> Path:
        """`rabbitmqctl`; it finds this node by `environment`."""
        return self._programs / "rabbitmqctl"

    @property
    def environment(self) -> dict[str, str]:
        """Of the node and its tools."""
        return dict(self._environment)

    def ctl(self, *arguments: str) -> str:
        """`rabbitmqctl` with the node's environment, about 1 s a call; returns what it prints."""
        return run([str(self.ctl_path), "--quiet", *arguments], self._environment)

    def eval(self, expressions: str) -> str:
        """Evaluate Erlang in the node (10 ms) and return the term's text: `eval("rabbit_vhost:list_names()")`."""
        command = [find_erl_call(), "-n", self.node, "-c", self._cookie, "-e"]
        deadline = time.monotonic() + CONNECT_TIMEOUT_S
        while True:
            try:
                answer = run(command, self._environment, stdin=f"{expressions}.\n")
                break
            except ServerFailed as error:
                # Nothing was evaluated: a node that has a lot to do misses the handshake now and then.
                if "failed to connect" not in str(error) or not self.is_running or time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
        if not answer.startswith("{ok,"):
            raise ServerFailed(f"RabbitMQ answered {answer.strip()} to {expressions}")
        return answer.strip().removeprefix("{ok,").removesuffix("}").strip()

    def add_vhost(self, name: str, user: str = "guest") -> str:
        """Create a vhost where `user` may do anything; returns its URL."""
        self.eval(f"rabbit_vhost:add({_binary(name)}, {_binary(user)})")
        self.permit(user, name)
        return self.amqp_url(name)

    def delete_vhost(self, name: str) -> None:
        """Delete a vhost with all that it holds; its connections are closed by the node."""
        self.eval(f"rabbit_vhost:delete({_binary(name)}, {_binary('guest')})")

    def memory_alarm(self, on: bool) -> None:
        """Raise or clear the memory alarm: publishing connections are blocked (`connection.blocked`)."""
        self.eval(f"vm_memory_monitor:set_vm_memory_high_watermark({'{absolute, 1}' if on else '0.4'})")

    def disk_alarm(self, on: bool) -> None:
        """Raise or clear the disk alarm, which blocks as the other one does."""
        self.eval(f"rabbit_disk_monitor:set_disk_free_limit({_binary('900000GB' if on else '50MB')})")

    @contextlib.contextmanager
    def limited_message_size(self, size_bytes: int) -> Iterator[None]:
        """Refuse larger messages meanwhile, on connections that begin from now on."""
        before = self.eval("rabbit_misc:get_env(rabbit, max_message_size, 0)")
        # RabbitMQ 4 takes the setting over at its start, into a term of its own.
        both = "application:set_env(rabbit, max_message_size, {0}), persistent_term:put(max_message_size, {0})"
        self.eval(both.format(size_bytes))
        try:
            yield
        finally:
            self.eval(both.format(before))

    def add_user(self, name: str, password: str) -> None:
        """Create a user without any right."""
        self.eval(f"rabbit_auth_backend_internal:add_user({_binary(name)}, {_binary(password)}, {_binary('guest')})")

    def change_password(self, name: str, password: str) -> None:
        """Connections that exist stay."""
        who, secret = _binary(name), _binary(password)
        self.eval(f"rabbit_auth_backend_internal:change_password({who}, {secret}, {_binary('guest')})")

    def permit(self, user: str, vhost: str, *, configure: str = ".*", write: str = ".*", read: str = ".*") -> None:
        """What `user` may do in a vhost, as regular expressions. A channel that exists goes by what it asked before."""
        rights = ", ".join(_binary(pattern) for pattern in (configure, write, read))
        who, where = _binary(user), _binary(vhost)
        self.eval(f"rabbit_auth_backend_internal:set_permissions({who}, {where}, {rights}, {_binary('guest')})")

    def join(self, other: RabbitServer) -> None:
        """Become a member of the other's cluster; both have the same epmd. What this node holds is forgotten."""
        self.ctl("stop_app")
        self.ctl("join_cluster", other.node)
        self.ctl("start_app")

    def stop(self) -> None:
        """SIGTERM: the node closes its connections and ends, in 1 s, or 6 s with the management plugin."""
        self.thaw()
        if self.is_running:
            send_signal([self.broker_pid], signal.SIGTERM)
            self._await_exit()
        self._end()

    def write_down(self) -> None:
        """What was declared so far outlives a crash that comes at once; it may still be in the node's own buffers."""
        self.eval("mnesia:sync_log()")

    def kill(self) -> None:
        """SIGKILL the node's whole process group: a crash. See `write_down`."""
        self._end()

    def _launch(self) -> None:
        if self._has_own_epmd:
            # In the foreground, as a child: the daemon that a node starts by itself would outlive it.
            command = [find_epmd(), "-address", LOOPBACK, "-port", str(self._epmd_port)]
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
        return [self.pid, *group_members(self.pid)]

    def _write_files(self, plugins: Sequence[str], extra_config: str) -> None:
        for name in ("home", "data", "log", "gen", "conf.d"):
            (self.directory / name).mkdir(exist_ok=True)
        cookie = self.directory / "home" / ".erlang.cookie"
        cookie.write_text(self._cookie)
        cookie.chmod(0o400)
        (self.directory / "enabled_plugins").write_text(f"[{','.join(plugins)}].\n")
        (self.directory / "advanced.config").write_text("[].\n")
        lines = [
            f"listeners.tcp.1 = {LOOPBACK}:{self.port}",
            "loopback_users = none",
            "disk_free_limit.absolute = 50MB",
        ]
        if self.management_port is not None:
            lines += [f"management.tcp.ip = {LOOPBACK}", f"management.tcp.port = {self.management_port}"]
        (self.directory / "rabbitmq.conf").write_text("\n".join([*lines, extra_config, ""]))


def _new_cookie() -> str:
    return f"RELAY{random.getrandbits(64):016X}"


def _binary(text: str) -> str:
    """An Erlang binary by its bytes, so that no character of a name needs quoting."""
    return f"<<{','.join(map(str, text.encode()))}>>"
