"""Prometheus metrics of the gateway. SLO attainment counts every well-formed request, also refused and failed
ones."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from tandem_proto.v1 import common_pb2
from tandem_service.metrics import LATENCY_BUCKETS_S, TOKEN_BUCKETS_S

from tandem_gateway.admission import Admission
from tandem_gateway.errors import Outcome
from tandem_gateway.request import NS_PER_S

#: Prompt length that the gauge of the predicted TTFT assumes.
_PREDICTED_PROMPT_TOKENS = 4096


class GatewayMetrics:
    """Registers in the process's registry; one instance per process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"tandem_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...] = LATENCY_BUCKETS_S) -> Histogram:
            return Histogram(f"tandem_{name}", text, ["slo_class"], buckets=buckets, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"tandem_{name}", text, labels, registry=registry)

        self.ended = counter("requests", "Requests ended, by outcome", "outcome")
        self.received = counter(
            "slo_requests_received", "Well-formed requests received; the base of attainment", "slo_class"
        )
        self._met = counter("slo_requests_met", "Requests that met every objective", "slo_class")
        self._goodput = counter(
            "goodput_tokens", "Output tokens of requests that met every objective", "slo_class"
        )
        self._output = counter("output_tokens", "Output tokens relayed", "slo_class")
        self._prompt = counter("prompt_tokens", "Prompt tokens of finished requests")
        self._cached = counter("cached_prompt_tokens", "Prompt tokens found in a prefix cache")
        self._ttft = histogram("ttft_seconds", "Request received to first token relayed")
        self._tpot = histogram("tpot_seconds", "Mean time per output token after the first", TOKEN_BUCKETS_S)
        self._e2e = histogram("e2e_seconds", "Request received to last token relayed")
        self.queue_seconds = histogram("queue_seconds", "Wait for admission at the gateway")
        self.failovers = counter("decode_failovers", "Requests moved to another decode pod")
        self.resumed = counter(
            "answers_resumed", "Requests that got an answer begun before, by how they named it", "by"
        )
        self.kept_answer_bytes = gauge("kept_answer_bytes", "Memory of the answers that can be resumed")
        self._queue_length = gauge("queue_length", "Requests waiting for admission")
        self._in_flight = gauge("requests_in_flight", "Admitted requests that have not ended")
        self._service = gauge(
            "predicted_service_seconds", "Predicted time from admission to end of a request"
        )
        self._predicted_ttft = gauge(
            "predicted_ttft_seconds", f"Predicted TTFT of a new prompt of {_PREDICTED_PROMPT_TOKENS} tokens"
        )
        self.healthy_pods = gauge("healthy_pods", "Pods that answer and are serving", "role")
        for outcome in Outcome:
            self.ended.labels(outcome.value)

    def watch(self, admission: Admission) -> None:
        """Reads the gauges of the queue from `admission` at each scrape."""
        self._queue_length.set_function(lambda: admission.num_waiting)
        self._in_flight.set_function(lambda: admission.num_in_flight)
        self._service.set_function(lambda: admission.predictor.service_s)
        self._predicted_ttft.set_function(lambda: admission.predicted_ttft_s(_PREDICTED_PROMPT_TOKENS))

    def finished(self, receipt: common_pb2.Receipt) -> None:
        """Counts a request that ended without an error."""
        name = receipt.slo.name
        self._ttft.labels(name).observe(receipt.ttft_ns / NS_PER_S)
        self._e2e.labels(name).observe(receipt.e2e_ns / NS_PER_S)
        if receipt.output_tokens > 1:
            decode_s = (receipt.e2e_ns - receipt.ttft_ns) / NS_PER_S
            self._tpot.labels(name).observe(decode_s / (receipt.output_tokens - 1))
        self._output.labels(name).inc(receipt.output_tokens)
        self._prompt.inc(receipt.prompt_tokens)
        self._cached.inc(receipt.cached_tokens)
        if receipt.slo_met:
            self._met.labels(name).inc()
            self._goodput.labels(name).inc(receipt.output_tokens)
