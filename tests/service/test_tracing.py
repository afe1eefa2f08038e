"""The trace of a request in one process; disabled tracing or a missing collector costs nothing."""

from __future__ import annotations

import contextvars
import os
import subprocess
import sys
import time

import pytest
import structlog
from otlp_collector import Collector, collecting
from processes import free_port
from tandem_service.tracing import (
    RequestTrace,
    TracingSettingsError,
    check_environment,
    current,
    start_tracing,
)

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED = f"00-{TRACE_ID}-{SPAN_ID}-01"
NOT_SAMPLED = f"00-{TRACE_ID}-{SPAN_ID}-00"
ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch):
    """Removes the developer's variables; a test's current trace ends with the test."""
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)


async def _trace(
    monkeypatch: pytest.MonkeyPatch, *headers: tuple[str, str], is_entry: bool = True, **environment: str
) -> tuple[Collector, RequestTrace, RequestTrace]:
    """Runs a call with stages a and b: the collector, and the traces that begin and current returned."""
    with collecting() as collector:
        monkeypatch.setenv(ENDPOINT, collector.url)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        tracing = start_tracing("gateway", "g-0")

        def call() -> tuple[RequestTrace, RequestTrace]:
            started_ns = time.monotonic_ns() - 1_000_000
            trace = tracing.begin(headers, "chat", "a", started_ns=started_ns, is_entry=is_entry)
            trace.stage("b")
            trace.end()
            return trace, current()

        begun, found = contextvars.copy_context().run(call)
        await tracing.close()
    return collector, begun, found


async def test_a_trace_continues_that_of_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    collector, begun, found = await _trace(monkeypatch, ("traceparent", SAMPLED), ("tracestate", "vendor=1"))
    assert begun is found
    server = collector.only("chat")
    assert (server.trace_id, server.parent_id) == (TRACE_ID, SPAN_ID)
    assert (server.service, server.instance) == ("tandem-gateway", "g-0")
    assert collector.names_below(server) == ["a", "b"]
    assert dict(begun.metadata)["tracestate"] == "vendor=1"
    assert begun.exemplar == {"trace_id": TRACE_ID, "span_id": server.span_id}
    collector.assert_stages_add_up()


@pytest.mark.parametrize(
    "traceparent",
    [
        "",
        "00",
        SAMPLED[:-1],
        SAMPLED.upper().replace("00-", "ff-", 1),
        f"00-{'0' * 32}-{SPAN_ID}-01",
        f"00-{TRACE_ID}-{'0' * 16}-01",
        f"00-{TRACE_ID[:-1]}g-{SPAN_ID}-01",
        "€" * 55,
    ],
)
async def test_a_malformed_traceparent_counts_as_none(
    monkeypatch: pytest.MonkeyPatch, traceparent: str
) -> None:
    collector, _, _ = await _trace(monkeypatch, ("traceparent", traceparent))
    server = collector.only("chat")
    assert server.parent_id == ""
    assert server.trace_id != TRACE_ID
    collector, _, _ = await _trace(monkeypatch, ("traceparent", traceparent), is_entry=False)
    assert collector.spans() == [], "a pod begins no traces"


async def test_a_trace_that_the_caller_does_not_sample_is_not_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    collector, begun, found = await _trace(monkeypatch, ("traceparent", NOT_SAMPLED))
    assert collector.spans() == []
    assert not begun.is_recording
    assert begun.exemplar is None
    context = dict(found.metadata)["traceparent"]
    assert context.startswith(f"00-{TRACE_ID}-"), "the next process gets the caller's trace id"
    assert context.endswith("-00")


@pytest.mark.parametrize(
    ("sampler", "share", "is_traced"),
    [
        ("parentbased_traceidratio", "0", False),
        ("parentbased_traceidratio", "1", True),
        ("always_off", "", False),
        ("", "", True),
    ],
)
async def test_the_ratio_sets_the_share_of_traced_requests(
    monkeypatch: pytest.MonkeyPatch, sampler: str, share: str, is_traced: bool
) -> None:
    settings = {"OTEL_TRACES_SAMPLER": sampler, "OTEL_TRACES_SAMPLER_ARG": share}
    collector, begun, _ = await _trace(
        monkeypatch, **{name: value for name, value in settings.items() if value}
    )
    assert bool(collector.spans()) == begun.is_recording == is_traced


