"""A prefill pod and a decode pod over real gRPC and ZeroMQ, with a tiny random model. Disaggregated results
equal those of one engine, and whatever fails, the request completes and nothing stays held."""

from __future__ import annotations

import asyncio
import itertools
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from fake_pods import FakePod
from fake_streams import SlowStreams
from pod_fleet import Fleet, request, run_fleet
from tandem_core.sampling import SamplingParams
from tandem_decode.main import open_pod as open_decode
from tandem_decode.settings import DecodeSettings
from tandem_drafting.drafter import drafter_for
from tandem_engine.batch import Batch
from tandem_engine.gpu_block_store import GpuBlockStore
from tandem_engine.kv_pool import GroupPool, KVShape
from tandem_engine.llm import LLM
from tandem_engine.runner import ModelRunner
from tandem_prefill.main import open_pod as open_prefill
from tandem_prefill.servicer import PrefillServicer
from tandem_prefill.settings import PrefillSettings
from tandem_proto.v1 import (
    common_pb2,
    decode_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
)
from toy_models import SIZES, VOCABULARY, prompt_of
from waiting import pause_async, until_async, wait_until


async def run(fleet: Fleet, message) -> tuple[list[int], common_pb2.Receipt]:
    tokens: list[int] = []
    call = fleet.decode.Decode(message)
    try:
        async for response in call:
            tokens.extend(response.chunk.token_ids)
            if response.HasField("finished"):
                return tokens, response.finished.receipt
    finally:
        # grpc.aio forgets this when the task is cancelled before the call has begun.
        call.cancel()
    raise AssertionError("the stream ended without a receipt")


@pytest.fixture
def delayed_copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[SlowStreams]]:
    """Pools copy for transfers as on a GPU: later, on a stream of their own, through few slots."""
    devices: list[SlowStreams] = []
    make = GroupPool.__init__

    def init(pool: GroupPool, shape: KVShape, num_blocks: int, device: torch.device) -> None:
        make(pool, shape, num_blocks, device)
        devices.append(SlowStreams())
        pool._gpu = GpuBlockStore(pool.caches, devices[-1], shape.block_bytes * 2, num_slots=3)

    monkeypatch.setattr(GroupPool, "__init__", init)
    yield devices
    for device in devices:
        device.close()


async def test_apart_equals_together_when_copies_are_delayed(
    tiny_model: Path, delayed_copies: list[SlowStreams]
) -> None:
    await test_apart_equals_together(tiny_model, {})
    assert sum("start" in entry for device in delayed_copies for entry in device.log) > 50


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "seed": 7, "top_p": 0.9}])
async def test_apart_equals_together(tiny_model: Path, sampling: dict[str, float]) -> None:
    lengths = (33, 64, 65, 200, 437)
    prompts = [prompt_of(n, start=i) for i, n in enumerate(lengths)]
    alone = LLM(tiny_model, **SIZES)
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 24, "ignore_eos": True, **sampling})
    want = [alone.generate([p], params)[0].token_ids for p in prompts]
    async with run_fleet(tiny_model) as fleet:
        got = await asyncio.gather(
            *(
                run(fleet, request(f"r{i}", p, [fleet.prefill_target], **sampling))
                for i, p in enumerate(prompts)
            )
        )
        assert [tokens for tokens, _ in got] == want
        assert all(receipt.prefill_pod == "p0" for _, receipt in got)
        assert all(receipt.transfer_bytes > 0 for _, receipt in got)
        again = await run(fleet, request("again", prompts[3], [fleet.prefill_target], **sampling))
        assert again[0] == want[3]
        assert again[1].cached_tokens >= 192
        assert again[1].prefill_pod == "", "with a warm cache the decode pod does the rest itself"
        await fleet.assert_idle()


