"""The table of metrics: names, meanings, labels, and the processes that serve them.

Processes make their Prometheus objects from these rows (`REQUESTS.make(registry)`); the Grafana dashboards,
the alert rules and the table in docs/observability.md are generated from them. After a change of this file
run deploy/observability/generate.py.

`tandem_*` names are Tandem's. `vllm:*` names are those of vLLM and of the Gateway API inference extension's
model-server protocol, with the meanings that vLLM gives them. Their data is that of the `tandem_*` row in
`sources`, or comes from receipts and reports of pods. Only gateways serve them, and each gateway serves all
of them: queries that take their instance from one name find the others there, and sums over all processes
count nothing twice.

To add a metric: one row here, one `make` or `view` where it is measured, a panel in
deploy/observability/grafana_dashboards.py. Predicted times and their errors belong to the section
"Prediction"; reasons of refusals are values of `REFUSED`'s label.
"""

from __future__ import annotations

from tandem_core.slo import DEFAULT_SLO_CLASSES

from tandem_service.metric_rows import (
    CounterRow,
    GaugeRow,
    HistogramRow,
    Process,
    Row,
    Source,
    Unit,
    with_targets,
)

_GATEWAY = (Process.GATEWAY,)
_DECODE = (Process.DECODE,)
_PODS = (Process.DECODE, Process.PREFILL)
_LOOKAHEAD = (Process.LOOKAHEAD,)
_SCALER = (Process.SCALER,)
_SERVERS = (*_GATEWAY, *_PODS, *_LOOKAHEAD)

#: Seconds.
LATENCY_BUCKETS_S = with_targets(
    (0.005, 0.01, 0.025, 0.05, 0.1, 0.15, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 7.5, 10.0,
     20.0, 30.0, 60.0, 120.0),
    (target for slo in DEFAULT_SLO_CLASSES.values() for target in (slo.ttft_s, slo.e2e_s)),
)  # fmt: skip
#: Seconds per token.
TOKEN_BUCKETS_S = with_targets(
    (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0),
    (slo.tpot_s for slo in DEFAULT_SLO_CLASSES.values()),
)
#: Tokens of a request.
_LENGTH_BUCKETS = tuple(float(2**n) for n in range(4, 18))
#: Tokens of a request in vLLM's buckets.
_ONE_TWO_FIVE = tuple(float(digit * 10**n) for n in range(6) for digit in (1, 2, 5))


def _counter(
    name: str, help_: str, *labels: str, by: tuple[Process, ...], unit: Unit = Unit.COUNT
) -> CounterRow:
    return CounterRow(name, help_, labels, unit, by)


def _gauge(name: str, help_: str, *labels: str, by: tuple[Process, ...], unit: Unit = Unit.COUNT) -> GaugeRow:
    return GaugeRow(name, help_, labels, unit, by)


def _seconds(
    name: str,
    help_: str,
    *labels: str,
    by: tuple[Process, ...],
    buckets: tuple[float, ...] = LATENCY_BUCKETS_S,
) -> HistogramRow:
    return HistogramRow(name, help_, labels, Unit.SECONDS, by, buckets=buckets)


# -- every gRPC server ---------------------------------------------------------------------------------

GRPC_CALLS = _counter("tandem_grpc_calls_total", "gRPC calls ended", "method", "code", by=_SERVERS)
GRPC_CALL_SECONDS = _seconds("tandem_grpc_call_seconds", "Duration of gRPC calls", "method", by=_SERVERS)

# -- gateway: requests. Tenants are those of the keys file, or "default", so there are few of them. -------

