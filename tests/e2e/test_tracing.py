"""Spans end to end: to a collector over HTTP, off without a trace of them, and never in the way."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from relay.servers import free_port
from tests.conftest import eventually

from .conftest import Daemon, Site
from .ledger import drain

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"


class Collector(ThreadingHTTPServer):
    """Takes OTLP over HTTP at /v1/traces."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Export)
        self.requests: list[ExportTraceServiceRequest] = []

    def spans(self) -> list[Any]:
        return [
            span
            for each in self.requests
            for resource in each.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    def resource(self) -> dict[str, str]:
        attributes = self.requests[0].resource_spans[0].resource.attributes
        return {attribute.key: attribute.value.string_value for attribute in attributes}


class _Export(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        assert self.path == "/v1/traces"
        self.server.requests.append(ExportTraceServiceRequest.FromString(body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        """Not on the terminal."""


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def traced(site: Site, port: int) -> Daemon:
    site.settings |= {
        "OTEL_TRACES_EXPORTER": "otlp",
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}",
        "OTEL_SERVICE_NAME": "orders-relay",
        "OTEL_BSP_SCHEDULE_DELAY": "100",
        "OTEL_EXPORTER_OTLP_TIMEOUT": "1",
    }
    return site.start(retry_delays="100ms", name="relay-1")


def attributes(span: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}


async def test_a_span_for_each_publish_reaches_the_collector(site: Site, collector: Collector) -> None:
    daemon = await traced(site, collector.server_port).ready()
    await site.insert("m1", traceparent=TRACEPARENT, tracestate="congo=t61")
    await site.insert("m2", "nope.x")
    await site.until("EXISTS (SELECT FROM outbox WHERE aside = 'parked')")
    await eventually(lambda: len(collector.spans()) >= 3)
    assert await daemon.stop() == 0
    (message,) = await drain(site.amqp_url, 1)
    assert message.headers["traceparent"] == TRACEPARENT, "the message's stays the writer's"
    by_id = {attributes(span)["messaging.message.id"]: span for span in collector.spans()}
    delivered, lost = by_id["m1"], by_id["m2"]
    assert (delivered.trace_id.hex(), delivered.parent_span_id.hex()) == (TRACE, PARENT)
    assert delivered.trace_state == "congo=t61"
    assert delivered.name == "publish events"
    assert delivered.end_time_unix_nano > delivered.start_time_unix_nano
    assert attributes(delivered)["outbox_relay.outcome"] == "acked"
    assert 0 <= attributes(delivered)["outbox_relay.outbox_duration_s"] < 30
    outcomes = [attributes(span)["outbox_relay.outcome"] for span in collector.spans()]
    assert outcomes.count("returned") == 2, "each try has its span"
    assert lost.status.message == "no route"
    resource = collector.resource()
    assert (resource["service.name"], resource["service.instance.id"]) == ("orders-relay", "relay-1")


async def test_a_collector_that_is_away_is_in_nobodys_way(site: Site) -> None:
    """Everything is delivered, the log has one line about it, and the stop does not wait for it."""
    daemon = await traced(site, free_port()).ready()
    ids = await site.insert_many(3000, 10)
    await site.all_sent()
    await eventually(lambda: "spans_lost" in daemon.text(), 30)
    assert await daemon.stop(12) == 0
    assert len(await drain(site.amqp_url, len(ids))) == len(ids)
    assert [event["event"] for event in daemon.events()].count("spans_lost") == 1


async def test_off_it_is_not_even_imported(site: Site) -> None:
    """An endpoint that a cluster sets for everybody is no wish for spans."""
    site.settings["OTEL_EXPORTER_OTLP_ENDPOINT"] = "http://127.0.0.1:1"
    report = 'import atexit, sys; atexit.register(lambda: print("LOADED", *sorted(sys.modules), file=sys.stderr))'
    daemon = await site.start(prelude=report).ready()
    await site.insert("m1", traceparent=TRACEPARENT, tracestate="congo=t61,,é")
    await site.all_sent()
    assert await daemon.stop() == 0
    (message,) = await drain(site.amqp_url, 1)
    assert (message.headers["traceparent"], message.headers["tracestate"]) == (TRACEPARENT, "congo=t61,,é")
    loaded = daemon.text().rpartition("LOADED")[2].split()
    assert "relay.publisher" in loaded
    assert not [name for name in loaded if name.split(".")[0] in ("opentelemetry", "requests", "google")]
