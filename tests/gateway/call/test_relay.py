"""Failover: a lost pod only delays an answer, and another pod continues it."""

import asyncio
import time

import grpc
import pytest
import structlog
from otlp_collector import ERROR, collecting
from tandem_proto.v1 import common_pb2, gateway_pb2
from waiting import until, until_async

USER = [gateway_pb2.ChatMessage(role="user", content="hi")]


async def _text(front) -> tuple[str, str]:
    messages = [m async for m in front.grpc.Chat(gateway_pb2.ChatRequest(messages=USER), timeout=10)]
    return "".join(message.chunk.text for message in messages), messages[-1].end.receipt.decode_pod


@pytest.mark.parametrize("status", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED])
async def test_a_request_moves_to_another_pod_when_its_pod_is_lost(status, pods, gateway):
    # The bad pod reports more free blocks, so that it is asked first.
    bad = await pods("bad", fail_with=status, free_blocks=100)
    good = await pods("good", free_blocks=90)
    front = await gateway(bad, good)
    assert await _text(front) == ("Hello there!", "good")
    assert len(bad.requests) == 1
    assert await front.metric("tandem_decode_failovers_total") == 1


@pytest.mark.parametrize("status", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.FAILED_PRECONDITION])
async def test_the_work_of_a_request_moves_with_it(status, pods, gateway):
    bad = await pods("bad", fail_with=status, fail_after=1, pause_s=0.3, free_blocks=100)
    good = await pods("good", pause_s=30.0, free_blocks=90)
    front = await gateway(bad, good)
    works = {pod.target: pod.works for pod in front.process.fleet.pods()}

    async def until_works(*expected: int) -> None:
        async def are_there() -> bool:
            return tuple(len(works[pod.target].all) for pod in (bad, good)) == expected

        await until_async(are_there)

    asking = asyncio.create_task(_text(front))
    await until_works(1, 0)
    await until_works(0, 1)
    asking.cancel()
    await until_works(0, 0)


async def test_the_time_on_lost_pods_is_in_the_receipt(pods, gateway):
    words = [f"w{n} " for n in range(12)]
    lost = await pods(
        "lost",
        words=words,
        pause_s=0.05,
        fail_with=grpc.StatusCode.UNAVAILABLE,
        fail_after=6,
        free_blocks=100,
    )
    silent = await pods("silent", words=words, hangs=True, pause_s=30.0, free_blocks=90)
    good = await pods("good", words=words, pause_s=0.05, free_blocks=80)
    front = await gateway(lost, silent, good)
    call = front.grpc.Chat(gateway_pb2.ChatRequest(messages=USER), timeout=20)
    receipt = [m async for m in call][-1].end.receipt
    assert (receipt.decode_pod, receipt.decode_retries) == ("good", 2)
    # Until the first token, and while the silent pod sent nothing.
    assert 1.0 < receipt.failover_ns / 1e9 < 1.6
    # Decoding on the first pod; receipts of fake pods have no times.
    assert 5 * 0.05 <= receipt.decode_ns / 1e9 < 0.6
    assert receipt.ttft_ns < 0.3e9


@pytest.mark.parametrize(("slo_class", "end_s"), [("interactive", 5.0), ("chat", None), ("batch", None)])
async def test_the_request_to_a_pod_has_the_end_objective(slo_class, end_s, pods, gateway):
    lost = await pods("lost", fail_with=grpc.StatusCode.UNAVAILABLE, fail_after=2, free_blocks=100)
    other = await pods("other", free_blocks=50)
    front = await gateway(lost, other)
    sampling = common_pb2.SamplingParams(max_tokens=20, ignore_eos=True)
    call = front.grpc.Chat(
        gateway_pb2.ChatRequest(messages=USER, sampling=sampling, slo_class=slo_class), timeout=10
    )
    assert [m async for m in call][-1].HasField("end")
    for sent, num_left in (lost.requests[0], 20), (other.requests[0], 18):
        assert sent.expected_tokens == num_left
        assert sent.HasField("end_seconds") is (end_s is not None)
        if end_s is not None:
            assert end_s - 2 < sent.end_seconds <= end_s


