"""/metrics, /livez and /readyz, served by threads of their own, so that a wedged event loop is still told about.

Owns: the listening socket, a bounded number of connections, and the two states that probes ask for (`Heartbeat`,
`Readiness`). Reads the loop's numbers without locks: each is one object, replaced as a whole.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer, ThreadingMixIn
from typing import Any, Final

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from relay import __version__
from relay.errors import ListenFailed
from relay.logs import get_logger
from relay.metrics import METRICS, Histogram, Kind, Metric, Metrics, boot_time
from relay.values import ListenAddress

CONNECTIONS_MAX = 8
"""A probe, a scrape, and room; the oldest connection is cut for a ninth, so that idle ones cannot lock probes out."""

REQUEST_TIMEOUT_S = 5.0

HEARTBEAT_AGE_S_MAX = 5.0
"""Longer than any honest turn of the loop, shorter than the patience of a liveness probe."""


class Heartbeat:
    """When the event loop turned last, by the boot-time clock. The loop calls `beat` about every second."""

    __slots__ = ("_now", "beaten_at")

    def __init__(self, now: Callable[[], float] = boot_time) -> None:
        self._now = now
        self.beaten_at = now()

    def beat(self) -> None:
        """The loop turns."""
        self.beaten_at = self._now()

    @property
    def age_s(self) -> float:
        """Seconds since the last beat."""
        return self._now() - self.beaten_at

    @property
    def is_alive(self) -> bool:
        """Whether the loop turned within `HEARTBEAT_AGE_S_MAX`."""
        return self.age_s < HEARTBEAT_AGE_S_MAX


class Readiness:
    """Why the relay is not ready: reasons (stable names) with a detail for people. Ready when there is none.

    Written by one thread, read by any: the tuple is replaced as a whole.
    """

    __slots__ = ("_reasons",)

    def __init__(self) -> None:
        self._reasons: tuple[tuple[str, str], ...] = ()

    @property
    def reasons(self) -> tuple[tuple[str, str], ...]:
        """(reason, detail) in the order in which they came up."""
        return self._reasons

    @property
    def is_ready(self) -> bool:
        """Whether nothing stands in the way."""
        return not self._reasons

    def add(self, reason: str, detail: str = "") -> None:
        """A reason begins, or its detail changes."""
        if any(known == reason for known, _ in self._reasons):
            self._reasons = tuple((known, detail if known == reason else text) for known, text in self._reasons)
        else:
            self._reasons = (*self._reasons, (reason, detail))

    def remove(self, reason: str) -> None:
        """A reason is over; one that was not there is ignored."""
        self._reasons = tuple(known for known in self._reasons if known[0] != reason)

    def replace(self, reasons: tuple[tuple[str, str], ...]) -> None:
        """These reasons and no others."""
        self._reasons = reasons


# ---------------------------------------------------------------- the exposition


class TableCollector(Collector):
    """A table of metrics, and the object that holds their numbers, for a registry."""

    def __init__(self, table: Sequence[Metric], numbers: object) -> None:
        self._table = table
        self._numbers = numbers

    def collect(self) -> Iterator[Family]:
        for metric in self._table:
            value = getattr(self._numbers, metric.field)
            if value is not None:
                yield _family(metric, value)


def _family(metric: Metric, value: Any) -> Family:
    # `created` stays unset, so that no `_created` series appears.
    labels = [metric.label] if metric.label else []
    family: CounterMetricFamily | GaugeMetricFamily
    match metric.kind:
        case Kind.HISTOGRAM:
            return _histogram_family(metric, value)
        case Kind.COUNTER:
            family = CounterMetricFamily(metric.name.removesuffix("_total"), metric.help, labels=labels)
        case Kind.GAUGE:
            family = GaugeMetricFamily(metric.name, metric.help, labels=labels)
    if metric.label:
        # A list first: the loop's thread may add a value meanwhile.
        for label, number in list(value.items()):
            family.add_metric([label], float(number))
    else:
        family.add_metric([], float(value))
    return family


def _histogram_family(metric: Metric, histogram: Histogram) -> Family:
    counts, total = list(histogram.counts), histogram.sum
    buckets: list[tuple[str, float]] = []
    cumulated = 0
    for bound, count in zip((*map(repr, histogram.bounds), "+Inf"), counts, strict=True):
        cumulated += count
        buckets.append((bound, cumulated))
    family = HistogramMetricFamily(metric.name, metric.help)
    family.add_metric([], buckets, total)
    return family


# ---------------------------------------------------------------- the server


class HttpServer:
    """Serves the three endpoints once started. Raises ListenFailed (exit code 2) when the address cannot be bound.

    `numbers` are the relay's metrics, or a collector of others. `redact` is applied to the details of /readyz. `port` is
    the real one, also where 0 was asked for. `variable` is the setting that an error names.
    """

    def __init__(
        self,
        address: ListenAddress,
        numbers: Metrics | Collector,
        readiness: Readiness,
        heartbeat: Heartbeat,
        *,
        redact: Callable[[str], str] = str,
        variable: str = "RELAY_LISTEN",
    ) -> None:
        self._address = address
        self._variable = variable
        self._readiness = readiness
        self._heartbeat = heartbeat
        self._redact = redact
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(TableCollector(METRICS, numbers) if isinstance(numbers, Metrics) else numbers)
        ProcessCollector(registry=self._registry)
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Bind, listen and serve from a thread of its own."""
        assert self._server is None, "started twice"
        self._server = _Server(self._address, self._answer, self._variable)
        # serve_forever looks for its end this often; four times a second costs nothing that can be measured.
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.25,), name="relay-http", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The port that is listened on."""
        assert self._server is not None, "not started"
        return int(self._server.server_address[1])

    def close(self) -> None:
        """Stop listening; safe to repeat. Answers under way end with their connections' timeout at the latest."""
        if self._server is None or self._thread is None:
            return
        self._server.shutdown()
        self._thread.join(timeout=REQUEST_TIMEOUT_S)
        self._server.server_close()
        self._server = self._thread = None

    def _answer(self, path: str, accept: str) -> tuple[int, str, bytes]:
        """(status, content type, body) for a GET."""
        match path.partition("?")[0]:
            case "/metrics":
                encode, content_type = _encoder(accept)
                return 200, content_type, encode(self._registry)
            case "/livez":
                is_alive = self._heartbeat.is_alive
                body = {"alive": is_alive, "heartbeat_age_seconds": round(self._heartbeat.age_s, 3)}
                return (200 if is_alive else 503), "application/json", _json(body)
            case "/readyz":
                reasons = self._readiness.reasons
                shown = [{"reason": reason, "detail": self._redact(detail)} for reason, detail in reasons]
                status = 503 if reasons else 200
                return (status, "application/json", _json({"ready": not reasons, "reasons": shown}))
            case _:
                error = {"error": "not found; there are /metrics, /livez and /readyz"}
                return 404, "application/json", _json(error)


