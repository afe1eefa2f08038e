"""n choices of real pods are n separate requests with seeds s, s + 1, ...; the prompt is computed once."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest
from served_fleet import served
from toy_models import prompt_of

NUM_PROMPT, NUM_CHOICES = 200, 4


SAMPLED = {"temperature": 1.0, "seed": 7, "max_tokens": 24, "logprobs": 2, "return_token_ids": True}
CASES = {
    "sampled": {},
    "penalties": {"frequency_penalty": 0.7, "repetition_penalty": 1.2, "top_p": 0.9},
    "allowed": {"allowed_token_ids": list(range(3, 40)), "bad_words": [[5], [6, 7]]},
    "stops": {"stop_token_ids": list(range(3, 96, 7)), "min_tokens": 3, "include_stop_str_in_output": True},
    "special": {"skip_special_tokens": False, "ignore_eos": True, "min_p": 0.01},
}


async def completed(client: httpx.AsyncClient, **body: object) -> dict:
    response = await client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def plain(choice: dict) -> dict:
    return {name: value for name, value in choice.items() if name != "index"}


@pytest.mark.parametrize("speculation", ["off", "local"])
async def test_n_choices_are_n_separate_requests(tiny_model: Path, speculation: str) -> None:
    async with served(tiny_model, speculation=speculation) as (_, client):
        for start, (name, case) in enumerate(CASES.items()):
            body = {"prompt": prompt_of(NUM_PROMPT, start), **SAMPLED, **case}
            together = await completed(client, n=NUM_CHOICES, **body)
            for i, choice in enumerate(together["choices"]):
                alone = await completed(client, **{**body, "seed": body["seed"] + i})
                assert plain(choice) == plain(alone["choices"][0]), name
            assert len({tuple(choice["token_ids"]) for choice in together["choices"]}) > 1


async def test_the_prompt_is_computed_once(tiny_model: Path) -> None:
    async with served(tiny_model) as (_, client):
        answer = await completed(client, prompt=prompt_of(NUM_PROMPT), n=NUM_CHOICES, **SAMPLED)
        first, *others = answer["usage"]["tandem_receipts"]
        assert (first["prefill_pod"], first["cached_tokens"]) == ("p0", 0)
        for receipt in others:
            # All full blocks of 16 tokens but what the last token needs.
            assert (receipt["prefill_pod"], receipt["cached_tokens"]) == ("", NUM_PROMPT // 16 * 16)


async def test_a_list_of_prompts_is_a_request_for_each(tiny_model: Path) -> None:
    async with served(tiny_model) as (_, client):
        prompts = [prompt_of(50, start) for start in range(3)]
        together = await completed(client, prompt=prompts, n=2, **SAMPLED)
        for p, prompt in enumerate(prompts):
            alone = await completed(client, prompt=prompt, n=2, **SAMPLED)
            of_prompt = together["choices"][2 * p : 2 * p + 2]
            assert list(map(plain, of_prompt)) == list(map(plain, alone["choices"]))
        assert together["usage"]["prompt_tokens"] == 150


async def test_choices_that_are_left_hold_nothing(tiny_model: Path) -> None:
    async with served(tiny_model) as (fleet, client):
        for pause_s in (0.01, 0.05, 0.2):
            body = {"prompt": prompt_of(NUM_PROMPT), "n": 8, **SAMPLED, "max_tokens": 400, "ignore_eos": True}
            call = asyncio.create_task(client.post("/v1/completions", json=body))
            await asyncio.sleep(pause_s)
            call.cancel()
            await fleet.assert_idle()