async def test_a_killed_pod_gets_no_request_until_it_answers_polls(pods, gateway):
    first = await pods("first", free_blocks=100)
    second = await pods("second", free_blocks=90)
    front = await gateway(first, second)
    port = first.server.port
    await first.stop()
    assert await _text(front) == ("Hello there!", "second")
    await front.until_healthy(1)
    await first.start(port)
    await front.until_healthy(2)
    # Its cache died with it, so the second pod, which has seen the prompt since, may keep it.
    text, _ = await _text(front)
    assert text == "Hello there!"


async def test_a_request_waits_for_the_only_pod_to_come_back(pods, gateway):
    pod = await pods()
    front = await gateway(pod, failover_wait_s=5.0)
    port = pod.server.port
    await pod.stop()
    answer = asyncio.create_task(_text(front))
    await front.until_healthy(0)
    assert not answer.done()
    await pod.start(port)
    assert (await answer)[0] == "Hello there!"


async def test_requests_delayed_by_a_lost_pod_do_not_count_as_prediction_errors(pods, gateway):
    lost = await pods(fail_after=1, fail_with=grpc.StatusCode.UNAVAILABLE)
    front = await gateway(lost, await pods("d-1", free_blocks=90))
    fleet = front.process.fleet
    assert fleet.failing_since < 0
    before = time.monotonic()
    assert (await _text(front))[0] == "Hello there!"
    assert fleet.failing_since > before


async def test_requests_delayed_by_a_failed_prefill_pod_count_only_in_a_series_of_failures(
    pods, gateway, monkeypatch
):
    front = await gateway(await pods(prefill_failures=1))
    fleet = front.process.fleet
    assert (await _text(front))[0] == "Hello there!"
    began = fleet.failing_since
    assert began > 0
    assert (await _text(front))[0] == "Hello there!"
    assert fleet.failing_since == began, "what is predicted from then on knows of it"
    monkeypatch.setattr("tandem_gateway.fleet.pods.FAILURES_APART_S", 0.0)
    assert (await _text(front))[0] == "Hello there!"
    assert fleet.failing_since > began


async def test_draining_and_unlisted_pods_are_no_failures(pods, gateway):
    leaving = await pods(is_draining=True, pause_s=0.05)
    front = await gateway(leaving, await pods("d-1", free_blocks=90))
    assert await _text(front) == ("Hello there!", "d-1")
    assert front.process.fleet.failing_since < 0


async def test_without_pods_a_request_ends_unavailable_after_the_wait(pods, gateway):
    pod = await pods()
    front = await gateway(pod, failover_wait_s=0.3)
    await pod.stop()
    started = time.monotonic()
    with pytest.raises(grpc.aio.AioRpcError) as info:
        await _text(front)
    assert info.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "no decode pod" in info.value.details()
    assert 0.2 < time.monotonic() - started < 2.0
    assert await front.metric('tandem_requests_total{outcome="unavailable"}') == 1


@pytest.mark.parametrize("status", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED])
async def test_another_pod_continues_the_answer_of_a_lost_one(status, pods, gateway):
    bad = await pods("bad", fail_with=status, fail_after=2)
    good = await pods("good", free_blocks=50)
    front = await gateway(bad, good)
    messages = [m async for m in front.grpc.Chat(gateway_pb2.ChatRequest(messages=USER), timeout=10)]
    chunks = [m.chunk for m in messages if m.HasField("chunk")]
    assert [chunk.text for chunk in chunks] == ["Hello", " there", "!"]
    assert [token for chunk in chunks for token in chunk.token_ids] == [10, 11, 12]
    (first,), (second,) = bad.requests, good.requests
    assert (list(first.output_token_ids), first.decode_retries) == ([], 0)
    assert (list(second.output_token_ids), second.decode_retries) == ([10, 11], 1)
    assert second.sampling == first.sampling
    receipt = messages[-1].end.receipt
    assert (receipt.output_tokens, receipt.decode_retries, receipt.decode_pod) == (3, 1, "good")
    assert await front.metric("tandem_decode_failovers_total") == 1
    assert await front.metric('tandem_output_tokens_total{slo_class="standard"}') == 3


