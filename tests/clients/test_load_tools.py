"""What `vllm bench serve` and guidellm send and how they read the answers, written down from their sources:
vllm/benchmarks/lib/endpoint_request_func.py, and guidellm's backends/openai/request_handlers.py."""

from __future__ import annotations

import json
from collections.abc import Mapping

import httpx
import pytest


def vllm_bench_completion(model: str) -> dict[str, object]:
    return {
        "model": model, "prompt": "Where is my order?", "repetition_penalty": 1.0, "max_tokens": 6,
        "logprobs": None, "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip


def vllm_bench_chat(model: str) -> dict[str, object]:
    content = [{"type": "text", "text": "Where is my order?"}]
    return {
        "model": model, "messages": [{"role": "user", "content": content}], "max_completion_tokens": 6,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip


def guidellm_completion(model: str) -> dict[str, object]:
    return {
        "prompt": "Where is my order?", "model": model, "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "max_tokens": 6, "stop": None, "ignore_eos": True,
    }  # fmt: skip


def guidellm_chat(model: str) -> dict[str, object]:
    content = [{"type": "text", "text": "Where is my order?"}]
    return {
        "messages": [{"role": "user", "content": content}], "model": model, "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "max_completion_tokens": 6, "stop": None, "ignore_eos": True,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("path", "shape"),
    [
        ("/v1/completions", vllm_bench_completion),
        ("/v1/chat/completions", vllm_bench_chat),
        ("/v1/completions", guidellm_completion),
        ("/v1/chat/completions", guidellm_chat),
    ],
)
@pytest.mark.parametrize("extra", [{}, {"ignore_eos": True, "temperature": 0.0, "top_p": 1.0, "top_k": -1}])
def test_a_load_tool_counts_tokens_times_and_usage(system, path, shape, extra: Mapping[str, object]):
    body = {**shape(system.model), **extra}
    headers = {"x-request-id": "bench-1", "authorization": "Bearer EMPTY"}
    num_chunks, usage, is_done = 0, {}, False
    with httpx.stream(
        "POST", f"{system.url}{path}", json=body, headers=headers, trust_env=False, timeout=30
    ) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if not line:
                continue
            assert line.startswith("data: ") or line.startswith("id: ")
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                is_done = True
                continue
            data = json.loads(line.removeprefix("data: "))
            if choices := data["choices"]:
                assert "text" in choices[0] or "delta" in choices[0]
                num_chunks += 1
            elif data["usage"]:
                usage = data["usage"]
    assert is_done and num_chunks
    is_full = "ignore_eos" in body
    assert usage["completion_tokens"] == 6 if is_full else 1 <= usage["completion_tokens"] <= 6
    assert usage["prompt_tokens"] > 0


def test_the_probes_of_load_tools_find_the_model(system):
    with httpx.Client(base_url=system.url, trust_env=False) as client:
        assert client.get("/health").status_code == 200
        assert client.get("/v1/models").json()["data"][0]["id"] == system.model
        assert "vllm:" in client.get("/metrics").text, "vllm bench reads speculation's counters there"
