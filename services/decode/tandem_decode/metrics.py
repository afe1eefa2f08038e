"""Metrics of the decode pod."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from tandem_drafting.native import Reliability
from tandem_engine.transport.base import DropCause
from tandem_pod.status import PodGauges
from tandem_service.metrics import LATENCY_BUCKETS_S, TOKEN_BUCKETS_S


class DecodeMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = Counter(
            "tandem_decode_requests", "Requests by outcome", ["outcome"], registry=registry
        )
        self.output_tokens = Counter("tandem_decode_output_tokens", "Tokens emitted", registry=registry)
        self.drafted_tokens = Counter("tandem_decode_drafted_tokens", "Guesses verified", registry=registry)
        self.accepted_tokens = Counter(
            "tandem_decode_accepted_tokens", "Guesses accepted, by source", ["source"], registry=registry
        )
        self.received_bytes = Counter(
            "tandem_kv_received_bytes", "KV payload bytes received", registry=registry
        )
        self.prefill_retries = Counter(
            "tandem_decode_prefill_retries", "Prefill attempts that failed", registry=registry
        )
        self.local_prefills = Counter(
            "tandem_decode_local_prefills",
            "Prompts computed on this pod, by reason",
            ["reason"],
            registry=registry,
        )
        self.transfer_seconds = Histogram(
            "tandem_kv_transfer_seconds",
            "From the first token's arrival to the last frame's",
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )
        self.tpot_seconds = Histogram(
            "tandem_decode_tpot_seconds",
            "Mean time per token after a request's first",
            buckets=TOKEN_BUCKETS_S,
            registry=registry,
        )
        self.pod = PodGauges(registry)
        self._dropped_frames = Gauge(
            "tandem_kv_dropped_frames",
            "KV frames dropped since the start, by cause",
            ["cause"],
            registry=registry,
        )
        self._lookahead_connected = Gauge(
            "tandem_lookahead_connected", "Open streams to the lookahead service", registry=registry
        )
        self._lookahead_dropped_spans = Gauge(
            "tandem_lookahead_dropped_spans",
            "Spans since the start that were dropped because the queue to the lookahead service was full",
            registry=registry,
        )

        self._guesses = {
            what: Gauge(
                f"tandem_draft_guesses_{what}",
                f"Guesses verified since the start{described}, by tenths of the predicted acceptance",
                ["tenth"],
                registry=registry,
            )
            for what, described in (
                ("sent", ""),
                ("predicted", ", as many as were to be accepted"),
                ("accepted", ", as many as were accepted"),
            )
        }

    def show_reliability(self, tenths: Sequence[Reliability]) -> None:
        """Predicted beside realised acceptance of guesses: the drafter's reliability curve."""
        for number, tenth in enumerate(tenths):
            label = f"{number / 10:.1f}"
            self._guesses["sent"].labels(label).set(tenth.num_guesses)
            self._guesses["predicted"].labels(label).set(tenth.predicted)
            self._guesses["accepted"].labels(label).set(tenth.accepted)

    def show_dropped_frames(self, dropped: Mapping[DropCause, int]) -> None:
        for cause, num_frames in dropped.items():
            self._dropped_frames.labels(cause.value).set(num_frames)

    def show_lookahead(self, *, connected: int, dropped_spans: int) -> None:
        self._lookahead_connected.set(connected)
        self._lookahead_dropped_spans.set(dropped_spans)
