"""An OpenTelemetry collector on loopback: takes OTLP over HTTP and keeps the spans."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

CLIENT, SERVER = 3, 2
ERROR = 2


@dataclass(frozen=True)
class Span:
    trace_id: str
    span_id: str
    parent_id: str
    name: str
    kind: int
    start_ns: int
    end_ns: int
    attributes: dict[str, object]
    status: int
    #: service.name and service.instance.id of the process.
    service: str
    instance: str

    @property
    def length_ns(self) -> int:
        return self.end_ns - self.start_ns


class Collector:
    """The spans that have arrived."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._spans: list[Span] = []
        self._lock = threading.Lock()
        #: Everything that arrived, as bytes.
        self.payload = b""

    def take(self, body: bytes) -> None:
        message = ExportTraceServiceRequest.FromString(body)
        with self._lock:
            self.payload += body
            for resource in message.resource_spans:
                process = _values(resource.resource.attributes)
                for scope in resource.scope_spans:
                    self._spans += [
                        Span(
                            span.trace_id.hex(),
                            span.span_id.hex(),
                            span.parent_span_id.hex(),
                            span.name,
                            span.kind,
                            span.start_time_unix_nano,
                            span.end_time_unix_nano,
                            _values(span.attributes),
                            span.status.code,
                            str(process["service.name"]),
                            str(process["service.instance.id"]),
                        )
                        for span in scope.spans
                    ]

    def spans(self) -> list[Span]:
        """The spans, ordered by start."""
        with self._lock:
            return sorted(self._spans, key=lambda span: (span.start_ns, -span.end_ns))

    def named(self, name: str) -> list[Span]:
        return [span for span in self.spans() if span.name == name]

    def only(self, name: str) -> Span:
        (span,) = self.named(name)
        return span

    def children(self, parent: Span) -> list[Span]:
        """The children, ordered by start and end."""
        found = [span for span in self.spans() if span.parent_id == parent.span_id]
        return sorted(found, key=lambda span: (span.start_ns, span.end_ns))

    def names_below(self, parent: Span) -> list[str]:
        return [span.name for span in self.children(parent)]

    def assert_stages_add_up(self) -> None:
        """The stages of each server span cover it to 1 %, and none overlap."""
        spans = self.spans()
        servers = [span for span in spans if span.kind == SERVER]
        assert servers
        for server in servers:
            stages = self.children(server)
            assert stages, server.name
            total = sum(stage.length_ns for stage in stages)
            assert abs(total - server.length_ns) <= server.length_ns / 100, (server.name, stages)
            for before, after in pairwise(stages):
                assert after.start_ns >= before.end_ns, (before.name, after.name)


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector that listens until the context ends."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            collector.take(body)
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Logs nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    collector = Collector(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _values(pairs: object) -> dict[str, object]:
    """Values of OTLP's key-value pairs; an array is a list."""
    found: dict[str, object] = {}
    for pair in pairs:  # type: ignore[attr-defined]
        kind = pair.value.WhichOneof("value")
        value = getattr(pair.value, kind)
        found[pair.key] = [v.string_value for v in value.values] if kind == "array_value" else value
    return found
