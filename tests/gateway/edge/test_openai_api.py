"""HTTP through OpenAI's client: answers, streams, usage with the receipt, errors, disconnects."""

import asyncio
import itertools
import json

import grpc
import httpx
import openai
import pytest
import structlog
from tandem_core.model.tokenizer import Tokenizer
from tandem_proto.v1 import gateway_pb2

USER = [{"role": "user", "content": "hi"}]
CHAT = "/v1/chat/completions"


async def test_a_chat_answer_has_openais_fields_and_a_receipt(pods, gateway):
    front = await gateway(await pods())
    answer = await front.openai.chat.completions.create(model="tiny-chat", messages=USER)
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == "Hello there!"
    assert choice.finish_reason == "stop"
    assert choice.logprobs is None
    assert answer.usage.completion_tokens == 3
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 3
    receipt = answer.usage.tandem_receipt
    assert receipt["decode_pod"] == "d-0"
    assert receipt["slo_met"] is True
    assert answer.id == "chatcmpl-" + receipt["request_id"] == "chatcmpl-" + answer._request_id


async def test_a_chat_stream_ends_with_usage_on_request(pods, gateway):
    front = await gateway(await pods())
    stream = await front.openai.chat.completions.create(
        model="tiny-chat", messages=USER, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    *texts, finish, usage = chunks
    assert [chunk.choices[0].delta.content for chunk in texts] == ["Hello", " there", "!"]
    assert [chunk.choices[0].delta.role for chunk in texts] == ["assistant", None, None]
    assert finish.choices[0].finish_reason == "stop"
    assert usage.choices == []
    assert usage.usage.completion_tokens == 3
    assert usage.usage.tandem_receipt["output_tokens"] == 3
    assert all(chunk.usage is None for chunk in (*texts, finish))


async def test_a_stream_without_usage_ends_with_done(pods, gateway):
    front = await gateway(await pods())
    response = await front.http.post(CHAT, json={"messages": USER, "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    events = response.text.removesuffix("\n\n").split("\n\n")
    assert events[-1] == "data: [DONE]"
    bodies = [json.loads(event.partition("data: ")[2]) for event in events[:-1]]
    assert all("usage" not in body for body in bodies)
    assert bodies[-1]["choices"][0]["finish_reason"] == "stop"


async def test_text_arrives_as_the_pod_sends_it(pods, gateway):
    front = await gateway(await pods(pause_s=0.15))
    loop = asyncio.get_running_loop()
    stream = await front.openai.chat.completions.create(model="", messages=USER, stream=True)
    times = [loop.time() async for chunk in stream if chunk.choices[0].delta.content]
    assert all(later - earlier > 0.1 for earlier, later in itertools.pairwise(times))


async def test_a_chat_has_logprobs_in_openais_format(pods, gateway):
    front = await gateway(await pods())
    answer = await front.openai.chat.completions.create(
        model="tiny-chat", messages=USER, logprobs=True, top_logprobs=2
    )
    first = answer.choices[0].logprobs.content[0]
    assert (first.token, first.logprob, first.bytes) == ("Hello", -0.5, list(b"Hello"))
    assert [top.token for top in first.top_logprobs] == ["Hello", "\ufffd"]
    assert first.top_logprobs[1].bytes == [0xE2, 0x82]


async def test_a_completion_is_equal_whole_and_streamed(pods, gateway):
    pod = await pods()
    front = await gateway(pod)
    answer = await front.openai.completions.create(model="tiny-chat", prompt="the order", logprobs=2)
    (choice,) = answer.choices
    assert choice.text == "Hello there!"
    assert choice.logprobs.tokens == ["Hello", " there", "!"]
    assert choice.logprobs.text_offset == [0, 5, 11]
    assert choice.logprobs.top_logprobs[0] == {"Hello": -0.5, "bytes:\\xe2\\x82": -1.5}
    stream = await front.openai.completions.create(model="tiny-chat", prompt=[5, 6], stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == "Hello there!"
    assert list(pod.requests[1].prompt_token_ids) == [5, 6]


async def test_parameters_of_the_body_reach_the_pod(pods, gateway):
    pod = await pods()
    front = await gateway(pod)
    answer = await front.openai.chat.completions.create(
        model="tiny-chat",
        messages=[
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        ],
        temperature=0, top_p=0.5, max_completion_tokens=9, seed=3, stop="END", logit_bias={"5": -1},
        presence_penalty=1, frequency_penalty=-1, n=1, tools=[], response_format={"type": "text"}, user="u",
        extra_body={"top_k": 4, "min_p": 0.25, "repetition_penalty": 1.5, "ignore_eos": True,
                    "min_tokens": 2, "slo_class": "batch", "stop_token_ids": [7],
                    "speculation": "chain", "bad_words": [[5, 6], [7]]},
    )  # fmt: skip
    sampling = pod.requests[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens, sampling.seed) == (0, 0.5, 9, 3)
    assert (sampling.top_k, sampling.min_p, sampling.repetition_penalty) == (4, 0.25, 1.5)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (1, -1)
    assert (sampling.ignore_eos, sampling.min_tokens) == (True, 2)
    assert list(sampling.stop) == ["END"]
    assert list(sampling.stop_token_ids) == [7]
    assert dict(sampling.logit_bias) == {5: -1.0}
    assert [list(word.ids) for word in sampling.bad_words] == [[5, 6], [7]]
    assert answer.usage.tandem_receipt["slo"]["name"] == "batch"
    assert pod.requests[0].speculation == "chain"


async def test_vllms_fields_are_accepted_with_their_meaning(pods, gateway):
    pod = await pods()
    front = await gateway(pod)
    off = {
        "best_of": None, "use_beam_search": False, "length_penalty": 1.0, "early_stopping": False,
        "echo": False, "tools": [], "tool_choice": "none", "functions": None, "suffix": "", "documents": [],
        "prompt_logprobs": None, "reasoning_effort": "none", "cache_salt": "", "kv_transfer_params": {},
        "priority": 0, "spaces_between_special_tokens": True, "top_logprobs": 0, "logprobs": False,
        "seed": -1, "top_k": -1, "logit_bias": None, "include_reasoning": True, "user": "u",
        "add_special_tokens": False, "bad_words": [], "allowed_token_ids": [], "logits_processors": [],
    }  # fmt: skip
    response = await front.http.post(CHAT, json={"messages": USER, **off})
    assert response.status_code == 200, response.text
    asked = {
        "skip_special_tokens": False, "include_stop_str_in_output": True, "detokenize": False,
        "allowed_token_ids": [5, 6], "logits_processors": ["digits"], "min_tokens": 1, "request_id": "mine",
    }  # fmt: skip
    answer = await front.openai.chat.completions.create(model="", messages=USER, extra_body=asked)
    first, second = (request.sampling for request in pod.requests)
    assert first.skip_special_tokens
    assert not first.include_stop_str_in_output
    assert second.HasField("skip_special_tokens")
    assert not second.skip_special_tokens
    assert second.include_stop_str_in_output
    assert not second.detokenize
    assert list(second.allowed_token_ids) == [5, 6]
    assert list(second.logits_processors) == ["digits"]
    assert pod.requests[1].request_id == "mine"
    assert answer.id == "chatcmpl-mine"


async def test_texts_of_bad_words_are_forbidden_within_a_text_and_at_its_start(pods, gateway, model_folder):
    pod = await pods()
    front = await gateway(pod)
    encode = Tokenizer(model_folder).encode
    body = {"prompt": "a", "bad_words": ["order", [7, 8]]}
    assert (await front.http.post("/v1/completions", json=body)).status_code == 200
    sent = [list(word.ids) for word in pod.requests[0].sampling.bad_words]
    assert sent == [[7, 8], encode("order"), encode(" order")]


async def test_a_truncated_prompt_keeps_its_last_tokens(pods, gateway):
    pod = await pods()
    front = await gateway(pod)
    for limit, most, kept in ((3, 100, 3), (500, 100, 300), (-1, 100, 256 - 100), (-1, 9000, 128)):
        prompt = [5 + i % 7 for i in range(300)]
        body = {"prompt": prompt, "truncate_prompt_tokens": limit, "max_tokens": most}
        response = await front.http.post("/v1/completions", json=body)
        if limit == 500:
            assert response.status_code == 400  # still longer than the context
            continue
        assert list(pod.requests[-1].prompt_token_ids) == prompt[-kept:]


async def test_token_ids_are_returned_on_request(pods, gateway):
    front = await gateway(await pods())
    body = {"prompt": [5, 6], "return_token_ids": True, "return_tokens_as_token_ids": True, "logprobs": 1}
    whole = (await front.http.post("/v1/completions", json=body)).json()["choices"][0]
    assert whole["prompt_token_ids"] == [5, 6]
    assert whole["token_ids"] == [10, 11, 12]
    assert whole["logprobs"]["tokens"] == ["token_id:10", "token_id:11", "token_id:12"]
    chat = (await front.http.post(CHAT, json={"messages": USER, "return_token_ids": True})).json()
    assert chat["prompt_token_ids"]
    assert chat["choices"][0]["token_ids"] == [10, 11, 12]
    stream = await front.http.post("/v1/completions", json={**body, "stream": True})
    events = [json.loads(event.partition("data: ")[2]) for event in stream.text.split("\n\n")[:-2]]
    assert [event["choices"][0].get("token_ids") for event in events] == [[10], [11], [12], None]
    assert [event["choices"][0].get("prompt_token_ids") for event in events] == [[5, 6], None, None, None]


IMAGE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}


BAD_FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"tpye": "object"}}}

