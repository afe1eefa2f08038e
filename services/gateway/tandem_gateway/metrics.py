"""Prometheus metrics of the gateway.

SLO attainment counts every well-formed request, also refused and failed ones, as one met or one miss. Three
kinds are not counted, because they say nothing about the service: requests over their tenant's own quota,
requests found invalid later, and requests that their clients left while all objectives were kept.
"""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence

from prometheus_client import CollectorRegistry
from tandem_core.contracts import RefusalReason
from tandem_core.errors import InvalidRequestError
from tandem_core.slo import DEFAULT_SLO_CLASSES, SloTarget
from tandem_proto.v1 import common_pb2, decode_pb2
from tandem_service import metric_table as table
from tandem_service import tracing
from tandem_service.metric_rows import CounterRow, Values
from tandem_service.metric_twins import serve_twins, vllm_labels

from tandem_gateway.admission.admission import Admission
from tandem_gateway.admission.miss_cause import CAUSES
from tandem_gateway.errors import (
    GatewayError,
    LossCause,
    Outcome,
    OverloadedError,
    presentation,
)
from tandem_gateway.fleet.pods import Fleet, Role
from tandem_gateway.request import NS_PER_S, TokenizedRequest

#: Prompt length for the gauge of the predicted TTFT.
_PREDICTED_PROMPT_TOKENS = 4096
_STAGES = ("queue", "prefill", "transfer", "decode", "failover")
#: vLLM's finish reasons by ours.
_FINISH_REASONS = {common_pb2.FINISH_REASON_STOP: "stop", common_pb2.FINISH_REASON_LENGTH: "length"}
#: vLLM's finish reasons of requests without a complete answer. Outcomes that are missing here never begin.
_ENDED_EARLY = {
    Outcome.CANCELLED: "abort",
    Outcome.DEADLINE: "abort",
    Outcome.UNAVAILABLE: "error",
    Outcome.ERROR: "error",
}


#: Why a request misses its SLO: a stage, or an outcome without a complete answer.
_MISS_CAUSES = (
    *CAUSES,
    *(o.value for o in Outcome if o not in (Outcome.OK, Outcome.UNAUTHENTICATED, Outcome.INVALID)),
)
#: Refusals that depend on the tenant's own use alone, not on the load.
_QUOTAS = frozenset({RefusalReason.TENANT_REQUESTS, RefusalReason.TENANT_TOKENS})


class TenantCounter:
    """A counter whose series have class and tenant as their first labels.

    The dashboard sums them by class each second. With a counter of prometheus_client and a hundred tenants
    that takes 18 ms of the event loop, so the values are kept here.
    """

    def __init__(self, row: CounterRow, registry: CollectorRegistry) -> None:
        self._values: defaultdict[tuple[str, ...], float] = defaultdict(float)
        # A copy in one step, since scrapes read it from another thread.
        row.view(registry, self._values.copy)

    def add(self, *labels: str, amount: float = 1.0) -> None:
        """`amount` 0 creates the series."""
        self._values[labels] += amount

    def sums(self, label: int) -> Counter[str]:
        """Sums over all series by the label at this index; 0 is the class."""
        sums: Counter[str] = Counter()
        for labels, value in self._values.items():
            sums[labels[label]] += int(value)
        return sums