async def test_a_span_may_end_after_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    with collecting() as collector:
        monkeypatch.setenv(ENDPOINT, collector.url)
        tracing = start_tracing("gateway", "g-0")

        def call() -> None:
            trace = tracing.begin((), "chat", "receive", started_ns=time.monotonic_ns(), is_entry=True)
            trace.begin_work("queue")
            trace.end()
            trace.stage("decode")
            trace.fail("too late")
            trace.end_work("respond")

        contextvars.copy_context().run(call)
        await tracing.close()
    server = collector.only("chat")
    assert collector.names_below(server) == ["receive", "queue", "decode"]
    assert server.status == 0
    assert collector.only("decode").end_ns > server.end_ns > collector.only("receive").end_ns


async def test_an_unreachable_collector_is_logged_once_and_delays_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(ENDPOINT, f"http://127.0.0.1:{free_port()}")
    # A failed attempt is repeated after a second, within this time.
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.2")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "8")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "2")
    with structlog.testing.capture_logs() as logs:
        tracing = start_tracing("gateway", "g-0")

        def call() -> None:
            trace = tracing.begin((), "chat", "a", started_ns=time.monotonic_ns(), is_entry=True)
            trace.end()

        for _ in range(200):
            contextvars.copy_context().run(call)
        await tracing.close()
    warnings = [entry for entry in logs if entry["log_level"] == "warning"]
    assert len(warnings) == 1
    assert "collector" in warnings[0]["event"]


async def test_closing_does_not_wait_for_a_collector_that_never_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(ENDPOINT, f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "3600")
    tracing = start_tracing("gateway", "g-0")

    def call() -> None:
        tracing.begin((), "chat", "a", started_ns=time.monotonic_ns(), is_entry=True).end()

    contextvars.copy_context().run(call)
    started = time.monotonic()
    await tracing.close()
    assert time.monotonic() - started < 60, "its retries take an hour"


def test_disabled_tracing_imports_no_sdk() -> None:
    """redis-py imports `opentelemetry.sdk.metrics` where it is installed; nothing here imports the rest."""
    code = (
        "import sys, tandem_gateway.main\n"
        "from tandem_service.tracing import current, start_tracing\n"
        "tracing = start_tracing('gateway', 'g-0')\n"
        "trace = tracing.begin([('traceparent', sys.argv[1])], 'chat', 'a', started_ns=0, is_entry=True)\n"
        "trace.stage('b'); trace.end()\n"
        "assert not tracing.is_on and trace is current() and trace.metadata == ()\n"
        "parts = ('opentelemetry.sdk.trace', 'opentelemetry.exporter')\n"
        "print([name for name in sys.modules if name.startswith(parts)])"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    done = subprocess.run(
        [sys.executable, "-c", code, SAMPLED], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize(
    ("environment", "is_on"),
    [
        ({}, False),
        ({ENDPOINT: ""}, False),
        ({ENDPOINT: "http://127.0.0.1:4318"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "https://collector:4318/v1/traces"}, True),
        ({ENDPOINT: "http://127.0.0.1:4318", "OTEL_SDK_DISABLED": "true"}, False),
        ({ENDPOINT: "http://127.0.0.1:4318", "OTEL_TRACES_EXPORTER": "none"}, False),
        ({"OTEL_TRACES_SAMPLER": "unknown"}, False),
    ],
)
def test_the_environment_enables_tracing(environment: dict[str, str], is_on: bool) -> None:
    assert check_environment(environment) is is_on


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        (ENDPOINT, "collector:4318", "http://127.0.0.1:4318"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc", "http/protobuf"),
        ("OTEL_TRACES_EXPORTER", "jaeger", "otlp or none"),
        ("OTEL_TRACES_SAMPLER", "sometimes", "traceidratio"),
        ("OTEL_TRACES_SAMPLER_ARG", "10", "from 0 to 1"),
        ("OTEL_TRACES_SAMPLER_ARG", "half", "from 0 to 1"),
    ],
)
def test_a_bad_variable_is_refused_in_one_sentence(name: str, value: str, remedy: str) -> None:
    environment = {ENDPOINT: "http://127.0.0.1:4318", "OTEL_TRACES_SAMPLER": "traceidratio", name: value}
    with pytest.raises(TracingSettingsError, match=remedy) as error:
        check_environment(environment)
    assert name in str(error.value)
    assert repr(value) in str(error.value)