REQUESTS = _counter(
    "tandem_requests_total", "Requests ended, by outcome", "outcome", by=_GATEWAY, unit=Unit.REQUESTS
)
FINISHED = _counter(
    "tandem_finished_requests_total",
    "Requests whose answer ended: stop, length, abort (the client left or its deadline passed) or error",
    "finish_reason",
    by=_GATEWAY,
    unit=Unit.REQUESTS,
)
REFUSED = _counter(
    "tandem_refused_requests_total",
    "Requests and calls refused for now, by reason",
    "reason",
    by=_GATEWAY,
    unit=Unit.REQUESTS,
)
SLO_RECEIVED = _counter(
    "tandem_slo_requests_received_total",
    "Well-formed requests received; the base of attainment",
    "slo_class",
    "tenant",
    by=_GATEWAY,
    unit=Unit.REQUESTS,
)
SLO_MET = _counter(
    "tandem_slo_requests_met_total",
    "Requests that met every objective",
    "slo_class",
    "tenant",
    by=_GATEWAY,
    unit=Unit.REQUESTS,
)
SLO_MISSES = _counter(
    "tandem_slo_misses_total",
    "Requests that missed an objective, by the stage that took longer than predicted, or by how an "
    "incomplete answer ended",
    "slo_class",
    "tenant",
    "cause",
    by=_GATEWAY,
    unit=Unit.REQUESTS,
)
SLO_WIDENED = _counter(
    "tandem_slo_widened_total",
    "Finished requests with widened objectives, because an idle system could not meet the original ones; "
    "judged by the wider ones",
    "slo_class",
    "tenant",
    by=_GATEWAY,
    unit=Unit.REQUESTS,
)
GOODPUT_TOKENS = _counter(
    "tandem_goodput_tokens_total",
    "Output tokens of requests that met every objective",
    "slo_class",
    "tenant",
    by=_GATEWAY,
    unit=Unit.TOKENS,
)
OUTPUT_TOKENS = _counter(
    "tandem_output_tokens_total",
    "Output tokens relayed",
    "slo_class",
    "tenant",
    by=_GATEWAY,
    unit=Unit.TOKENS,
)
PROMPT_TOKENS = _counter(
    "tandem_prompt_tokens_total",
    "Prompt tokens of finished requests",
    "slo_class",
    "tenant",
    by=_GATEWAY,
    unit=Unit.TOKENS,
)
CACHED_PROMPT_TOKENS = _counter(
    "tandem_cached_prompt_tokens_total",
    "Prompt tokens found in a prefix cache",
    "slo_class",
    "tenant",
    by=_GATEWAY,
    unit=Unit.TOKENS,
)
TTFT_SECONDS = _seconds(
    "tandem_ttft_seconds", "Request received to first token relayed", "slo_class", by=_GATEWAY
)
TPOT_SECONDS = _seconds(
    "tandem_tpot_seconds",
    "Mean time per output token after the first, of finished requests",
    "slo_class",
    by=_GATEWAY,
    buckets=TOKEN_BUCKETS_S,
)
ITL_SECONDS = _seconds(
    "tandem_itl_seconds",
    "Time between two messages with tokens of one answer; a message has the tokens of one step",
    "slo_class",
    by=_GATEWAY,
    buckets=TOKEN_BUCKETS_S,
)
E2E_SECONDS = _seconds(
    "tandem_e2e_seconds", "Request received to last token relayed", "slo_class", by=_GATEWAY
)
QUEUE_SECONDS = _seconds(
    "tandem_queue_seconds", "Wait for admission at the gateway", "slo_class", by=_GATEWAY
)
STAGE_SECONDS = _seconds(
    "tandem_stage_seconds",
    "Time of finished requests by stage: queue (gateway and pods), prefill, transfer, decode, failover",
    "slo_class",
    "stage",
    by=_GATEWAY,
)
REQUEST_PROMPT_TOKENS = HistogramRow(
    "tandem_request_prompt_tokens",
    "Prompt tokens of a finished request",
    ("slo_class",),
    Unit.TOKENS,
    _GATEWAY,
    buckets=_LENGTH_BUCKETS,
)
REQUEST_OUTPUT_TOKENS = HistogramRow(
    "tandem_request_output_tokens",
    "Output tokens of a finished request",
    ("slo_class",),
    Unit.TOKENS,
    _GATEWAY,
    buckets=_LENGTH_BUCKETS,
)
SLO_TARGET_SECONDS = _gauge(
    "tandem_slo_target_seconds",
    "Objectives of the SLO classes: ttft, tpot, e2e",
    "slo_class",
    "objective",
    by=_GATEWAY,
    unit=Unit.SECONDS,
)
FAILOVERS = _counter(
    "tandem_decode_failovers_total",
    "Requests moved to another decode pod: crashed, silent, unreachable, draining",
    "cause",
    by=_GATEWAY,
)
ANSWERS_RESUMED = _counter(
    "tandem_answers_resumed_total",
    "Requests that resumed or joined an earlier answer, by how they named it",
    "by",
    by=_GATEWAY,
)
ANSWERS_NOT_KEPT = _counter(
    "tandem_answers_not_kept_total",
    "Answers that cannot be resumed because memory is full (memory), or whose idempotency key holds at this "
    "gateway only because Redis does not answer (redis)",
    "cause",
    by=_GATEWAY,
)
GATEWAY_REDIS_CONNECTED = _gauge(
    "tandem_gateway_redis_connected",
    "1 while Redis answers, so that other gateways can resume answers; absent without --redis-url",
    by=_GATEWAY,
)
KEPT_ANSWER_BYTES = _gauge(
    "tandem_kept_answer_bytes", "Memory of the answers that can be resumed", by=_GATEWAY, unit=Unit.BYTES
)