class GatewayMetrics:
    """Registers in the process's registry; one instance per process."""

    def __init__(
        self,
        registry: CollectorRegistry,
        *,
        model_name: str,
        slo_classes: Mapping[str, SloTarget] = DEFAULT_SLO_CLASSES,
    ) -> None:
        self._registry = registry
        self.slo_classes = slo_classes
        self._model_name = model_name
        self.ended = table.REQUESTS.make(registry)
        self.finished = table.FINISHED.make(registry)
        self._refused = table.REFUSED.make(registry)
        self.received = TenantCounter(table.SLO_RECEIVED, registry)
        self.met = TenantCounter(table.SLO_MET, registry)
        self.misses = TenantCounter(table.SLO_MISSES, registry)
        self.goodput = TenantCounter(table.GOODPUT_TOKENS, registry)
        self.output = TenantCounter(table.OUTPUT_TOKENS, registry)
        self.prompt = table.PROMPT_TOKENS.make(registry)
        self.cached = table.CACHED_PROMPT_TOKENS.make(registry)
        latencies = [limit for slo in slo_classes.values() for limit in (slo.ttft_s, slo.e2e_s)]
        self.ttft = table.TTFT_SECONDS.make(registry, latencies)
        self.tpot = table.TPOT_SECONDS.make(registry, [slo.tpot_s for slo in slo_classes.values()])
        self.itl = table.ITL_SECONDS.make(registry)
        self.e2e = table.E2E_SECONDS.make(registry, latencies)
        self.queue_seconds = table.QUEUE_SECONDS.make(registry)
        self.stages = table.STAGE_SECONDS.make(registry)
        vllm = vllm_labels(model_name)
        self.inference = table.VLLM_INFERENCE_TIME.make(registry).labels(*vllm)
        self.max_tokens = table.VLLM_PARAMS_MAX_TOKENS.make(registry).labels(*vllm)
        self._num_answers = table.VLLM_PARAMS_N.make(registry).labels(*vllm)
        self._longest_answer = table.VLLM_MAX_GENERATION.make(registry).labels(*vllm)
        self._preemptions = table.VLLM_PREEMPTIONS.make(registry).labels(*vllm)
        self._drafts = table.VLLM_DRAFTS.make(registry).labels(*vllm)
        self._draft_tokens = table.VLLM_DRAFT_TOKENS.make(registry).labels(*vllm)
        self._accepted_tokens = table.VLLM_ACCEPTED_TOKENS.make(registry).labels(*vllm)
        self._accepted_at = table.VLLM_ACCEPTED_PER_POS.make(registry)
        self.prompt_length = table.REQUEST_PROMPT_TOKENS.make(registry)
        self.output_length = table.REQUEST_OUTPUT_TOKENS.make(registry)
        self.predictions = table.PREDICTIONS.make(registry)
        self.predictions_held = table.PREDICTIONS_HELD.make(registry)
        self.widened = table.SLO_WIDENED.make(registry)
        self._predicted_ttft = table.PREDICTED_TTFT.make(registry)
        self.failovers = table.FAILOVERS.make(registry)
        self.resumed = table.ANSWERS_RESUMED.make(registry)
        self.not_kept = table.ANSWERS_NOT_KEPT.make(registry)
        self.kept_answer_bytes = table.KEPT_ANSWER_BYTES.make(registry)
        #: Classes and tenants whose series exist.
        self._known: set[tuple[str, ...]] = set()
        self._show_zeros(registry)
        serve_twins(registry, model_name=model_name)

    def _show_zeros(self, registry: CollectorRegistry) -> None:
        """Creates the series whose labels are known at start, so that rates count their first event."""
        targets = table.SLO_TARGET_SECONDS.make(registry)
        for outcome in Outcome:
            self.ended.labels(outcome.value)
        for reason in (*_FINISH_REASONS.values(), *_ENDED_EARLY.values()):
            self.finished.labels(reason)
        for refusal in RefusalReason:
            self._refused.labels(refusal.value)
        for cause in LossCause:
            self.failovers.labels(cause.value)
        for reason in ("memory", "redis"):
            self.not_kept.labels(reason)
        for name, slo in self.slo_classes.items():
            for histogram in (
                self.ttft, self.tpot, self.itl, self.e2e, self.queue_seconds, self.prompt_length,
                self.output_length,
            ):  # fmt: skip
                histogram.labels(name)
            for stage in _STAGES:
                self.stages.labels(name, stage)
            for measured in ("ttft", "e2e"):
                self.predictions.labels(name, measured)
                self.predictions_held.labels(name, measured)
            for objective, target_s in (("ttft", slo.ttft_s), ("tpot", slo.tpot_s), ("e2e", slo.e2e_s)):
                if target_s:
                    targets.labels(name, objective).set(target_s)

    def watch(self, admission: Admission, fleet: Fleet) -> None:
        """Reads the gauges of the queue and of the pods' last reports at each scrape."""
        registry = self._registry
        for row, read in (
            (table.QUEUE_LENGTH, lambda: admission.queue.num_waiting),
            (table.IN_FLIGHT, lambda: admission.queue.num_in_flight),
            (table.ADMISSION_LIMIT, lambda: admission.queue.max_in_flight),
            (table.SATURATION, lambda: _saturation(admission, fleet)),
            (table.PREDICTED_SERVICE, lambda: admission.queue.service_s),
        ):
            row.make(registry).set_function(read)
        table.HEALTHY_PODS.view(
            registry, lambda: {(role.value,): float(len(fleet.healthy(role))) for role in Role}
        )
        table.LISTED_PODS.view(registry, lambda: _listed(fleet))
        table.REPORT_AGE.view(registry, lambda: _report_ages(fleet))
        table.FLEET_KV_USAGE.view(registry, lambda: _kv_usage(fleet))
        vllm = vllm_labels(self._model_name)

        def waiting() -> Values:
            return {vllm: float(admission.queue.num_waiting + _waiting_in_pods(admission, fleet))}

        def running() -> Values:
            return {vllm: float(admission.queue.num_in_flight - _waiting_in_pods(admission, fleet))}

        table.VLLM_WAITING.view(registry, waiting)
        table.VLLM_RUNNING.view(registry, running)
        table.VLLM_CACHE_CONFIG.view(registry, lambda: self._cache_config(fleet))

    def watch_redis(self, is_connected: Callable[[], bool]) -> None:
        """Call it if the gateway has a Redis."""
        table.GATEWAY_REDIS_CONNECTED.make(self._registry).set_function(is_connected)

    def show_prediction(self, admission: Admission) -> None:
        """Call it on the event loop, to which the forecast belongs; scrapes run in another thread."""
        self._predicted_ttft.set(admission.gate.predicted_ttft_s(_PREDICTED_PROMPT_TOKENS))

    def refused(self, error: InvalidRequestError | GatewayError) -> None:
        """Counts a request or call that ended before it was well-formed."""
        self.ended.labels(presentation(error).outcome.value).inc()
        self.count_refusal(error)

    def count_refusal(self, error: InvalidRequestError | GatewayError) -> None:
        if isinstance(error, OverloadedError):
            self._refused.labels(error.reason.value).inc()

    def count_work(self, receipt: common_pb2.Receipt) -> None:
        """Counts the pods' work for one request, once even if it has several answers."""
        self._preemptions.inc(receipt.preemptions + receipt.prefill_preemptions)
        self._drafts.inc(receipt.drafts)
        self._draft_tokens.inc(receipt.drafted_tokens)
        self._accepted_tokens.inc(receipt.accepted_tokens)
        for position, count in enumerate(receipt.accepted_at):
            self._accepted_at.labels(*vllm_labels(self._model_name), str(position)).inc(count)

    def answered(self, num_tokens: Sequence[int]) -> None:
        """Counts a prompt whose answers are complete. `num_tokens`: the length of each answer."""
        self._num_answers.observe(len(num_tokens))
        self._longest_answer.observe(max(num_tokens))

    def of(self, request: TokenizedRequest) -> RequestMetrics:
        """Counts a well-formed request as received."""
        self._show(request.slo.name, request.tenant)
        return RequestMetrics(self, request)

    def refused_early(self, slo_class: str, tenant: str) -> None:
        """Counts a request that was refused for lack of capacity before it was checked."""
        self._show(slo_class, tenant)
        self.received.add(slo_class, tenant)
        self.misses.add(slo_class, tenant, Outcome.REFUSED.value)

    def _show(self, *labels: str) -> None:
        if labels not in self._known:
            self._known.add(labels)
            for shown in (self.met, self.goodput, self.output):
                shown.add(*labels, amount=0)
            for counter in (self.widened, self.prompt, self.cached):
                counter.labels(*labels)
            # Else the share of misses would be undefined until the first one.
            for cause in _MISS_CAUSES:
                self.misses.add(*labels, cause, amount=0)

    def _cache_config(self, fleet: Fleet) -> Values:
        pods = fleet.healthy(Role.DECODE)
        if not pods:
            return {}
        num_blocks = sum(pod.load.total_blocks for pod in pods)
        return {(*vllm_labels(self._model_name), str(pods[0].load.block_size), str(num_blocks)): 1.0}


