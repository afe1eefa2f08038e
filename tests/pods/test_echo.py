"""`echo` and `prompt_logprobs` of real pods, as lm-evaluation-harness and vLLM's clients ask for them."""

from __future__ import annotations

import json
from operator import itemgetter
from pathlib import Path

import httpx
import pytest
import torch
from pod_fleet import request, run_fleet
from served_fleet import served
from tandem_core.model.manifest import ModelManifest
from tandem_core.sampling import SamplingParams
from tandem_engine.llm import LLM
from tandem_proto.v1 import decode_pb2
from toy_models import SIZES, prompt_of
from transformers import AutoModelForCausalLM

TEXT = "Where_is_my_order?"


async def completed(client: httpx.AsyncClient, **body: object) -> dict:
    response = await client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def parse_logprobs(outputs: dict, ctxlens: list[int]) -> list[tuple[float, bool]]:
    """As lm-evaluation-harness reads an answer (LocalCompletionsAPI.parse_logprobs)."""
    res = []
    for choice, ctxlen in zip(sorted(outputs["choices"], key=itemgetter("index")), ctxlens, strict=True):
        assert ctxlen > 0
        logprobs = sum(choice["logprobs"]["token_logprobs"][ctxlen:-1])
        tokens_logprobs = choice["logprobs"]["token_logprobs"][ctxlen:-1]
        top_logprobs = choice["logprobs"]["top_logprobs"][ctxlen:-1]
        is_greedy = True
        for tok, top in zip(tokens_logprobs, top_logprobs, strict=True):
            if tok != max(top.values()):
                is_greedy = False
                break
        res.append((logprobs, is_greedy))
    return res


async def test_lm_evaluation_harness_gets_its_loglikelihoods(tiny_model: Path) -> None:
    """Its requests as they are, compared with transformers in float32. One continuation is greedy."""
    reference = AutoModelForCausalLM.from_pretrained(
        Path(ModelManifest.read(tiny_model).source), dtype=torch.float32
    ).eval()
    greedy = LLM(tiny_model, **SIZES).generate(
        [prompt_of(90, 5)], SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
    )[0]
    prompts = [prompt_of(40), prompt_of(150, 3), prompt_of(90, 5) + greedy.token_ids, prompt_of(40)]
    ctxlens = [30, 149, 90, 1]
    async with served(tiny_model) as (_, client):
        name = (await client.get("/v1/models")).json()["data"][0]["id"]
        body = {"model": name, "prompt": prompts, "temperature": 0, "max_tokens": 1, "logprobs": 1,
                "seed": 1234, "echo": True}  # fmt: skip
        got = parse_logprobs(await completed(client, **body), ctxlens)
        # The older form of it generates nothing, so that no token is to be left out at the end.
        older = await completed(client, **{**body, "max_tokens": 0, "logprobs": 5})
    for (total, is_greedy), choice, prompt, ctxlen in zip(
        got, older["choices"], prompts, ctxlens, strict=True
    ):
        with torch.inference_mode():
            logprobs = torch.log_softmax(reference(torch.tensor([prompt])).logits[0], dim=-1)
        want = [float(logprobs[i - 1, prompt[i]]) for i in range(ctxlen, len(prompt))]
        assert total == pytest.approx(sum(want), abs=2e-3)
        best = logprobs.argmax(dim=-1).tolist()
        assert is_greedy is all(best[i - 1] == prompt[i] for i in range(ctxlen, len(prompt)))
        shown = choice["logprobs"]
        assert len(shown["tokens"]) == len(shown["text_offset"]) == len(prompt)
        assert sum(shown["token_logprobs"][ctxlen:]) == pytest.approx(total, abs=1e-5)
        assert [len(top) for top in shown["top_logprobs"][1:]] == [5] * (len(prompt) - 1)
        assert shown["token_logprobs"][0] is shown["top_logprobs"][0] is None
    assert [is_greedy for _, is_greedy in got] == [False, False, True, False]
    assert older["usage"]["completion_tokens"] == 0


async def test_the_text_begins_with_the_prompt_and_offsets_point_into_it(tiny_model: Path) -> None:
    async with served(tiny_model) as (_, client):
        body = {"prompt": TEXT, "max_tokens": 8, "seed": 3, "logprobs": 2, "n": 2}
        plain, echoed = await completed(client, **body), await completed(client, **body, echo=True)
        for before, choice in zip(plain["choices"], echoed["choices"], strict=True):
            assert choice["text"] == TEXT + before["text"]
            shown, answer = choice["logprobs"], before["logprobs"]
            assert shown["text_offset"][: len(TEXT)] == list(range(len(TEXT)))
            assert shown["tokens"] == [*TEXT, *answer["tokens"]]
            for field in ("token_logprobs", "top_logprobs"):
                assert shown[field][len(TEXT) :] == answer[field]
        nothing = await completed(client, **{**body, "max_tokens": 0}, echo=True)
        assert [choice["text"] for choice in nothing["choices"]] == [TEXT, TEXT]
        assert [choice["finish_reason"] for choice in nothing["choices"]] == ["length", "length"]
        assert nothing["choices"][0]["logprobs"]["tokens"] == list(TEXT)
        # Of token ids the text is what they decode to; without `logprobs` there are none.
        of_ids = await completed(client, prompt=prompt_of(9), echo=True, max_tokens=0)
        assert of_ids["choices"][0]["text"] == LLM(tiny_model, **SIZES).tokenizer.decode(prompt_of(9))
        assert of_ids["choices"][0]["logprobs"] is None