# -- gateway: admission and the fleet ----------------------------------------------------------------------

QUEUE_LENGTH = _gauge(
    "tandem_queue_length", "Requests waiting for admission", by=_GATEWAY, unit=Unit.REQUESTS
)
IN_FLIGHT = _gauge(
    "tandem_requests_in_flight",
    "Admitted requests that have not ended",
    by=_GATEWAY,
    unit=Unit.REQUESTS,
)
ADMISSION_LIMIT = _gauge(
    "tandem_admission_limit", "Most requests that may be in flight", by=_GATEWAY, unit=Unit.REQUESTS
)
SATURATION = _gauge(
    "tandem_saturation_ratio",
    "Maximum of: requests in flight / limit; KV use of the decode pods; share of the objectives' spare time "
    "that load was predicted to take (mean of 10 s, 1 for a refused or late request). 1 is full",
    by=_GATEWAY,
    unit=Unit.RATIO,
)
HEALTHY_PODS = _gauge("tandem_healthy_pods", "Pods that answer and are serving", "role", by=_GATEWAY)
LISTED_PODS = _gauge("tandem_listed_pods", "Pods that discovery lists", "role", by=_GATEWAY)
REPORT_AGE = _gauge(
    "tandem_pod_report_age_seconds",
    "Age of a pod's last report, including the age of the engine's state in it; infinite before the first",
    "role",
    "pod_id",
    by=_GATEWAY,
    unit=Unit.SECONDS,
)
FLEET_KV_USAGE = _gauge(
    "tandem_fleet_kv_usage_ratio",
    "Share of the KV blocks of a role's healthy pods that requests and transfers use",
    "role",
    by=_GATEWAY,
    unit=Unit.RATIO,
)

# -- gateway: prediction -----------------------------------------------------------------------------------

PREDICTIONS = _counter(
    "tandem_predictions_total",
    "Finished requests with a time predicted at admission: ttft or e2e",
    "slo_class",
    "time",
    by=_GATEWAY,
    unit=Unit.REQUESTS,
)
PREDICTIONS_HELD = _counter(
    "tandem_predictions_held_total",
    "Finished requests within the predicted 90th percentile",
    "slo_class",
    "time",
    by=_GATEWAY,
    unit=Unit.REQUESTS,
)
PREDICTED_SERVICE = _gauge(
    "tandem_predicted_service_seconds",
    "Predicted time from admission to end of a request",
    by=_GATEWAY,
    unit=Unit.SECONDS,
)
PREDICTED_TTFT = _gauge(
    "tandem_predicted_ttft_seconds",
    "Predicted TTFT of a new prompt of 4096 tokens",
    by=_GATEWAY,
    unit=Unit.SECONDS,
)

# -- pods with an engine -----------------------------------------------------------------------------------