def _encoder(accept: str) -> tuple[Callable[[Collector], bytes], str]:
    """The format that a scraper asks for; the ordinary one where its wish cannot be read."""
    try:
        return choose_encoder(accept)
    except (TypeError, ValueError):
        # A version with letters is compared with numbers there.
        return choose_encoder("")


def _json(value: object) -> bytes:
    return json.dumps(value).encode() + b"\n"


class _Server(ThreadingMixIn, TCPServer):
    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True
    request_queue_size = 64

    def __init__(
        self, address: ListenAddress, answer: Callable[[str, str], tuple[int, str, bytes]], variable: str
    ) -> None:
        self.answer = answer
        self._open: deque[socket.socket] = deque()
        self._lock: Final = threading.Lock()
        try:
            found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
            self.address_family, _, _, _, sockaddr = found[0]
            super().__init__((str(sockaddr[0]), int(sockaddr[1])), _Request)
        except OSError as error:
            raise ListenFailed(
                f"cannot listen on {address}: {error.strerror or error}",
                hint=f"another process has the port, or {variable} names an address that is not this machine's",
            ) from error

    def server_bind(self) -> None:
        if self.address_family == socket.AF_INET6 and self.server_address[0] == "::":
            # `[::]` means every address, IPv4 included, whatever the system's default for it is.
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._open.append(request)
            oldest = self._open.popleft() if len(self._open) > CONNECTIONS_MAX else None
        if oldest is not None:
            _cut(oldest)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            if request in self._open:
                self._open.remove(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no event; anything else is a fault of ours."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            get_logger().warning("http_failed", error=error)


def _cut(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        # It had ended by itself between the two looks.
        return


class _Request(BaseHTTPRequestHandler):
    server: _Server
    timeout = REQUEST_TIMEOUT_S
    server_version = f"relay/{__version__}"
    sys_version = ""

    def do_GET(self) -> None:
        status, content_type, body = self.server.answer(self.path, self.headers.get("Accept", ""))
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        """Probes and scrapes are no events."""
