"""What the dashboard's samples cost a gateway: CPU time of one a second, and memory of half an hour.

    python -P benchmarks/dashboard_samples.py

The gateway's own parts are filled by hand: tenants that have used every class, pods with a report, requests
in flight, and requests that end before each sample.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack

from prometheus_client import CollectorRegistry
from tandem_core.sampling import SamplingParams
from tandem_core.slo import DEFAULT_SLO_CLASSES
from tandem_gateway.admission import Admission
from tandem_gateway.dashboard.ended import EndedRequests
from tandem_gateway.dashboard.history import MAX_BYTES, MAX_SAMPLES, History
from tandem_gateway.dashboard.sampler import INTERVAL_S, Sampler
from tandem_gateway.errors import Outcome
from tandem_gateway.fleet import Fleet, Pod, Role
from tandem_gateway.forecast import Forecaster
from tandem_gateway.metrics import GatewayMetrics
from tandem_gateway.request import TokenizedRequest
from tandem_gateway.routing import OutputLengths, Router
from tandem_gateway.settings import Policy
from tandem_proto.v1 import common_pb2

#: Tenants, pods, requests in flight, requests that end per second.
CASES = ((1, 2, 0, 0), (1, 4, 24, 10), (100, 20, 128, 50), (100, 100, 384, 100))
NUM_SAMPLES = 300

RECEIPT = common_pb2.Receipt(
    prefill_pod="prefill-0", decode_pod="decode-0", output_tokens=100, decode_steps=30, slo_met=True,
    ttft_ns=100_000_000, predicted_ttft_p50_ns=90_000_000, predicted_ttft_p90_ns=200_000_000, e2e_ns=10**9,
    drafted_by_source={"prompt": 30, "global": 20, "output": 10},
    accepted_by_source={"prompt": 3, "global": 2, "output": 10},
)  # fmt: skip


class ListedFleet(Fleet):
    """Pods that have reported and are not polled."""

    def __init__(self, num_pods: int) -> None:
        super().__init__({}, model_revision="", poll_interval_s=1.0)
        self._listed = [Pod(Role.DECODE, f"127.0.0.1:{1 + number}") for number in range(num_pods)]
        usage = common_pb2.ResourceUsage(
            blocks_total=5000, blocks_used=1200, blocks_cached=3000, requests_running=20
        )
        for number, pod in enumerate(self._listed):
            pod.report = common_pb2.PodStatus(pod_id=f"decode-{number}", usage=usage)
            pod.cause, pod.last_seen = "", time.monotonic()

    def pods(self) -> list[Pod]:
        return self._listed


def request(number: int, tenant: int = 0, slo_class: str = "interactive") -> TokenizedRequest:
    now = time.monotonic()
    slo = DEFAULT_SLO_CLASSES[slo_class]
    return TokenizedRequest(
        f"{number:032x}", f"tenant-{tenant}", (1,) * 300, SamplingParams(), slo, now, now + 600
    )


async def measure(num_tenants: int, num_pods: int, num_open: int, num_ending: int) -> tuple[float, float]:
    """CPU seconds and bytes per sample."""
    metrics, fleet = GatewayMetrics(CollectorRegistry(), model_name="m"), ListedFleet(num_pods)
    lengths = OutputLengths()
    forecaster = Forecaster(Router(fleet, lengths), lengths, first_confidence=0.99, end_confidence=0.9)
    admission = Admission(forecaster, max_in_flight=384, max_queue=0, policy=Policy.FIFO, slack=0.0)
    history, ended = History(max_bytes=1 << 30), EndedRequests()
    sampler = Sampler(history, metrics, admission, fleet, ended)
    for tenant in range(num_tenants):
        for name in DEFAULT_SLO_CLASSES:
            metrics.of(request(0, tenant, name)).ended(Outcome.OK)
    cpu_s = 0.0
    async with AsyncExitStack() as stack:
        for number in range(num_open):
            admitted = await stack.enter_async_context(admission.slot(request(number)))
            admitted.first_at = time.monotonic()
        for _ in range(NUM_SAMPLES):
            ending = [request(number) for number in range(num_ending)]
            begun = time.process_time()
            for one in ending:
                ended.add(one, Outcome.OK, RECEIPT, was_admitted=True)
            history.append(sampler.sample())
            cpu_s += time.process_time() - begun
    return cpu_s / NUM_SAMPLES, history.num_bytes / NUM_SAMPLES


async def main() -> None:
    print("| tenants | pods | in flight | ending/s | CPU ms per sample | share of a core | 30 minutes, MB |")
    print("|---|---|---|---|---|---|---|")
    for case in CASES:
        cpu_s, num_bytes = await measure(*case)
        kept = min(num_bytes * MAX_SAMPLES, MAX_BYTES) / 1e6
        cells = (*case, f"{cpu_s * 1000:.2f}", f"{cpu_s / INTERVAL_S:.2%}", f"{kept:.1f}")
        print(f"| {' | '.join(map(str, cells))} |")


if __name__ == "__main__":
    asyncio.run(main())