KV_BLOCKS = _gauge(
    "tandem_kv_blocks",
    "KV blocks: free, kept for the prefix cache (cached), or used by requests and transfers",
    "state",
    by=_PODS,
)
POD_REQUESTS = _gauge(
    "tandem_requests",
    "Requests: waiting for the batch, for blocks or for KV; running; with an open KV transfer (transferring)",
    "state",
    by=_PODS,
    unit=Unit.REQUESTS,
)
STATUS_AGE = _gauge(
    "tandem_engine_status_age_seconds",
    "Time since the engine's last report; grows while a step runs or the engine hangs",
    by=_PODS,
    unit=Unit.SECONDS,
)
VIOLATIONS = _gauge(
    "tandem_invariant_violations",
    "Broken invariants found by the pod's last check of blocks and queues",
    by=_PODS,
)
KV_BLOCK_TOKENS = _gauge("tandem_kv_block_tokens", "Tokens of a KV block", by=_PODS, unit=Unit.TOKENS)
STEP_LIMIT = _gauge(
    "tandem_step_limit",
    "Most prompt tokens (chunk) and sequences (batch) of a step",
    "of",
    by=_PODS,
)
STEP_COST = _gauge(
    "tandem_step_cost_seconds",
    "Learned costs of steps with prompts (prefill) and without (decode): per step, per token (decode: "
    "sequence), and per pair of a token and an earlier token that it attends to",
    "steps",
    "per",
    by=_PODS,
    unit=Unit.SECONDS,
)
PROMPT_BACKLOG = _gauge(
    "tandem_prompt_backlog_seconds",
    "Predicted time to compute all prompts of the pod",
    by=_PODS,
    unit=Unit.SECONDS,
)
TOKENS_PER_STEP = _gauge(
    "tandem_tokens_per_step",
    "Recent tokens per sequence and decode step; 1 without accepted drafts, 0 on prefill pods",
    by=_PODS,
    unit=Unit.TOKENS,
)
KV_COPIES = _counter(
    "tandem_kv_copies_total", "Copies of KV from (read) and to (write) the GPU", "direction", by=_PODS
)
KV_COPIED_BYTES = _counter(
    "tandem_kv_copied_bytes_total", "Bytes of these copies", "direction", by=_PODS, unit=Unit.BYTES
)
KV_COPY_WAIT = _counter(
    "tandem_kv_copy_wait_seconds_total",
    "Time that senders waited for a copy (read) and receivers for a buffer (write)",
    "direction",
    by=_PODS,
    unit=Unit.SECONDS,
)
KV_COPIED_OUT = _counter(
    "tandem_kv_frames_copied_out_total", "Frames copied once more because pinned buffers ran short", by=_PODS
)

# -- decode pod. What its requests did is counted when they end. -------------------------------------------

