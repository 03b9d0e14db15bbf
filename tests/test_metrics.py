"""The metrics' names and numbers, and the three endpoints over a real socket."""

from __future__ import annotations

import http.client
import json
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from relay import __version__
from relay.errors import ListenFailed
from relay.http import CONNECTIONS_MAX, HEARTBEAT_AGE_S_MAX, Heartbeat, HttpServer, Readiness
from relay.metrics import ATTEMPTS_BUCKETS, METRICS, SECONDS_BUCKETS, Backpressure, Histogram, Kind, Metrics
from relay.values import ListenAddress, listen_address
from tests.conftest import has_ipv6

LOOPBACK = ListenAddress("127.0.0.1", 0)


class Clock:
    def __init__(self) -> None:
        self.time = 100.0

    def __call__(self) -> float:
        return self.time


class Site:
    """A started server and what it shows."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.metrics = Metrics(self.clock)
        self.readiness = Readiness()
        self.heartbeat = Heartbeat(self.clock)
        self.server = HttpServer(
            LOOPBACK,
            self.metrics,
            self.readiness,
            self.heartbeat,
            redact=lambda text: text.replace("sesame", "***"),
        )
        self.server.start()

    def get(self, path: str, method: str = "GET", accept: str = "") -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=10)
        try:
            connection.request(method, path, headers={"Accept": accept})
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()

    def samples(self) -> dict[str, float]:
        """Exposed numbers by name, with `{value}` of a label."""
        found = {}
        for family in text_string_to_metric_families(self.get("/metrics")[1]):
            for sample in family.samples:
                labels = ",".join(sample.labels.values())
                found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
        return found


@pytest.fixture
def site() -> Iterator[Site]:
    made = Site()
    yield made
    made.server.close()


@pytest.mark.parametrize("wish", ["1.0.0", "1", "abc", "1.0.x", "", "0.0.1", "99.9"])
def test_a_scraper_whose_wish_cannot_be_read_gets_the_numbers_all_the_same(site: Site, wish: str) -> None:
    """A version with letters was a TypeError, and no answer."""
    for kind in ("application/openmetrics-text", "text/plain"):
        status, text = site.get("/metrics", accept=f"{kind}; version={wish}")
        assert status == 200 and "relay_published_total" in text


# ---------------------------------------------------------------- numbers


@given(st.lists(st.floats(0, 1000), max_size=50))
def test_a_histogram_counts_like_its_definition(values: list[float]) -> None:
    one_by_one, at_once = Histogram(SECONDS_BUCKETS), Histogram(SECONDS_BUCKETS)
    for value in values:
        one_by_one.observe(value)
    at_once.observe_many(values)
    assert one_by_one.counts == at_once.counts
    assert at_once.sum == pytest.approx(sum(values))
    cumulated = 0
    for bound, count in zip(SECONDS_BUCKETS, at_once.counts, strict=False):
        cumulated += count
        assert cumulated == sum(value <= bound for value in values)
    assert sum(at_once.counts) == len(values)


def test_a_time_that_is_none_leaves_the_sum_alone() -> None:
    """One row whose created_at was -infinity: the sum was infinite for the rest of the process's life, each rate NaN."""
    histogram = Histogram(SECONDS_BUCKETS)
    histogram.observe_many([float("inf"), 0.5])
    histogram.observe_many([float("-inf"), 0.25, -1.0])
    histogram.observe_many([float("inf")])
    assert (sum(histogram.counts), histogram.sum) == (3, 0.75)


def test_the_contracts_buckets() -> None:
    assert SECONDS_BUCKETS[0] == 0.0005
    assert SECONDS_BUCKETS[-1] >= 120
    assert ATTEMPTS_BUCKETS == (1, 2, 3, 5, 8, 13, 21)


def test_backpressure_adds_up_while_it_lasts() -> None:
    pressure = Backpressure()
    pressure.set("bytes", True, 10.0)
    pressure.set("bytes", True, 12.0)
    assert pressure.seconds("bytes", 13.0) == 3.0
    assert pressure.active == ("bytes",)
    pressure.set("bytes", False, 14.0)
    pressure.set("bytes", False, 20.0)
    assert pressure.seconds("bytes", 30.0) == 4.0
    pressure.set("bytes", True, 40.0)
    assert pressure.seconds("bytes", 41.0) == 5.0
    assert pressure.seconds("rate", 41.0) == 0.0


