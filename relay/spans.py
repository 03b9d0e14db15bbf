"""A span for each publish, exported by OpenTelemetry; imported only where tracing is on.

A span begins when the message is written to the broker and ends with its outcome. It is a child of the span in which the
writer inserted the row (its `traceparent`), so the writer's decision to sample holds, and it carries the time that the row
spent in the outbox. The message itself is left alone: its `traceparent` stays the writer's.

Bounded: the SDK's queue (OTEL_BSP_MAX_QUEUE_SIZE), from which a thread exports; what does not fit is dropped. Nothing
here waits for the collector, at the end neither for long.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from relay import __version__
from relay.errors import MessageInvalid
from relay.logs import Log
from relay.message import Row, due_since
from relay.route import Router

CLOSE_TIMEOUT_S: Final = 1.0
"""For what is still in the queue at the end: spans are not worth a late exit."""

_ROOT: Final = Context()
_PROPAGATOR: Final = TraceContextTextMapPropagator()


class OtelSpans:
    """Implements `relay.core.ports.broker.Spans`. `router` names destinations; `database_now` gives epoch seconds by the
    database's clock, which dates the rows: it is known wherever a row is."""

    def __init__(
        self, provider: TracerProvider, router: Router, database_now: Callable[[], float], *, system: str = "rabbitmq"
    ) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("relay", __version__)
        self._router = router
        self._database_now = database_now
        self._system = system

    @classmethod
    def exported(cls, name: str, system: str, router: Router, database_now: Callable[[], float], log: Log) -> OtelSpans:
        """By OTLP over HTTP, as the OTEL_ variables say. `name` is the relay's, `system` the sink's."""
        # Its exporter logs each failed try; one line per change of state is `_Exporter`'s.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        own = {"service.name": "outbox-relay", "service.instance.id": name, "service.version": __version__}
        resource = Resource.create().merge(Resource(own)).merge(OTELResourceDetector().detect())
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(_Exporter(OTLPSpanExporter(), log)))
        return cls(provider, router, database_now, system=system)

    def end(self, outcome: str, rows: Sequence[Row], now: float, error: str = "") -> None:
        """See `Spans.end`."""
        ended_ns = time.time_ns()
        database_now = self._database_now()
        for row in rows:
            took_s = now - row.published_at
            exchange, routing_key = self._route(row)
            span = self._tracer.start_span(
                # Few names, as the conventions want: the exchange, never the routing key.
                f"publish {exchange}".rstrip(),
                context=_writer(row),
                kind=trace.SpanKind.PRODUCER,
                start_time=ended_ns - int(took_s * 1e9),
            )
            if span.is_recording():
                # (For a row without any time max gives its first argument.)
                waited_s = max(0.0, database_now - took_s - due_since(row))
                span.set_attributes(self._attributes(row, exchange, routing_key, outcome, waited_s))
                if error:
                    span.set_status(trace.StatusCode.ERROR, error)
            span.end(ended_ns)

    def close(self) -> None:
        """Export what is left, for a moment; never raises."""
        # The SDK's own wait is half a minute, on whoever calls.
        thread = threading.Thread(target=self._provider.shutdown, name="spans", daemon=True)
        thread.start()
        thread.join(CLOSE_TIMEOUT_S)

    def _route(self, row: Row) -> tuple[str, str]:
        try:
            return self._router.route(row)
        except MessageInvalid:
            return "", ""

    def _attributes(
        self, row: Row, exchange: str, routing_key: str, outcome: str, waited_s: float
    ) -> dict[str, str | int | float]:
        """By the semantic conventions for messaging, with the relay's own under `outbox_relay`."""
        found: dict[str, str | int | float] = {
            "messaging.system": self._system,
            "messaging.operation.name": "publish",
            "messaging.operation.type": "send",
            "messaging.destination.name": exchange,
            "messaging.rabbitmq.destination.routing_key": routing_key,
            "messaging.message.id": row.id,
            "messaging.message.body.size": len(row.payload or b""),
            "outbox_relay.event_type": row.event_type,
            "outbox_relay.outcome": outcome,
            "outbox_relay.attempt": row.attempts + 1,
            "outbox_relay.outbox_duration_s": round(waited_s, 6),
        }
        if row.rare and (correlation_id := row.rare.get("correlation_id")):
            found["messaging.message.conversation_id"] = correlation_id
        return found


def _writer(row: Row) -> Context:
    """The context in which the row was written; that of a new trace where it carries none, or one that is none."""
    rare = row.rare
    if rare is None or "traceparent" not in rare:
        return _ROOT
    carrier = {name: rare[name] for name in ("traceparent", "tracestate") if rare.get(name)}
    return _PROPAGATOR.extract(carrier, context=_ROOT)


class _Exporter(SpanExporter):
    """Says once that the collector takes nothing, and once that it does again."""

    def __init__(self, inner: SpanExporter, log: Log) -> None:
        self._inner = inner
        self._log = log
        self._has_failed = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._inner.export(spans)
        has_failed = result is not SpanExportResult.SUCCESS
        if has_failed and not self._has_failed:
            self._log.warning(
                "spans_lost", spans=len(spans), hint="check OTEL_EXPORTER_OTLP_ENDPOINT and its collector"
            )
        elif self._has_failed and not has_failed:
            self._log.info("spans_exported_again")
        self._has_failed = has_failed
        return result

    def shutdown(self) -> None:
        self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return self._inner.force_flush(timeout_millis)
