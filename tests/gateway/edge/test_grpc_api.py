"""gRPC: Chat and Generate, receipts, refusals, cancellation, deadlines."""

import asyncio
import gc
import time

import grpc
import pytest
from tandem_gateway.answers.answer import Answer
from tandem_gateway.errors import OverloadedError
from tandem_proto.v1 import common_pb2, gateway_pb2
from waiting import until

USER = [gateway_pb2.ChatMessage(role="user", content="hi")]


async def _collect(call):
    messages = [message async for message in call]
    return "".join(message.chunk.text for message in messages), messages[-1].end


async def _error(call) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as info:
        async for _ in call:
            pass
    return info.value


async def test_chat_streams_the_text_and_ends_with_a_receipt(pods, gateway):
    pod = await pods()
    front = await gateway(pod)
    call = front.grpc.Chat(gateway_pb2.ChatRequest(messages=USER, request_id="r-1"))
    text, end = await _collect(call)
    assert text == "Hello there!"
    assert end.reason == common_pb2.FINISH_REASON_STOP
    assert end.stop_reason == ""
    receipt = end.receipt
    assert receipt.request_id == "r-1"
    assert receipt.decode_pod == "d-0"
    assert receipt.prompt_tokens == len(pod.requests[0].prompt_token_ids) > 0
    assert receipt.output_tokens == 3
    assert receipt.queue_ns > 1000, "the pod's queue and the gateway's"
    assert 0 < receipt.ttft_ns <= receipt.e2e_ns
    assert receipt.slo.name == "standard"
    assert receipt.slo_met
    assert receipt.slo_miss_reason == ""
    trailing = dict(await call.trailing_metadata())
    assert common_pb2.Receipt.FromString(trailing["tandem-receipt-bin"]) == receipt


async def test_unset_parameters_get_defaults_and_a_reported_random_seed(pods, gateway):
    pod = await pods()
    front = await gateway(pod)
    seeds = []
    for _ in range(2):
        _, end = await _collect(front.grpc.Chat(gateway_pb2.ChatRequest(messages=USER)))
        seeds.append(end.receipt.seed)
    sent = pod.requests[0]
    assert sent.sampling.temperature == 1.0
    assert sent.sampling.max_tokens == 256 - len(sent.prompt_token_ids)
    assert [request.sampling.seed for request in pod.requests] == seeds
    assert seeds[0] != seeds[1]
    assert all(0 <= seed < 2**53 for seed in seeds), "JavaScript reads them exactly"
    assert sent.tenant == "default"


async def test_given_parameters_reach_the_pod(pods, gateway):
    pod = await pods()
    front = await gateway(pod)
    sampling = common_pb2.SamplingParams(
        max_tokens=7, min_tokens=2, temperature=0, top_k=5, top_p=0.5, min_p=0.25, repetition_penalty=1.5,
        presence_penalty=0.5, frequency_penalty=-0.5, logit_bias={5: 1.0}, stop=["END"], stop_token_ids=[9],
        seed=11, logprobs=1, ignore_eos=True,
        bad_words=[common_pb2.TokenIds(ids=[5, 6]), common_pb2.TokenIds(ids=[7])],
        allowed_token_ids=[5, 6, 9], logits_processors=["digits"], skip_special_tokens=False,
        include_stop_str_in_output=True, detokenize=False,
    )  # fmt: skip
    request = gateway_pb2.GenerateRequest(
        text="the order", sampling=sampling, slo_class="chat", speculation="off"
    )
    _, end = await _collect(front.grpc.Generate(request))
    assert pod.requests[0].speculation == "off"
    assert pod.requests[0].sampling == sampling
    assert end.receipt.slo == common_pb2.SloTarget(name="chat", ttft_ns=1_000_000_000, tpot_ns=150_000_000)


async def test_generate_takes_token_ids_as_they_are(pods, gateway):
    pod = await pods()
    front = await gateway(pod)
    request = gateway_pb2.GenerateRequest(token_ids=common_pb2.TokenIds(ids=[5, 6, 7]))
    text, _ = await _collect(front.grpc.Generate(request))
    assert text == "Hello there!"
    assert list(pod.requests[0].prompt_token_ids) == [5, 6, 7]


async def test_the_receipt_of_a_miss_has_the_excess(pods, gateway):
    front = await gateway(await pods(pause_s=0.4))
    request = gateway_pb2.ChatRequest(messages=USER, slo_class="chat")
    _, end = await _collect(front.grpc.Chat(request))
    assert not end.receipt.slo_met
    assert end.receipt.slo_miss_reason.startswith("tpot 0.4")
    assert "exceeded 0.15 s" in end.receipt.slo_miss_reason


def _sampling(**params):
    return common_pb2.SamplingParams(**params)