async def test_a_stream_sends_the_prompt_first_and_is_resumed_without_it(tiny_model: Path) -> None:
    async with served(tiny_model) as (_, client):
        body = {"prompt": TEXT, "max_tokens": 12, "seed": 3, "logprobs": 1, "echo": True, "n": 2}
        whole = await completed(client, **body)

        async def lines(headers: dict[str, str]) -> list[tuple[str, dict]]:
            response = await client.post("/v1/completions", json={**body, "stream": True}, headers=headers)
            events, event_id = [], ""
            for line in response.text.splitlines():
                if line.startswith("id: "):
                    event_id = line[4:]
                elif line.startswith("data: {"):
                    events.append((event_id, json.loads(line[6:])))
            return events

        events = await lines({"X-Event-Ids": "true"})
        for index, choice in enumerate(whole["choices"]):
            parts = [e["choices"][0] for _, e in events if e["choices"][0]["index"] == index]
            assert parts[0]["text"].startswith(TEXT)
            assert "".join(part["text"] for part in parts) == choice["text"]
            for field in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
                joined = [value for part in parts if part["logprobs"] for value in part["logprobs"][field]]
                assert joined == choice["logprobs"][field]
        rest = await lines({"Last-Event-ID": events[0][0]})
        assert [event for _, event in rest] == [event for _, event in events[1:]]


async def test_prompt_logprobs_are_the_engines_and_vllms_shape(tiny_model: Path) -> None:
    prompt = prompt_of(150)
    want = LLM(tiny_model, **SIZES).generate([prompt], SamplingParams(max_tokens=1, prompt_logprobs=3))[0]
    assert want.prompt_logprobs is not None
    async with served(tiny_model, speculation="local") as (_, client):
        await completed(client, prompt=prompt, max_tokens=1)  # now the prefix caches hold it
        answer = await completed(client, prompt=[prompt, prompt], n=2, max_tokens=4, prompt_logprobs=3)
        assert answer["usage"]["tandem_receipts"][0]["cached_tokens"] == 0
        assert answer["usage"]["tandem_receipts"][0]["prefill_pod"] == ""
        assert answer["usage"]["tandem_receipts"][1]["cached_tokens"] > 0, "only the first choice computes it"
    for choice in answer["choices"]:
        first, *others = choice["prompt_logprobs"]
        assert first is None
        assert len(others) == len(prompt) - 1
        for i, position in enumerate(others):
            token_id, entry = next(iter(position.items()))
            assert int(token_id) == prompt[i + 1]
            # The wire has float32.
            assert entry["logprob"] == pytest.approx(want.prompt_logprobs.logprobs[i], abs=1e-6)
            assert entry["rank"] == want.prompt_logprobs.ranks[i]
            by_rank = {shown["rank"]: int(name) for name, shown in position.items()}
            top_ids = want.prompt_logprobs.top_token_ids[3 * i : 3 * i + 3]
            assert [by_rank[rank] for rank in (1, 2, 3)] == list(top_ids)
        assert choice["logprobs"] is None


@pytest.mark.parametrize("one_token", [False, True])
async def test_a_pod_sends_them_once_with_the_first_token(tiny_model: Path, one_token: bool) -> None:
    """A pod that continues an answer, or another one that begins it anew, sends none or the same."""
    async with run_fleet(tiny_model) as fleet:
        message = request("r", prompt_of(200), [fleet.prefill_target], prompt_logprobs=4)
        message.one_token_chunks = one_token

        async def chunks_of(message: decode_pb2.DecodeRequest) -> list[decode_pb2.DecodeChunk]:
            return [r.chunk async for r in fleet.decode.Decode(message) if r.HasField("chunk")]

        chunks = await chunks_of(message)
        again = await chunks_of(message)
        assert [chunk.HasField("prompt_logprobs") for chunk in chunks] == [True] + [False] * (len(chunks) - 1)
        assert chunks[0].prompt_logprobs == again[0].prompt_logprobs
        assert len(chunks[0].prompt_logprobs.logprobs) == 199
        token_ids = [token_id for chunk in chunks for token_id in chunk.token_ids]
        message.output_token_ids[:] = token_ids[:1]
        message.decode_retries = 1
        rest = await chunks_of(message)
        assert not any(chunk.HasField("prompt_logprobs") for chunk in rest)
        assert [token_id for chunk in rest for token_id in chunk.token_ids] == token_ids[1:]
        await fleet.assert_idle()
