"""Tracing with OpenTelemetry's SDK: spans in batches to a collector, as OTLP over HTTP.

A thread sends the spans. A collector that cannot be reached costs requests nothing: the queue of spans is
bounded, those that do not fit are dropped, and the log says so once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Sequence

import structlog
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import (
    INVALID_SPAN,
    Span,
    SpanKind,
    Status,
    StatusCode,
    Tracer,
    format_span_id,
    format_trace_id,
    get_current_span,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from tandem_service.tracing import (
    _NONE,
    Attributes,
    Headers,
    RequestTrace,
    Tracing,
    set_current,
)
from tandem_service.version import software_version

#: How long a process that stops waits for its last spans to be sent.
_CLOSE_S = 2.0
_CONTEXT_HEADERS = ("traceparent", "tracestate")

_propagator = TraceContextTextMapPropagator()


class _RecordedTrace(RequestTrace):
    is_recording = True

    def __init__(self, tracer: Tracer, span: Span, clock_ns: int, started_ns: int) -> None:
        self._tracer = tracer
        self._span = span
        self._context = set_span_in_context(span, Context())
        #: Unix time minus monotonic time. Spans have Unix times, but durations that no clock change affects.
        self._clock_ns = clock_ns
        self._stage: Span | None = None
        self._last_ns = started_ns
        self._is_working = False
        self._has_ended = False

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return _metadata(set_span_in_context(self._stage or self._span, Context()))

    @property
    def exemplar(self) -> dict[str, str]:
        context = self._span.get_span_context()
        return {
            "trace_id": format_trace_id(context.trace_id),
            "span_id": format_span_id(context.span_id),
        }

    def stage(self, name: str, attributes: Attributes = _NONE, *, at_ns: int | None = None) -> None:
        self._begin_stage(name, SpanKind.INTERNAL, attributes, at_ns)

    def call_stage(self, name: str, target: str, attributes: Attributes = _NONE) -> None:
        host, _, port = target.rpartition(":")
        address: Attributes = {"server.address": host, "server.port": int(port)} if port.isdigit() else {}
        self._begin_stage(name, SpanKind.CLIENT, {**address, **attributes}, None)

    def fail_stage(self, cause: str) -> None:
        if self._stage is not None:
            self._stage.set_attribute("error.type", cause)
            self._stage.set_status(Status(StatusCode.ERROR, cause))

    def set_stage(self, attributes: Attributes) -> None:
        if self._stage is not None:
            self._stage.set_attributes(attributes)

    def set(self, attributes: Attributes) -> None:
        if not self._has_ended:
            self._span.set_attributes(attributes)

    def fail(self, error_type: str) -> None:
        if not self._has_ended:
            self._span.set_attribute("error.type", error_type)
            self._span.set_status(Status(StatusCode.ERROR, error_type))

    def begin_work(self, name: str) -> None:
        self.stage(name)
        self._is_working = True

    def end_work(self, name: str) -> None:
        self._is_working = False
        if self._has_ended:
            self._end_stage(time.monotonic_ns())
        else:
            self.stage(name)

    def end(self) -> None:
        if self._has_ended:
            return
        self._has_ended = True
        now = time.monotonic_ns()
        if not self._is_working:
            self._end_stage(now)
        self._span.end(max(now, self._last_ns) + self._clock_ns)

    def _begin_stage(self, name: str, kind: SpanKind, attributes: Attributes, at_ns: int | None) -> None:
        self._end_stage(time.monotonic_ns() if at_ns is None else at_ns)
        self._stage = self._tracer.start_span(
            name, self._context, kind, attributes, start_time=self._last_ns + self._clock_ns
        )

    def _end_stage(self, at_ns: int) -> None:
        self._last_ns = max(self._last_ns, at_ns)
        if self._stage is not None:
            self._stage.end(self._last_ns + self._clock_ns)
            self._stage = None


class SdkTracing(Tracing):
    """Samples and sends as the environment says."""

    is_on = True

    def __init__(self, role: str, instance: str) -> None:
        exporter = OTLPSpanExporter()
        self._exporter = _LoggedExporter(exporter)
        attributes = {
            "service.instance.id": instance,
            "service.version": software_version(),
        }
        if not os.environ.get("OTEL_SERVICE_NAME"):
            attributes["service.name"] = f"tandem-{role}"
        self._provider = TracerProvider(resource=Resource.create(attributes), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer = self._provider.get_tracer("tandem")
        # The SDK logs every failed attempt; `_LoggedExporter` logs the first.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        log = structlog.get_logger("tandem.tracing")
        log.info("requests are traced", sampler=self._provider.sampler.get_description())

    def begin(
        self, headers: Headers, name: str, first_stage: str, *, started_ns: int, is_entry: bool = False
    ) -> RequestTrace:
        caller = _propagator.extract(_context_headers(headers), Context())
        if not is_entry and get_current_span(caller) is INVALID_SPAN:
            return RequestTrace()
        clock_ns = time.time_ns() - time.monotonic_ns()
        span = self._tracer.start_span(name, caller, SpanKind.SERVER, start_time=started_ns + clock_ns)
        trace: RequestTrace
        if span.is_recording():
            trace = _RecordedTrace(self._tracer, span, clock_ns, started_ns)
            trace.stage(first_stage, at_ns=started_ns)
        else:
            trace = RequestTrace(_metadata(set_span_in_context(span, Context())))
        set_current(trace)
        return trace

    async def close(self) -> None:
        # A thread of its own: it may hang for longer in an attempt to connect.
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        await asyncio.to_thread(closing.join, _CLOSE_S)
        if closing.is_alive():
            self._exporter.shutdown()


class _LoggedExporter(SpanExporter):
    """Logs when spans begin to be lost, and when the collector answers again."""

    def __init__(self, exporter: OTLPSpanExporter) -> None:
        self._exporter = exporter
        self._is_failing = False
        self._is_closed = False
        self._log = structlog.get_logger("tandem.tracing")

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        is_failing = result is not SpanExportResult.SUCCESS
        if is_failing and not self._is_failing:
            self._log.warning(
                "the trace collector does not take spans; they are dropped until it does. Check "
                "OTEL_EXPORTER_OTLP_ENDPOINT"
            )
        elif self._is_failing and not is_failing:
            self._log.info("the trace collector takes spans again")
        self._is_failing = is_failing
        return result

    def shutdown(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._exporter.shutdown()  # type: ignore[no-untyped-call]


def _context_headers(headers: Headers) -> dict[str, str]:
    return {name: value for name, value in headers if name in _CONTEXT_HEADERS and isinstance(value, str)}


def _metadata(context: Context) -> tuple[tuple[str, str], ...]:
    carrier: dict[str, str] = {}
    _propagator.inject(carrier, context)
    return tuple(carrier.items())
