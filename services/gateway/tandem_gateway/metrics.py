"""What the gateway counts. Every well-formed request counts for attainment, refused and failed ones too."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from tandem_core.slo import SloTarget
from tandem_proto.v1 import common_pb2
from tandem_service.metrics import LATENCY_BUCKETS_S, TOKEN_BUCKETS_S

from tandem_gateway.admission import Admission
from tandem_gateway.errors import Outcome
from tandem_gateway.predictor import Predictor
from tandem_gateway.request import NS_PER_S


class GatewayMetrics:
    """Registers in the pod's registry; one instance per process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        by_class = ["slo_class"]
        self._requests = Counter(
            "tandem_requests", "Requests ended, by outcome", ["outcome"], registry=registry
        )
        self._received = Counter(
            "tandem_slo_requests_received",
            "Well-formed requests received; the base of attainment",
            by_class,
            registry=registry,
        )
        self._within = Counter(
            "tandem_slo_requests_met", "Requests that met every objective", by_class, registry=registry
        )
        self._goodput = Counter(
            "tandem_goodput_tokens",
            "Output tokens of requests that met every objective",
            by_class,
            registry=registry,
        )
        self._output = Counter("tandem_output_tokens", "Output tokens relayed", by_class, registry=registry)
        self._prompt = Counter(
            "tandem_prompt_tokens", "Prompt tokens of finished requests", registry=registry
        )
        self._cached = Counter(
            "tandem_cached_prompt_tokens", "Prompt tokens found in a prefix cache", registry=registry
        )
        self._ttft = Histogram(
            "tandem_ttft_seconds",
            "Request received to first token relayed",
            by_class,
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )
        self._tpot = Histogram(
            "tandem_tpot_seconds",
            "Mean time per output token after the first",
            by_class,
            buckets=TOKEN_BUCKETS_S,
            registry=registry,
        )
        self._e2e = Histogram(
            "tandem_e2e_seconds",
            "Request received to last token relayed",
            by_class,
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )
        self._queue_seconds = Histogram(
            "tandem_queue_seconds",
            "Wait for admission at the gateway",
            by_class,
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )
        self._failovers = Counter(
            "tandem_decode_failovers", "Requests moved to another decode pod", registry=registry
        )
        self._queue_length = Gauge("tandem_queue_length", "Requests waiting for admission", registry=registry)
        self._in_flight = Gauge("tandem_requests_in_flight", "Requests with a decode pod", registry=registry)
        self._service = Gauge(
            "tandem_predicted_service_seconds", "Predicted time a request holds its place", registry=registry
        )
        self._predicted_ttft = Gauge(
            "tandem_predicted_ttft_seconds",
            "Predicted TTFT of a 4096-token prompt that came now",
            registry=registry,
        )
        self.healthy_pods = Gauge(
            "tandem_healthy_pods", "Pods that answer and are serving", ["role"], registry=registry
        )
        for outcome in Outcome:
            self._requests.labels(outcome.value)

    def watch(self, admission: Admission, predictor: Predictor) -> None:
        """Read the queue's gauges from these whenever metrics are asked for."""
        self._queue_length.set_function(lambda: admission.num_waiting)
        self._in_flight.set_function(lambda: admission.num_in_flight)
        self._service.set_function(lambda: predictor.service_s)
        self._predicted_ttft.set_function(lambda: admission.predicted_ttft_s(4096))

    def received(self, slo: SloTarget) -> None:
        self._received.labels(slo.name).inc()

    def ended(self, outcome: Outcome) -> None:
        self._requests.labels(outcome.value).inc()

    def admitted(self, slo: SloTarget, queued_s: float) -> None:
        self._queue_seconds.labels(slo.name).observe(queued_s)

    def failover(self) -> None:
        self._failovers.inc()

    def finished(self, receipt: common_pb2.Receipt) -> None:
        """A request that ran to its end."""
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
            self._within.labels(name).inc()
            self._goodput.labels(name).inc(receipt.output_tokens)