BAD_INPUTS = [
    (gateway_pb2.ChatRequest(), ["messages", "empty"]),
    (gateway_pb2.ChatRequest(messages=USER * 1025), ["messages", "1025 messages", "limit of 1024"]),
    (
        gateway_pb2.ChatRequest(messages=USER, template_arguments='{"a": [' + ",".join(["[]"] * 4096) + "]}"),
        ["tools", "more than 4096 objects and lists"],
    ),
    (
        gateway_pb2.ChatRequest(messages=[gateway_pb2.ChatMessage()] * 4097),
        ["messages", "more than 4096 with the tools and all tool calls"],
    ),
    (
        gateway_pb2.ChatRequest(messages=USER, tools=[gateway_pb2.Tool()] * 4096),
        ["messages", "more than 4096 with the tools and all tool calls"],
    ),
    (
        gateway_pb2.ChatRequest(
            messages=[gateway_pb2.ChatMessage(role="assistant", tool_calls=[gateway_pb2.ToolCall()] * 4096)]
        ),
        ["messages", "more than 4096 with the tools and all tool calls"],
    ),
    (gateway_pb2.ChatRequest(messages=USER, slo_class="fast"), ["slo_class", "standard, interactive, chat"]),
    (gateway_pb2.ChatRequest(messages=USER, slo=common_pb2.SloTarget(name="gold")), ["slo_class", "'gold'"]),
    (
        gateway_pb2.ChatRequest(messages=USER, slo_class="chat", slo=common_pb2.SloTarget(name="batch")),
        ["slo.name", "'batch'", "slo_class 'chat'"],
    ),
    (
        gateway_pb2.ChatRequest(messages=USER, speculation="fast"),
        ["speculation", "off, local, chain, global"],
    ),
    (gateway_pb2.ChatRequest(messages=USER, request_id="a b"), ["request_id", "128"]),
    (gateway_pb2.GenerateRequest(), ["prompt", "empty"]),
    (
        gateway_pb2.GenerateRequest(text="hat " * 300),
        [
            "This model's maximum context length is 256 tokens. However, your prompt is too long",
            "at most 255",
        ],
    ),
    (gateway_pb2.GenerateRequest(token_ids=common_pb2.TokenIds(ids=[9999])), ["prompt", "9999"]),
    *(
        (gateway_pb2.GenerateRequest(text="a", sampling=sampling), words)
        for sampling, words in [
            (_sampling(max_tokens=0), ["max_tokens", "at least 1"]),
            (_sampling(max_tokens=2, min_tokens=3), ["min_tokens", "max_tokens (2)"]),
            (_sampling(temperature=2.5), ["temperature", "[0, 2]"]),
            (_sampling(temperature=float("nan")), ["temperature", "[0, 2]"]),
            (_sampling(top_p=0), ["top_p", "(0, 1]"]),
            (_sampling(min_p=1.5), ["min_p", "[0, 1]"]),
            (_sampling(repetition_penalty=0.005), ["repetition_penalty", "[0.01, 10]"]),
            (_sampling(presence_penalty=3), ["presence_penalty", "[-2, 2]"]),
            (_sampling(frequency_penalty=-3), ["frequency_penalty", "[-2, 2]"]),
            (_sampling(logit_bias={1: 101}), ["logit_bias", "[-100, 100]"]),
            (_sampling(logit_bias={4096: 1}), ["logit_bias", "4096"]),
            (_sampling(stop=["a"] * 17), ["stop", "at most 16"]),
            (_sampling(stop=[""]), ["stop", "empty"]),
            (_sampling(logprobs=21), ["logprobs", "[0, 20]"]),
            (_sampling(bad_words=[common_pb2.TokenIds()]), ["bad_words", "1 to 32 ids"]),
            (_sampling(bad_words=[common_pb2.TokenIds(ids=[4096])]), ["bad_words", "4096"]),
        ]
    ),
]


async def test_bad_input_is_refused_with_field_and_limit(pods, gateway, subtests):
    pod = await pods()
    front = await gateway(pod)
    for request, (field, *words) in BAD_INPUTS:
        with subtests.test(field, request=str(request)[:80]):
            method = front.grpc.Chat if isinstance(request, gateway_pb2.ChatRequest) else front.grpc.Generate
            error = await _error(method(request))
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert error.details().startswith(field + ": ")
            for word in words:
                assert word in error.details()
    assert pod.requests == []
    assert await front.metric('tandem_requests_total{outcome="invalid"}') == len(BAD_INPUTS)


@pytest.mark.parametrize("compression", [grpc.Compression.NoCompression, grpc.Compression.Gzip])
async def test_too_many_bytes_are_refused_before_they_are_parsed(pods, gateway, compression):
    pod = await pods()
    front = await gateway(pod, max_body_bytes=4096)
    method = front.channel.unary_stream("/tandem.v1.GatewayService/Generate")
    error = await _error(method(b"\xff" * 4097, compression=compression))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "4097 vs. 4096" in error.details()
    error = await _error(method(b"\xff" * 4096, compression=compression))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, "now parsed, and no message"
    assert pod.requests == []


