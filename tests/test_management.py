"""The management API's client, against a stub that answers as RabbitMQ does, over HTTP and TLS."""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from relay.config import load
from relay.management import ApiFailed, ApiRefused, ManagementApi
from relay.preflight import management
from relay.preflight.finding import Level
from relay.topology.broker import look
from relay.topology.description import Topology
from relay.topology.expand import expand
from relay.urls import management_url
from tests.authority import Authority


class _Stub(BaseHTTPRequestHandler):
    answers: dict[str, tuple[int, object]]
    asked: list[tuple[str, str, str | None, Any]]

    def _answer(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        body = json.loads(self.rfile.read(length)) if length else None
        self.asked.append((self.command, self.path, self.headers.get("Authorization"), body))
        status, document = self.answers.get(self.path, (404, {"error": "Object Not Found"}))
        data = b"" if document is None else json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_PUT = do_POST = _answer

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""


class _Broker:
    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        stub = type("Stub", (_Stub,), {"answers": {}, "asked": []})
        self.answers: dict[str, tuple[int, object]] = stub.answers  # type: ignore[attr-defined]
        self.asked: list[tuple[str, str, str | None, Any]] = stub.asked  # type: ignore[attr-defined]
        self._server = HTTPServer(("127.0.0.1", 0), stub)
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        self.port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def broker() -> Iterator[_Broker]:
    broker = _Broker()
    yield broker
    broker.close()


def test_names_and_credentials_of_any_kind(broker: _Broker) -> None:
    """A vhost or queue with a slash is one part of the path; a password with an at-sign is one password."""
    broker.answers["/base/api/queues/a%2Fb/q%20%C3%BC"] = (200, {"name": "q ü"})
    api = ManagementApi(f"http://us%40er:p%40ss%2Fword@127.0.0.1:{broker.port}/base/")
    assert api.get("queues", "a/b", "q ü") == {"name": "q ü"}
    assert broker.asked[0][2] == "Basic dXNAZXI6cEBzcy93b3Jk"  # us@er:p@ss/word


def test_what_is_not_there_is_none(broker: _Broker) -> None:
    assert ManagementApi(f"http://127.0.0.1:{broker.port}").get("queues", "/", "q") is None


def test_a_server_of_another_kind_is_no_broker_without_the_vhost(broker: _Broker) -> None:
    """Its 404 was taken for an answer: `plan` said that there is no such vhost, `check` that all is well."""
    api = ManagementApi(f"http://me:hunter2secret@127.0.0.1:{broker.port}/shop")
    for document in ({"version": "1"}, ["overview"], None):
        broker.answers["/shop/api/overview"] = (404 if document is None else 200, document)
        with pytest.raises(ApiFailed, match=rf"^http://127.0.0.1:{broker.port}/shop is not RabbitMQ's management API$"):
            look(api, expand(Topology("/", 0, (), ())))
    config, _ = load({"RELAY_AMQP_URL": "amqp://h", "RELAY_MANAGEMENT_URL": f"http://127.0.0.1:{broker.port}"})
    found = asyncio.run(management.check(config, None))
    assert "is not RabbitMQ's management API" in found[0].text
    assert {finding.level for finding in found[1:]} == {Level.NOT_CHECKED}


@pytest.mark.parametrize("end", ["", "/", "/api", "/api/"])
def test_the_api_in_its_address_is_there_once(broker: _Broker, end: str) -> None:
    broker.answers["/api/overview"] = (200, {"rabbitmq_version": "3.10.8"})
    assert ManagementApi(f"http://127.0.0.1:{broker.port}{end}").overview()["rabbitmq_version"] == "3.10.8"


def test_a_refusal_says_why(broker: _Broker) -> None:
    broker.answers["/api/policies/%2F/p"] = (400, {"error": "bad_request", "reason": "Validation failed\n\n-1 is not"})
    api = ManagementApi(f"http://me:hunter2secret@127.0.0.1:{broker.port}")
    with pytest.raises(ApiRefused, match=r"400 to PUT /api/policies/.*: Validation failed -1 is not") as caught:
        api.put("policies", "/", "p", document={"pattern": "x"})
    assert caught.value.status == 400
    assert "hunter2secret" not in str(caught.value)
    assert broker.asked[0][3] == {"pattern": "x"}


def test_nobody_there_is_one_error() -> None:
    gone = _Broker()
    gone.close()
    with pytest.raises(ApiFailed, match="cannot be asked"):
        ManagementApi(f"http://127.0.0.1:{gone.port}").get("overview")


def test_what_is_no_json_is_one_error(broker: _Broker) -> None:
    broker.answers["/api/overview"] = (204, None)
    assert ManagementApi(f"http://127.0.0.1:{broker.port}").get("overview") is None
    tls = ManagementApi(f"https://127.0.0.1:{broker.port}")
    with pytest.raises(ApiFailed, match="cannot be asked"):
        tls.get("overview")


def test_tls_with_an_authority_of_ones_own(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    broker = _Broker(authority.server_context("127.0.0.1"))
    broker.answers["/api/overview"] = (200, {"rabbitmq_version": "3.10.8"})
    try:
        address = f"https://guest:guest@127.0.0.1:{broker.port}"
        assert ManagementApi(f"{address}?cafile={authority.file}").get("overview")["rabbitmq_version"] == "3.10.8"
        assert ManagementApi(f"{address}?no_verify_ssl=1").get("overview")
        with pytest.raises(ApiFailed, match="certificate"):
            ManagementApi(address).get("overview")
    finally:
        broker.close()


def test_a_useless_certificate_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("nothing")
    with pytest.raises(ApiFailed, match="RELAY_MANAGEMENT_URL's certificates"):
        ManagementApi(f"https://127.0.0.1:1?cafile={tmp_path / 'ca.pem'}")


@pytest.mark.parametrize("url", ["http://h:1/?cafile=/etc/hosts", "https://h:1/?heartbeat=5", "ftp://h"])
def test_urls_that_mean_nothing(url: str) -> None:
    with pytest.raises(ValueError):
        management_url(url)
