"""Prompts' texts and log probabilities at the gateway: shapes, limits, both APIs."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import grpc
import pytest
from loop_turns import STALL_S, watched_loop
from tandem_core.model.manifest import ModelManifest
from tandem_gateway.dialects.prompt_logprobs import MAX_VALUES, text_offsets
from tandem_proto.v1 import common_pb2, gateway_pb2

USER = [{"role": "user", "content": "hi"}]


async def test_a_chat_has_prompt_logprobs_at_the_top_level(pods, gateway) -> None:
    pod = await pods()
    front = await gateway(pod)
    body = {"messages": USER, "prompt_logprobs": 2, "n": 2, "return_token_ids": True}
    answer = (await front.http.post("/v1/chat/completions", json=body)).json()
    first, *others = answer["prompt_logprobs"]
    assert first is None
    assert len(others) == len(pod.requests[0].prompt_token_ids) - 1
    token_id = str(pod.requests[0].prompt_token_ids[1])
    assert others[0][token_id]["rank"] == 2
    assert others[0][token_id]["logprob"] == -0.25
    assert others[0]["5"]["rank"] == 1
    assert isinstance(others[0]["5"]["decoded_token"], str)
    assert all(choice["logprobs"] is None for choice in answer["choices"])
    # Only the first choice asks for prompt log probabilities.
    asked = [request.sampling.HasField("prompt_logprobs") for request in pod.requests]
    assert sorted(asked) == [False, True]


@pytest.mark.parametrize("off", [None, False])
async def test_prompt_logprobs_that_are_off_are_not_sent(pods, gateway, off: bool | None) -> None:
    pod = await pods()
    front = await gateway(pod)
    body = {"prompt": "hat", "prompt_logprobs": off, "echo": off}
    answer = (await front.http.post("/v1/completions", json=body)).json()
    assert "prompt_logprobs" not in answer["choices"][0]
    assert answer["choices"][0]["text"] == "Hello there!"
    assert not pod.requests[0].sampling.HasField("prompt_logprobs")


async def test_prompt_logprobs_over_the_limit_are_refused(pods, gateway) -> None:
    front = await gateway(await pods())
    prompt = [5] * 200
    num_prompts = MAX_VALUES // (21 * len(prompt))
    body = {"prompt_logprobs": 20, "max_tokens": 1}
    for more in (
        {"prompt": [prompt] * (num_prompts + 1)},
        {"n": 2, "prompt": [prompt] * (num_prompts // 2 + 1)},
    ):
        refused = await front.http.post("/v1/completions", json={**body, **more})
        assert refused.status_code == 400
        error = refused.json()["error"]
        assert error["param"] == "prompt_logprobs"
        assert str(MAX_VALUES) in error["message"]
        assert "fewer" in error["message"]


async def test_a_pod_without_prompt_logprobs_is_an_error_that_names_it(pods, gateway) -> None:
    front = await gateway(await pods(knows_prompt_logprobs=False))
    answer = await front.http.post("/v1/completions", json={"prompt": "hat", "prompt_logprobs": 1})
    assert answer.status_code == 500
    assert "log probabilities" in answer.json()["error"]["message"]
    assert "version" in answer.json()["error"]["message"]


async def test_grpc_sends_the_prompt_with_the_first_message_of_each_choice(pods, gateway) -> None:
    front = await gateway(await pods())
    request = gateway_pb2.GenerateRequest(
        text="hat", n=2, echo=True, sampling=common_pb2.SamplingParams(prompt_logprobs=3)
    )
    chunks = [r.chunk async for r in front.grpc.Generate(request) if r.HasField("chunk")]
    for choice in (0, 1):
        of_choice = [chunk for chunk in chunks if chunk.choice == choice]
        assert "".join(chunk.text for chunk in of_choice) == "hatHello there!"
        assert of_choice[0].text == "hatHello"
    assert [chunk.HasField("prompt_logprobs") for chunk in chunks] == [True] + [False] * (len(chunks) - 1)
    assert len(chunks[0].prompt_logprobs.top_token_ids) == 3 * len(chunks[0].prompt_logprobs.logprobs)


async def test_grpc_sends_only_the_prompt_with_max_tokens_zero(pods, gateway) -> None:
    front = await gateway(await pods(words=("Hello",)))
    sampling = common_pb2.SamplingParams(max_tokens=0, logprobs=1, prompt_logprobs=0)
    request = gateway_pb2.GenerateRequest(text="hat", echo=True, sampling=sampling)
    chunk, end = [response async for response in front.grpc.Generate(request)]
    assert (chunk.chunk.text, list(chunk.chunk.token_ids), list(chunk.chunk.logprobs)) == ("hat", [], [])
    assert chunk.chunk.HasField("prompt_logprobs")
    assert end.end.reason == common_pb2.FINISH_REASON_LENGTH
    assert end.end.stop_reason == ""
    request.echo = False
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        _ = [response async for response in front.grpc.Generate(request)]
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "max_tokens" in (refused.value.details() or "")


@pytest.mark.parametrize(
    ("text", "pieces", "offsets"),
    [
        ("a hat", [b"a", b" hat"], [0, 1]),
        # A special token before the text, and the space that SentencePiece puts there.
        ("a hat", [b"<s>", b" a", b" hat"], [0, 0, 1]),
        # Parts of a character begin where it does.
        ("ü€!", [b"\xc3", b"\xbc", b"\xe2\x82", b"\xac", b"!"], [0, 0, 1, 1, 2]),
        # The normalizer has composed a character: the tokens after it are found again.
        ("cafe\u0301 au", [b"caf", "\u00e9".encode(), b" au"], [0, 3, 5]),
        ("", [b"<s>"], [0]),
    ],
)
def test_offsets_count_characters_of_the_text(text: str, pieces: list[bytes], offsets: list[int]) -> None:
    assert text_offsets(text, pieces) == offsets


@pytest.mark.parametrize("is_streamed", [True, False])
async def test_prompt_logprobs_of_a_long_prompt_do_not_block_streams(
    pods, gateway, model_folder: Path, tmp_path: Path, is_streamed: bool
) -> None:
    """Megabytes of JSON."""
    shutil.copy(model_folder / "tokenizer.json", tmp_path)
    dataclasses.replace(ModelManifest.read(model_folder), max_model_len=8192).write(tmp_path)
    front = await gateway(await pods(), model=tmp_path)
    body = {"prompt": [5] * 8000, "max_tokens": 1, "echo": True, "logprobs": 20, "stream": is_streamed,
            "return_tokens_as_token_ids": True}  # fmt: skip
    async with (
        watched_loop() as turns,
        front.http.stream("POST", "/v1/completions", json=body) as response,
    ):
        data = b"".join([part async for part in response.aiter_raw()])
    assert len(data) > 3 * 2**20
    first = json.loads(data.split(b"\n\n")[0].split(b"data: ")[-1])
    assert len(first["choices"][0]["logprobs"]["token_logprobs"]) >= 8000
    assert max(turns) < STALL_S
