"""One trace per request: the spans of each process, and their propagation to the next process.

    start_tracing(role, instance)   one `Tracing` per process; it records nothing unless the environment
                                    names an OpenTelemetry collector
    tracing.begin(headers, ...)     the request's server span, below the caller's span if `traceparent` names
                                    one
    current().stage("tokenize")     what the request does from now on: ends the stage before, so that the
                                    stages of a process add up to its server span
    current().metadata              for a call to the next process, whose server span then lies below the
                                    current stage
    trace.end()

The settings are OpenTelemetry's own environment variables, which every process and `tandem up` read alike:
OTEL_EXPORTER_OTLP_ENDPOINT (unset: off), OTEL_TRACES_SAMPLER, OTEL_TRACES_SAMPLER_ARG and the others of the
specification. The SDK is imported only when it is on (`tracing_sdk`).

Spans contain no text, no token ids and no messages of errors that may quote a request: only names, numbers,
ids, and codes of errors.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from typing import TypeAlias
from urllib.parse import urlsplit

#: Attributes of a span.
Value: TypeAlias = "str | bool | int | float | Sequence[str]"
Attributes: TypeAlias = "Mapping[str, Value]"
Headers: TypeAlias = "Iterable[tuple[str, str | bytes]]"

_NONE: Attributes = {}
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_SAMPLERS = ("always_on", "always_off", "traceidratio")


class TracingSettingsError(Exception):
    """A variable of the environment cannot be used; the message names it and the remedy."""


class RequestTrace:
    """One process's part of a request's trace. This class is that of requests which are not recorded: it
    passes on the caller's context and does nothing else.

    Times are `time.monotonic_ns()`; without one, a stage begins and ends now. Use it from one event loop.
    """

    is_recording = False

    def __init__(self, metadata: tuple[tuple[str, str], ...] = ()) -> None:
        self._metadata = metadata

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Metadata of a gRPC call that the current stage makes."""
        return self._metadata

    @property
    def exemplar(self) -> dict[str, str] | None:
        """Labels that tie an observation of a histogram to this trace."""
        return None

    def stage(self, name: str, attributes: Attributes = _NONE, *, at_ns: int | None = None) -> None:
        """Begins a stage at `at_ns`; ends the stage before."""

    def call_stage(self, name: str, target: str, attributes: Attributes = _NONE) -> None:
        """A stage in which another process, at `target`, does the work."""

    def fail_stage(self, cause: str) -> None:
        """Marks the current stage as failed; the request may still succeed."""

    def set_stage(self, attributes: Attributes) -> None:
        """Adds attributes to the current stage."""

    def set(self, attributes: Attributes) -> None:
        """Adds attributes to the server span."""

    def fail(self, error_type: str) -> None:
        """Marks the request as failed. `error_type` is a code, not a message."""

    def begin_work(self, name: str) -> None:
        """Begins a stage that may outlive the call; `end` leaves the stages to `end_work`."""

    def end_work(self, name: str) -> None:
        """Ends the work; if the call has not ended, it continues with a stage of this name."""

    def end(self) -> None:
        """The call has ended."""


_NOT_RECORDED = RequestTrace()
_current: ContextVar[RequestTrace] = ContextVar("tandem_trace", default=_NOT_RECORDED)


def current() -> RequestTrace:
    """The trace of the call being handled, also in the tasks that it started."""
    return _current.get()


class Tracing:
    """Tracing of one process; this class is for processes without a collector."""

    is_on = False

    def begin(
        self, headers: Headers, name: str, first_stage: str, *, started_ns: int, is_entry: bool = False
    ) -> RequestTrace:
        """Begins the trace of a call, which `current()` then returns.

        `headers` are the call's, HTTP or gRPC. `is_entry`: begins a trace of its own if they name none, where
        the sampler wants one; otherwise such a call is not recorded. A malformed `traceparent` counts as
        none.
        """
        return _NOT_RECORDED

    async def close(self) -> None:
        """Sends the remaining spans, for at most a few seconds."""


def set_current(trace: RequestTrace) -> None:
    """Calls run in tasks of their own, so nothing has to be reset afterwards."""
    _current.set(trace)


def start_tracing(role: str, instance: str) -> Tracing:
    """Tracing as configured by the environment; `role` and `instance` name the process.

    Raises TracingSettingsError.
    """
    if not check_environment():
        return Tracing()
    from tandem_service.tracing_sdk import SdkTracing  # only where it is on

    return SdkTracing(role, instance)


def check_environment(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether tracing is on. Raises TracingSettingsError for values that it cannot use.

    The SDK itself replaces a value that it does not know with a default.
    """
    name = next((name for name in _ENDPOINTS if environment.get(name)), "")
    if (
        not name
        or environment.get("OTEL_SDK_DISABLED", "").lower() == "true"
        or environment.get("OTEL_TRACES_EXPORTER") == "none"
    ):
        return False
    url = urlsplit(environment[name])
    if url.scheme not in ("http", "https") or not url.hostname:
        raise TracingSettingsError(
            f"{name} is {environment[name]!r}: expected the URL of an OTLP collector, such as "
            "http://127.0.0.1:4318; unset it to switch tracing off"
        )
    for name in _PROTOCOLS:
        if environment.get(name) and environment[name] != "http/protobuf":
            raise TracingSettingsError(
                f"{name} is {environment[name]!r}: traces are sent as http/protobuf only (port 4318 of a "
                "collector); set it so, or unset it"
            )
    exporter = environment.get("OTEL_TRACES_EXPORTER", "otlp")
    if exporter not in ("otlp", ""):
        raise TracingSettingsError(f"OTEL_TRACES_EXPORTER is {exporter!r}: expected otlp or none")
    sampler = environment.get("OTEL_TRACES_SAMPLER", "").lower()
    if sampler and sampler.removeprefix("parentbased_") not in _SAMPLERS:
        raise TracingSettingsError(
            f"OTEL_TRACES_SAMPLER is {sampler!r}: expected {', '.join(_SAMPLERS)}, or one of these after "
            "parentbased_"
        )
    share = environment.get("OTEL_TRACES_SAMPLER_ARG", "")
    if share and sampler.endswith("traceidratio") and not _is_share(share):
        raise TracingSettingsError(
            f"OTEL_TRACES_SAMPLER_ARG is {share!r}: expected the share of requests to trace, from 0 to 1"
        )
    return True


def _is_share(text: str) -> bool:
    try:
        return 0.0 <= float(text) <= 1.0
    except ValueError:
        return False
