"""TCP ports for throwaway servers, handed out once, also where several processes of this machine ask at a time.

A process claims a block of ports by the name of an abstract socket (unix(7)), which the kernel frees when the process
ends, however it ends. Elsewhere than on Linux there is no such name, and chance has to do.
"""

from __future__ import annotations

import random
import socket
import sys
from typing import Final

from relay.errors import RelayError
from relay.servers.programs import LOOPBACK

PORTS: Final = range(20_000, 32_000)
"""Below Linux's ephemeral range (32768 and up), so that no outgoing connection takes a port first."""

BLOCK: Final = 100

_left: list[int] = []
"""Of the claimed blocks: not yet handed out."""


class PortsExhausted(RelayError):
    """Every port is taken, or claimed by another process."""


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody listens on, and that nobody else gets from here as long as this process lives.

    Raises PortsExhausted.
    """
    while True:
        while _left:
            port = _left.pop()
            if _is_free(port):
                return port
        _left.extend(_claimed())


def _claimed() -> list[int]:
    """A block that no process has, in any order."""
    for first in random.sample(PORTS[::BLOCK], len(PORTS[::BLOCK])):
        if _claim(first):
            return random.sample(range(first, first + BLOCK), BLOCK)
    raise PortsExhausted(f"no free port in {PORTS.start}-{PORTS.stop} on {LOOPBACK}")


def _claim(first: int) -> bool:
    if sys.platform != "linux":
        return True
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(f"\0outbox-relay-ports-{first}")
    except OSError:
        claim.close()
        return False
    # Kept open to the end of the process: nobody has to hold or close it.
    claim.detach()
    return True


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        # As the servers do: a port whose last connections linger in TIME_WAIT is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
    return True
