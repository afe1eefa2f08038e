"""Several choices and prompts in one call: separate seeds, admitted and streamed together."""

from __future__ import annotations

import asyncio
import json

import pytest
from tandem_gateway.fleet.routing import Router
from tandem_proto.v1 import common_pb2, gateway_pb2
from waiting import until_async

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "hi"}]
WITH_IDS = {"x-event-ids": "true"}


def events_of(text: str) -> list[tuple[str, dict]]:
    """Ids and bodies of a stream's events."""
    events = []
    for event in text.removesuffix("\n\n").split("\n\n"):
        head, _, data = event.partition("data: ")
        if data != "[DONE]":
            events.append((head.removeprefix("id: ").strip(), json.loads(data)))
    return events


async def test_choice_i_is_a_request_with_seed_plus_i(pods, gateway):
    pod = await pods()
    front = await gateway(pod)
    answer = await front.openai.chat.completions.create(model="", messages=USER, n=3, seed=2**63 - 1)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [choice.message.content for choice in answer.choices] == ["Hello there!"] * 3
    assert [request.sampling.seed for request in pod.requests] == [2**63 - 1, 2**63, 2**63 + 1]
    assert len({request.request_id for request in pod.requests}) == 3
    usage = answer.usage
    assert usage.completion_tokens == 9
    assert usage.prompt_tokens == len(pod.requests[0].prompt_token_ids)
    assert [receipt["seed"] for receipt in usage.tandem_receipts] == [2**63 - 1, 2**63, 2**63 + 1]
    assert await front.metric('tandem_requests_total{outcome="ok"}') == 3


async def test_seeds_wrap_around_at_the_largest_seed(pods, gateway):
    pod = await pods()
    front = await gateway(pod)
    response = await front.http.post(CHAT, json={"messages": USER, "n": 2, "seed": 2**64 - 1})
    assert response.status_code == 200
    assert [request.sampling.seed for request in pod.requests] == [2**64 - 1, 0]


async def test_choices_of_a_prompt_wait_for_the_first_choices_first_token(pods, gateway):
    pod = await pods(pause_s=0.3)
    front = await gateway(pod)
    body = {"prompt": [[5] * 200, [6] * 200], "n": 2}
    call = asyncio.create_task(front.http.post(COMPLETIONS, json=body))

    async def have_begun(num: int) -> bool:
        return len(pod.requests) == num

    await until_async(lambda: have_begun(2))
    await asyncio.sleep(0.1)
    assert len({tuple(request.prompt_token_ids) for request in pod.requests}) == 2
    await until_async(lambda: have_begun(4))
    (works,) = [one.works for one in front.process.fleet.pods()]
    num_left = sum(job.stop - job.start for job in works.jobs({}).values())
    assert num_left < 20, "the first choices have left most of 400 tokens in the cache"
    answer = (await call).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"]["prompt_tokens"] == 400
    assert answer["usage"]["completion_tokens"] == 12
    queued_s = [receipt["queue_ns"] / 1e9 for receipt in answer["usage"]["tandem_receipts"]]
    waits = [queued_s[other] - queued_s[first] for first, other in ((0, 1), (2, 3))]
    assert min(waits) > 0.25, "for the first one's token, which came after .3 s"


async def test_the_longest_prompt_of_a_call_is_predicted_behind_the_others(pods, gateway):
    """920 tokens take two steps of a second."""
    front = await gateway(await pods(step_s=1.0))
    prompts = [[5] * 230, [6] * 250, [7] * 240, [8] * 200]
    response = await front.http.post(COMPLETIONS, json={"prompt": prompts, "max_tokens": 5})
    receipts = response.json()["usage"]["tandem_receipts"]
    predicted_s = [receipt["predicted_ttft_p50_ns"] / 1e9 for receipt in receipts]
    assert predicted_s == [0, pytest.approx(2, abs=0.5), 0, 0], "only the longest one has a prediction"


async def test_the_choices_of_a_call_count_as_one_request_in_the_expected_wait(pods, gateway):
    pod = await pods()
    front = await gateway(pod, max_in_flight=1, max_queue=0)
    assert (await front.http.post(COMPLETIONS, json={"prompt": "a", "n": 16})).status_code == 200
    pod.pause_s = 10.0
    pod.started.clear()
    slow = asyncio.create_task(front.http.post(CHAT, json={"messages": USER}))
    await pod.started.wait()
    refused = await front.http.post(CHAT, json={"messages": USER})
    slow.cancel()
    # A request is expected to take a second at first; each measured one counts for a tenth.
    assert (refused.status_code, float(refused.headers["retry-after-ms"]) > 800) == (429, True)


