"""Collects a request's figures on this pod for its receipt."""

from __future__ import annotations

import time
from collections import Counter

from tandem_engine.beam_search import Hypothesis
from tandem_engine.engine import StepOutput
from tandem_engine.request import Request
from tandem_proto.v1 import common_pb2
from tandem_service.tracing import RequestTrace, Value

from tandem_decode.handoff import Attempts, HandoffResult


class RequestRecord:
    """Sums up a request's steps; the gateway adds its own queue, TTFT and the SLO."""

    def __init__(self, request: Request, request_id: str, pod_id: str) -> None:
        self._request = request
        #: The caller's id; the engine's id is unique per call.
        self._request_id = request_id
        self._pod_id = pod_id
        self.arrived_ns = time.monotonic_ns()
        self._first_token_ns = 0
        self._last_token_ns = 0
        self._handoff = HandoffResult()
        self.attempts = Attempts()
        self._steps = 0
        self._num_drafts = 0
        #: Draft tokens by their position in the draft.
        self.drafted_at: Counter[int] = Counter()
        self.accepted_at: Counter[int] = Counter()
        self._drafted: Counter[str] = Counter()
        self._accepted: Counter[str] = Counter()
        self._hits = 0
        self._hits_by_source: Counter[str] = Counter()
        self._output_tokens = 0
        self._longest_gap_ns = 0

    def handed_off(self, result: HandoffResult) -> None:
        self._handoff = result

    def step(self, output: StepOutput) -> None:
        now = time.monotonic_ns()
        if not self._first_token_ns:
            self._first_token_ns = now
        else:
            self._steps += 1
            self._longest_gap_ns = max(self._longest_gap_ns, now - self._last_token_ns)
        self._last_token_ns = now
        self._num_drafts += bool(output.drafted_sources)
        self.drafted_at.update(output.drafted_positions)
        self.accepted_at.update(range(len(output.accepted_sources)))
        self._drafted.update(output.drafted_sources)
        self._accepted.update(output.accepted_sources)
        self._hits += bool(output.accepted_sources)
        self._hits_by_source.update(set(output.accepted_sources))
        self._output_tokens += len(output.token_ids)

    def found(self, hypothesis: Hypothesis) -> None:
        """Notes the best text of a beam search, whose steps emit no tokens."""
        self._output_tokens = len(hypothesis.token_ids)

    @property
    def has_tokens(self) -> bool:
        return self._first_token_ns > 0

    @property
    def num_preemptions(self) -> int:
        return self._request.num_preemptions

    def trace_prefill(self, trace: RequestTrace) -> None:
        """Adds the stage of a prompt that is computed here, whose start the engine's thread reports later."""
        if not self._handoff.prefill_pod and self._request.first_scheduled_ns is not None:
            trace.stage("prefill", at_ns=self._request.first_scheduled_ns)

    def trace_attributes(self) -> dict[str, Value]:
        """Attributes of the decode stage; steps have no spans."""
        accepted = {f"tandem.decode.accepted.{source}": count for source, count in self._accepted.items()}
        return {
            "tandem.decode.tokens": self._output_tokens,
            "tandem.decode.steps": self._steps,
            "tandem.decode.drafted_tokens": self._drafted.total(),
            "tandem.decode.accepted_tokens": self._accepted.total(),
            "tandem.decode.longest_gap_s": self._longest_gap_ns / 1e9,
            "tandem.preemptions": self.num_preemptions,
            **accepted,
        }

    def receipt(self) -> common_pb2.Receipt:
        request, handoff = self._request, self._handoff
        first = self._first_token_ns or time.monotonic_ns()
        if handoff.prefill_pod:
            queue_ns, prefill_ns = handoff.reserve_ns + handoff.queue_ns, handoff.prefill_ns
        else:
            started = request.first_scheduled_ns or first
            queue_ns, prefill_ns = started - self.arrived_ns, first - started
        return common_pb2.Receipt(
            request_id=self._request_id,
            queue_ns=max(queue_ns, 0),
            prefill_ns=max(prefill_ns, 0),
            transfer_ns=handoff.transfer_ns,
            decode_ns=max(self._last_token_ns - first, 0),
            prompt_tokens=request.num_prompt_tokens,
            cached_tokens=max(request.num_cached_tokens, handoff.remote_cached_tokens),
            output_tokens=self._output_tokens,
            decode_steps=self._steps,
            drafted_tokens=self._drafted.total(),
            drafted_by_source=dict(self._drafted),
            accepted_tokens=self._accepted.total(),
            accepted_by_source=dict(self._accepted),
            prefill_pod=handoff.prefill_pod,
            decode_pod=self._pod_id,
            transfer_bytes=handoff.transfer_bytes,
            seed=request.sampling.seed,
            preemptions=request.num_preemptions,
            prefill_retries=self.attempts.num_failed,
            hit_steps=self._hits,
            hit_steps_by_source=dict(self._hits_by_source),
            drafts=self._num_drafts,
            accepted_at=[self.accepted_at[position] for position in sorted(self.accepted_at)],
            prefill_preemptions=handoff.num_preemptions,
        )
