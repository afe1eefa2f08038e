"""Beam search through gateway, prefill and decode pod finds the engine's beams, in every API, and leaves
nothing behind."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import grpc
import httpx
import pytest
from pod_fleet import request, run_fleet
from served_fleet import served
from tandem_core.beams import BeamParams, EarlyStopping
from tandem_core.sampling import SamplingParams
from tandem_engine.llm import LLM
from tandem_proto.v1 import common_pb2
from toy_models import SIZES, prompt_of

#: For the prefill pod, and for the decode pod alone.
LENGTHS = (200, 20)
MAX_TOKENS = 24
BEAMS = {"use_beam_search": True, "max_tokens": MAX_TOKENS, "return_token_ids": True}


async def completed(client: httpx.AsyncClient, **body: object) -> dict:
    response = await client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def found(tiny_model: Path, prompt: list[int], params: BeamParams) -> list[list[int]]:
    sampling = SamplingParams(beam_search=params, max_tokens=MAX_TOKENS)
    return [one.token_ids for one in LLM(tiny_model, **SIZES).beam_search(prompt, sampling)]


def token_ids(answer: dict) -> list[list[int]]:
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(answer["choices"])))
    return [choice["token_ids"] for choice in answer["choices"]]


async def test_the_choices_are_the_best_beams_of_the_engine(tiny_model: Path) -> None:
    async with served(tiny_model) as (_, client):
        for num_prompt in LENGTHS:
            prompt = prompt_of(num_prompt)
            want = found(tiny_model, prompt, BeamParams(4))
            body = {"prompt": prompt, **BEAMS}
            for width in ({"n": 4}, {"beam_width": 4, "n": 4, "temperature": 0.0}, {"best_of": 4, "n": 4}):
                assert token_ids(await completed(client, **body, **width)) == want
            best = await completed(client, **body, beam_width=4, n=2)
            assert token_ids(best) == want[:2]
            assert best["usage"]["prompt_tokens"] == num_prompt
            assert best["usage"]["completion_tokens"] == sum(map(len, want[:2]))
            other = await completed(
                client, **body, beam_width=3, n=3, length_penalty=-1.0, early_stopping="never"
            )
            assert token_ids(other) == found(tiny_model, prompt, BeamParams(3, -1.0, EarlyStopping.NEVER))
        first = await completed(client, prompt=prompt_of(200, 5), **BEAMS, n=4)
        receipt = first["usage"]["tandem_receipt"]
        # One more token is computed, for its logits.
        assert (receipt["prefill_pod"], receipt["decode_steps"]) == ("p0", MAX_TOKENS - 1)


async def test_a_stream_has_each_choice_whole(tiny_model: Path) -> None:
    async with served(tiny_model) as (_, client):
        body = {"prompt": prompt_of(40), **BEAMS, "n": 3, "logprobs": 2, "ignore_eos": True}
        whole = await completed(client, **body)
        text = (await client.post("/v1/completions", json={**body, "stream": True})).text
        events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        parts = [event["choices"][0] for event in events]
        assert [part["index"] for part in parts] == [0, 0, 1, 1, 2, 2]
        for part, choice in zip(parts[::2], whole["choices"], strict=True):
            assert (part["text"], part["token_ids"]) == (choice["text"], choice["token_ids"])
            assert part["logprobs"] == choice["logprobs"]
            assert len(choice["logprobs"]["token_logprobs"]) == len(choice["token_ids"])
        assert [part["finish_reason"] for part in parts[1::2]] == ["length"] * 3


async def test_lists_of_prompts_are_searched_one_by_one(tiny_model: Path) -> None:
    async with served(tiny_model) as (_, client):
        prompts = [prompt_of(50, start) for start in range(3)]
        answer = await completed(client, prompt=prompts, **BEAMS, beam_width=3, n=2)
        want = [beam for prompt in prompts for beam in found(tiny_model, prompt, BeamParams(3))[:2]]
        assert token_ids(answer) == want
        assert answer["usage"]["prompt_tokens"] == 150


REFUSED: list[tuple[dict[str, object], str]] = [
    ({"beam_width": 17}, "beam_width"),
    ({"n": 20}, "n"),
    ({"beam_width": 2, "n": 3}, "n"),
    ({"beam_width": 2, "best_of": 3}, "best_of"),
    ({"beam_width": 2, "length_penalty": 9}, "length_penalty"),
    ({"beam_width": 2, "early_stopping": "soon"}, "early_stopping"),
    ({"beam_width": 2, "top_p": 0.9}, "top_p"),
    ({"beam_width": 2, "stop": ["x"]}, "stop"),
    ({"beam_width": 2, "logit_bias": {"5": 1}}, "logit_bias"),
    ({"beam_width": 2, "guided_choice": ["a", "b"]}, "guided_choice"),
    ({"beam_width": 2, "response_format": {"type": "json_object"}}, "response_format"),
    ({"beam_width": 2, "use_beam_search": False}, "beam_width"),
    ({"beam_width": 16, "stop_token_ids": list(range(3, 40))}, "beam_width"),
]


async def test_what_makes_no_sense_is_refused_by_name(tiny_model: Path) -> None:
    async with served(tiny_model) as (_, client):
        for body, field in REFUSED:
            response = await client.post("/v1/completions", json={"prompt": prompt_of(20), **BEAMS, **body})
            assert response.status_code == 400, response.text
            assert response.json()["error"]["param"] == field


async def test_a_search_that_is_left_holds_nothing(tiny_model: Path) -> None:
    async with served(tiny_model) as (fleet, client):
        for pause_s in (0.01, 0.05, 0.2):
            body = {"prompt": prompt_of(200), **BEAMS, "n": 3, "max_tokens": 200, "ignore_eos": True}
            call = asyncio.create_task(client.post("/v1/completions", json=body))
            await asyncio.sleep(pause_s)
            call.cancel()
            await fleet.assert_idle()


async def test_a_pod_continues_no_search(tiny_model: Path) -> None:
    async with run_fleet(tiny_model) as fleet:
        call = request("r", prompt_of(20), [], beam_search=common_pb2.BeamSearch(width=2))
        call.output_token_ids.append(5)
        with pytest.raises(grpc.aio.AioRpcError, match="begins anew") as error:
            async for _ in fleet.decode.Decode(call):
                pass
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_search_says_when_its_prompt_is_computed(tiny_model: Path) -> None:
    async with run_fleet(tiny_model) as fleet:
        for num_prompt in LENGTHS:
            call = request("r", prompt_of(num_prompt), [], beam_search=common_pb2.BeamSearch(width=2))
            responses = [response async for response in fleet.decode.Decode(call)]
            told = [response.progress.prompt_computed for response in responses[:-1]]
            assert told[-1], "before the beams"
            assert told == sorted(told), "and again with each heartbeat"
            assert responses[-1].beams.beams
