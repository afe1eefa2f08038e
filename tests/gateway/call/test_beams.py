"""A beam search at the gateway: one request to the pods, whose texts are the choices; lost pods only delay
it."""

from __future__ import annotations

import asyncio
import hashlib
import json

import grpc
import pytest
from tandem_proto.v1 import common_pb2, gateway_pb2
from waiting import until_async

COMPLETIONS = "/v1/completions"
BEAMS = {"prompt": "a", "use_beam_search": True, "beam_width": 3}
SAMPLING = common_pb2.SamplingParams(beam_search=common_pb2.BeamSearch(width=3))


def texts(answer: dict) -> list[str]:
    return [choice["text"] for choice in answer["choices"]]


async def test_the_best_texts_are_the_choices(pods, gateway):
    pod = await pods(num_preemptions=3)
    front = await gateway(pod)
    body = {**BEAMS, "n": 2, "length_penalty": 0.5, "early_stopping": "never"}
    answer = (await front.http.post(COMPLETIONS, json=body)).json()
    assert texts(answer) == ["Hello", "Hello  there"]
    (request,) = pod.requests
    asked = request.sampling.beam_search
    assert (asked.width, asked.length_penalty) == (3, 0.5)
    assert asked.early_stopping == common_pb2.EARLY_STOPPING_NEVER
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (1, 3)
    receipts = usage["tandem_receipts"]
    assert [receipt["output_tokens"] for receipt in receipts] == [1, 2]
    # Work for both counts once.
    assert [receipt["transfer_bytes"] for receipt in receipts] == [100, 0]
    assert await front.metric("vllm:num_preemptions_total") == 3
    assert await front.metric('tandem_requests_total{outcome="ok"}') == 2


async def test_the_prompt_of_a_search_is_computed_before_its_texts_come(pods, gateway):
    front = await gateway(await pods(pause_s=30.0))
    (pod,) = front.process.fleet.pods()
    searching = asyncio.create_task(front.http.post(COMPLETIONS, json={**BEAMS, "n": 2}))
    await until_async(lambda: asyncio.sleep(0, pod.in_flight == 1 and not pod.works.has_prompts))
    assert pod.works.num_sequences() == 3, "one search finds both texts"
    searching.cancel()


async def test_chats_support_beam_search(pods, gateway):
    front = await gateway(await pods())
    body = {"messages": [{"role": "user", "content": "hi"}], **BEAMS, "n": 2}
    del body["prompt"]
    answer = (await front.http.post("/v1/chat/completions", json=body)).json()
    assert [choice["message"]["content"] for choice in answer["choices"]] == ["Hello", "Hello  there"]


@pytest.mark.parametrize(
    ("width", "asked"), [({"n": 2}, 2), ({"best_of": 3, "beam_width": None}, 3), ({"beam_width": 16}, 16)]
)
async def test_the_width_accepts_the_names_of_vllm_and_tandem(pods, gateway, width, asked):
    pod = await pods()
    front = await gateway(pod)
    body = {"prompt": "a", "use_beam_search": True, **width}
    assert (await front.http.post(COMPLETIONS, json=body)).status_code == 200
    assert pod.requests[0].sampling.beam_search.width == asked


async def test_length_penalty_has_no_effect_without_beam_search(pods, gateway):
    pod = await pods()
    front = await gateway(pod)
    body = {"prompt": "a", "use_beam_search": False, "length_penalty": 0.5, "early_stopping": True}
    assert (await front.http.post(COMPLETIONS, json=body)).status_code == 200
    assert not pod.requests[0].sampling.HasField("beam_search")


async def test_grpc_has_a_chunk_and_an_end_for_each_choice(pods, gateway):
    front = await gateway(await pods())
    request = gateway_pb2.GenerateRequest(text="a", sampling=SAMPLING, n=3)
    messages = [message async for message in front.grpc.Generate(request, timeout=10)]
    parts = [getattr(message, message.WhichOneof("event")) for message in messages]
    assert [part.choice for part in parts] == [0, 0, 1, 1, 2, 2]
    assert [list(part.token_ids) for part in parts[::2]] == [[10], [10, 11], [10, 11, 12]]
    assert {part.reason for part in parts[1::2]} == {common_pb2.FINISH_REASON_STOP}
    request.n = 4
    with pytest.raises(grpc.aio.AioRpcError, match="more than the 3 beams") as error:
        _ = [message async for message in front.grpc.Generate(request, timeout=10)]
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("status", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED])
async def test_another_pod_restarts_the_search_of_a_lost_pod(pods, gateway, status):
    lost = await pods("lost", fail_with=status, free_blocks=100, pause_s=0.2)
    other = await pods("other", free_blocks=90)
    front = await gateway(lost, other)
    answer = (await front.http.post(COMPLETIONS, json={**BEAMS, "n": 3})).json()
    assert texts(answer) == ["Hello", "Hello  there", "Hello  there !"]
    assert (len(lost.requests), len(other.requests)) == (1, 1)
    assert not other.requests[0].output_token_ids
    receipt = answer["usage"]["tandem_receipt"]
    assert (receipt["decode_pod"], receipt["decode_retries"]) == ("other", 1)


async def test_a_search_leaves_a_draining_pod(pods, gateway):
    draining = await pods("draining", is_draining=True, free_blocks=100, pause_s=20.0)
    other = await pods("other", free_blocks=90)
    front = await gateway(draining, other)
    answer = (await front.http.post(COMPLETIONS, json=BEAMS)).json()
    assert answer["usage"]["tandem_receipt"]["decode_pod"] == "other"
    assert other.requests[0].kv_source == draining.target


async def test_a_pod_without_beam_search_is_an_error(pods, gateway):
    front = await gateway(await pods(can_search=False))
    response = await front.http.post(COMPLETIONS, json=BEAMS)
    assert response.status_code == 500
    assert "has no beam search" in response.json()["error"]["message"]


async def test_a_resumed_search_sends_only_missing_choices(pods, gateway):
    """After the first choice, and after the second one's text."""
    pod = await pods()
    front = await gateway(pod)
    body = {**BEAMS, "n": 3, "stream": True}
    whole = (await front.http.post(COMPLETIONS, json=body, headers={"x-event-ids": "true"})).text
    events = [event for event in whole.split("\n\n") if event.startswith("id: ")]
    for num_seen in (2, 3):
        last = events[num_seen - 1].partition("\n")[0].removeprefix("id: ")
        response = await front.http.post(COMPLETIONS, json=body, headers={"Last-Event-ID": last})
        rest = [event for event in response.text.split("\n\n") if event.startswith("id: ")]
        assert rest == events[num_seen:]


async def test_all_texts_of_a_search_count_in_the_tenants_tokens_per_minute(pods, gateway, tmp_path):
    keys = tmp_path / "keys.jsonl"
    line = {"key_sha256": hashlib.sha256(b"k").hexdigest(), "tenant": "t", "tokens_per_minute": 60}
    keys.write_text(json.dumps(line))
    front = await gateway(await pods(), api_keys_file=keys)
    headers = {"authorization": "Bearer k"}
    body = {**BEAMS, "beam_width": 16, "n": 2}
    statuses = [
        (await front.http.post(COMPLETIONS, json=body, headers=headers)).status_code for _ in range(4)
    ]
    # A search shows two texts of 3 tokens together: 16 texts of their mean length have 24, the prompt has 1.
    assert statuses == [200, 200, 200, 429]
