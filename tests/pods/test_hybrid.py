"""Prefill and decode pods of a model with recurrent layers: states travel after the last chunk."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hybrid_models import VARIANTS, randomize
from pod_fleet import Fleet, request, run_fleet
from tandem_core.sampling import SamplingParams
from tandem_engine.llm import LLM
from tandem_engine.model_loader import pull
from tandem_proto.v1 import common_pb2
from toy_models import SIZES, prompt_of, save_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("hybrid")
    save_checkpoint(randomize(VARIANTS["qwen3_5"]()), home / "checkpoint")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TANDEM_HOME", str(home / "home"))
        return pull(str(home / "checkpoint"))


async def run(fleet: Fleet, message) -> tuple[list[int], common_pb2.Receipt]:
    tokens: list[int] = []
    async for response in fleet.decode.Decode(message):
        tokens.extend(response.chunk.token_ids)
        if response.HasField("finished"):
            return tokens, response.finished.receipt
    raise AssertionError("the stream ended without a receipt")


async def test_apart_equals_together(folder: Path) -> None:
    prompts = [prompt_of(n, start=i) for i, n in enumerate((33, 64, 65, 150, 210))]
    alone = LLM(folder, **SIZES)
    greedy = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    want = [alone.generate([p], greedy)[0].token_ids for p in prompts]
    kv_bytes = 16 * 2 * 2 * 64 * 4  # of a block in the one layer with attention
    async with run_fleet(folder) as fleet:
        calls = [run(fleet, request(f"r{i}", p, [fleet.prefill_target])) for i, p in enumerate(prompts)]
        got = await asyncio.gather(*calls)
        assert [tokens for tokens, _ in got] == want
        assert all(receipt.prefill_pod == "p0" for _, receipt in got)
        for prompt, (_, receipt) in zip(prompts, got, strict=True):
            state_bytes = receipt.transfer_bytes - -(-len(prompt) // 16) * kv_bytes
            assert state_bytes == 3 * 4 * (3 * 192 + 4 * 32 * 16)
        await fleet.assert_idle()
