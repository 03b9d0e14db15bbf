"""Tracing: whether spans are wanted, and the one way to the optional libraries.

Off unless `OTEL_TRACES_EXPORTER` says `otlp`; then nothing is imported, and the publisher asks one None a batch. An
environment is often shared with the service beside the relay, so what is not understood there is a warning: a relay
without spans is better than none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from relay.logs import Log
from relay.route import Router

if TYPE_CHECKING:
    from relay.spans import OtelSpans

EXPORTER = "OTEL_TRACES_EXPORTER"
_OFF = ("", "none")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_PROTOCOL = "http/protobuf"


def is_wanted(environ: Mapping[str, str]) -> tuple[bool, tuple[str, ...]]:
    """Whether the standard variables ask for spans, and warnings about those that ask for what there is not."""
    exporter = environ.get(EXPORTER, "").strip().lower()
    if exporter in _OFF or environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False, ()
    if exporter != "otlp":
        return False, (f"{EXPORTER}={exporter!r} is not known here, no spans; allowed: otlp, none",)
    protocol = next((environ[name] for name in _PROTOCOLS if environ.get(name)), _PROTOCOL)
    if protocol != _PROTOCOL:
        return True, (f"the OTLP protocol {protocol!r} is not known here: {_PROTOCOL} it is",)
    return True, ()


def start(name: str, system: str, router: Router, database_now: Callable[[], float], log: Log) -> OtelSpans | None:
    """Spans of a relay called `name` that writes to `system`; None, with a warning in the log, where the extra is not installed."""
    try:
        from relay.spans import OtelSpans
    except ImportError as error:
        log.warning("tracing_unavailable", error=error, hint="install it with the extra [otel]: docs/tracing.md")
        return None
    spans = OtelSpans.exported(name, system, router, database_now, log)
    log.info("tracing_started", exporter="otlp")
    return spans