def test_every_metric_of_the_table_has_its_attribute() -> None:
    metrics = Metrics()
    for metric in METRICS:
        value = getattr(metrics, metric.field)
        if metric.kind is Kind.HISTOGRAM:
            assert isinstance(value, Histogram)
        elif metric.label:
            assert tuple(value) == metric.values


# ---------------------------------------------------------------- exposition


def test_the_contracts_names_are_exposed(site: Site) -> None:
    """A series that exists from the start at 0 is one that a rate() misses nothing of."""
    counters = {
        *("rows_sent_total", "rows_read_total", "lease_lost_total"),
        *(f"published_total{{{outcome}}}" for outcome in ("acked", "nacked", "returned", "lost")),
        *(f"reconnects_total{{{peer}}}" for peer in ("database", "broker")),
        *(
            f"backpressure_{name}{{{reason}}}"
            for name in ("active", "seconds_total")
            for reason in ("in_flight", "bytes", "blocked", "rate", "broker_down", "database_down")
        ),
        *(f"rows_parked_total{{{reason}}}" for reason in ("unroutable", "refused", "invalid", "unknown")),
        *(f"rows_deferred_total{{{reason}}}" for reason in ("unroutable", "refused", "unknown")),
        *(
            "in_flight_messages",
            "in_flight_bytes",
            "shards_owned",
            "connected{database}",
            "connected{broker}",
        ),
        *(
            f"{name}_{part}"
            for name in (
                "confirm_seconds",
                "delivery_seconds",
                "claim_seconds",
                "settle_seconds",
                "publish_attempts",
            )
            for part in ("count", "sum", "bucket{+Inf}")
        ),
    }
    samples = site.samples()
    assert {f"relay_{name}" for name in counters} <= samples.keys()
    assert samples["relay_build_info{" + __version__ + "}"] == 1
    assert not any(name.endswith("_created") for name in samples)
    assert "process_resident_memory_bytes" in samples


def test_a_gauge_that_is_not_known_is_absent(site: Site) -> None:
    names = {
        *("backlog_rows", "backlog_estimated", "oldest_pending_age_seconds", "deferred_rows", "parked_rows"),
        *("held_keys", "newest_seq", "late_commit_writers", "paused", "last_confirm_timestamp_seconds"),
        "backlog_observed_timestamp_seconds",
    }
    assert not {f"relay_{name}" for name in names} & site.samples().keys()
    for name in names:
        setattr(site.metrics, name, 7)
    samples = site.samples()
    assert {samples[f"relay_{name}"] for name in names} == {7}
    site.metrics.backlog_rows = None
    assert "relay_backlog_rows" not in site.samples()


def test_what_only_the_database_knows_goes_with_it(site: Site) -> None:
    """A gauge that stays when its server is gone reads as if all were well."""
    names = (
        *(
            "backlog_rows",
            "backlog_estimated",
            "oldest_pending_age_seconds",
            "deferred_rows",
            "parked_rows",
            "held_keys",
        ),
        *("newest_seq", "late_commit_writers", "oldest_writer_age_seconds", "paused"),
    )
    for name in (*names, "backlog_observed_timestamp_seconds"):
        setattr(site.metrics, name, 7)
    assert {f"relay_{name}" for name in names} <= site.samples().keys()
    site.metrics.forget_database()
    assert not {f"relay_{name}" for name in names} & site.samples().keys()
    assert "relay_backlog_observed_timestamp_seconds" in site.samples()


def test_numbers_arrive(site: Site) -> None:
    metrics = site.metrics
    metrics.published["acked"] += 3
    metrics.rows_sent += 2
    metrics.rows_parked["too_large"] += 1
    metrics.connected["broker"] = True
    metrics.confirm_seconds.observe(0.003)
    metrics.publish_attempts.observe_many([1, 1, 4])
    metrics.backpressure.set("blocked", True, site.clock.time)
    site.clock.time += 1.5
    samples = site.samples()
    assert samples["relay_published_total{acked}"] == 3
    assert samples["relay_rows_sent_total"] == 2
    assert samples["relay_rows_parked_total{too_large}"] == 1
    assert samples["relay_connected{broker}"] == 1
    assert samples["relay_connected{database}"] == 0
    assert samples["relay_confirm_seconds_bucket{0.0025}"] == 0
    assert samples["relay_confirm_seconds_bucket{0.005}"] == 1
    assert samples["relay_publish_attempts_bucket{1.0}"] == 2
    assert samples["relay_publish_attempts_bucket{5.0}"] == 3
    assert samples["relay_publish_attempts_sum"] == 6
    assert samples["relay_backpressure_active{blocked}"] == 1
    assert samples["relay_backpressure_seconds_total{blocked}"] == 1.5