class RequestMetrics:
    """Measures one well-formed request: received, admitted, relayed ..., finished or failed, ended."""

    def __init__(self, metrics: GatewayMetrics, request: TokenizedRequest) -> None:
        self._metrics = metrics
        self._labels = request.slo.name, request.tenant
        self._slo_class = request.slo.name
        self._slo = request.slo
        self._arrived = request.arrived
        self._first_at: float | None = None
        self._max_tokens = request.sampling.max_tokens
        self._last_at: float | None = None
        self._num_tokens = 0
        self._itl = metrics.itl.labels(self._slo_class)
        #: Why the request misses its SLO; "": it does not, or the outcome says why.
        self._miss = ""
        self._is_met = False
        #: Whether the caller itself is the cause that there is no answer.
        self._is_callers = False
        self._exemplar = tracing.current().exemplar
        metrics.received.add(*self._labels)

    def admitted(self, slo: SloTarget, queued_s: float) -> None:
        """`slo`: the objectives after admission, which may have widened them."""
        self._slo = slo
        self._metrics.queue_seconds.labels(self._slo_class).observe(queued_s)

    def relayed(self, num_tokens: int) -> float:
        """Counts tokens on their way to the caller; returns the time."""
        now = time.monotonic()
        if self._last_at is None:
            self._first_at = now
            self._metrics.ttft.labels(self._slo_class).observe(now - self._arrived, self._exemplar)
        else:
            self._itl.observe(now - self._last_at)
        self._last_at = now
        self._num_tokens += num_tokens
        self._metrics.output.add(*self._labels, amount=num_tokens)
        return now

    def finished(self, end: decode_pb2.DecodeFinished) -> None:
        """Counts a complete answer by its receipt."""
        metrics, name, receipt = self._metrics, self._slo_class, end.receipt
        metrics.finished.labels(_FINISH_REASONS.get(end.reason, "abort")).inc()
        metrics.e2e.labels(name).observe(receipt.e2e_ns / NS_PER_S, self._exemplar)
        # Tokens of this computation; a resumed answer has earlier ones too.
        if self._num_tokens > 1:
            decode_s = (receipt.e2e_ns - receipt.ttft_ns) / NS_PER_S
            metrics.tpot.labels(name).observe(decode_s / (self._num_tokens - 1), self._exemplar)
        for stage in _STAGES:
            metrics.stages.labels(name, stage).observe(getattr(receipt, f"{stage}_ns") / NS_PER_S)
        metrics.inference.observe((receipt.prefill_ns + receipt.transfer_ns + receipt.decode_ns) / NS_PER_S)
        metrics.max_tokens.observe(self._max_tokens)
        metrics.prompt_length.labels(name).observe(receipt.prompt_tokens)
        metrics.output_length.labels(name).observe(receipt.output_tokens)
        metrics.prompt.labels(*self._labels).inc(receipt.prompt_tokens)
        metrics.cached.labels(*self._labels).inc(receipt.cached_tokens)
        for measured, took_ns, limit_ns in (
            ("ttft", receipt.ttft_ns, receipt.predicted_ttft_p90_ns),
            ("e2e", receipt.e2e_ns, receipt.predicted_e2e_p90_ns),
        ):
            if limit_ns:
                metrics.predictions.labels(name, measured).inc()
                metrics.predictions_held.labels(name, measured).inc(took_ns <= limit_ns)
        metrics.widened.labels(*self._labels).inc(receipt.slo_widened)
        self._is_met = receipt.slo_met
        self._miss = receipt.slo_miss_cause
        if receipt.slo_met:
            metrics.met.add(*self._labels)
            metrics.goodput.add(*self._labels, amount=receipt.output_tokens)

    def failed(self, error: InvalidRequestError | GatewayError) -> None:
        self._metrics.count_refusal(error)
        is_quota = isinstance(error, OverloadedError) and error.reason in _QUOTAS
        self._is_callers = is_quota or isinstance(error, InvalidRequestError)

    @property
    def is_in_time(self) -> bool:
        """Whether no objective is missed yet."""
        now, decode_s = time.monotonic(), 0.0
        if self._first_at is not None and self._last_at is not None:
            decode_s = self._last_at - self._first_at
        return not self._slo.miss(
            (self._first_at or now) - self._arrived,
            decode_s / max(self._num_tokens - 1, 1),
            now - self._arrived,
        )

    def ended(self, outcome: Outcome) -> None:
        """Call it last, whatever the outcome."""
        self._metrics.ended.labels(outcome.value).inc()
        if outcome in _ENDED_EARLY:
            self._metrics.finished.labels(_ENDED_EARLY[outcome]).inc()
        if outcome is Outcome.CANCELLED:
            self._is_callers = self.is_in_time
        if not self._is_met and not self._is_callers:
            self._metrics.misses.add(*self._labels, self._miss or outcome.value)


