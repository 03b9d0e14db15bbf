"""Throwaway private PostgreSQL and RabbitMQ servers for `relay demo`, the tests and the benchmark.

Owns: the processes that it starts, their ports (20,000-32,000 on 127.0.0.1) and their private directories. It
finds installed programs and installs nothing; no other server on the machine is looked at, used or stopped.

States of a server: running, frozen (SIGSTOP), stopped; `restart` leads from each of them to running, with the
data kept. `close` ends it for good and removes the directory if the server made it. Every server is closed on
leaving its `with` block and at exit; a guard process ends it when this process is killed with SIGKILL.

All calls are blocking; from a running event loop use `asyncio.to_thread`.
"""

from relay.servers.ports import free_port
from relay.servers.postgres import PostgresServer
from relay.servers.process import ServerFailed
from relay.servers.programs import LOOPBACK, ServersUnavailable, find_postgres, find_rabbitmq
from relay.servers.rabbit import Epmd, RabbitServer

__all__ = [
    "LOOPBACK",
    "Epmd",
    "PostgresServer",
    "RabbitServer",
    "ServerFailed",
    "ServersUnavailable",
    "find_postgres",
    "find_rabbitmq",
    "free_port",
]
