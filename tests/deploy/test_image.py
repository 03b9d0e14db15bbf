"""The Dockerfile: linted, read, and in the long form executed step by step; then the relay runs in what came of it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest

from relay.servers import free_port
from tests.e2e.conftest import Site, site  # noqa: F401 - a fixture

from .dockerfile import build, ignored, read

ROOT = Path(__file__).resolve().parent.parent.parent
STAGES = read(ROOT / "Dockerfile")
PIP = ("PIP_CERT", "PIP_FIND_LINKS", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "HTTPS_PROXY", "https_proxy")
"""How this machine reaches its packages, if not in the usual way."""


def test_it_passes_the_linter() -> None:
    program = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([program, ROOT / "Dockerfile"], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_it_is_what_a_sidecar_should_be() -> None:
    build_stage, image = STAGES
    assert build_stage.name == "build"
    assert not image.of("RUN"), "nothing is installed into the image, so no tool for that is in it"
    user = image.of("USER")[-1]
    assert user.partition(":")[0].isdigit(), "by number: `runAsNonRoot` cannot judge a name"
    assert int(user.partition(":")[0]) > 0
    assert image.document("ENTRYPOINT") == ["relay"]
    assert image.document("CMD") == ["run"]
    assert "/livez" in image.of("HEALTHCHECK")[0]
    assert "/readyz" not in image.of("HEALTHCHECK")[0], "an outage of the broker is no reason for a restart"
    assert set(ignored(ROOT)) == {source for text in build_stage.of("COPY") for source in text.split()[:-1]}


class _Alive(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/livez" else 404)
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        """Not on the terminal."""


def test_the_health_check_asks_where_the_relay_listens() -> None:
    command = [sys.executable, *STAGES[-1].document("HEALTHCHECK")[1:]]

    def health(**environment: str) -> int:
        # A proxy is for the outside; asking it for this container's own port would fail.
        settings = {"PATH": os.environ["PATH"], "http_proxy": "http://127.0.0.1:1", **environment}
        return subprocess.run(command, env=settings, capture_output=True, check=False, timeout=30).returncode

    with HTTPServer(("127.0.0.1", 0), _Alive) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        port = server.server_port
        try:
            for listen in (f"0.0.0.0:{port}", f":{port}", f"127.0.0.1:{port}", f"localhost:{port}"):
                assert health(RELAY_LISTEN=listen) == 0, listen
        finally:
            server.shutdown()
            thread.join()
    assert health(RELAY_LISTEN="") == 0, "nothing to ask"
    assert health(RELAY_LISTEN=f"0.0.0.0:{free_port()}") != 0


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0, reason="chroot and mounts need root")
async def test_its_steps_are_executed_and_the_relay_runs_there(site: Site, tmp_path: Path) -> None:  # noqa: F811
    """Every step, on overlays of this machine's root in the place of the base; then as the image's user, on a read-only
    root, without a single capability: migrate, run, health check, a row, SIGTERM."""
    environment = {name: os.environ[name] for name in PIP if name in os.environ}
    root = build(STAGES, ROOT, tmp_path / "image", environment, {})
    installed = sorted(path.name for path in (root.upper / "opt/relay/bin").iterdir())
    assert "relay" in installed
    assert not [name for name in installed if name.startswith(("pip", "easy_install", "gcc"))]
    assert root.run("relay", "--version").endswith(" (compiled)\n")
    size = sum(path.stat().st_size for path in root.upper.rglob("*") if path.is_file() and not path.is_symlink())
    assert size < 64 * 1024 * 1024, "what the image adds to its base"
    port = free_port()
    settings = {**site.settings, "RELAY_LISTEN": f"127.0.0.1:{port}"}
    root.environment |= settings
    entrypoint = ["setpriv", "--no-new-privs", "--", *STAGES[-1].document("ENTRYPOINT"), "run"]
    process = root.start(*entrypoint, output=site.directory / "image.log")
    try:
        await site.insert("m")
        await site.all_sent(30)
        status = await asyncio.to_thread(root.proc, process, "status")
        mounts = await asyncio.to_thread(root.proc, process, "mounts")
        assert "Uid:\t65532\t65532" in status
        assert "CapEff:\t0000000000000000" in status
        assert [line for line in mounts.splitlines() if line.split()[1] == "/" and line.split()[3].startswith("ro,")]
        await asyncio.to_thread(root.run, *STAGES[-1].document("HEALTHCHECK"))
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, 20) == 0
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