async def test_choices_go_to_the_pod_on_which_their_call_has_its_places(pods, gateway):
    both = [await pods(name) for name in ("d-0", "d-1")]
    front = await gateway(*both)
    response = await front.http.post(CHAT, json={"messages": USER, "n": 8})
    assert response.status_code == 200
    assert sorted(len(pod.requests) for pod in both) == [0, 8]


async def test_the_places_of_a_choice_are_free_on_its_pod_when_it_ends(pods, gateway):
    pod = await pods(words=["a"] * 20, pause_s=0.05)
    front = await gateway(pod)
    works = {pod.target: pod.works for pod in front.process.fleet.pods()}[pod.target]
    body = {"prompt": ["a", "b", "c"], "max_tokens": 20}
    call = asyncio.create_task(front.http.post(COMPLETIONS, json=body))

    async def have_begun() -> bool:
        return len(pod.requests) == 3

    await until_async(have_begun)
    assert [work.num_places for work in works.all] == [1, 1, 1]
    assert {work.placed.request.prompt_token_ids for work in works.all} == {
        tuple(request.prompt_token_ids) for request in pod.requests
    }

    async def have_answers() -> bool:
        return min([work.placed.num_tokens for work in works.all], default=0) > 5

    await until_async(have_answers)
    assert (await call).status_code == 200
    assert works.all == []


async def test_prompts_are_routed_one_in_each_turn_of_the_loop(pods, gateway, monkeypatch):
    front = await gateway(await pods())
    loop, choose, log = asyncio.get_running_loop(), Router.choose, []

    def logged(*args):
        log.append("choice")
        loop.call_soon(log.append, "turn")
        return choose(*args)

    monkeypatch.setattr(Router, "choose", logged)
    response = await front.http.post(COMPLETIONS, json={"prompt": [[n] for n in range(5, 25)]})
    assert response.status_code == 200
    assert log == ["choice", "turn"] * 19, "one prompt was routed when the call was admitted"


async def test_a_stream_has_the_events_of_all_choices(pods, gateway):
    front = await gateway(await pods())
    body = {"messages": USER, "n": 3, "stream": True, "stream_options": {"include_usage": True}}
    events = events_of((await front.http.post(CHAT, json=body)).text)
    *chunks, (_, usage) = events
    for index in range(3):
        of_choice = [body["choices"][0] for _, body in chunks if body["choices"][0]["index"] == index]
        assert [choice["delta"].get("content", "") for choice in of_choice] == ["Hello", " there", "!", ""]
        assert [choice["delta"].get("role") for choice in of_choice] == ["assistant", None, None, None]
        assert [choice["finish_reason"] for choice in of_choice] == [None, None, None, "stop"]
    assert usage["usage"]["completion_tokens"] == 9
    assert len(usage["usage"]["tandem_receipts"]) == 3


@pytest.mark.parametrize("cut", range(1, 12))
async def test_a_stream_cut_after_any_event_is_resumed(pods, gateway, cut):
    front = await gateway(await pods(pause_s=0.01))
    body = {"prompt": [5, 6], "n": 3, "stream": True, "logprobs": 1}
    texts = dict.fromkeys(range(3), "")
    last = ""
    async with front.http.stream("POST", COMPLETIONS, json=body, headers=WITH_IDS) as response:
        num = 0
        async for line in response.aiter_lines():
            if line.startswith("id: "):
                last = line.removeprefix("id: ")
            elif line.startswith("data: "):
                choice = json.loads(line.removeprefix("data: "))["choices"][0]
                texts[choice["index"]] += choice["text"]
                num += 1
                if num == cut:
                    break
    rest = await front.http.post(COMPLETIONS, headers={"last-event-id": last})
    assert rest.status_code == 200, rest.text
    for _, body in events_of(rest.text):
        choice = body["choices"][0]
        texts[choice["index"]] += choice["text"]
    assert texts == dict.fromkeys(range(3), "Hello there!")


