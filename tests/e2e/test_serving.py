"""The whole system as its users see it: real processes, gRPC and HTTP, customer-service dialogues of 2K-4K
tokens, and everything users do wrong. Afterwards no pod holds anything."""

from __future__ import annotations

import concurrent.futures
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import httpx
import openai
import pytest
from tandem_core.model.conversation import Message
from tandem_core.sampling import SamplingParams
from tandem_engine.llm import LLM
from tandem_proto.v1 import common_pb2, gateway_pb2
from waiting import wait_until

if TYPE_CHECKING:
    from conftest import RunningFleet

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

MODEL = "smollm2-135m-instruct"
#: Characters that come to 2,000 - 4,000 tokens of dialogue.
DIALOGUE_CHARS = (8_400, 8_800, 9_200, 9_700)


@pytest.fixture(scope="module")
def fleet(start_fleet, model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFleet]:
    folder = tmp_path_factory.mktemp("fleet")
    with start_fleet(
        model_dir, folder, "--set", "gateway.max-queue=2", "--set", "gateway.max-in-flight=9"
    ) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def alone(model_dir: Path) -> LLM:
    """The same model in one process."""
    return LLM(model_dir, dtype="float32", num_blocks=100)


def greedy(max_tokens: int) -> common_pb2.SamplingParams:
    return common_pb2.SamplingParams(temperature=0.0, max_tokens=max_tokens)


def chat_request(messages: list[dict[str, str]], sampling: common_pb2.SamplingParams, **fields: str):
    return gateway_pb2.ChatRequest(
        messages=[gateway_pb2.ChatMessage(**message) for message in messages], sampling=sampling, **fields
    )


def chat(
    fleet: RunningFleet, messages: list[dict[str, str]], max_tokens: int, **fields: str
) -> tuple[str, common_pb2.Receipt]:
    call = fleet.gateway().Chat(chat_request(messages, greedy(max_tokens), **fields), timeout=300)
    text = ""
    for response in call:
        text += response.chunk.text
        if response.HasField("end"):
            receipt = response.end.receipt
    trailing = dict(call.trailing_metadata())
    assert common_pb2.Receipt.FromString(trailing["tandem-receipt-bin"]).request_id == receipt.request_id
    return text, receipt


def dialogue(corpus, index: int) -> list[dict[str, str]]:
    return [
        {"role": "system", "content": corpus.prompt(index, DIALOGUE_CHARS[index])},
        {"role": "user", "content": f"Summarise ticket {index} for me in a few sentences."},
    ]


def client(fleet: RunningFleet) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{fleet.url}/v1", api_key="none", max_retries=0, timeout=300,
        http_client=httpx.Client(trust_env=False, timeout=300),
    )  # fmt: skip


def test_the_same_text_over_grpc_over_http_and_in_one_process(
    fleet: RunningFleet, corpus, alone: LLM
) -> None:
    for index in range(len(DIALOGUE_CHARS)):
        messages = dialogue(corpus, index)
        text, receipt = chat(fleet, messages, 48)
        if receipt.prefill_pod:  # a decode pod leaves one that gets no processor for a second
            break
    assert receipt.prefill_pod == "prefill-0"
    assert receipt.decode_pod == "decode-0"
    assert receipt.transfer_bytes > 0
    assert 2000 <= receipt.prompt_tokens <= 4000
    assert receipt.output_tokens >= 1
    assert (
        text
        == alone.chat([Message(**m) for m in messages], SamplingParams(temperature=0.0, max_tokens=48)).text
    )
    over_http = client(fleet).chat.completions.create(
        model=MODEL, messages=messages, temperature=0.0, max_tokens=48
    )
    assert over_http.choices[0].message.content == text
    assert over_http.usage.prompt_tokens == receipt.prompt_tokens
    fleet.assert_idle()


def test_seeded_sampling_is_the_same_apart_and_together(fleet: RunningFleet, corpus, alone: LLM) -> None:
    messages = dialogue(corpus, 1)
    recommended = alone.manifest.sampling
    assert recommended == {"temperature": 0.2, "top_p": 0.9}
    for given in ({"temperature": 0.8, "top_p": 1.0}, {}):
        drawn = common_pb2.SamplingParams(**given, seed=7, max_tokens=48)
        texts = [
            "".join(r.chunk.text for r in fleet.gateway().Chat(chat_request(messages, drawn), timeout=300))
            for _ in range(2)
        ]
        want = alone.chat(
            [Message(**m) for m in messages],
            SamplingParams(**{**recommended, **given, "seed": 7, "max_tokens": 48}),
        ).text
        assert texts == [want, want], "cold and hot, apart, with drafts"