DECODE_REQUESTS = _counter(
    "tandem_decode_requests_total", "Requests by outcome", "outcome", by=_DECODE, unit=Unit.REQUESTS
)
DECODE_OUTPUT_TOKENS = _counter(
    "tandem_decode_output_tokens_total", "Tokens emitted", by=_DECODE, unit=Unit.TOKENS
)
DECODE_STEPS = _counter(
    "tandem_decode_steps_total",
    "Verification passes, summed over sequences; each emits one token and the accepted draft tokens",
    by=_DECODE,
)
DRAFTS = _counter("tandem_decode_drafts_total", "Verification passes over a draft", by=_DECODE)
DRAFTED_TOKENS = _counter(
    "tandem_decode_drafted_tokens_total",
    "Draft tokens verified, by source",
    "source",
    by=_DECODE,
    unit=Unit.TOKENS,
)
ACCEPTED_TOKENS = _counter(
    "tandem_decode_accepted_tokens_total",
    "Draft tokens accepted, by source",
    "source",
    by=_DECODE,
    unit=Unit.TOKENS,
)
DRAFTED_AT = _counter(
    "tandem_decode_drafted_at_total",
    "Draft tokens verified, by number of draft tokens before them on their path",
    "position",
    by=_DECODE,
    unit=Unit.TOKENS,
)
ACCEPTED_AT = _counter(
    "tandem_decode_accepted_at_total",
    "Draft tokens accepted, by number of accepted ones before them in the step",
    "position",
    by=_DECODE,
    unit=Unit.TOKENS,
)
_TENTHS = "by tenths of the predicted acceptance"
GUESSES_SENT = _counter(
    "tandem_draft_guesses_sent_total",
    f"Draft tokens verified, {_TENTHS}",
    "tenth",
    by=_DECODE,
    unit=Unit.TOKENS,
)
GUESSES_PREDICTED = _counter(
    "tandem_draft_guesses_predicted_total",
    f"Draft tokens expected to be accepted, {_TENTHS}",
    "tenth",
    by=_DECODE,
    unit=Unit.TOKENS,
)
GUESSES_ACCEPTED = _counter(
    "tandem_draft_guesses_accepted_total",
    f"Draft tokens accepted, {_TENTHS}",
    "tenth",
    by=_DECODE,
    unit=Unit.TOKENS,
)
DECODE_TPOT = _seconds(
    "tandem_decode_tpot_seconds",
    "Mean time per token after a request's first",
    by=_DECODE,
    buckets=TOKEN_BUCKETS_S,
)
DECODE_PREEMPTIONS = _counter(
    "tandem_decode_preemptions_total", "Times a request gave up its KV blocks to an older one", by=_DECODE
)
LOCAL_PREFILLS = _counter(
    "tandem_decode_local_prefills_total",
    "Prompts computed on this pod, by reason; `no pod delivered`: every prefill pod failed",
    "reason",
    by=_DECODE,
    unit=Unit.REQUESTS,
)
HANDOFFS = _counter(
    "tandem_handoffs_total",
    "Attempts to get a prompt's KV from a prefill pod: ok, or the cause of failure",
    "outcome",
    by=_DECODE,
)
HANDOFF_QUEUE = _gauge(
    "tandem_handoff_queue_length",
    "Prompts handed to a prefill pod: waiting for blocks here (bootstrapping), waiting for the first frame "
    "(waiting), receiving frames (transferring)",
    "state",
    by=_DECODE,
    unit=Unit.REQUESTS,
)
TRANSFER_SECONDS = _seconds(
    "tandem_kv_transfer_seconds", "From the first token's arrival to the last frame's", by=_DECODE
)
KV_RECEIVED_BYTES = _counter(
    "tandem_kv_received_bytes_total", "KV payload bytes received", by=_DECODE, unit=Unit.BYTES
)
KV_DROPPED_FRAMES = _counter(
    "tandem_kv_dropped_frames_total", "KV frames dropped, by cause", "cause", by=_DECODE
)
LOOKAHEAD_CONNECTED = _gauge(
    "tandem_lookahead_connected", "Open streams to the lookahead service", by=_DECODE
)
LOOKAHEAD_DROPPED_SPANS = _counter(
    "tandem_lookahead_dropped_spans_total",
    "Spans dropped because the queue to the lookahead service was full",
    by=_DECODE,
)

# -- prefill. A decode pod that drains serves prefill too, so it has these. --------------------------------

PREFILL_REQUESTS = _counter(
    "tandem_prefill_requests_total", "Prompts by outcome", "outcome", by=_PODS, unit=Unit.REQUESTS
)
PREFILL_PROMPT_TOKENS = _counter(
    "tandem_prefill_prompt_tokens_total",
    "Prompt tokens computed or found in the prefix cache",
    by=_PODS,
    unit=Unit.TOKENS,
)
PREFILL_CACHED_TOKENS = _counter(
    "tandem_prefill_cached_tokens_total",
    "Prompt tokens found in the prefix cache",
    by=_PODS,
    unit=Unit.TOKENS,
)
PREFILL_QUEUE_SECONDS = _seconds(
    "tandem_prefill_queue_seconds", "From a prompt's arrival to its first step", by=_PODS
)
PREFILL_SECONDS = _seconds(
    "tandem_prefill_seconds", "From a prompt's first step to its first token", by=_PODS
)
PREFILL_PREEMPTIONS = _counter(
    "tandem_prefill_preemptions_total", "Times a prompt gave up its KV blocks to an older one", by=_PODS
)
KV_SENT_BYTES = _counter("tandem_kv_sent_bytes_total", "KV payload bytes sent", by=_PODS, unit=Unit.BYTES)