async def test_a_position_of_another_number_of_choices_is_refused(pods, gateway):
    front = await gateway(await pods())
    body = {"messages": USER, "n": 2, "stream": True}
    events = events_of((await front.http.post(CHAT, json=body, headers=WITH_IDS)).text)
    assert events[-1][0].endswith("-4.4")
    for wrong in ("4", "4.4.4", "4.5"):
        last = events[-1][0].rpartition("-")[0] + "-" + wrong
        response = await front.http.post(CHAT, headers={"last-event-id": last})
        assert response.status_code == 404


async def test_requests_with_one_key_get_the_same_choices(pods, gateway):
    pod = await pods()
    front = await gateway(pod)
    body, headers = {"messages": USER, "n": 2}, {"idempotency-key": "k"}
    first, second = [(await front.http.post(CHAT, json=body, headers=headers)).json() for _ in range(2)]
    assert first == second
    assert len(pod.requests) == 2


async def test_the_best_choices_have_the_highest_mean_log_probability(pods, gateway):
    pod = await pods(logprob_of_seed=True)
    front = await gateway(pod)
    body = {"prompt": "a", "best_of": 4, "n": 2, "seed": 10}
    answer = (await front.http.post(COMPLETIONS, json={**body, "return_token_ids": True})).json()
    assert [choice["logprobs"] for choice in answer["choices"]] == [None, None]
    assert answer["usage"]["completion_tokens"] == 12
    shown = (await front.http.post(COMPLETIONS, json={**body, "logprobs": 0})).json()
    # The pod's log probabilities are -1 / (1 + seed): the largest seed is the best.
    chosen = [choice["logprobs"]["token_logprobs"][0] for choice in shown["choices"]]
    assert chosen == pytest.approx([-1 / 14, -1 / 13])
    assert [choice["index"] for choice in shown["choices"]] == [0, 1]


async def test_grpc_streams_several_choices(pods, gateway):
    front = await gateway(await pods())
    call = front.grpc.Generate(gateway_pb2.GenerateRequest(text="a", n=2))
    texts, ends = ["", ""], []
    async for response in call:
        if response.HasField("chunk"):
            texts[response.chunk.choice] += response.chunk.text
        else:
            ends.append(response.end.choice)
    assert texts == ["Hello there!"] * 2
    assert sorted(ends) == [0, 1]
    receipts = [value for key, value in await call.trailing_metadata() if key == "tandem-receipt-bin"]
    assert len({common_pb2.Receipt.FromString(receipt).seed for receipt in receipts}) == 2


async def test_each_choice_takes_a_place(pods, gateway):
    pod = await pods(pause_s=0.2)
    front = await gateway(pod, max_in_flight=3, max_queue=10)
    slow = asyncio.create_task(front.http.post(CHAT, json={"messages": USER, "n": 2}))
    await pod.started.wait()
    many = asyncio.create_task(front.http.post(CHAT, json={"messages": USER, "n": 2}))
    await front.until_metric("tandem_queue_length", 1)
    assert await front.metric("tandem_requests_in_flight") == 2
    one = asyncio.create_task(front.http.post(CHAT, json={"messages": USER}))
    answers = await asyncio.gather(slow, many, one)
    assert [answer.status_code for answer in answers] == [200] * 3
    # More than the number of places: it gets all of them.
    assert (await front.http.post(CHAT, json={"messages": USER, "n": 5})).status_code == 200
    assert await front.metric("tandem_requests_in_flight") == 0


async def test_a_call_with_many_choices_leaves_places_for_others(pods, gateway):
    pod = await pods(pause_s=0.1)
    front = await gateway(pod, max_in_flight=8, max_queue=20)
    prompts = [f"prompt {number}" for number in range(12)]
    many = asyncio.create_task(front.http.post(COMPLETIONS, json={"prompt": prompts}))
    await pod.started.wait()
    assert await front.metric("tandem_requests_in_flight") == 4
    assert (await front.http.post(CHAT, json={"messages": USER})).status_code == 200
    assert not many.done()
    choices = (await many).json()["choices"]
    assert [choice["text"] for choice in choices] == ["Hello there!"] * 12


async def test_a_failed_or_cancelled_call_ends_all_its_choices(pods, gateway):
    pod = await pods(pause_s=0.2)
    front = await gateway(pod)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await front.http.post(CHAT, json={"messages": USER, "n": 4})
    await front.until_metric("tandem_requests_in_flight", 0)
    await front.until_metric('tandem_requests_total{outcome="cancelled"}', 4)
