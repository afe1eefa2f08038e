"""Prefill and decode pods of a model with windows: of layers that have one, only the last window travels."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from pod_fleet import Fleet, request, run_fleet
from tandem_core.sampling import SamplingParams
from tandem_engine.llm import LLM
from tandem_proto.v1 import common_pb2, prefill_pb2_grpc
from toy_models import SIZES, prompt_of
from window_models import WINDOW, save_model

BLOCK = SIZES["block_size"]
#: Of a block in one layer.
BLOCK_BYTES = 2 * 2 * 16 * BLOCK * 4
NUM_FULL, NUM_WINDOW = 1, 3
LENGTHS = (33, 64, 65, 150, 210, 600)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("windows beside full layers", tmp_path_factory.mktemp("windows"))[1]


@pytest.fixture(scope="module")
def together(folder: Path) -> dict[int, list[int]]:
    """The text of a prompt of each length, in one process."""
    llm = LLM(folder, **SIZES)
    greedy = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    return {n: llm.generate([prompt_of(n, start=n)], greedy)[0].token_ids for n in LENGTHS}


async def run(fleet: Fleet, message) -> tuple[list[int], common_pb2.Receipt]:
    tokens: list[int] = []
    async for response in fleet.decode.Decode(message):
        tokens.extend(response.chunk.token_ids)
        if response.HasField("finished"):
            return tokens, response.finished.receipt
    raise AssertionError("the stream ended without a receipt")


def window_bytes(num_tokens: int) -> int:
    """Of the blocks that the last token of a prompt sees."""
    first = max(num_tokens - WINDOW, 0) // BLOCK
    return (-(-num_tokens // BLOCK) - first) * NUM_WINDOW * BLOCK_BYTES


def full_bytes(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK) * NUM_FULL * BLOCK_BYTES


async def test_apart_equals_together_and_windows_travel_once(
    folder: Path, together: dict[int, list[int]]
) -> None:
    async with run_fleet(folder) as fleet:
        calls = [run(fleet, request(f"r{n}", prompt_of(n, start=n), [fleet.prefill_target])) for n in LENGTHS]
        for n, (tokens, receipt) in zip(LENGTHS, await asyncio.gather(*calls), strict=True):
            assert tokens == together[n]
            assert receipt.prefill_pod == "p0"
            assert receipt.transfer_bytes == full_bytes(n) + window_bytes(n)
        # Found in both pods' caches, and continued.
        longer = [*prompt_of(600, start=600), *together[600], *prompt_of(40)]
        again, _ = await run(fleet, request("again", longer, [fleet.prefill_target]))
        assert again == (await run(fleet, request("here", longer, [])))[0]
        await fleet.assert_idle()


class _FullLayersAlone(prefill_pb2_grpc.PrefillServiceServicer):
    """Hands calls on to a prefill pod, which sends the full layers' blocks, and then fails."""

    def __init__(self, behind: prefill_pb2_grpc.PrefillServiceStub) -> None:
        self._behind = behind

    async def Prefill(self, request, context):  # noqa: N802
        request.ticket.wanted_blocks[1].ClearField("blocks")
        async for response in self._behind.Prefill(request):
            if response.HasField("progress"):
                yield response
        await context.abort(grpc.StatusCode.ABORTED, "the pod is lost")


@asynccontextmanager
async def failing(fleet: Fleet) -> AsyncIterator[str]:
    server = grpc.aio.server()
    prefill_pb2_grpc.add_PrefillServiceServicer_to_server(_FullLayersAlone(fleet.prefill), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def test_the_next_pod_sends_what_the_lost_one_did_not(
    folder: Path, together: dict[int, list[int]]
) -> None:
    async with run_fleet(folder) as fleet, failing(fleet) as lost:
        prompt = prompt_of(600, start=600)
        tokens, receipt = await run(fleet, request("a", prompt, [lost, fleet.prefill_target]))
        assert tokens == together[600]
        assert (receipt.prefill_pod, receipt.prefill_retries) == ("p0", 1)
        sent = fleet.registries[1].get_sample_value("tandem_kv_sent_bytes_total")
        assert sent == full_bytes(600) + window_bytes(600), "the second pod sent only the windows"
        await fleet.assert_idle()


async def test_without_windows_the_prompt_is_computed_here(
    folder: Path, together: dict[int, list[int]]
) -> None:
    async with run_fleet(folder) as fleet, failing(fleet) as lost:
        tokens, receipt = await run(fleet, request("a", prompt_of(600, start=600), [lost]))
        assert tokens == together[600]
        assert (receipt.prefill_pod, receipt.prefill_retries) == ("", 1)
        await fleet.assert_idle()