async def test_an_unknown_model_is_not_found_and_the_error_names_the_served_one(pods, gateway):
    front = await gateway(await pods())
    error = await _error(front.grpc.Chat(gateway_pb2.ChatRequest(model="gpt-4", messages=USER)))
    assert error.code() is grpc.StatusCode.NOT_FOUND
    assert "tiny-chat" in error.details()
    models = await front.grpc.ListModels(gateway_pb2.ListModelsRequest())
    assert [(model.name, model.max_model_len) for model in models.models] == [("tiny-chat", 256)]


async def test_cancellation_reaches_the_pod_within_a_second(pods, gateway):
    pod = await pods(pause_s=0.2, words=("a",) * 100)
    front = await gateway(pod)
    call = front.grpc.Chat(gateway_pb2.ChatRequest(messages=USER))
    assert (await call.read()).chunk.text == "a"
    call.cancel()
    await asyncio.wait_for(pod.cancelled.wait(), 1.0)
    await front.until_metric('tandem_requests_total{outcome="cancelled"}', 1)
    assert await front.metric("tandem_requests_in_flight") == 0


async def test_a_deadline_ends_the_call_on_the_pod_too(pods, gateway):
    pod = await pods(pause_s=30.0)
    front = await gateway(pod)
    started = time.monotonic()
    error = await _error(front.grpc.Chat(gateway_pb2.ChatRequest(messages=USER), timeout=0.3))
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert time.monotonic() - started < 10.0
    await asyncio.wait_for(pod.cancelled.wait(), 10.0)


@pytest.fixture
async def full(pods, gateway):
    """A gateway without a queue whose only place is taken."""
    pod = await pods(pause_s=30.0)
    front = await gateway(pod, max_in_flight=1, max_queue=0)
    running = front.grpc.Chat(gateway_pb2.ChatRequest(messages=USER))
    reading = asyncio.create_task(running.read())
    await pod.started.wait()
    yield front
    reading.cancel()


async def test_a_refused_request_is_freed_without_a_garbage_collection(full):
    gc.disable()
    before = _alive(OverloadedError, Answer)
    try:
        for _ in range(3):
            error = await _error(full.grpc.Chat(gateway_pb2.ChatRequest(messages=USER)))
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await until(lambda: _alive(OverloadedError, Answer).keys() <= before.keys())
    finally:
        gc.enable()


def _alive(*kinds: type) -> dict[int, object]:
    return {id(thing): thing for thing in gc.get_objects() if type(thing) in kinds}


async def test_a_full_queue_is_refused_at_once_with_a_retry_after(full):
    error = await _error(full.grpc.Chat(gateway_pb2.ChatRequest(messages=USER)))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "limit 0" in error.details()
    trailing = dict(error.trailing_metadata())
    assert int(trailing["retry-after-ms"]) > 0
    assert trailing["refusal-reason"] == "queue full"
    assert await full.metric('tandem_requests_total{outcome="refused"}') == 1
    # Attainment covers all received requests: a refusal counts as a miss.
    assert await full.metric('tandem_slo_requests_received_total{slo_class="standard"}') == 2


async def test_a_pods_refusal_keeps_its_status(pods, gateway):
    pod = await pods()
    front = await gateway(pod)
    for status, expected in [
        (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.INVALID_ARGUMENT),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.RESOURCE_EXHAUSTED),
        (grpc.StatusCode.DATA_LOSS, grpc.StatusCode.INTERNAL),
    ]:
        pod.fail_with = status
        error = await _error(front.grpc.Chat(gateway_pb2.ChatRequest(messages=USER)))
        assert error.code() is expected
        assert "prompt: d-0 says no" in error.details()


async def test_equal_request_ids_in_flight_become_different(pods, gateway):
    pod = await pods(pause_s=0.05)
    front = await gateway(pod)
    request = gateway_pb2.ChatRequest(messages=USER, request_id="same")
    ends = await asyncio.gather(*(_collect(front.grpc.Chat(request)) for _ in range(2)))
    ids = {end.receipt.request_id for _, end in ends}
    assert len(ids) == 2
    assert "same" in ids


async def test_the_fleet_view_shows_pods_and_their_reports(pods, gateway):
    decode, prefill = await pods("d-0", num_running=3), await pods("p-0")
    front = await gateway(decode, prefill=(prefill.target, "127.0.0.1:1"))
    await front.until_metric('tandem_healthy_pods{role="prefill"}', 1)
    view = await front.grpc.GetFleetStatus(gateway_pb2.GetFleetStatusRequest())
    by_target = {pod.target: pod for pod in view.pods}
    assert by_target[decode.target].status.usage.requests_running == 3
    assert by_target[prefill.target].role == "prefill"
    assert not by_target["127.0.0.1:1"].healthy
