"""A decode pod that stops gives its requests and their KV to another, and no token changes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from pod_fleet import request
from pod_usage import held
from tandem_decode.main import open_pod as open_decode
from tandem_decode.settings import DecodeSettings
from tandem_proto.v1 import common_pb2, decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from tandem_service.server import PodServer
from toy_models import SIZES, prompt_of
from waiting import until_async

CASES = {
    "greedy": {},
    "sampled": {"temperature": 1.3, "seed": 11, "top_p": 0.95},
    "logprobs": {"logprobs": 2, "frequency_penalty": 1.0},
}
MAX_TOKENS = 700


@dataclass
class Pod:
    server: PodServer
    decode: decode_pb2_grpc.DecodeServiceStub
    prefill: prefill_pb2_grpc.PrefillServiceStub

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.server.port}"

    async def usage(self) -> common_pb2.ResourceUsage:
        answer = await self.decode.GetDecodeStatus(decode_pb2.GetDecodeStatusRequest())
        return answer.status.usage


@asynccontextmanager
async def pods(tiny_model: Path, *names: str) -> AsyncIterator[list[Pod]]:
    async with AsyncExitStack() as stack:
        found = []
        for name in names:
            settings = DecodeSettings(
                model=tiny_model, pod_id=name, local_prefill_tokens=32, idle_prefill_tokens=0, drain_s=60.0,
                speculation="local", **SIZES,
            )  # fmt: skip
            server = await stack.enter_async_context(open_decode(settings))
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(f"127.0.0.1:{server.port}"))
            stubs = decode_pb2_grpc.DecodeServiceStub(channel), prefill_pb2_grpc.PrefillServiceStub(channel)
            found.append(Pod(server, *stubs))
        yield found


async def collect(responses, tokens: list[int], logprobs: list[common_pb2.PositionLogprobs]):
    """Adds what the call sends, up to its end or the news that the pod drains."""
    async for response in responses:
        tokens += response.chunk.token_ids
        logprobs += response.chunk.logprobs
        if response.HasField("finished"):
            return response.finished.receipt
        if response.progress.draining:
            return None
    raise AssertionError("the stream ended without a receipt")


@pytest.mark.parametrize("case", CASES)
async def test_another_pod_takes_over_with_the_kv_of_the_one_that_drains(tiny_model: Path, case: str) -> None:
    async with pods(tiny_model, "d0", "d1") as (first, second):
        message = request("r", prompt_of(200), [], max_tokens=MAX_TOKENS, **CASES[case])
        want: tuple[list, list] = ([], [])
        assert await collect(second.decode.Decode(message), *want) is not None
        # The second pod must not find the text in its own cache.
        message.tenant = "other"
        got: tuple[list, list] = ([], [])
        call = first.decode.Decode(message)
        responses = aiter(call)
        while not got[0]:
            got[0].extend((response := await anext(responses)).chunk.token_ids)
            got[1].extend(response.chunk.logprobs)
        stopping = asyncio.create_task(first.server.stop())
        assert await collect(responses, *got) is None, "the pod says that it drains"
        assert 0 < len(got[0]) < MAX_TOKENS
        call.cancel()
        message.output_token_ids[:] = got[0]
        message.kv_source = first.target
        receipt = await collect(second.decode.Decode(message), *got)
        assert got == want
        assert receipt.prefill_pod == "d0"
        assert receipt.transfer_bytes > 0
        assert receipt.cached_tokens >= 192, "the KV was there and was not computed again"
        async with asyncio.timeout(30):
            await stopping
        await until_async(lambda: _is_idle(second))


async def _is_idle(pod: Pod) -> bool:
    return held(await pod.usage()) == {}


async def test_a_pod_that_drains_serves_on_until_somebody_takes_over(tiny_model: Path) -> None:
    async with pods(tiny_model, "d0") as (pod,):
        message = request("r", prompt_of(100), [], max_tokens=200)
        want: list[int] = []
        assert await collect(pod.decode.Decode(message), want, []) is not None
        call = pod.decode.Decode(message)
        responses = aiter(call)
        got: list[int] = []
        while not got:
            got += (await anext(responses)).chunk.token_ids
        stopping = asyncio.create_task(pod.server.stop())
        await until_async(lambda: _refuses(pod))
        async for response in responses:
            got += response.chunk.token_ids
        assert got == want
        await stopping


async def _refuses(pod: Pod) -> bool:
    """Whether new requests are refused, with a status that does not count as a crash."""
    call = pod.decode.Decode(request("new", prompt_of(20), [], max_tokens=1))
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError as error:
        assert error.code() is grpc.StatusCode.CANCELLED
        assert "the pod is stopping" in (error.details() or "")
        return True
    return False


async def test_an_idle_pod_stops_at_once_and_asks_for_nothing(tiny_model: Path) -> None:
    async with pods(tiny_model, "d0") as (pod,):
        async with asyncio.timeout(20):  # drain_s is 60
            await pod.server.stop()


async def test_a_decode_pod_serves_prefill_beside_its_own_requests(tiny_model: Path) -> None:
    """What others fetch from it changes no token of the requests that it decodes."""
    async with pods(tiny_model, "d0", "d1") as (first, second):
        message = request("own", prompt_of(90), [], max_tokens=300)
        want: list[int] = []
        await collect(first.decode.Decode(message), want, [])
        got: list[int] = []
        own = asyncio.create_task(collect(first.decode.Decode(message), got, []))
        for index in range(3):
            other = request(f"other-{index}", prompt_of(150, start=index), [], max_tokens=8)
            alone: list[int] = []
            await collect(second.decode.Decode(other), alone, [])
            other.tenant, other.kv_source = "other", first.target
            fetched: list[int] = []
            receipt = await collect(second.decode.Decode(other), fetched, [])
            assert (receipt.prefill_pod, fetched) == ("d0", alone)
        await own
        assert got == want
        status = await first.prefill.GetPrefillStatus(prefill_pb2.GetPrefillStatusRequest())
        assert status.status.requests_total == 3
        for pod in (first, second):
            await until_async(lambda pod=pod: _is_idle(pod))
