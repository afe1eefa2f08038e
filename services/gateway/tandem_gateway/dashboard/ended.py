"""The requests that ended since the last sample, and sums over receipts, such as drafts by source."""

from __future__ import annotations

import statistics
import time
from collections import Counter, deque
from dataclasses import dataclass

from tandem_proto.v1 import common_pb2

from tandem_gateway.dashboard.rows import EndedRow, TtftRow
from tandem_gateway.errors import Outcome
from tandem_gateway.request import NS_PER_S, TokenizedRequest

#: Requests kept for the next sample; beyond it the oldest are dropped, but stay in the sums.
_MAX_PENDING = 1024
#: Ended requests shown per second.
SHOWN_PER_SECOND = 4


@dataclass(frozen=True)
class _Ended:
    """Without the request, whose prompt may be long."""

    row: EndedRow
    outcome: Outcome
    receipt: common_pb2.Receipt

    @property
    def rank(self) -> tuple[bool, bool, float]:
        """Sorts requests that ran and missed their SLO first, refused ones last; slow ones first."""
        return self.outcome is Outcome.REFUSED, self.receipt.slo_met, -self.row.e2e_s


class EndedRequests:
    """Belongs to one event loop."""

    def __init__(self) -> None:
        self._pending: deque[_Ended] = deque(maxlen=_MAX_PENDING)
        self.drafted: Counter[str] = Counter()
        self.accepted: Counter[str] = Counter()
        #: Requests that were admitted and have ended.
        self.num_ended = 0
        self.num_steps = 0
        self.num_prefill_retries = 0

    def add(
        self,
        request: TokenizedRequest,
        outcome: Outcome,
        receipt: common_pb2.Receipt | None,
        *,
        was_admitted: bool,
        refusal: str = "",
    ) -> None:
        """`receipt` None: the request has no complete answer; `refusal`: the message of its refusal."""
        self.num_ended += was_admitted
        if receipt is None:
            receipt = common_pb2.Receipt(slo_miss_reason=refusal)
        else:
            self.drafted.update(receipt.drafted_by_source)
            self.accepted.update(receipt.accepted_by_source)
            self.num_steps += receipt.decode_steps
            self.num_prefill_retries += receipt.prefill_retries
        row = _row(request, outcome, receipt, time.monotonic() - request.arrived)
        self._pending.append(_Ended(row, outcome, receipt))

    def take(self) -> tuple[list[EndedRow], TtftRow | None]:
        """Rows of some requests that ended since the last call, and the medians over all of them."""
        ended = list(self._pending)
        self._pending.clear()
        shown = sorted(ended, key=lambda one: one.rank)[:SHOWN_PER_SECOND]
        return [one.row for one in shown], _medians([one.receipt for one in ended])


def _medians(receipts: list[common_pb2.Receipt]) -> TtftRow | None:
    predicted = [receipt for receipt in receipts if receipt.predicted_ttft_p50_ns]
    if not predicted:
        return None
    actual, p50, p90 = (
        round(statistics.median(getattr(receipt, name) for receipt in predicted) / NS_PER_S, 4)
        for name in ("ttft_ns", "predicted_ttft_p50_ns", "predicted_ttft_p90_ns")
    )
    return TtftRow(len(predicted), actual, p50, p90)


def _row(request: TokenizedRequest, outcome: Outcome, receipt: common_pb2.Receipt, e2e_s: float) -> EndedRow:
    def seconds(nanoseconds: int) -> float:
        return round(nanoseconds / NS_PER_S, 4)

    return EndedRow(
        request_id=request.request_id,
        tenant=request.tenant,
        slo_class=request.slo.name,
        outcome=outcome.value,
        cause="" if receipt.slo_met else receipt.slo_miss_cause or outcome.value,
        miss_reason=receipt.slo_miss_reason,
        prompt_tokens=len(request.prompt_token_ids),
        cached_tokens=receipt.cached_tokens,
        output_tokens=receipt.output_tokens,
        decode_steps=receipt.decode_steps,
        queue_s=seconds(receipt.queue_ns),
        prefill_s=seconds(receipt.prefill_ns),
        transfer_s=seconds(receipt.transfer_ns),
        decode_s=seconds(receipt.decode_ns),
        failover_s=seconds(receipt.failover_ns),
        is_widened=receipt.slo_widened,
        ttft_s=seconds(receipt.ttft_ns),
        e2e_s=round(e2e_s, 4),
        ttft_p50_s=seconds(receipt.predicted_ttft_p50_ns),
        ttft_p90_s=seconds(receipt.predicted_ttft_p90_ns),
        e2e_p50_s=seconds(receipt.predicted_e2e_p50_ns),
        e2e_p90_s=seconds(receipt.predicted_e2e_p90_ns),
        ttft_objective_s=request.slo.ttft_s,
        tpot_objective_s=request.slo.tpot_s,
        e2e_objective_s=request.slo.e2e_s,
        prefill_pod=receipt.prefill_pod,
        decode_pod=receipt.decode_pod,
        prefill_retries=receipt.prefill_retries,
        decode_retries=receipt.decode_retries,
        preemptions=receipt.preemptions,
        transfer_bytes=receipt.transfer_bytes,
        drafted=dict(receipt.drafted_by_source),
        accepted=dict(receipt.accepted_by_source),
    )