async def test_a_pod_that_falls_silent_is_left_after_a_second(pods, gateway):
    slow = await pods("slow", pause_s=1.5, free_blocks=100)
    front = await gateway(slow)
    assert await _text(front) == ("Hello there!", "slow"), "heartbeats show that it lives"
    slow.hangs = True
    good = await pods("good", free_blocks=90)
    front = await gateway(slow, good)
    begun = time.monotonic()
    assert await _text(front) == ("Hello there!", "good")
    assert 1.0 <= time.monotonic() - begun < 5.0, "a busy loop turns more slowly"
    assert list(good.requests[0].output_token_ids) == []


async def test_a_pod_stays_in_use_while_only_one_of_its_calls_is_silent(pods, gateway):
    pod = await pods(words=tuple("abcdefghijklmnopqrst"), pause_s=0.1)
    front = await gateway(pod)
    (pod.hangs_on,) = front.process.gateway.tokenizer.encode("~", add_special_tokens=False)
    other = asyncio.create_task(_text(front))
    await until(lambda: pod.requests)
    silent = [{"role": "user", "content": "~"}]
    answer = asyncio.create_task(front.http.post("/v1/chat/completions", json={"messages": silent}))
    await until(lambda: len(pod.requests) == 2)
    await asyncio.sleep(0.3)
    pod.hangs_on = None
    assert (await other)[1] == pod.name
    assert (await answer).json()["choices"][0]["message"]["content"] == "".join(pod.words)
    assert await front.metric("tandem_decode_failovers_total") == 1
    assert [len(request.output_token_ids) for request in pod.requests] == [0, 0, 0]


async def test_the_only_pod_continues_when_it_is_back(pods, gateway):
    pod = await pods(fail_with=grpc.StatusCode.CANCELLED, fail_after=2)
    front = await gateway(pod, failover_wait_s=5.0)
    answer = asyncio.create_task(_text(front))
    await until(lambda: pod.requests)
    await front.until_healthy(0)
    pod.fail_with = None
    assert (await answer)[0] == "Hello there!"
    assert [list(request.output_token_ids) for request in pod.requests][-1] == [10, 11]


async def test_an_answer_without_another_pod_ends_with_its_seed(pods, gateway):
    pod = await pods(fail_with=grpc.StatusCode.CANCELLED, fail_after=2)
    front = await gateway(pod, failover_wait_s=0.3)
    call = front.grpc.Chat(gateway_pb2.ChatRequest(messages=USER))
    texts = []
    stopping = None
    with pytest.raises(grpc.aio.AioRpcError) as info:
        async for message in call:
            texts.append(message.chunk.text)
            stopping = stopping or asyncio.create_task(pod.stop())
    assert texts == ["Hello", " there"]
    assert info.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "stops after 2 tokens" in info.value.details()
    assert str(pod.requests[0].sampling.seed) in info.value.details()


async def test_a_pod_without_support_for_continuation_sends_no_token_twice(pods, gateway):
    bad = await pods("bad", fail_with=grpc.StatusCode.UNAVAILABLE, fail_after=1)
    old = await pods("old", free_blocks=50, can_continue=False)
    front = await gateway(bad, old)
    texts = []
    with pytest.raises(grpc.aio.AioRpcError) as info:
        async for message in front.grpc.Chat(gateway_pb2.ChatRequest(messages=USER)):
            texts.append(message.chunk.text)  # noqa: PERF401  (kept when it raises)
    assert texts == ["Hello"]
    assert "not after the tokens so far" in info.value.details()


async def test_crashes_with_progress_in_between_do_not_end_the_request(pods, gateway):
    fleet = [
        await pods(f"d-{n}", fail_with=grpc.StatusCode.UNAVAILABLE, fail_after=n + 1, free_blocks=100 - n)
        for n in range(3)
    ]
    front = await gateway(*fleet)
    assert await _text(front) == ("Hello there!", "d-2")
    assert [list(pod.requests[0].output_token_ids) for pod in fleet] == [[], [10], [10, 11]]