def test_four_dialogues_at_once_while_others_misbehave(fleet: RunningFleet, corpus) -> None:
    def over_grpc(index: int) -> int:
        _, receipt = chat(fleet, dialogue(corpus, index), 32, slo_class="batch")
        assert 2000 <= receipt.prompt_tokens <= 4000
        return receipt.output_tokens

    def over_http(index: int) -> int:
        stream = client(fleet).chat.completions.create(
            model=MODEL, messages=dialogue(corpus, index), temperature=0.0, max_tokens=32,
            stream=True, stream_options={"include_usage": True}, extra_body={"slo_class": "batch"},
        )  # fmt: skip
        chunks = list(stream)
        assert chunks[-1].usage.total_tokens > 2000
        assert chunks[-1].usage.model_extra["tandem_receipt"]["decode_pod"] == "decode-0"
        return chunks[-1].usage.completion_tokens

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        running = [pool.submit(over_grpc if i % 2 else over_http, i) for i in range(4)]
        wait_until(lambda: fleet.num_running() == 4, interval_s=0.05)
        _grpc_client_cancels_midway(fleet)
        produced = [future.result() for future in running]
    assert all(tokens >= 1 for tokens in produced)
    fleet.assert_idle()


def _grpc_client_cancels_midway(fleet: RunningFleet) -> None:
    call = fleet.gateway().Chat(
        chat_request([{"role": "user", "content": "Count to a thousand."}], greedy(400), slo_class="batch"),
        timeout=120,
    )
    with pytest.raises(grpc.RpcError) as cancelled:
        for response in call:
            if response.chunk.token_ids:
                call.cancel()
    assert cancelled.value.code() is grpc.StatusCode.CANCELLED


def test_an_http_client_that_disconnects_is_forgotten(fleet: RunningFleet) -> None:
    body = json.dumps(
        {"model": MODEL, "stream": True, "max_tokens": 1500, "ignore_eos": True,
         "messages": [{"role": "user", "content": "Tell me a very long story."}]}
    ).encode()  # fmt: skip
    host, port = fleet.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        connection.sendall(head.encode() + body)
        assert b"data:" in _read_until(connection, b"data:")
    fleet.assert_idle(within_s=5.0)


def _read_until(connection: socket.socket, wanted: bytes) -> bytes:
    connection.settimeout(60)
    seen = b""
    while wanted not in seen and (more := connection.recv(4096)):
        seen += more
    return seen


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b'{"messages": [{"role": "user", "content": "caf\xe9"}]}', 400, ["UTF-8"]),
        (b'{"messages": [', 400, ["JSON"]),
        (b'{"messages": []}', 400, ["messages"]),
        (b'{"model": "gpt-9", "messages": [{"role": "user", "content": "hi"}]}', 404, ["gpt-9", MODEL]),
        (b'{"temperature": 9, "messages": [{"role": "user", "content": "hi"}]}', 400, ["temperature", "2"]),
        (b'{"n": 99, "messages": [{"role": "user", "content": "hi"}]}', 400, ["n", "32"]),
    ],
)
def test_bad_http_input_names_field_and_limit(
    fleet: RunningFleet, body: bytes, status: int, words: list[str]
) -> None:
    answer = httpx.post(
        f"{fleet.url}/v1/chat/completions", content=body,
        headers={"Content-Type": "application/json"}, trust_env=False,
    )  # fmt: skip
    assert answer.status_code == status, answer.text
    assert all(word in answer.json()["error"]["message"] for word in words), answer.text


def test_an_over_long_prompt_is_refused_on_both_doors(fleet: RunningFleet) -> None:
    words = "hello " * 9000
    with pytest.raises(openai.BadRequestError, match="8192"):
        client(fleet).chat.completions.create(model=MODEL, messages=[{"role": "user", "content": words}])
    with pytest.raises(grpc.RpcError) as refused:
        chat(fleet, [{"role": "user", "content": words}], 8)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "8192" in refused.value.details()


def test_an_unknown_model_is_not_found(fleet: RunningFleet) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        list(fleet.gateway().Chat(
            chat_request([{"role": "user", "content": "hi"}], greedy(4), model="gpt-9"), timeout=30
        ))  # fmt: skip
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND
    assert MODEL in refused.value.details()


def test_a_full_queue_refuses_at_once_and_says_when_to_come_back(fleet: RunningFleet) -> None:
    """Six without objectives may run and two may wait; the rest of twenty hear 429 without waiting."""

    def ask(_: int) -> tuple[int, float, str | None]:
        started = time.monotonic()
        answer = httpx.post(
            f"{fleet.url}/v1/chat/completions",
            json={"messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 48,
                  "temperature": 0.0, "ignore_eos": True, "slo_class": "batch"},
            timeout=300, trust_env=False,
        )  # fmt: skip
        return answer.status_code, time.monotonic() - started, answer.headers.get("Retry-After")

    with concurrent.futures.ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(ask, range(20)))
    statuses = [status for status, _, _ in answers]
    assert set(statuses) == {200, 429}
    assert statuses.count(200) >= 8
    for status, seconds, retry_after in answers:
        if status == 429:
            assert seconds < 5.0
            assert int(retry_after) >= 1
    fleet.assert_idle()


def test_models_metrics_and_fleet_are_told(fleet: RunningFleet) -> None:
    assert [model.id for model in client(fleet).models.list()] == [MODEL]
    metrics = httpx.get(f"{fleet.url}/metrics", trust_env=False).text
    assert 'le="2.5"' in metrics
    view = httpx.get(f"{fleet.url}/fleet", trust_env=False).json()
    assert {pod["role"] for pod in view["pods"]} >= {"decode", "prefill"}