def test_openmetrics_is_spoken_to_who_asks(site: Site) -> None:
    text = site.get("/metrics", accept="application/openmetrics-text; version=1.0.0")[1]
    assert text.endswith("# EOF\n")
    assert "_created" not in text


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool")
def test_promtool_has_no_complaint(site: Site) -> None:
    for name in ("backlog_rows", "held_keys", "paused", "last_confirm_timestamp_seconds"):
        setattr(site.metrics, name, 1)
    text = "".join(
        line
        for line in site.get("/metrics")[1].splitlines(keepends=True)
        # The process collector's names are prometheus-client's.
        if "process_" not in line
    )
    checked = subprocess.run(
        ["promtool", "check", "metrics"], input=text, capture_output=True, text=True, check=False, timeout=30
    )
    assert (checked.returncode, checked.stderr) == (0, "")


# ---------------------------------------------------------------- probes


def test_livez_says_whether_the_loop_turns(site: Site) -> None:
    assert site.get("/livez")[0] == 200
    site.clock.time += HEARTBEAT_AGE_S_MAX + 0.1
    status, body = site.get("/livez")
    assert (status, json.loads(body)["alive"]) == (503, False)
    site.heartbeat.beat()
    assert site.get("/livez")[0] == 200


def test_readyz_says_why_not(site: Site) -> None:
    assert site.get("/readyz") == (200, '{"ready": true, "reasons": []}\n')
    site.readiness.add("broker_disconnected", "connecting")
    site.readiness.add("paused")
    site.readiness.add("broker_disconnected", "refused for sesame")
    status, body = site.get("/readyz?verbose")
    assert status == 503
    assert json.loads(body) == {
        "ready": False,
        "reasons": [
            {"reason": "broker_disconnected", "detail": "refused for ***"},
            {"reason": "paused", "detail": ""},
        ],
    }
    site.readiness.remove("broker_disconnected")
    site.readiness.remove("never_there")
    assert site.readiness.reasons == (("paused", ""),)
    site.readiness.replace(())
    assert site.readiness.is_ready
    assert site.get("/readyz")[0] == 200


def test_other_paths_and_methods(site: Site) -> None:
    assert site.get("/")[0] == 404
    assert site.get("/metricsx")[0] == 404
    assert site.get("/livez", method="HEAD") == (200, "")
    assert site.get("/livez", method="POST")[0] == 501


def test_idle_connections_do_not_lock_probes_out(site: Site) -> None:
    """Without a bound, or with one that refuses newcomers, a few silent clients would have the relay killed."""
    idle = [socket.create_connection(("127.0.0.1", site.server.port)) for _ in range(3 * CONNECTIONS_MAX)]
    try:
        assert site.get("/livez")[0] == 200
        deadline = time.monotonic() + 10
        while _threads_serving() > CONNECTIONS_MAX + 1:
            assert time.monotonic() < deadline, "connections are not bounded"
            idle[0].settimeout(10)
            idle[0].recv(1)
    finally:
        for connection in idle:
            connection.close()


def _threads_serving() -> int:
    return sum("process_request_thread" in thread.name for thread in threading.enumerate())


def test_a_taken_port_is_a_configurations_fault(site: Site) -> None:
    taken = ListenAddress("127.0.0.1", site.server.port)
    server = HttpServer(taken, site.metrics, site.readiness, site.heartbeat)
    with pytest.raises(ListenFailed, match=f"127.0.0.1:{site.server.port}") as caught:
        server.start()
    assert caught.value.exit_code == 2
    assert caught.value.hint
    server.close()


def test_an_address_that_is_not_ours() -> None:
    server = HttpServer(ListenAddress("192.0.2.1", 0), Metrics(), Readiness(), Heartbeat())
    with pytest.raises(ListenFailed):
        server.start()


@pytest.mark.parametrize(("text", "family"), [("[::]:0", socket.AF_INET6), (":0", socket.AF_INET)])
def test_every_address_includes_ipv4(text: str, family: int) -> None:
    if family == socket.AF_INET6 and not has_ipv6():
        pytest.skip("no IPv6 here")
    address = listen_address(text)
    assert address is not None
    server = HttpServer(address, Metrics(), Readiness(), Heartbeat())
    server.start()
    try:
        socket.create_connection(("127.0.0.1", server.port), timeout=5).close()
    finally:
        server.close()
        server.close()