async def test_two_crashes_at_one_token_end_the_request(pods, gateway):
    fleet = [await pods(f"d-{n}", fail_with=grpc.StatusCode.UNAVAILABLE, fail_after=1) for n in range(3)]
    front = await gateway(*fleet)
    with pytest.raises(grpc.aio.AioRpcError) as info:
        await _text(front)
    assert "2 pods crashed while they computed token 2" in info.value.details()
    assert sum(len(pod.requests) for pod in fleet) == 2


async def test_a_pod_with_another_model_revision_is_not_used(pods, gateway):
    wrong = await pods("wrong", revision="00" * 32, free_blocks=100)
    right = await pods("right", free_blocks=10)
    with structlog.testing.capture_logs() as logs:
        front = await gateway(right, decode=(wrong.target, right.target))
        await until(lambda: wrong.num_status_calls >= 2)
    assert (await _text(front))[1] == "right"
    assert wrong.requests == []
    warnings = [entry["cause"] for entry in logs if entry.get("target") == wrong.target]
    assert len(warnings) == 1 and "serves model revision 0000" in warnings[0], "at once and once"


async def test_a_prefill_pod_with_another_model_revision_is_not_used(pods, gateway):
    decode, wrong, right = await pods(), await pods("wrong", revision="00" * 32), await pods("right")
    front = await gateway(decode, prefill=(wrong.target, right.target))
    await until(lambda: wrong.num_status_calls >= 2)
    await front.until_metric('tandem_healthy_pods{role="prefill"}', 1)
    await _text(front)
    assert list(decode.requests[0].prefill_targets) == [right.target]


async def test_a_pod_is_used_through_a_step_of_seconds_but_not_of_minutes(pods, gateway):
    hung = await pods("hung", age_seconds=61.0, free_blocks=100)
    busy = await pods("busy", age_seconds=20.0, free_blocks=10)
    front = await gateway(busy, decode=(hung.target, busy.target))
    await until(lambda: hung.num_status_calls >= 2)
    assert (await _text(front))[1] == "busy"
    assert hung.requests == []


@pytest.mark.long_turns("the log renders a traceback")
async def test_a_pod_whose_reports_fail_is_not_used_until_they_succeed_again(pods, gateway):
    broken, other = await pods("broken", free_blocks=100), await pods("other", free_blocks=10)
    front = await gateway(broken, other, decode=(broken.target, other.target), poll_interval_s=0.1)
    await front.until_healthy(2)
    assert (await _text(front))[1] == "broken"
    broken.status_error = RuntimeError("a report that cannot be made")
    await front.until_healthy(1)
    seen = broken.num_status_calls
    assert [(await _text(front))[1] for _ in range(3)] == ["other"] * 3
    await until(lambda: broken.num_status_calls >= seen + 2)
    assert [pod.target for pod in front.process.fleet.pods() if pod.healthy] == [other.target]
    broken.status_error = None
    await front.until_healthy(2)
    assert (await _text(front))[1] == "broken"


async def test_the_pod_gets_the_healthy_prefill_pods_least_busy_first(pods, gateway):
    decode = await pods()
    busy, idle = await pods("busy", num_prompts=4), await pods("idle")
    dead = "127.0.0.1:1"
    front = await gateway(decode, prefill=(busy.target, idle.target, dead))
    await front.until_metric('tandem_healthy_pods{role="prefill"}', 2)
    await _text(front)
    assert list(decode.requests[0].prefill_targets) == [idle.target, busy.target]


async def test_the_wait_for_a_pod_begins_when_the_pod_is_lost(pods, gateway):
    pod = await pods(pause_s=30.0)
    front = await gateway(pod, failover_wait_s=0.6)
    port = pod.server.port
    answer = asyncio.create_task(_text(front))
    await pod.started.wait()
    begun = time.monotonic()
    await until(lambda: time.monotonic() - begun > 0.7)  # longer than failover_wait_s
    pod.pause_s = 0.0
    await pod.stop()
    await front.until_healthy(0)
    await pod.start(port)
    assert (await answer)[0] == "Hello there!"