async def test_prompts_that_arrive_together_are_computed_one_after_another(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the first one's first token comes after the steps of its own prompt."""
    prompts_in_steps: list[str] = []
    execute, start = ModelRunner.execute, PrefillServicer._start

    def started_together(servicer: PrefillServicer, *rest: Any) -> None:
        # Else one that is due earlier may arrive during the first one's steps. On the engine's thread.
        if next(number) == 0:
            wait_until(lambda: servicer._loop._calls.qsize() == 3)
        start(servicer, *rest)

    def recorded(runner: ModelRunner, batch: Batch, on_layer_done: Any, *rest: Any) -> torch.Tensor:
        if on_layer_done is not None:  # a step of the prefill pod
            prompts_in_steps.append("+".join(s.request.request_id.split("#")[0] for s in batch.sequences))
        return execute(runner, batch, on_layer_done, *rest)

    number = itertools.count()
    monkeypatch.setattr(PrefillServicer, "_start", started_together)
    monkeypatch.setattr(ModelRunner, "execute", recorded)
    num_steps = 6
    num_tokens = num_steps * SIZES["chunk_size"]  # the rest of a step would go to the next prompt
    async with run_fleet(tiny_model, decode_blocks=160, num_blocks=160) as fleet:
        calls = [
            run(fleet, request(f"r{i}", prompt_of(num_tokens, start=i), [fleet.prefill_target]))
            for i in range(4)
        ]
        results = await asyncio.gather(*calls)
        assert all(receipt.prefill_pod == "p0" for _, receipt in results)
        order = list(dict.fromkeys(prompts_in_steps))
        assert sorted(order) == ["r0", "r1", "r2", "r3"]
        assert prompts_in_steps == [name for name in order for _ in range(num_steps)]
        await fleet.assert_idle()


@pytest.mark.parametrize("apart", [False, True])
async def test_bad_words_hold_from_the_first_token_on(tiny_model: Path, apart: bool) -> None:
    alone = LLM(tiny_model, **SIZES)
    greedy = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    async with run_fleet(tiny_model) as fleet:
        for last in range(3):
            prompt = prompt_of(90, start=last)
            tokens = alone.generate([prompt], greedy)[0].token_ids
            word = tokens[max(last - 1, 0) : last + 1]
            want = alone.generate([prompt], replace(greedy, bad_words=(tuple(word),)))[0].token_ids
            targets = [fleet.prefill_target] if apart else []
            ids = common_pb2.TokenIds(ids=word)
            got, receipt = await run(fleet, request(f"r{last}", prompt, targets, bad_words=[ids]))
            assert got == want != tokens
            assert word not in [got[n : n + len(word)] for n in range(len(got))]
            assert receipt.prefill_pod == ("p0" if apart else "")
        await fleet.assert_idle()


async def test_an_idle_decode_pod_computes_short_prompts_itself(tiny_model: Path) -> None:
    async with run_fleet(tiny_model, idle_prefill_tokens=64) as fleet:
        prompts = [prompt_of(50, start=i) for i in range(3)]
        _, receipt = await run(fleet, request("idle", prompts[0], [fleet.prefill_target]))
        assert receipt.prefill_pod == ""
        decoding = fleet.decode.Decode(request("long", prompts[1], [fleet.prefill_target], max_tokens=900))
        await decoding.read()
        _, receipt = await run(fleet, request("busy", prompts[2], [fleet.prefill_target], max_tokens=1))
        assert receipt.prefill_pod == "p0", "the other request would have waited for this prompt"
        decoding.cancel()
        await fleet.assert_idle()


async def test_a_dead_prefill_pod_is_passed_over(tiny_model: Path) -> None:
    async with run_fleet(tiny_model) as fleet:
        prompt = prompt_of(200)
        tokens, receipt = await run(fleet, request("a", prompt, ["127.0.0.1:9", fleet.prefill_target]))
        assert (receipt.prefill_pod, receipt.prefill_retries) == ("p0", 1)
        alone, receipt = await run(fleet, request("b", prompt_of(200, start=5), ["127.0.0.1:9"]))
        assert receipt.prefill_pod == ""
        assert (len(tokens), len(alone)) == (24, 24)
        await fleet.assert_idle()


class _Between(prefill_pb2_grpc.PrefillServiceServicer):
    """Hands calls on to a prefill pod; its answers stop before the first token, when all frames are sent."""

    def __init__(self, behind: prefill_pb2_grpc.PrefillServiceStub) -> None:
        self._behind = behind

    async def Prefill(self, request, context):  # noqa: N802
        async for response in self._behind.Prefill(request):
            if response.HasField("progress"):
                yield response
        await context.abort(grpc.StatusCode.ABORTED, "the first token is lost")


@asynccontextmanager
async def _served(servicer: prefill_pb2_grpc.PrefillServiceServicer) -> AsyncIterator[str]:
    server = grpc.aio.server()
    prefill_pb2_grpc.add_PrefillServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def test_all_blocks_without_a_first_token_cost_one_token(tiny_model: Path) -> None:
    async with run_fleet(tiny_model) as fleet, _served(_Between(fleet.prefill)) as target:
        prompt = prompt_of(200)
        want, _ = await run(fleet, request("whole", prompt_of(200), []))
        # Other blocks, so that nothing is cached.
        message = request("a", [*prompt[50:], *prompt[:50]], [target, fleet.prefill_target])
        got, receipt = await run(fleet, message)
        status = await fleet.prefill.GetPrefillStatus(prefill_pb2.GetPrefillStatusRequest())
        assert status.status.requests_total == 1, "the second pod of the list was not asked"
        assert (receipt.prefill_pod, receipt.prefill_retries) == ("", 1)
        assert got == (await run(fleet, request("b", list(message.prompt_token_ids), [])))[0] != want
        await fleet.assert_idle()


class _Preempting(_Between):
    """Says that the prompt was preempted three times."""

    async def Prefill(self, request, context):  # noqa: N802
        async for response in self._behind.Prefill(request):
            if response.HasField("finished"):
                response.finished.preemptions = 3
            yield response


async def test_the_receipt_has_the_prompts_preemptions(tiny_model: Path) -> None:
    async with run_fleet(tiny_model) as fleet, _served(_Preempting(fleet.prefill)) as target:
        _, receipt = await run(fleet, request("a", prompt_of(200), [target]))
        assert (receipt.prefill_pod, receipt.prefill_preemptions, receipt.preemptions) == ("p0", 3, 0)


@asynccontextmanager
async def two_prefill_pods(**script: Any) -> AsyncIterator[list[str]]:
    """Their addresses. They send a heartbeat, then do what `script` says, by default nothing."""
    async with AsyncExitStack() as stack:
        targets = []
        for name in ("p1", "p2"):
            pod = FakePod(name, **script)
            await pod.start()
            stack.push_async_callback(pod.stop)
            targets.append(pod.target)
        yield targets


async def test_prefill_pods_that_fall_silent_are_not_held_against_the_request(tiny_model: Path) -> None:
    async with run_fleet(tiny_model) as fleet, two_prefill_pods() as silent:
        message = request("one", prompt_of(200), silent)
        message.crashes = 1
        tokens, receipt = await run(fleet, message)
        assert (len(tokens), receipt.prefill_pod, receipt.prefill_retries) == (24, "", 2)
        call = fleet.decode.Decode(request("two", prompt_of(200, start=7), silent))
        failures = [response.progress.prefill_failures async for response in call]
        assert sorted(set(failures)) == [0, 1, 2], "the caller is told of each"
        await fleet.assert_idle()


async def test_the_second_prefill_pod_that_crashes_with_a_request_ends_it(tiny_model: Path) -> None:
    crashing = two_prefill_pods(fail_with=grpc.StatusCode.UNAVAILABLE)
    async with run_fleet(tiny_model) as fleet, crashing as stopped:
        tokens, receipt = await run(fleet, request("one", prompt_of(200), stopped[:1]))
        assert (len(tokens), receipt.prefill_pod, receipt.prefill_retries) == (24, "", 1)
        crashes: list[int] = []
        with pytest.raises(grpc.aio.AioRpcError, match="2 pods crashed while they computed this request"):
            async for response in fleet.decode.Decode(request("two", prompt_of(200, start=7), stopped)):
                assert response.HasField("progress")
                crashes.append(response.progress.prefill_crashes)
        assert sorted(set(crashes) - {0}) == [1, 2], "the caller was told of each"
        message = request("three", prompt_of(200, start=9), stopped[1:])
        message.crashes = 1
        with pytest.raises(grpc.aio.AioRpcError, match="2 pods crashed"):
            await run(fleet, message)
        await fleet.assert_idle()


async def test_another_layout_is_refused_by_name_and_the_prompt_computed_here(tiny_model: Path) -> None:
    async with run_fleet(tiny_model, block_size=32) as fleet:
        tokens, receipt = await run(fleet, request("a", prompt_of(100), [fleet.prefill_target]))
        assert len(tokens) == 24
        assert receipt.prefill_pod == ""
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            ticket = prefill_pb2.KvTicket(
                transfer_id=bytes(16), epoch=1, layout_fingerprint="00", layout_description="block_size=16"
            )
            async for _ in fleet.prefill.Prefill(
                prefill_pb2.PrefillRequest(request_id="x", prompt_token_ids=[5] * 40, ticket=ticket)
            ):
                pass
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "block_size" in refused.value.details()
        await fleet.assert_idle()


@pytest.mark.parametrize("delay_s", [0.0, 0.02, 0.1])
async def test_cancelling_at_any_moment_gives_everything_back(tiny_model: Path, delay_s: float) -> None:
    async with run_fleet(tiny_model) as fleet:
        running = [
            asyncio.ensure_future(
                run(fleet, request(f"r{i}", prompt_of(300 + i), [fleet.prefill_target], max_tokens=400))
            )
            for i in range(4)
        ]
        await pause_async(delay_s)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await fleet.assert_idle()
        tokens, _ = await run(fleet, request("after", prompt_of(100), [fleet.prefill_target]))
        assert len(tokens) == 24


async def test_more_requests_than_blocks_all_finish(tiny_model: Path) -> None:
    async with run_fleet(tiny_model) as fleet:
        got = await asyncio.gather(
            *(run(fleet, request(f"r{i}", prompt_of(400, start=i), [fleet.prefill_target])) for i in range(9))
        )
        assert [len(tokens) for tokens, _ in got] == [24] * 9
        await fleet.assert_idle()


async def test_requests_that_wait_for_blocks_are_among_those_that_wait(tiny_model: Path) -> None:
    async with run_fleet(tiny_model) as fleet, two_prefill_pods() as silent:
        waiting = [
            asyncio.ensure_future(run(fleet, request(f"r{i}", prompt_of(400, start=i), silent)))
            for i in range(9)
        ]

        async def all_wait() -> bool:
            usage, _ = await fleet.usage()
            return usage.requests_waiting == 9

        await until_async(all_wait, limit_s=5.0)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await fleet.assert_idle()


@pytest.mark.parametrize(
    ("prompt", "sampling", "code", "words"),
    [
        ([], {}, grpc.StatusCode.INVALID_ARGUMENT, "prompt"),
        ([5] * 1024, {}, grpc.StatusCode.INVALID_ARGUMENT, "1024 tokens"),
        ([5, VOCABULARY], {}, grpc.StatusCode.INVALID_ARGUMENT, "vocabulary [0, 96)"),
        ([5], {"top_p": 1.5}, grpc.StatusCode.INVALID_ARGUMENT, "top_p"),
        ([5], {"logprobs": 99}, grpc.StatusCode.INVALID_ARGUMENT, "logprobs"),
    ],
)
@pytest.mark.parametrize("apart", [False, True])
async def test_bad_input_is_refused_by_name(
    tiny_model: Path, prompt: list[int], sampling: dict[str, float], code, words: str, apart: bool
) -> None:
    async with run_fleet(tiny_model) as fleet:
        targets = [fleet.prefill_target] if apart else []
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await run(fleet, request("bad", prompt, targets, **sampling))
        assert refused.value.code() is code
        assert words in refused.value.details()
        await fleet.assert_idle()


@pytest.mark.parametrize("apart", [False, True])
async def test_a_request_that_no_pool_of_this_size_can_hold_is_one_for_another_pod(
    tiny_model: Path, apart: bool
) -> None:
    async with run_fleet(tiny_model, decode_blocks=8) as fleet:
        targets = [fleet.prefill_target] if apart else []
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await run(fleet, request("large", prompt_of(100), targets, max_tokens=30))
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "129 tokens, 9 blocks of 16, but this pod holds 128" in refused.value.details()
        assert "max_tokens" in refused.value.details()
        tokens, _ = await run(fleet, request("fits", prompt_of(100), targets, max_tokens=29))
        assert len(tokens) == 29
        await fleet.assert_idle()


async def test_stop_strings_and_logprobs_travel(tiny_model: Path) -> None:
    async with run_fleet(tiny_model) as fleet:
        texts, positions = [], 0
        async for response in fleet.decode.Decode(
            request("s", prompt_of(90), [fleet.prefill_target], max_tokens=40, logprobs=2)
        ):
            texts.append(response.chunk.text)
            positions += len(response.chunk.logprobs)
        whole = "".join(texts)
        assert positions == 40
        stop = whole[len(whole) // 2 : len(whole) // 2 + 2]
        cut, finished = "", None
        async for response in fleet.decode.Decode(
            request("t", prompt_of(90), [fleet.prefill_target], max_tokens=40, stop=[stop])
        ):
            cut += response.chunk.text
            if response.HasField("finished"):
                finished = response.finished
        assert cut == whole[: whole.index(stop)]
        assert (finished.reason, finished.stop_reason) == (common_pb2.FINISH_REASON_STOP, stop)
        await fleet.assert_idle()


@pytest.mark.parametrize(
    ("ticket", "sampling", "words"),
    [
        ({"credit_bytes": 0}, {}, "credit"),
        ({"endpoint": "udp://127.0.0.1:9"}, {}, "endpoint"),
        ({"transfer_id": b"short"}, {}, "transfer_id"),
        ({}, {"top_p": 1.5}, "top_p"),
    ],
)
async def test_a_bad_ticket_is_refused_by_name_and_holds_nothing(
    tiny_model: Path, ticket: dict[str, object], sampling: dict[str, float], words: str
) -> None:
    async with run_fleet(tiny_model) as fleet:
        layout = fleet.layout
        good = {
            "transfer_id": bytes(16), "epoch": 1, "endpoint": "tcp://127.0.0.1:9", "credit_bytes": 1 << 20,
            "layout_fingerprint": layout.fingerprint, "layout_description": layout.description,
            "public_key": "x" * 40,
        }  # fmt: skip
        message = prefill_pb2.PrefillRequest(
            request_id="x",
            prompt_token_ids=[5] * 40,
            sampling=common_pb2.SamplingParams(**sampling),
            ticket=prefill_pb2.KvTicket(**{**good, **ticket}),
        )
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            async for _ in fleet.prefill.Prefill(message):
                pass
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert words in refused.value.details()
        await fleet.assert_idle()


async def test_two_calls_with_one_request_id_do_not_touch_each_other(tiny_model: Path) -> None:
    async with run_fleet(tiny_model) as fleet:
        first, second = await asyncio.gather(
            run(fleet, request("twin", prompt_of(300), [fleet.prefill_target])),
            run(fleet, request("twin", prompt_of(200, start=4), [fleet.prefill_target])),
        )
        assert (len(first[0]), len(second[0])) == (24, 24)
        assert first[1].request_id == second[1].request_id == "twin"
        await fleet.assert_idle()


async def test_the_harshest_penalties_do_not_end_a_pod(tiny_model: Path) -> None:
    async with run_fleet(tiny_model) as fleet:
        harsh = {"temperature": 2.0, "seed": 1, "repetition_penalty": 0.01, "presence_penalty": -2.0}
        tokens, _ = await run(fleet, request("harsh", prompt_of(80), [fleet.prefill_target], **harsh))
        assert len(tokens) == 24
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await run(fleet, request("beyond", prompt_of(80), [], repetition_penalty=1e-38))
        assert "repetition_penalty" in refused.value.details()
        tokens, _ = await run(fleet, request("after", prompt_of(80), [fleet.prefill_target]))
        assert len(tokens) == 24


async def test_a_stop_string_cuts_the_same_with_drafts_and_without(tiny_model: Path) -> None:
    """Tokens that a draft brought beyond the stop string are neither sent nor counted."""
    prompt = prompt_of(90)
    plain = LLM(tiny_model, **SIZES)
    params = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True}
    whole = plain.generate([prompt], SamplingParams(**params))[0].text
    stop = whole[15:17]
    want = plain.generate([prompt], SamplingParams(**params, stop=(stop,)))[0]
    drafted = LLM(tiny_model, drafter=drafter_for("local"), **SIZES)
    assert drafted.generate([prompt], SamplingParams(**params, stop=(stop,)))[0].token_ids == want.token_ids
    async with run_fleet(tiny_model) as fleet:
        tokens, receipt = await run(
            fleet, request("s", prompt, [fleet.prefill_target], max_tokens=40, stop=[stop])
        )
        assert tokens == want.token_ids
        assert receipt.output_tokens == len(want.token_ids)


async def test_a_request_says_how_it_is_drafted_for(tiny_model: Path) -> None:
    """The same tokens each time; the receipt tells what the drafts were worth. A new pod has measured no step
    that could stop it from drafting."""
    receipts, texts = {}, []
    for name in ("", "off", "local", "chain"):
        async with run_fleet(tiny_model) as fleet:
            message = request(f"s{name}", prompt_of(90), [fleet.prefill_target], max_tokens=64)
            message.speculation = name
            tokens, receipts[name] = await run(fleet, message)
            texts.append(tokens)
    assert texts == [texts[0]] * 4
    off = receipts.pop("off")
    assert (off.drafted_tokens, off.hit_steps, dict(off.hit_steps_by_source)) == (0, 0, {})
    assert off.decode_steps == 63
    for receipt in receipts.values():
        assert receipt.drafted_tokens > 0
        assert receipt.accepted_tokens + receipt.decode_steps == 63
        assert sum(receipt.drafted_by_source.values()) == receipt.drafted_tokens
        assert all(receipt.drafted_by_source[name] >= n for name, n in receipt.accepted_by_source.items())
        by_source = dict(receipt.hit_steps_by_source)
        assert set(by_source) == set(receipt.accepted_by_source)
        assert "global" not in by_source, "there is nobody else's text"
        assert receipt.hit_steps <= sum(by_source.values()) <= receipt.accepted_tokens


async def test_an_unknown_speculation_is_named_with_what_there_is(tiny_model: Path) -> None:
    async with run_fleet(tiny_model) as fleet:
        message = request("s", prompt_of(20), [fleet.prefill_target])
        message.speculation = "forest"
        with pytest.raises(grpc.aio.AioRpcError, match="off, local, chain, global") as refused:
            await run(fleet, message)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (refused.value.details() or "").startswith("speculation: 'forest'")


async def scrape(port: int | None) -> dict[str, float]:
    """The samples of our own of a pod's /metrics."""
    url = f"http://127.0.0.1:{port}/metrics"
    text = await asyncio.to_thread(lambda: urllib.request.urlopen(url).read().decode())
    lines = (line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("tandem_"))
    return {name: float(value) for name, value in lines}


def _blocks(samples: dict[str, float]) -> dict[str, float]:
    return {state: samples[f'tandem_kv_blocks{{state="{state}"}}'] for state in ("free", "cached", "used")}


def _busy(samples: dict[str, float]) -> dict[str, float]:
    """The gauges that are zero on an idle pod and are not."""
    states = [f'tandem_requests{{state="{state}"}}' for state in ("waiting", "running", "transferring")]
    names = ('tandem_kv_blocks{state="used"}', "tandem_invariant_violations", *states)
    return {name: samples[name] for name in names if samples[name]}


async def test_the_gauges_of_both_pods_follow_their_status(tiny_model: Path) -> None:
    options = {"model": tiny_model, "metrics_port": 0, **SIZES}
    decode = DecodeSettings(
        pod_id="d0", local_prefill_tokens=32, idle_prefill_tokens=0, speculation="local", **options
    )
    async with open_prefill(PrefillSettings(pod_id="p0", **options)) as p, open_decode(decode) as d:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{d.port}") as channel:
            call = decode_pb2_grpc.DecodeServiceStub(channel).Decode(
                request("a", prompt_of(200), [f"127.0.0.1:{p.port}"])
            )
            async for _ in call:
                pass
        seen: list[dict[str, float]] = []

        async def are_up_to_date() -> bool:
            seen[:] = [await scrape(server.metrics_port) for server in (d, p)]
            return all(_blocks(samples)["cached"] >= 12 and not _busy(samples) for samples in seen)

        await until_async(are_up_to_date)
        for samples in seen:
            assert _blocks(samples)["cached"] >= 12, "200 tokens are twelve full blocks, kept for later"
            assert sum(_blocks(samples).values()) == SIZES["num_blocks"]
            assert _busy(samples) == {}
        assert seen[0]['tandem_kv_dropped_frames_total{cause="bad_digest"}'] == 0
        assert seen[0]["tandem_lookahead_connected"] == 0
        assert seen[0]["tandem_lookahead_dropped_spans_total"] == 0
    assert "pod-gauges" not in {task.get_name() for task in asyncio.all_tasks()}