# -- lookahead service -------------------------------------------------------------------------------------

SPANS_RECEIVED = _counter("tandem_lookahead_spans_received_total", "Spans that pods sent", by=_LOOKAHEAD)
TOKENS_MERGED = _counter(
    "tandem_lookahead_tokens_merged_total",
    "Tokens merged into a namespace's corpus",
    by=_LOOKAHEAD,
    unit=Unit.TOKENS,
)
PROMPTS_REFUSED = _counter(
    "tandem_lookahead_prompts_refused_total", "Dropped spans of prompts that are not shared", by=_LOOKAHEAD
)
SPANS_DROPPED = _counter(
    "tandem_lookahead_spans_dropped_total",
    "Spans dropped because the backlog for Redis was full",
    by=_LOOKAHEAD,
)
ENTRIES_DAMAGED = _counter(
    "tandem_lookahead_stream_entries_damaged_total", "Unreadable entries in Redis streams", by=_LOOKAHEAD
)
SNAPSHOTS_PUBLISHED = _counter(
    "tandem_lookahead_snapshots_published_total", "Snapshots written to Redis", by=_LOOKAHEAD
)
SNAPSHOTS_REJECTED = _counter(
    "tandem_lookahead_snapshots_rejected_total", "Dropped damaged snapshots in Redis", by=_LOOKAHEAD
)
SNAPSHOTS_REFUSED = _counter(
    "tandem_lookahead_snapshots_refused_total",
    "Snapshots that Redis refused, by cause",
    "cause",
    by=_LOOKAHEAD,
)
REDIS_FAILURES = _counter("tandem_lookahead_redis_failures_total", "Times Redis was lost", by=_LOOKAHEAD)
REDIS_FULL = _counter(
    "tandem_lookahead_redis_full_total",
    "Times Redis was at its maxmemory, and its streams were halved",
    by=_LOOKAHEAD,
)
STREAMS_LAGGING = _counter(
    "tandem_lookahead_streams_lagging_total",
    "Streams closed because a pod read too slowly",
    by=_LOOKAHEAD,
)
REDIS_CONNECTED = _gauge("tandem_lookahead_redis_connected", "1 while Redis answers", by=_LOOKAHEAD)
STREAMS_OPEN = _gauge("tandem_lookahead_streams_open", "Streams of decode pods", by=_LOOKAHEAD)
BACKLOG_SPANS = _gauge("tandem_lookahead_backlog_spans", "Spans that wait for Redis", by=_LOOKAHEAD)
NAMESPACES = _gauge("tandem_lookahead_namespaces", "Namespaces held", by=_LOOKAHEAD)
CORPUS_TOKENS = _gauge(
    "tandem_lookahead_corpus_tokens",
    "Tokens held, over all namespaces",
    by=_LOOKAHEAD,
    unit=Unit.TOKENS,
)
CORPUS_SHARED_TOKENS = _gauge(
    "tandem_lookahead_corpus_shared_tokens",
    "Tokens shared with pods, over all namespaces",
    by=_LOOKAHEAD,
    unit=Unit.TOKENS,
)
CORPUS_MEMORY_BYTES = _gauge(
    "tandem_lookahead_corpus_memory_bytes",
    "Memory of all text, as the limits count it",
    by=_LOOKAHEAD,
    unit=Unit.BYTES,
)

# -- `tandem scaler` -----------------------------------------------------------------------------------------