async def test_a_pod_that_failed_and_recovered_is_asked_again_when_the_others_fail(pods, gateway):
    first = await pods("first", fail_with=grpc.StatusCode.CANCELLED, free_blocks=100)
    second = await pods("second", pause_s=30.0, free_blocks=90)
    front = await gateway(first, second, failover_wait_s=8.0)
    answer = asyncio.create_task(_text(front))
    await second.started.wait()
    first.fail_with = None
    await front.until_healthy(2)
    await second.stop()
    async with asyncio.timeout(3.0):
        assert await answer == ("Hello there!", "first")


async def test_two_crashes_before_the_first_token_end_the_request(pods, gateway):
    fleet = [await pods(f"d-{n}", fail_with=grpc.StatusCode.UNAVAILABLE) for n in range(3)]
    front = await gateway(*fleet)
    with pytest.raises(grpc.aio.AioRpcError) as info:
        await _text(front)
    assert info.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "2 pods crashed" in info.value.details()
    assert sum(len(pod.requests) for pod in fleet) == 2


async def test_crashes_of_prefill_pods_count(pods, gateway):
    fleet = [await pods(f"d-{n}", prefill_crashes=1, fail_with=grpc.StatusCode.UNAVAILABLE) for n in range(2)]
    front = await gateway(*fleet)
    with pytest.raises(grpc.aio.AioRpcError, match="2 pods crashed while they computed token 1"):
        await _text(front)
    assert sum(len(pod.requests) for pod in fleet) == 1


async def test_the_next_pod_gets_the_number_of_crashes_since_the_last_token(pods, gateway):
    scripts = [{"fail_after": 0, "free_blocks": 90}, {"fail_after": 1, "free_blocks": 80}]
    first, second = [
        await pods(f"d-{n}", fail_with=grpc.StatusCode.UNAVAILABLE, **script)
        for n, script in enumerate(scripts)
    ]
    third = await pods("d-2", free_blocks=70)
    front = await gateway(first, second, third)
    assert await _text(front) == ("Hello there!", "d-2")
    assert [pod.requests[0].crashes for pod in (first, second, third)] == [0, 1, 1]


async def test_draining_and_unreachable_pods_do_not_count_as_crashes(pods, gateway):
    draining = [await pods(f"drain-{n}", fail_with=grpc.StatusCode.CANCELLED) for n in range(3)]
    stopped = [await pods(f"stop-{n}") for n in range(3)]
    good = await pods("good", free_blocks=50)
    front = await gateway(*draining, *stopped, good, poll_interval_s=2.0)
    for pod in stopped:
        await pod.stop()
    assert (await _text(front)) == ("Hello there!", "good")
    assert await front.metric("tandem_decode_failovers_total") == 6


async def test_a_request_too_large_for_one_pod_is_served_by_another(pods, gateway):
    small = await pods("small", fail_with=grpc.StatusCode.FAILED_PRECONDITION, free_blocks=100)
    large = await pods("large", free_blocks=90)
    front = await gateway(small, large)
    assert await _text(front) == ("Hello there!", "large")
    assert len(small.requests) == 1
    await front.until_healthy(2)
    assert await front.metric("tandem_decode_failovers_total") == 0, "the small pod has not failed"


async def test_a_request_too_large_for_every_pod_is_refused_with_the_limit(pods, gateway):
    fleet = [
        await pods(f"d-{n}", fail_with=grpc.StatusCode.FAILED_PRECONDITION, total_blocks=size)
        for n, size in enumerate((100, 300, 200))
    ]
    front = await gateway(*fleet, failover_wait_s=60.0)
    with pytest.raises(grpc.aio.AioRpcError) as info:
        await _text(front)
    assert info.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert info.value.details().startswith("This model's maximum context length is 19200 tokens. However, ")
    assert "no decode pod can hold it" in info.value.details()
    assert "d-1 says no" in info.value.details(), "the limit to keep is the largest pod's"
    assert [len(pod.requests) for pod in fleet] == [1, 1, 1]
    assert await front.metric('tandem_requests_total{outcome="invalid"}') == 1