def _listed(fleet: Fleet) -> Values:
    roles = [pod.role for pod in fleet.pods()]
    return {(role.value,): float(roles.count(role)) for role in Role}


def _report_ages(fleet: Fleet) -> Values:
    """Seconds since each pod's last answer, plus the age of the report in it."""
    now = time.monotonic()
    return {
        (pod.role.value, pod.report.pod_id or pod.target): math.inf
        if pod.last_seen is None
        else now - pod.last_seen + pod.report.age_seconds
        for pod in fleet.pods()
    }


def _waiting_in_pods(admission: Admission, fleet: Fleet) -> int:
    """Requests in flight that no pod computes yet.

    Every request is on one decode pod, which also reports those as waiting whose prompts run on prefill pods.
    Pods report sums over all gateways; this gateway counts its share of them.
    """
    decode, prefill = fleet.healthy(Role.DECODE), fleet.healthy(Role.PREFILL)
    num_waiting = sum(pod.report.usage.requests_waiting for pod in decode)
    num_waiting -= sum(pod.report.usage.requests_running for pod in prefill)
    num_own = sum(pod.in_flight for pod in decode)
    if num_waiting <= 0 or not num_own:
        return 0
    share = num_own / (num_own + sum(pod.num_foreign for pod in decode))
    return min(round(share * num_waiting), admission.queue.num_in_flight)


def _kv_usage(fleet: Fleet) -> dict[tuple[str, ...], float]:
    used: dict[tuple[str, ...], float] = {}
    for role in Role:
        loads = [pod.load for pod in fleet.healthy(role)]
        total = sum(load.total_blocks for load in loads)
        if total:
            used[role.value,] = 1.0 - sum(load.free_blocks for load in loads) / total
    return used


def _saturation(admission: Admission, fleet: Fleet) -> float:
    of_places = admission.queue.num_in_flight / admission.queue.max_in_flight
    return max(of_places, _kv_usage(fleet).get((Role.DECODE.value,), 0.0), admission.gate.slack_used)