SCALER_DESIRED = _gauge(
    "tandem_scaler_desired_replicas", "Replicas that the scaling law decided on", "role", by=_SCALER
)
SCALER_REPLICAS = _gauge("tandem_scaler_replicas", "Replicas in the workload of a role", "role", by=_SCALER)
SCALER_READY = _gauge("tandem_scaler_ready_pods", "Pods that are ready", "role", by=_SCALER)
SCALER_START = _gauge(
    "tandem_scaler_pod_start_seconds",
    "Learned time from the request for a pod until it is ready",
    "role",
    by=_SCALER,
    unit=Unit.SECONDS,
)
SCALER_BIAS = _gauge(
    "tandem_scaler_bias_ratio",
    "Pods needed / pods computed by the load model, learned from missed objectives",
    "role",
    by=_SCALER,
    unit=Unit.RATIO,
)
SCALER_LEADS = _gauge("tandem_scaler_leads", "1 while this scaler holds the Lease", by=_SCALER)
SCALER_CHANGES = _counter(
    "tandem_scaler_changes_total", "Changes of replicas: up or down", "role", "direction", by=_SCALER
)
SCALER_FAILURES = _counter(
    "tandem_scaler_failures_total",
    "Decisions not made or not carried out: no metrics of gateways or pods (metrics), no answer of the API "
    "server (api), missing rights (rights), a concurrent change (conflict)",
    "cause",
    by=_SCALER,
)

# -- names of vLLM and of the Gateway API inference extension ------------------------------------------------

#: First labels of every `vllm:` name. The gateway and all its pods count as one engine.
VLLM_LABELS = ("model_name", "engine")


def _vllm_counter(name: str, help_: str, source: Source, label: str = "", of: str = "") -> CounterRow:
    labels = (*VLLM_LABELS, label) if label else VLLM_LABELS
    label_of = {label: of or label} if label else {}
    return CounterRow(f"vllm:{name}", help_, labels, source.row.unit, _GATEWAY, (source,), label_of)


def _vllm_receipts(name: str, help_: str, *labels: str, unit: Unit = Unit.COUNT) -> CounterRow:
    """What pods did, as the receipts of finished requests say."""
    return CounterRow(f"vllm:{name}", help_, (*VLLM_LABELS, *labels), unit, _GATEWAY)


def _vllm_gauge(name: str, help_: str, unit: Unit, *sources: Source) -> GaugeRow:
    return GaugeRow(f"vllm:{name}", help_, VLLM_LABELS, unit, _GATEWAY, sources)


def _vllm_histogram(name: str, help_: str, row: HistogramRow, **where: str) -> HistogramRow:
    sources = (Source(row, where),)
    return HistogramRow(f"vllm:{name}", help_, VLLM_LABELS, row.unit, _GATEWAY, sources, buckets=row.buckets)