BAD_INPUTS = [
    (CHAT, {}, "messages", ["required"]),
    (CHAT, {"messages": []}, "messages", ["empty"]),
    (CHAT, {"messages": [{"role": "alien", "content": "x"}]}, "messages[0].role", ["alien", "assistant"]),
    (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content", ["missing"]),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content", ["5", "string"]),
    (CHAT, {"messages": [IMAGE]}, "messages[0].content[0]", ["image_url", "only text"]),
    (CHAT, {"messages": USER, "response_format": {"type": "xml"}}, "response_format.type", ["json_schema"]),
    (
        CHAT,
        {"messages": USER, "response_format": {"type": "json_object", "schema": {"tpye": 1}}},
        "response_format.schema",
        ["'tpye'"],
    ),
    (CHAT, {"messages": USER, "guided_json": {"type": "object", "maxsize": 1}}, "guided_json", ["'maxsize'"]),
    (CHAT, {"messages": USER, "guided_regex": "("}, "guided_regex", ["regex"]),
    (CHAT, {"messages": USER, "guided_choice": []}, "guided_choice", ["1 to 4096"]),
    (CHAT, {"messages": USER, "guided_grammar": "begin: /a/"}, "guided_grammar", ["lark"]),
    (CHAT, {"messages": USER, "structured_outputs": {"regex": "("}}, "structured_outputs.regex", ["regex"]),
    (
        CHAT,
        {"messages": USER, "response_format": BAD_FORMAT},
        "response_format.json_schema.schema",
        ["'tpye'"],
    ),
    (CHAT, {"messages": USER, "guided_regex": "a", "min_tokens": 2}, "min_tokens", ["guide"]),
    (CHAT, {"messages": USER, "n": 0}, "n", ["between 1 and 32"]),
    (CHAT, {"messages": USER, "n": 33}, "n", ["between 1 and 32"]),
    (CHAT, {"messages": USER, "n": 3, "best_of": 2}, "best_of", ["less than n (3)"]),
    (CHAT, {"messages": USER, "best_of": 2, "stream": True}, "best_of", ["cannot be streamed"]),
    (CHAT, {"messages": USER, "max_tokens": "5"}, "max_tokens", ["'5'", "integer"]),
    (CHAT, {"messages": USER, "max_tokens": -1}, "max_tokens", ["at least 1"]),
    (CHAT, {"messages": USER, "max_completion_tokens": 0}, "max_completion_tokens", ["at least 1"]),
    (CHAT, {"messages": USER, "logprobs": True, "top_logprobs": 21}, "top_logprobs", ["[0, 20]"]),
    ("/v1/responses", {"input": "a", "max_output_tokens": 0}, "max_output_tokens", ["at least 1"]),
    ("/v1/messages", {"messages": USER, "max_tokens": 0}, "max_tokens", ["at least 1"]),
    (CHAT, {"messages": USER, "temperature": 3}, "temperature", ["[0, 2]"]),
    (CHAT, {"messages": USER, "logit_bias": {"x": 1}}, "logit_bias", ["'x'"]),
    (CHAT, {"messages": USER, "logit_bias": {"1" * 3000: 1}}, "logit_bias", ["not a token id"]),
    (CHAT, {"messages": USER, "seed": -2}, "seed", ["2^64"]),
    (CHAT, {"messages": USER, "request_id": "a b"}, "request_id", ["1 to 128"]),
    (CHAT, {"messages": USER, "add_special_tokens": True}, "add_special_tokens", ["template"]),
    (CHAT, {"messages": USER, "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", ["at least 1", "-1"]),
    (CHAT, {"messages": USER, "bad_words": [" "]}, "bad_words", ["blank"]),
    (CHAT, {"messages": USER, "bad_words": ["a"] * 129}, "bad_words", ["more than 128"]),
    (CHAT, {"messages": USER, "allowed_token_ids": [4000]}, "allowed_token_ids", ["outside the vocabulary"]),
    (CHAT, {"messages": USER, "logits_processors": [{"qualname": "os.system"}]}, "logits_processors[0]", []),
    ("/v1/completions", {"prompt": "a", "logprobs": True}, "logprobs", []),
    (CHAT, {"messages": USER, "bad_words": [[1], []]}, "bad_words", ["1 to 32 ids"]),
    (CHAT, {"messages": USER, "bad_words": [[1, "a"]]}, "bad_words[0]", ["'a'", "string"]),
    (CHAT, {"messages": USER, "top_logprobs": 2}, "top_logprobs", ["logprobs: true"]),
    (CHAT, {"messages": USER, "stream_options": {}}, "stream_options", ["stream: true"]),
    (CHAT, {"messages": USER, "slo_class": "fast"}, "slo_class", ["interactive"]),
    (CHAT, {"messages": USER, "speculation": "fast"}, "speculation", ["off, local, chain, global"]),
    ("/v1/completions", {"prompt": "a", "speculation": "Off"}, "speculation", ["'Off' is unknown"]),
    (CHAT, b'{"messages": [{"role": "user", "content": "\xff"}]}', "body", ["UTF-8", "byte 43"]),
    (CHAT, b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "body", ["JSON"]),
    (CHAT, b"{", "body", ["JSON"]),
    (CHAT, b"[" * 5000, "body", ["limit of 4096"]),
    (CHAT, b"[" * 2000, "body", ["JSON"]),
    (CHAT, b'{"messages": [], "temperature": NaN}', "temperature", ["finite"]),
    ("/v1/completions", {"prompt": ["a"] * 5, "n": 32}, "prompt", ["5 prompts", "limit is 128"]),
    ("/v1/completions", {"prompt": ["a", ""]}, "prompt", ["empty"]),
    ("/v1/completions", {"prompt": []}, "prompt", ["empty"]),
    ("/v1/completions", {"prompt": "hat " * 300}, "prompt", ["256", "Shorten"]),
    (CHAT, {"messages": USER, "echo": True}, "echo", ["not supported"]),
    ("/v1/completions", {"prompt": "a", "max_tokens": 0}, "max_tokens", ["at least 1"]),
    ("/v1/completions", {"prompt": "a", "echo": True, "detokenize": False}, "echo", ["detokenize"]),
    ("/v1/completions", {"prompt": "a", "prompt_logprobs": 21}, "prompt_logprobs", ["[0, 20]"]),
    ("/v1/completions", {"prompt": "a", "prompt_logprobs": -1}, "prompt_logprobs", ["[0, 20]"]),
    (CHAT, {"messages": USER, "prompt_logprobs": 1, "stream": True}, "prompt_logprobs", ["stream: false"]),
    ("/v1/completions", {"prompt": "a", "logprobs": 21}, "logprobs", ["[0, 20]"]),
]


async def test_bad_input_is_refused_in_openais_shape(pods, gateway, subtests):
    pod = await pods()
    front = await gateway(pod, max_body_bytes=4096)
    for path, body, param, words in BAD_INPUTS:
        with subtests.test(param, body=body):
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            response = await front.http.post(path, content=content)
            assert response.status_code == (413 if len(content) > 4096 else 400)
            error = response.json()["error"]
            assert error["type"] == "invalid_request_error"
            assert error["param"] == param
            assert error["code"]
            for word in words:
                assert word in error["message"]
    assert pod.requests == []
    assert await front.metric('tandem_requests_total{outcome="invalid"}') == len(BAD_INPUTS)


CONTEXT = "This model's maximum context length is 256 tokens. However, your prompt is too long: it has "


async def test_the_error_about_a_long_prompt_has_the_words_that_clients_match(pods, gateway):
    front = await gateway(await pods())
    long = "hat " * 300
    for path, body, param in (
        (CHAT, {"messages": [{"role": "user", "content": long}]}, "messages"),
        ("/v1/completions", {"prompt": long}, "prompt"),
        ("/v1/completions", {"prompt": [5] * 256}, "prompt"),
        ("/v1/responses", {"input": long}, "input"),
        ("/v1/completions", {"prompt": "x" * 100_000}, "prompt"),
    ):
        response = await front.http.post(path, json=body)
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["param"]) == (
            400, "context_length_exceeded", param,
        )  # fmt: skip
        assert error["message"].startswith(CONTEXT)
    body = {"max_tokens": 5, "messages": [{"role": "user", "content": long}]}
    response = await front.http.post("/v1/messages", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith(CONTEXT)


async def test_answers_without_or_with_a_larger_max_tokens_end_with_the_context(pods, gateway):
    pod = await pods()
    front = await gateway(pod)
    for path, body in (
        (CHAT, {"messages": USER}),
        (CHAT, {"messages": USER, "max_completion_tokens": 32_000}),
        (CHAT, {"messages": USER, "max_tokens": 2**40}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", {"messages": USER, "max_tokens": 32_000}),
        ("/v1/completions", {"prompt": "hi", "max_tokens": 255}),
    ):
        assert (await front.http.post(path, json=body)).status_code == 200
        sent = pod.requests[-1]
        assert sent.sampling.max_tokens == 256 - len(sent.prompt_token_ids)
    await front.http.post("/v1/completions", json={"prompt": "hi"})
    assert pod.requests[-1].sampling.max_tokens == 16, "OpenAI's default there"
    await front.http.post("/v1/completions", json={"prompt": [5] * 250})
    assert pod.requests[-1].sampling.max_tokens == 6


async def test_a_chat_of_more_than_1024_messages_is_refused(pods, gateway):
    front = await gateway(await pods())
    response = await front.http.post(CHAT, json={"messages": USER * 1025})
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith(
        "messages: 1025 messages are over the limit of 1024"
    )


async def test_a_huge_body_without_a_length_is_cut_off(pods, gateway):
    front = await gateway(await pods(), max_body_bytes=4096)

    async def endless():
        for _ in range(100):
            yield b" " * 1024

    response = await front.http.post(CHAT, content=endless())
    assert response.status_code == 413


async def test_the_clients_exceptions_are_openais(pods, gateway):
    front = await gateway(await pods())
    with pytest.raises(openai.NotFoundError) as info:
        await front.openai.chat.completions.create(model="gpt-4", messages=USER)
    assert (info.value.code, info.value.param) == ("model_not_found", "model")
    assert "tiny-chat" in str(info.value)
    with pytest.raises(openai.BadRequestError) as bad:
        await front.openai.chat.completions.create(model="", messages=USER, extra_body={"suffix": "x"})
    assert bad.value.code == "unsupported_parameter"
    missing = await front.http.get("/v1/nothing")
    assert missing.status_code == 404
    assert "/v1/nothing" in missing.json()["error"]["message"]


async def test_models_are_listed(pods, gateway):
    front = await gateway(await pods())
    listed = await front.openai.models.list()
    assert [model.id for model in listed.data] == ["tiny-chat"]
    assert (await front.openai.models.retrieve("tiny-chat")).id == "tiny-chat"


async def test_a_full_queue_is_429_with_retry_after(pods, gateway):
    pod = await pods(pause_s=30.0)
    front = await gateway(pod, max_in_flight=1, max_queue=0)
    async with httpx.AsyncClient(base_url=front.url, trust_env=False) as other:
        running = asyncio.create_task(other.post(CHAT, json={"messages": USER}))
        await pod.started.wait()
        for stream in (False, True):
            response = await front.http.post(CHAT, json={"messages": USER, "stream": stream})
            assert response.status_code == 429
            assert int(response.headers["retry-after"]) >= 1
            assert int(response.headers["retry-after-ms"]) >= 1
            assert response.headers["x-refusal-reason"] == "queue full"
            assert response.json()["error"]["code"] == "overloaded"
        running.cancel()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("words", [("a",) * 100, ()], ids=["midway", "before the first token"])
async def test_a_client_that_disconnects_frees_the_pod_within_a_second(stream, words, pods, gateway):
    pod = await pods(pause_s=0.1 if words else 30.0, words=words or ("never",))
    front = await gateway(pod)
    async with httpx.AsyncClient(base_url=front.url, trust_env=False) as client:
        running = asyncio.create_task(client.post(CHAT, json={"messages": USER, "stream": stream}))
        await pod.started.wait()
        running.cancel()
    await asyncio.wait_for(pod.cancelled.wait(), 1.0)
    await front.until_metric("tandem_requests_in_flight", 0)
    await front.until_metric('tandem_requests_total{outcome="cancelled"}', 1)


async def test_a_client_that_disconnects_while_queued_leaves_the_queue(pods, gateway):
    pod = await pods(pause_s=30.0)
    front = await gateway(pod, max_in_flight=1)
    async with httpx.AsyncClient(base_url=front.url, trust_env=False) as first:
        running = asyncio.create_task(first.post(CHAT, json={"messages": USER}))
        await pod.started.wait()
        async with httpx.AsyncClient(base_url=front.url, trust_env=False) as second:
            queued = asyncio.create_task(second.post(CHAT, json={"messages": USER}))
            await front.until_metric("tandem_queue_length", 1)
            queued.cancel()
        await front.until_metric("tandem_queue_length", 0)
        running.cancel()
    assert len(pod.requests) == 1


async def test_a_client_that_disconnects_while_sending_causes_no_server_error(pods, gateway):
    front = await gateway(await pods())
    _, writer = await asyncio.open_connection("127.0.0.1", front.process.http_port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{")
    await writer.drain()
    with structlog.testing.capture_logs() as logs:
        await asyncio.sleep(0.1)
        writer.close()
        await asyncio.sleep(0.1)
    assert [entry for entry in logs if entry["log_level"] == "error"] == []
    assert (await front.http.get("/health")).status_code == 200


async def test_an_error_within_a_stream_is_an_event(pods, gateway):
    front = await gateway(await pods(fail_with=grpc.StatusCode.UNAVAILABLE, fail_after=2))
    stream = await front.openai.chat.completions.create(model="", messages=USER, stream=True)
    texts = []
    with pytest.raises(openai.APIError, match="2 pods crashed while they computed token 3"):
        async for chunk in stream:
            texts.append(chunk.choices[0].delta.content)  # noqa: PERF401  (kept when it raises)
    assert texts == ["Hello", " there"]


async def test_health_metrics_and_fleet_show_the_pods(pods, gateway):
    pod = await pods()
    front = await gateway(pod)
    await front.openai.chat.completions.create(model="", messages=USER)
    await front.openai.chat.completions.create(model="", messages=USER, extra_body={"slo_class": "batch"})
    assert (await front.http.get("/health")).json() == {"status": "ok", "decode_pods": 1}
    assert await front.metric('tandem_requests_total{outcome="ok"}') == 2
    for name in ("received", "met"):
        assert await front.metric(f'tandem_slo_requests_{name}_total{{slo_class="standard"}}') == 1
    assert await front.metric('tandem_goodput_tokens_total{slo_class="batch"}') == 3
    assert await front.metric('tandem_healthy_pods{role="decode"}') == 1
    for name in ("ttft", "e2e"):
        for edge in ("1.0", "2.0", "2.5", "3.0", "5.0"):
            sample = f'tandem_{name}_seconds_bucket{{le="{edge}",slo_class="standard"}}'
            assert await front.metric(sample) == 1
    assert await front.metric('tandem_tpot_seconds_count{slo_class="standard"}') == 1
    fleet = (await front.http.get("/fleet")).json()
    assert fleet["requests_total"] == "2"
    assert [(entry["target"], entry["healthy"]) for entry in fleet["pods"]] == [(pod.target, True)]
    await pod.stop()
    await front.until_healthy(0)
    assert (await front.http.get("/health")).status_code == 503


async def test_a_drain_lets_a_running_stream_finish(pods, gateway):
    pod = await pods(pause_s=0.2)
    front = await gateway(pod, drain_s=5.0)
    stream = await front.openai.chat.completions.create(model="", messages=USER, stream=True)
    stopping = asyncio.create_task(front.process.stop())
    await asyncio.wait_for(front.process.server.draining.wait(), 1.0)
    for kept in (front.http, httpx.AsyncClient(base_url=front.http.base_url)):
        refused = await kept.post("/v1/chat/completions", json={"messages": USER})
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) > 0
        assert refused.headers["connection"] == "close"
        assert "stopping" in refused.json()["error"]["message"]
        assert (await kept.get("/health")).json()["status"] == "the gateway is stopping"
    await kept.aclose()
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await front.grpc.Chat(
            gateway_pb2.ChatRequest(messages=[gateway_pb2.ChatMessage(role="user", content="x")])
        ).read()
    assert refusal.value.code() is grpc.StatusCode.UNAVAILABLE
    texts = [chunk.choices[0].delta.content async for chunk in stream]
    assert texts[:3] == ["Hello", " there", "!"]
    await front.openai.close()
    await front.http.aclose()
    await asyncio.wait_for(stopping, 3.0)


async def test_an_answer_ended_by_the_gateway_counts_as_unavailable(pods, gateway):
    pod = await pods(pause_s=0.5)
    front = await gateway(pod, drain_s=0.2)
    stream = await front.openai.chat.completions.create(model="", messages=USER, stream=True)
    await anext(stream)
    stopping = asyncio.create_task(front.process.stop())
    with pytest.raises(openai.APIError, match="stopping"):
        async for _ in stream:
            pass
    await front.openai.close()
    await front.http.aclose()
    await asyncio.wait_for(stopping, 3.0)
    misses = front.process.metrics.misses.sums(2)
    assert (misses["unavailable"], misses["cancelled"]) == (1, 0)


async def test_a_request_can_set_its_objectives(pods, gateway):
    front = await gateway(await pods())
    headers = {
        "x-slo-class": "chat",
        "x-slo-ttft-ms": "700",
        "x-slo-e2e-ms": "9000.5",
        "x-slo-strict": "True",
    }
    body = {"messages": [{"role": "user", "content": "hi"}]}
    response = await front.http.post("/v1/chat/completions", json=body, headers=headers)
    slo = response.json()["usage"]["tandem_receipt"]["slo"]
    assert (slo["name"], slo["strict"]) == ("chat", True)
    assert (slo["ttft_ns"], slo["tpot_ns"], slo["e2e_ns"]) == (700_000_000, 150_000_000, 9_000_500_000)


@pytest.mark.parametrize(
    ("headers", "words"),
    [
        ({"x-slo-ttft-ms": "0"}, "x-slo-ttft-ms: is '0'; send a number of milliseconds over 0"),
        ({"x-slo-tpot-ms": "nan"}, "x-slo-tpot-ms: is 'nan'"),
        ({"x-slo-e2e-ms": "5s"}, "x-slo-e2e-ms: is '5s'"),
        ({"x-slo-e2e-ms": "1e12"}, "at most 86400000"),
        ({"x-slo-ttft-ms": "1_000"}, "x-slo-ttft-ms: is '1_000'; send a number of milliseconds"),
        ({"x-slo-strict": "yes"}, "x-slo-strict: is 'yes'; send true or false"),
        ({"x-slo-tftt-ms": "100"}, "is not a header of this API; use x-slo-class, x-slo-ttft-ms"),
        ({"x-slo-class": "batch"}, "x-slo-class: is 'batch', but slo_class in the body is 'chat'"),
        ({"x-slo-class": "gold"}, "slo_class"),
        ([("x-slo-ttft-ms", "5000"), ("x-slo-ttft-ms", "1")], "x-slo-ttft-ms: is repeated"),
        ([("x-slo-class", "batch"), ("x-slo-class", "chat")], "x-slo-class: is repeated"),
    ],
)
async def test_wrong_objectives_are_refused_by_name(pods, gateway, headers, words):
    front = await gateway(await pods())
    body = {"messages": [{"role": "user", "content": "hi"}]} | (
        {"slo_class": "chat"} if headers == {"x-slo-class": "batch"} else {}
    )
    response = await front.http.post("/v1/chat/completions", json=body, headers=headers)
    assert response.status_code == 400
    assert words in response.json()["error"]["message"]


@pytest.mark.parametrize(("log_format", "level"), [("json", "info"), ("console", "debug")])
async def test_a_line_per_request_is_for_collectors_and_for_debugging(pods, gateway, log_format, level):
    front = await gateway(await pods(), log_format=log_format)
    with structlog.testing.capture_logs() as logs:
        assert (await front.http.post("/v1/chat/completions", json={"messages": USER})).is_success
        assert (await front.http.post("/v1/chat/completions", json={"messages": []})).is_client_error
    lines = [(entry["log_level"], entry["outcome"]) for entry in logs if entry["event"] == "request"]
    assert lines == [(level, "ok"), (level, "invalid")]


async def test_an_answer_that_is_too_large_to_be_sent_whole_must_be_streamed(pods, gateway, monkeypatch):
    """45,000 tokens with 20 log probabilities each took a gigabyte as JSON objects."""
    front = await gateway(await pods(words=(" word",) * 64))
    body = {"messages": USER, "logprobs": True, "top_logprobs": 2, "max_tokens": 64}
    small = await front.http.post(CHAT, json=body)
    for name, limit in (("_INLINE_BYTES", 100), ("_LARGE_BYTES", 200)):
        monkeypatch.setattr(f"tandem_gateway.edge.openai_api.{name}", limit)
        assert (await front.http.post(CHAT, json=body)).json()["choices"] == small.json()["choices"]
    monkeypatch.setattr("tandem_gateway.edge.openai_api._MAX_WHOLE_BYTES", 1000)
    refused = await front.http.post(CHAT, json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "stream")
    streamed = await front.http.post(CHAT, json={**body, "stream": True})
    assert streamed.status_code == 200 and streamed.text.count("word") >= 64
