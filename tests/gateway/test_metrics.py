"""A gateway's /metrics: the table's names, and numbers that add up."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from pathlib import Path

import grpc
import httpx
import openai
import pytest
from metric_names import differences
from tandem_core.sampling import SamplingParams
from tandem_core.slo import DEFAULT_SLO_CLASSES
from tandem_gateway.call import gateway as gateway_module
from tandem_gateway.metrics import GatewayMetrics
from tandem_gateway.request import TokenizedRequest
from tandem_proto.v1 import gateway_pb2
from tandem_service.metric_rows import Process
from tandem_service.metric_table import GATEWAY_REDIS_CONNECTED
from tandem_service.metrics import new_registry

DOCS = Path(__file__).resolve().parents[2] / "docs" / "observability.md"
USER = [{"role": "user", "content": "Hi"}]
MESSAGES = [gateway_pb2.ChatMessage(**message) for message in USER]


async def ask(front, **body: object):
    return await front.openai.chat.completions.create(model="", messages=USER, extra_body=body)


async def test_a_gateway_serves_the_tables_names_and_no_other(pods, gateway):
    front = await gateway(await pods())
    await ask(front)
    for accept in ("text/plain", "application/openmetrics-text; version=1.0.0"):
        answer = await front.http.get("/metrics", headers={"accept": accept})
        assert answer.headers["content-type"].startswith(accept)
    assert await front.metric('tandem_slo_misses_total{cause="prefill"}') == 0, "known before the first miss"
    exposition = (await front.http.get("/metrics")).text
    assert differences(exposition, Process.GATEWAY, without=(GATEWAY_REDIS_CONNECTED,)) == []
    assert "_created" not in exposition


async def test_metrics_with_vllms_names_equal_ours(pods, gateway):
    front = await gateway(await pods(total_blocks=100, free_blocks=40))
    await ask(front)
    await ask(front, slo_class="batch")
    for vllm, ours in (
        ("vllm:prompt_tokens_total", "tandem_prompt_tokens_total"),
        ("vllm:generation_tokens_total", "tandem_output_tokens_total"),
        ("vllm:time_to_first_token_seconds_count", "tandem_ttft_seconds_count"),
        ("vllm:e2e_request_latency_seconds_sum", "tandem_e2e_seconds_sum"),
        ("vllm:inter_token_latency_seconds_count", "tandem_itl_seconds_count"),
        ("vllm:request_decode_time_seconds_sum", 'tandem_stage_seconds_sum{stage="decode"}'),
        ("vllm:prefix_cache_hits_total", "tandem_cached_prompt_tokens_total"),
    ):
        assert await front.metric(vllm) == pytest.approx(await front.metric(ours))
    assert await front.metric("vllm:generation_tokens_total") == 6
    assert await front.metric("vllm:time_to_first_token_seconds_count") == 2
    assert await front.metric('vllm:request_success_total{finished_reason="stop"}') == 2
    assert await front.metric("vllm:kv_cache_usage_perc") == pytest.approx(0.6)
    assert await front.metric('vllm:cache_config_info{block_size="64",num_gpu_blocks="100"}') == 1
    assert await front.metric("vllm:num_requests_waiting") == 0
    assert await front.metric("vllm:num_requests_running") == 0


async def test_pods_work_is_counted_from_receipts_under_vllms_names(pods, gateway):
    front = await gateway(await pods(num_preemptions=2, num_prefill_preemptions=1))
    assert await front.metric("vllm:spec_decode_num_drafts_total") == 0, "known before the first request"
    for _ in range(2):
        await ask(front)
    for name, value in (
        ("vllm:num_preemptions_total", 6),
        ("vllm:spec_decode_num_drafts_total", 2),
        ("vllm:spec_decode_num_draft_tokens_total", 6),
        ("vllm:spec_decode_num_accepted_tokens_total", 4),
        ('vllm:spec_decode_num_accepted_tokens_per_pos_total{position="0"}', 2),
        ('vllm:spec_decode_num_accepted_tokens_per_pos_total{position="1"}', 2),
    ):
        assert await front.metric(name) == value, name


async def test_vllms_histograms_show_requested_and_received_tokens(pods, gateway):
    front = await gateway(await pods())
    await ask(front, max_tokens=30, n=2)
    body = {"prompt": ["a", "b"], "max_tokens": 40, "n": 3}
    assert (await front.http.post("/v1/completions", json=body)).status_code == 200
    for name, count, total in (
        ("request_params_n", 3, 2 + 3 + 3),
        ("request_max_num_generation_tokens", 3, 3 * 3),
        ("request_params_max_tokens", 2 + 6, 2 * 30 + 6 * 40),
        ("request_inference_time_seconds", 2 + 6, pytest.approx(8 * 2e-6)),
    ):
        assert await front.metric(f"vllm:{name}_count") == count, name
        assert await front.metric(f"vllm:{name}_sum") == total, name
    assert await front.metric('vllm:request_params_n_bucket{le="2.0"}') == 1


async def test_requests_wait_in_the_gateway_or_in_pods_and_are_counted_once(pods, gateway):
    decode = await pods(pause_s=30.0, num_waiting=2, num_running=1)
    prefill = await pods("p-0")
    settings = {"prefill": (prefill.target,), "max_in_flight": 3}
    front, other = [await gateway(decode, **settings) for _ in range(2)]
    asking = [asyncio.create_task(ask(front)) for _ in range(4)]

    async def until(waiting: int, running: int) -> None:
        await front.until_metric("vllm:num_requests_waiting", waiting)
        await front.until_metric("vllm:num_requests_running", running)

    await until(1 + 2, 1)
    # The decode pod reports a request as waiting while its prompt runs.
    prefill.num_running = 1
    await until(1 + 1, 2)
    # Three of another gateway.
    decode.num_waiting, decode.num_running, prefill.num_running = 4, 2, 0
    await until(1 + 2, 1)
    # More than exist: the report is older.
    decode.num_waiting, decode.num_running = 30, 0
    await until(1 + 3, 0)
    assert await other.metric("vllm:num_requests_waiting") == 0
    assert await other.metric("vllm:num_requests_running") == 0
    for task in asking:
        task.cancel()
    await asyncio.gather(*asking, return_exceptions=True)


async def test_every_request_received_becomes_one_met_or_one_miss_of_its_tenant(pods, gateway, tmp_path):
    keys = tmp_path / "keys.jsonl"
    lines = [
        {"key_sha256": hashlib.sha256(tenant.encode()).hexdigest(), "tenant": tenant}
        for tenant in ("acme", "blue")
    ]
    keys.write_text("\n".join(map(json.dumps, lines)))
    pod = await pods(pause_s=0.05)
    front = await gateway(pod, api_keys_file=keys, max_in_flight=1, max_queue=1, failover_wait_s=0.2)

    async def one(tenant: str, **body: object) -> None:
        async with httpx.AsyncClient(trust_env=False) as client:
            await client.post(
                f"{front.url}/v1/chat/completions",
                json={"messages": USER, **body},
                headers={"authorization": f"Bearer {tenant}"},
            )

    await asyncio.gather(*(one("acme") for _ in range(4)), one("blue", slo_class="batch"))
    await front.until_metric("tandem_requests_in_flight", 0)
    pod.fail_with = grpc.StatusCode.INTERNAL
    await one("blue")
    received = await front.metric("tandem_slo_requests_received_total")
    met = await front.metric("tandem_slo_requests_met_total")
    assert received == 6
    # Of the two places, a tenant may have one.
    refused = await front.metric('tandem_refused_requests_total{reason="tenant requests"}')
    assert refused == await front.metric("vllm:admission_rejections_total") == 3
    assert met + await front.metric("tandem_slo_misses_total") == received - refused
    assert await front.metric('tandem_slo_misses_total{cause="refused"}') == 0, "nothing was wrong here"
    assert await front.metric('tandem_slo_misses_total{tenant="blue",cause="error"}') == 1
    assert await front.metric('tandem_slo_requests_received_total{tenant="acme"}') == 4
    assert await front.metric('vllm:request_success_total{finished_reason="error"}') == 1


async def test_the_stage_that_took_too_long_is_the_cause(pods, gateway, tmp_path):
    (tmp_path / "slo.json").write_text('{"chat": {"ttft_ms": 0.001}}')
    pod = await pods(pause_s=0.3)
    front = await gateway(pod, slo_classes_file=tmp_path / "slo.json", slo_slack=0.0)
    await ask(front, slo_class="chat")
    # The fake pod's receipt explains almost nothing of the .9 s that its words take.
    assert await front.metric('tandem_slo_misses_total{slo_class="chat",cause="other"}') == 1


async def test_a_tenant_and_class_have_as_many_series_as_the_documentation_says():
    registry = new_registry()
    metrics = GatewayMetrics(registry, model_name="m")
    slo = DEFAULT_SLO_CLASSES["chat"]

    def num_series_with(tenant: str) -> int:
        now = time.monotonic()
        metrics.of(TokenizedRequest("r", tenant, (1,), SamplingParams(), slo, now, now + 60))
        return sum(len(family.samples) for family in registry.collect())

    more = num_series_with("acme")
    more = num_series_with("blue") - more
    text = " ".join(DOCS.read_text().split())
    assert f"and {more} more for each further tenant and class" in text


async def test_an_operator_s_classes_replace_the_default_ones_everywhere(pods, gateway, tmp_path):
    classes = tmp_path / "slo.json"
    classes.write_text('{"voice": {"ttft_ms": 33210, "tpot_ms": 61, "strict": true}, "batch": {}}')
    front = await gateway(await pods(), slo_classes_file=classes)
    response = await front.http.post("/v1/chat/completions", json={"messages": USER})
    assert response.status_code == 200
    assert await front.metric('tandem_slo_requests_met_total{slo_class="voice"}') == 1, "the default class"
    assert await front.metric('tandem_slo_target_seconds{slo_class="voice",objective="ttft"}') == 33.21
    assert await front.metric('tandem_ttft_seconds_bucket{slo_class="voice",le="33.21"}') == 1
    assert await front.metric('tandem_tpot_seconds_bucket{slo_class="voice",le="0.061"}') == 1
    refused = await front.http.post("/v1/chat/completions", json={"messages": USER, "slo_class": "chat"})
    assert refused.status_code == 400
    assert "'chat' is unknown; use one of voice, batch" in refused.json()["error"]["message"]
    assert 'slo_class="chat"' not in (await front.http.get("/metrics")).text


async def test_the_time_to_send_a_request_is_not_measured(pods, gateway):
    front = await gateway(await pods())
    body = json.dumps({"messages": USER}).encode()

    async def slowly():
        yield body[:10]
        await asyncio.sleep(0.5)
        yield body[10:]

    headers = {"content-type": "application/json"}
    answer = await front.http.post("/v1/chat/completions", content=slowly(), headers=headers)
    assert answer.status_code == 200
    assert await front.metric("tandem_ttft_seconds_sum") < 0.4


async def test_the_tpot_of_a_resumed_answer_covers_only_new_tokens(pods, gateway):
    front = await gateway(await pods(words=[f"w{n} " for n in range(12)], pause_s=0.05))
    call = front.grpc.Chat(gateway_pb2.ChatRequest(messages=MESSAGES))
    for _ in range(9):
        last_id = (await call.read()).chunk.event_id
    call.cancel()
    await front.until_metric("tandem_requests_in_flight", 0)
    resumed = front.grpc.Chat(gateway_pb2.ChatRequest(last_event_id=last_id))
    assert [message async for message in resumed][-1].HasField("end")
    assert await front.metric("tandem_tpot_seconds_count") == 1
    assert await front.metric("tandem_tpot_seconds_sum") > 0.04


async def test_a_client_that_disconnects_counts_as_abort(pods, gateway):
    front = await gateway(await pods(pause_s=30.0))
    with pytest.raises(openai.APITimeoutError):
        await front.openai.with_options(timeout=0.3).chat.completions.create(model="", messages=USER)
    await front.until_metric("tandem_requests_in_flight", 0)
    await front.until_metric('vllm:request_success_total{finished_reason="abort"}', 1)
    assert await front.metric('tandem_slo_misses_total{cause="cancelled"}') == 0, "it was not late yet"


async def test_a_client_that_disconnects_after_a_missed_objective_is_a_miss(pods, gateway):
    front = await gateway(await pods(pause_s=30.0), slo_slack=0.0)
    client = front.openai.with_options(timeout=0.3, default_headers={"x-slo-ttft-ms": "100"})
    with pytest.raises(openai.APITimeoutError):
        await client.chat.completions.create(model="", messages=USER)
    await front.until_metric('tandem_slo_misses_total{cause="cancelled"}', 1)


async def test_invalid_requests_and_quotas_are_no_misses(pods, gateway, tmp_path):
    keys = tmp_path / "keys.jsonl"
    key = {"key_sha256": hashlib.sha256(b"acme").hexdigest(), "tenant": "acme", "max_requests": 2}
    keys.write_text(json.dumps(key))
    front = await gateway(await pods(), api_keys_file=keys)
    answer = await front.http.post(
        "/v1/chat/completions", json={"messages": USER, "n": 3}, headers={"authorization": "Bearer acme"}
    )
    assert answer.status_code == 400
    assert await front.metric("tandem_slo_requests_received_total") == 3
    assert await front.metric("tandem_slo_misses_total") == 0


async def test_texts_refused_before_tokenizing_are_misses(pods, gateway, monkeypatch):
    monkeypatch.setattr(gateway_module, "MAX_TOKENIZING", 0)
    monkeypatch.setattr(gateway_module, "INLINE_CHARS", 1)
    front = await gateway(await pods())
    answer = await front.http.post("/v1/chat/completions", json={"messages": USER, "slo_class": "chat"})
    assert answer.status_code == 429
    assert await front.metric('tandem_slo_requests_received_total{slo_class="chat"}') == 1
    assert await front.metric('tandem_slo_misses_total{slo_class="chat",cause="refused"}') == 1
    assert (await front.http.post("/tokenize", json={"prompt": "Hi"})).status_code == 429
    assert await front.metric("tandem_slo_requests_received_total") == 1, "nothing of it has an objective"