VLLM_WAITING = _vllm_gauge(
    "num_requests_waiting",
    "Requests waiting at the gateway (`tandem_queue_length`) or, by the last reports, in pods",
    Unit.REQUESTS,
)
VLLM_RUNNING = _vllm_gauge(
    "num_requests_running",
    "Admitted requests (`tandem_requests_in_flight`), without those that wait in pods",
    Unit.REQUESTS,
)
VLLM_KV_USAGE = _vllm_gauge(
    "kv_cache_usage_perc",
    "KV use of the healthy decode pods; 1 is 100 %",
    Unit.RATIO,
    Source(FLEET_KV_USAGE, {"role": "decode"}),
)
VLLM_CACHE_CONFIG = GaugeRow(
    "vllm:cache_config_info",
    "1; labels: block size in tokens, number of blocks of the healthy decode pods",
    (*VLLM_LABELS, "block_size", "num_gpu_blocks"),
    Unit.COUNT,
    _GATEWAY,
)
VLLM_TTFT = _vllm_histogram("time_to_first_token_seconds", "Time to first token", TTFT_SECONDS)
VLLM_TPOT = _vllm_histogram(
    "request_time_per_output_token_seconds", "Mean time per output token of a request", TPOT_SECONDS
)
VLLM_ITL = _vllm_histogram("inter_token_latency_seconds", "Time between two messages of tokens", ITL_SECONDS)
VLLM_E2E = _vllm_histogram("e2e_request_latency_seconds", "End-to-end time of requests", E2E_SECONDS)
VLLM_QUEUE_TIME = _vllm_histogram(
    "request_queue_time_seconds", "Waiting, at the gateway and in pods", STAGE_SECONDS, stage="queue"
)
VLLM_PREFILL_TIME = _vllm_histogram(
    "request_prefill_time_seconds", "From the first step to the first token", STAGE_SECONDS, stage="prefill"
)
VLLM_DECODE_TIME = _vllm_histogram(
    "request_decode_time_seconds", "From the first token to the last", STAGE_SECONDS, stage="decode"
)
VLLM_REQUEST_PROMPT = _vllm_histogram(
    "request_prompt_tokens", "Prompt tokens of a request", REQUEST_PROMPT_TOKENS
)
VLLM_REQUEST_GENERATION = _vllm_histogram(
    "request_generation_tokens", "Output tokens of a request", REQUEST_OUTPUT_TOKENS
)
VLLM_PROMPT_TOKENS = _vllm_counter(
    "prompt_tokens_total", "Prompt tokens of finished requests", Source(PROMPT_TOKENS)
)
VLLM_GENERATION_TOKENS = _vllm_counter(
    "generation_tokens_total", "Output tokens relayed", Source(OUTPUT_TOKENS)
)
VLLM_SUCCESS = _vllm_counter(
    "request_success_total",
    "Requests whose answer ended, by reason",
    Source(FINISHED),
    label="finished_reason",
    of="finish_reason",
)
VLLM_REJECTIONS = _vllm_counter(
    "admission_rejections_total", "Requests refused with a retry-after", Source(REFUSED), label="reason"
)
VLLM_PREFIX_QUERIES = _vllm_counter(
    "prefix_cache_queries_total",
    "Prompt tokens looked up in prefix caches, of finished requests",
    Source(PROMPT_TOKENS),
)
VLLM_PREFIX_HITS = _vllm_counter(
    "prefix_cache_hits_total", "Prompt tokens found in prefix caches", Source(CACHED_PROMPT_TOKENS)
)
VLLM_PREEMPTIONS = _vllm_receipts(
    "num_preemptions_total",
    "Times a request gave up its KV blocks to an older one, on decode and prefill pods",
)
VLLM_DRAFTS = _vllm_receipts("spec_decode_num_drafts_total", "Drafts verified")
VLLM_DRAFT_TOKENS = _vllm_receipts(
    "spec_decode_num_draft_tokens_total", "Draft tokens verified", unit=Unit.TOKENS
)
VLLM_ACCEPTED_TOKENS = _vllm_receipts(
    "spec_decode_num_accepted_tokens_total", "Draft tokens accepted", unit=Unit.TOKENS
)
VLLM_ACCEPTED_PER_POS = _vllm_receipts(
    "spec_decode_num_accepted_tokens_per_pos_total",
    "Draft tokens accepted, by position in their draft",
    "position",
    unit=Unit.TOKENS,
)
VLLM_INFERENCE_TIME = HistogramRow(
    "vllm:request_inference_time_seconds",
    "From the first step to the last token: the stages prefill, transfer and decode",
    VLLM_LABELS,
    Unit.SECONDS,
    _GATEWAY,
    buckets=LATENCY_BUCKETS_S,
)
VLLM_PARAMS_N = HistogramRow(
    "vllm:request_params_n",
    "Answers requested for a finished prompt (n)",
    VLLM_LABELS,
    Unit.COUNT,
    _GATEWAY,
    buckets=(1.0, 2.0, 5.0, 10.0, 20.0),
)
VLLM_PARAMS_MAX_TOKENS = HistogramRow(
    "vllm:request_params_max_tokens",
    "max_tokens of a finished request, explicit or default",
    VLLM_LABELS,
    Unit.TOKENS,
    _GATEWAY,
    buckets=_ONE_TWO_FIVE,
)
VLLM_MAX_GENERATION = HistogramRow(
    "vllm:request_max_num_generation_tokens",
    "Output tokens of the longest answer of a finished prompt",
    VLLM_LABELS,
    Unit.TOKENS,
    _GATEWAY,
    buckets=_ONE_TWO_FIVE,
)

#: Every row.
TABLE: tuple[Row, ...] = tuple(value for value in tuple(globals().values()) if isinstance(value, Row))

#: Names besides the table's that queries may use: made by prometheus_client, and by Prometheus itself.
FOREIGN_SERIES = frozenset(
    {
        "up",
        "process_cpu_seconds_total",
        "process_resident_memory_bytes",
        "process_open_fds",
        "process_start_time_seconds",
    }
)
