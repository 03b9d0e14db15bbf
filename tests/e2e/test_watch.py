"""`relay status --watch` on a terminal: a pseudo-terminal, a real relay, and a database that goes away meanwhile."""

from __future__ import annotations

import asyncio
import fcntl
import os
import pty
import signal
import struct
import subprocess
import termios

from relay.servers import PostgresServer
from tests.conftest import eventually
from tests.e2e.conftest import COMMAND, Site, command, environment


class Terminal:
    """The command on a terminal of 110 columns; `text` is all that it has written."""

    def __init__(self, site: Site, *arguments: str, **settings: str) -> None:
        self._leader, follower = pty.openpty()
        fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 110, 0, 0))
        os.set_blocking(self._leader, False)
        self.process = subprocess.Popen(
            [*COMMAND, "status", "--watch", *arguments],
            env=environment({"TERM": "xterm-256color", **site.settings, **settings}),
            stdin=follower,
            stdout=follower,
            stderr=follower,
            start_new_session=True,
        )
        os.close(follower)
        self.text = ""

    def shows(self, *words: str) -> bool:
        """Whether what was written since the last `forget` has all the words."""
        try:
            while data := os.read(self._leader, 65536):
                self.text += data.decode(errors="replace")
        except (BlockingIOError, OSError):
            pass  # nothing more by now, or the command has ended
        return all(word in self.text for word in words)

    def forget(self) -> None:
        self.text = ""

    async def end(self) -> int:
        self.process.send_signal(signal.SIGINT)
        await asyncio.to_thread(self.process.wait, 20.0)
        return int(self.process.returncode)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._leader)


async def test_the_live_view(site: Site, postgres_server: PostgresServer) -> None:
    relay = await site.start(name="watched", max_rate="5", retry_delays="1h").ready()
    await site.insert("nowhere", "nope.x", "k")
    await site.insert("behind", "ok.x", "k")
    await site.insert_many(500, 100)
    terminal = Terminal(site, RELAY_LISTEN=f"127.0.0.1:{relay.port}")
    try:
        await eventually(lambda: terminal.shows("waits: rate", "1 key", "watched", "64 of 64 shards", "acked"), 30.0)
        assert "Traceback" not in terminal.text
        await site.database.close()
        await asyncio.to_thread(postgres_server.stop)
        terminal.forget()
        await eventually(lambda: terminal.shows("old by now"), 30.0)
        await asyncio.to_thread(postgres_server.restart)
        terminal.forget()
        await eventually(lambda: terminal.shows("64 of 64 shards") and "old by now" not in terminal.text[-3000:], 40.0)
        assert await terminal.end() == 0
        assert "Traceback" not in terminal.text
    finally:
        terminal.close()
    await site.reconnect()


async def test_without_a_relay_what_is_in_flight_is_unknown(site: Site) -> None:
    terminal = Terminal(site, RELAY_LISTEN="")
    try:
        await eventually(lambda: terminal.shows("unknown", "no relay"), 30.0)
        assert await terminal.end() == 0
    finally:
        terminal.close()


def test_where_it_is_asked_is_checked() -> None:
    settings = {"RELAY_DATABASE_URL": "postgresql://x@127.0.0.1/x"}
    for arguments in (("--metrics-url", "http://x/metrics"), ("--watch", "--metrics-url", "file:///etc/passwd")):
        done = command("status", *arguments, settings=settings)
        assert done.returncode == 2
        assert "--metrics-url" in done.stderr
