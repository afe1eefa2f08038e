"""Makes one sample a second from the gateway's state."""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Iterable

import structlog
from prometheus_client import Metric

from tandem_gateway.admission.admission import Admission
from tandem_gateway.admission.admitted import Admitted
from tandem_gateway.dashboard.ended import EndedRequests
from tandem_gateway.dashboard.history import History
from tandem_gateway.dashboard.rows import ClassRow, OpenRow, PodRow, Sample
from tandem_gateway.fleet.pods import Fleet, Pod
from tandem_gateway.metrics import GatewayMetrics

INTERVAL_S = 1.0
#: Most open requests shown.
_MAX_OPEN = 24
#: gRPC's messages of lost pods can be long.
_MAX_TROUBLE_CHARS = 120


class Sampler:
    """`await run()` on the event loop to which its arguments belong."""

    def __init__(
        self,
        history: History,
        metrics: GatewayMetrics,
        admission: Admission,
        fleet: Fleet,
        ended: EndedRequests,
    ) -> None:
        self._history = history
        self._metrics = metrics
        self._admission = admission
        self._fleet = fleet
        self._ended = ended

    async def run(self) -> None:
        """Runs until cancelled. Seconds in which the event loop was blocked have no sample."""
        due = time.monotonic()
        while True:
            try:
                self._history.append(self.sample())
            except Exception as error:
                # The gateway keeps serving; the page shows that samples are missing.
                structlog.get_logger("tandem.dashboard").exception("no sample", exc_info=error)
            due = max(due + INTERVAL_S, time.monotonic())
            await asyncio.sleep(due - time.monotonic())

    def sample(self) -> Sample:
        metrics, ended = self._metrics, self._ended
        open_requests = self._admission.open_requests()
        num_decoding = sum(one.num_places for one in open_requests if one.first_at is not None)
        requests, ttft = ended.take()
        return Sample(
            number=self._history.next_number,
            time=round(time.time(), 3),
            classes=self._classes(),
            misses=+metrics.misses.sums(2),
            queued=sum(one.num_places for one in open_requests if one.admitted_at is None),
            prefill=self._admission.queue.num_in_flight - num_decoding,
            decode=num_decoding,
            admitted=_total(metrics.queue_seconds.collect(), "_count"),
            begun=_total(metrics.ttft.collect(), "_count"),
            ended=ended.num_ended,
            predictions=_total(metrics.predictions.collect(), "_total", time="ttft"),
            predictions_held=_total(metrics.predictions_held.collect(), "_total", time="ttft"),
            ttft=ttft,
            drafted=ended.drafted,
            accepted=ended.accepted,
            steps=ended.num_steps,
            failovers=_by_label(metrics.failovers.collect(), "cause"),
            prefill_retries=ended.num_prefill_retries,
            pods=[_pod(pod) for pod in self._fleet.pods()],
            open=[
                _open(one)
                for one in heapq.nsmallest(_MAX_OPEN, open_requests, key=lambda one: one.request.arrived)
            ],
            requests=requests,
        )

    def _classes(self) -> dict[str, ClassRow]:
        metrics = self._metrics
        counters = (metrics.received, metrics.met, metrics.misses, metrics.goodput, metrics.output)
        sums = [counter.sums(0) for counter in counters]
        return {name: ClassRow(*(of_class[name] for of_class in sums)) for name in metrics.slo_classes}


def _total(families: Iterable[Metric], suffix: str, **labels: str) -> int:
    """Sums a counter (suffix `_total`) or a histogram's observations (`_count`) over all other labels."""
    return int(
        sum(
            sample.value
            for family in families
            for sample in family.samples
            if sample.name.endswith(suffix) and labels.items() <= sample.labels.items()
        )
    )


def _by_label(families: Iterable[Metric], label: str) -> dict[str, int]:
    """The values of a counter with this label alone, without zeros."""
    return {
        sample.labels[label]: int(sample.value)
        for family in families
        for sample in family.samples
        if sample.name.endswith("_total") and sample.value
    }


def _pod(pod: Pod) -> PodRow:
    usage = pod.report.usage
    return PodRow(
        role=pod.role.value,
        pod_id=pod.report.pod_id or pod.target,
        target=pod.target,
        trouble=pod.cause[:_MAX_TROUBLE_CHARS],
        kv_used=usage.blocks_used,
        kv_cached=usage.blocks_cached,
        kv_blocks=usage.blocks_total,
        waiting=usage.requests_waiting,
        running=usage.requests_running,
        transfers=usage.transfers_open,
        age_s=None if pod.last_seen is None else round(time.monotonic() - pod.last_seen, 1),
    )


def _open(admitted: Admitted) -> OpenRow:
    request, first_at = admitted.request, admitted.first_at
    return OpenRow(
        request_id=request.request_id,
        slo_class=request.slo.name,
        age_s=round(time.monotonic() - request.arrived, 3),
        queued_s=None if admitted.admitted_at is None else round(admitted.queued_s, 3),
        ttft_s=None if first_at is None else round(first_at - request.arrived, 3),
        prompt_tokens=len(request.prompt_token_ids),
        output_tokens=admitted.num_tokens,
    )