async def test_a_request_too_large_for_the_pods_left_waits_for_the_lost_one(pods, gateway):
    small = await pods("small", fail_with=grpc.StatusCode.FAILED_PRECONDITION, free_blocks=100)
    large = await pods("large", free_blocks=90)
    front = await gateway(small, large)
    port = large.server.port
    await large.stop()
    answer = asyncio.create_task(_text(front))
    await front.until_healthy(1)
    await until(lambda: small.requests)
    assert not answer.done()
    await large.start(port)
    assert await answer == ("Hello there!", "large")
    await large.stop()
    with pytest.raises(grpc.aio.AioRpcError) as info:
        await _text(front)
    assert info.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "small says no" in info.value.details()


async def test_an_answer_moves_from_a_pod_that_drains_to_one_that_fetches_its_kv(pods, gateway):
    first = await pods("first", pause_s=0.2)
    second = await pods("second", free_blocks=50)
    front = await gateway(first, second)
    answer = asyncio.create_task(_text(front))
    await first.started.wait()
    first.is_draining = True
    assert await answer == ("Hello there!", "second")
    assert first.cancelled.is_set()
    moved = second.requests[0]
    assert moved.kv_source == first.target
    assert moved.crashes == 0
    assert 0 < len(moved.output_token_ids) < 3


async def test_an_answer_stays_on_a_draining_pod_without_another_one(pods, gateway):
    only = await pods(is_draining=True)
    front = await gateway(only)
    assert await _text(front) == ("Hello there!", "d-0")
    assert len(only.requests) == 1


async def test_an_answer_moves_when_another_pod_appears(pods, gateway):
    first = await pods("first", is_draining=True, pause_s=0.5)
    late = await pods("late", free_blocks=50)
    port = late.server.port
    await late.stop()
    front = await gateway(first, decode=(first.target, late.target))
    answer = asyncio.create_task(_text(front))
    await first.started.wait()
    await late.start(port)
    assert await answer == ("Hello there!", "late")


async def test_a_failed_pod_is_tried_again_only_after_the_others_failed(pods, gateway):
    """Three pods answer polls but no calls: each is healthy again when the next one fails."""
    broken = [await pods(f"broken-{n}", hangs=True, pause_s=60.0) for n in range(3)]
    good = await pods("good", num_running=4, free_blocks=90)
    front = await gateway(*broken, good)
    assert await _text(front) == ("Hello there!", "good")
    assert [len(pod.requests) for pod in broken] == [1, 1, 1]


async def test_four_silent_pods_end_the_request(pods, gateway):
    fleet = [await pods(f"d-{n}", hangs=True, pause_s=60.0) for n in range(5)]
    front = await gateway(*fleet)
    with pytest.raises(grpc.aio.AioRpcError, match="or 4 went silent") as info:
        await _text(front)
    assert info.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert sum(len(pod.requests) for pod in fleet) == 4


async def test_the_trace_of_an_answer_shows_each_pod_and_why_it_was_left(
    pods, gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    with collecting() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        bad = await pods("bad", fail_with=grpc.StatusCode.UNAVAILABLE, fail_after=1, free_blocks=100)
        good = await pods("good", free_blocks=90)
        front = await gateway(bad, good)
        assert await _text(front) == ("Hello there!", "good")
        also_bad = await pods("also bad", fail_with=grpc.StatusCode.UNAVAILABLE, fail_after=1)
        lost = await gateway(also_bad)
        with pytest.raises(grpc.aio.AioRpcError):
            await _text(lost)
        for one in (front, lost):
            await one.process.stop()
    answered, failed = [span for span in collector.spans() if not span.parent_id]
    first, second = [span for span in collector.children(answered) if span.name == "call decode pod"]
    assert (first.status, first.attributes["error.type"]) == (ERROR, "crashed")
    assert first.attributes["server.port"] == int(bad.target.rpartition(":")[2])
    assert (second.status, second.attributes["tandem.answer.tokens_before"]) == (0, 1)
    assert answered.status == 0
    assert (failed.status, failed.attributes["error.type"]) == (ERROR, "crashing_request")
    assert "wait for decode pod" in collector.names_below(failed)
    collector.assert_stages_add_up()
