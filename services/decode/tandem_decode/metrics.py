"""Metrics of the decode pod."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from prometheus_client import CollectorRegistry
from tandem_drafting.native import Reliability
from tandem_engine.transport.base import DropCause
from tandem_pod.status import PodGauges
from tandem_service import metric_table as table
from tandem_service.metric_rows import Values

from tandem_decode.prefill_stream import FailureKind


class DecodeMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = table.DECODE_REQUESTS.make(registry)
        self.output_tokens = table.DECODE_OUTPUT_TOKENS.make(registry)
        self.steps = table.DECODE_STEPS.make(registry)
        self.drafts = table.DRAFTS.make(registry)
        self.drafted_tokens = table.DRAFTED_TOKENS.make(registry)
        self.accepted_tokens = table.ACCEPTED_TOKENS.make(registry)
        self.drafted_at = table.DRAFTED_AT.make(registry)
        self.accepted_at = table.ACCEPTED_AT.make(registry)
        self.received_bytes = table.KV_RECEIVED_BYTES.make(registry)
        self.handoffs = table.HANDOFFS.make(registry)
        self.local_prefills = table.LOCAL_PREFILLS.make(registry)
        self.transfer_seconds = table.TRANSFER_SECONDS.make(registry)
        self.tpot_seconds = table.DECODE_TPOT.make(registry)
        self.preemptions = table.DECODE_PREEMPTIONS.make(registry)
        self.pod = PodGauges(registry)
        self._handoff_queue = table.HANDOFF_QUEUE.make(registry)
        self._lookahead_connected = table.LOOKAHEAD_CONNECTED.make(registry)
        # Counted elsewhere since the pod's start; `show_*` replaces them.
        self._dropped_frames: Values = {}
        self._dropped_spans: Values = {(): 0.0}
        self._reliability: tuple[Reliability, ...] = ()
        table.KV_DROPPED_FRAMES.view(registry, lambda: self._dropped_frames)
        table.LOOKAHEAD_DROPPED_SPANS.view(registry, lambda: self._dropped_spans)
        table.GUESSES_SENT.view(registry, lambda: self._tenths(lambda tenth: tenth.num_guesses))
        table.GUESSES_PREDICTED.view(registry, lambda: self._tenths(lambda tenth: tenth.predicted))
        table.GUESSES_ACCEPTED.view(registry, lambda: self._tenths(lambda tenth: tenth.accepted))

        # Creates the series before the first failure.
        for outcome in ("ok", *(kind.value for kind in FailureKind)):
            self.handoffs.labels(outcome)

    def show_reliability(self, tenths: Sequence[Reliability]) -> None:
        """Shows the drafter's reliability curve: predicted and actual acceptance of draft tokens."""
        self._reliability = tuple(tenths)

    def show_dropped_frames(self, dropped: Mapping[DropCause, int]) -> None:
        self._dropped_frames = {(cause.value,): float(num_frames) for cause, num_frames in dropped.items()}

    def show_handoffs(self, counts: Mapping[str, int]) -> None:
        """Shows the number of prompts by state of their handoff."""
        for state, count in counts.items():
            self._handoff_queue.labels(state).set(count)

    def show_lookahead(self, *, connected: int, dropped_spans: int) -> None:
        self._lookahead_connected.set(connected)
        self._dropped_spans = {(): float(dropped_spans)}

    def _tenths(self, value: Callable[[Reliability], float]) -> Values:
        return {(f"{number / 10:.1f}",): value(tenth) for number, tenth in enumerate(self._reliability)}
