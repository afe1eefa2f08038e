"""Fields of the sampling that a request leaves out are the model's recommendation, through every API."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from fake_pods import FakePod
from tandem_core.errors import ModelLoadError
from tandem_core.model.manifest import ModelManifest
from tandem_proto.v1 import common_pb2, gateway_pb2

RECOMMENDED = {
    "temperature": 0.2, "top_p": 0.75, "top_k": 20, "min_p": 0.125, "repetition_penalty": 1.25,
    "max_tokens": 40,
}  # fmt: skip
NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
MESSAGES = [{"role": "user", "content": "hi"}]
REQUESTS = {
    "/v1/chat/completions": {"messages": MESSAGES},
    # Its default is OpenAI's 16, as in vLLM.
    "/v1/completions": {"prompt": "hi", "max_tokens": 40},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 40},
}


@pytest.fixture
def folder(tmp_path: Path, model_folder: Path) -> Callable[..., Path]:
    """Makes a folder of the model with this recommendation."""

    def make(recommended: dict[str, float] | None) -> Path:
        (tmp_path / "tokenizer.json").symlink_to(model_folder / "tokenizer.json")
        replace(ModelManifest.read(model_folder), recommended_sampling=recommended).write(tmp_path)
        return tmp_path

    return make


def used(pod: FakePod, names: object = RECOMMENDED) -> dict[str, float]:
    """Of the last request, which has them as float32."""
    return {name: round(getattr(pod.requests[-1].sampling, name), 6) for name in names}


@pytest.mark.parametrize("path", REQUESTS)
async def test_http_uses_the_recommendation_and_the_client_overrides_it(
    pods, gateway, folder, path: str
) -> None:
    pod = await pods()
    front = await gateway(pod, model=folder(RECOMMENDED))
    answer = (await front.http.post(path, json=REQUESTS[path])).raise_for_status().json()
    assert used(pod) == RECOMMENDED
    if path == "/v1/responses":
        assert (answer["temperature"], answer["top_p"], answer["max_output_tokens"]) == (0.2, 0.75, 40)
    null = {"temperature": None, "top_p": None}
    (await front.http.post(path, json=REQUESTS[path] | null)).raise_for_status()
    assert used(pod) == RECOMMENDED
    given = {"temperature": 1.0, "top_p": 1.0}
    (await front.http.post(path, json=REQUESTS[path] | given)).raise_for_status()
    assert used(pod) == RECOMMENDED | given


async def test_a_chat_may_give_the_neutral_values_of_all(pods, gateway, folder) -> None:
    pod = await pods()
    front = await gateway(pod, model=folder(RECOMMENDED))
    body = {"messages": MESSAGES, "max_tokens": 7, **NEUTRAL}
    (await front.http.post("/v1/chat/completions", json=body)).raise_for_status()
    assert used(pod) == NEUTRAL | {"max_tokens": 7}


async def test_grpc_uses_the_recommendation_and_the_client_overrides_it(pods, gateway, folder) -> None:
    pod = await pods()
    front = await gateway(pod, model=folder(RECOMMENDED))

    async def generate(**sampling: float) -> dict[str, float]:
        request = gateway_pb2.GenerateRequest(text="hi", sampling=common_pb2.SamplingParams(**sampling))
        async for _ in front.grpc.Generate(request):
            pass
        return used(pod)

    assert await generate() == RECOMMENDED
    assert await generate(**NEUTRAL, max_tokens=7) == NEUTRAL | {"max_tokens": 7}
    (model,) = (await front.grpc.ListModels(gateway_pb2.ListModelsRequest())).models
    assert model.recommended_sampling == common_pb2.SamplingParams(**RECOMMENDED)


async def test_models_show_the_recommendation_and_a_setting_disables_it(pods, gateway, folder) -> None:
    pod = await pods()
    path = folder(RECOMMENDED)
    shown = (await (await gateway(pod, model=path)).http.get("/v1/models")).json()["data"][0]
    assert shown["recommended_sampling"] == RECOMMENDED
    front = await gateway(pod, model=path, generation_config="none")
    (await front.http.post("/v1/chat/completions", json={"messages": MESSAGES})).raise_for_status()
    assert used(pod, NEUTRAL) == NEUTRAL
    assert (await front.http.get("/v1/models")).json()["data"][0]["recommended_sampling"] == {}


async def test_a_beam_search_compares_the_models_own_probabilities(pods, gateway, folder) -> None:
    pod = await pods()
    front = await gateway(pod, model=folder(RECOMMENDED))
    body = {**REQUESTS["/v1/completions"], "use_beam_search": True, "beam_width": 2}
    (await front.http.post("/v1/completions", json=body)).raise_for_status()
    assert used(pod) == NEUTRAL | {"max_tokens": 40}


async def test_more_tokens_than_the_context_leaves_are_not_recommended(pods, gateway, folder) -> None:
    pod = await pods()
    front = await gateway(pod, model=folder({"max_tokens": 100_000}))
    (await front.http.post("/v1/chat/completions", json={"messages": MESSAGES})).raise_for_status()
    assert pod.requests[0].sampling.max_tokens == 256 - len(pod.requests[0].prompt_token_ids)


@pytest.mark.parametrize("wrong", [{"temperature": 7.5}, {"top_p": "much"}, {"temprature": 0.5}])
async def test_a_value_out_of_range_names_the_remedy(pods, gateway, folder, wrong) -> None:
    pod = await pods()
    path = folder(wrong)
    with pytest.raises(ModelLoadError, match=r"tiny-chat recommends .* --generation-config none"):
        await gateway(pod, model=path)
    await gateway(pod, model=path, generation_config="none")
