"""Spans: whose child they are, what they say, who samples; and what the variables mean."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from relay import tracing
from relay.logs import Log
from relay.message import Row
from relay.route import Router
from relay.spans import OtelSpans, _Exporter

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
DATABASE_NOW = 1_764_440_000.0


class Traced:
    def __init__(self, exchange: str = "events") -> None:
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.spans = OtelSpans(provider, Router(exchange, "{event_type}"), lambda: DATABASE_NOW)

    def of(self, *rows: Row, outcome: str = "acked", error: str = "") -> Sequence[ReadableSpan]:
        """The spans of rows that were published at second 100 and have their outcome at second 100.25."""
        self.spans.end(outcome, rows, 100.25, error)
        return self.exporter.get_finished_spans()


def row(**rare: Any) -> Row:
    made = Row(
        0, 1, "01K0", "order.created", payload=b"12345", created_at=DATABASE_NOW - 2.25, rare=rare or None, attempts=2
    )
    made.published_at = 100.0
    return made


def test_a_span_is_the_writers_child_and_says_how_long_the_row_waited() -> None:
    (span,) = Traced().of(row(traceparent=f"00-{TRACE}-{PARENT}-01", tracestate="congo=t61", correlation_id="c"))
    assert f"{span.context.trace_id:032x}" == TRACE
    assert span.parent is not None
    assert f"{span.parent.span_id:016x}" == PARENT
    assert span.parent.is_remote
    assert span.context.trace_state["congo"] == "t61"
    assert (span.name, span.kind) == ("publish events", SpanKind.PRODUCER)
    assert span.start_time is not None
    assert span.end_time is not None
    assert span.end_time - span.start_time == 250_000_000
    assert dict(span.attributes or {}) == {
        "messaging.system": "rabbitmq",
        "messaging.operation.name": "publish",
        "messaging.operation.type": "send",
        "messaging.destination.name": "events",
        "messaging.rabbitmq.destination.routing_key": "order.created",
        "messaging.message.id": "01K0",
        "messaging.message.body.size": 5,
        "messaging.message.conversation_id": "c",
        "outbox_relay.event_type": "order.created",
        "outbox_relay.outcome": "acked",
        "outbox_relay.attempt": 3,
        "outbox_relay.outbox_duration_s": 2.0,
    }
    assert span.status.status_code is StatusCode.UNSET


def test_a_scheduled_row_waits_from_when_it_might_go() -> None:
    (span,) = Traced().of(row(available_at=DATABASE_NOW - 1.0))
    assert (span.attributes or {})["outbox_relay.outbox_duration_s"] == 0.75


@pytest.mark.parametrize("traceparent", [None, "", "00-zz-yy-01", "nonsense", f"00-{'0' * 32}-{PARENT}-01", "é" * 500])
def test_without_a_usable_context_it_begins_a_trace(traceparent: str | None) -> None:
    (span,) = Traced().of(row() if traceparent is None else row(traceparent=traceparent))
    assert span.parent is None


def test_what_the_writer_does_not_sample_is_not_exported() -> None:
    assert Traced().of(row(traceparent=f"00-{TRACE}-{PARENT}-00")) == ()


def test_a_failure_is_the_spans_status() -> None:
    (span,) = Traced().of(row(), outcome="returned", error="312 NO_ROUTE")
    assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, "312 NO_ROUTE")


def test_a_row_without_a_route_harms_nobody() -> None:
    spans = Traced("{producer}").of(row(), row(producer="orders"), outcome="lost", error="cut")
    assert [span.name for span in spans] == ["publish", "publish orders"]


# ---------------------------------------------------------------- the variables


@pytest.mark.parametrize(
    ("environ", "is_wanted", "warning"),
    [
        ({}, False, None),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"}, False, None),
        ({"OTEL_TRACES_EXPORTER": "none"}, False, None),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, True, None),
        ({"OTEL_TRACES_EXPORTER": "otlp", "OTEL_SDK_DISABLED": "true"}, False, None),
        ({"OTEL_TRACES_EXPORTER": "zipkin"}, False, "'zipkin'"),
        ({"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, True, "'grpc'"),
    ],
)
def test_spans_are_asked_for_by_the_standard_variable(
    environ: dict[str, str], is_wanted: bool, warning: str | None
) -> None:
    found, warnings = tracing.is_wanted(environ)
    assert found is is_wanted
    assert len(warnings) == (warning is not None)
    assert warning is None or warning in warnings[0]


def test_without_the_extra_there_is_a_warning_and_a_relay() -> None:
    script = """
import sys
sys.modules["opentelemetry"] = None
from relay import logs, tracing
from relay.redaction import Redactor
from relay.route import Router
from relay.choices import LogFormat, LogLevel
logs.setup(LogFormat.JSON, LogLevel.INFO, Redactor())
assert tracing.start("r", "rabbitmq", Router("e", "k"), lambda: 0.0, logs.get_logger()) is None
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert '"event":"tracing_unavailable"' in done.stderr
    assert "[otel]" in done.stderr


def test_a_collector_that_takes_nothing_is_told_once_a_change(caplog: pytest.LogCaptureFixture) -> None:
    class Flaky(SpanExporter):
        results = [SpanExportResult.FAILURE] * 3 + [SpanExportResult.SUCCESS] * 2 + [SpanExportResult.FAILURE]

        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            return self.results.pop(0)

    exporter = _Exporter(Flaky(), Log(logging.getLogger("relay")))
    with caplog.at_level(logging.INFO, "relay"):
        for _ in range(6):
            exporter.export([])
    assert [record.message for record in caplog.records] == ["spans_lost", "spans_exported_again", "spans_lost"]
