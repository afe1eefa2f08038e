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
from trained_hybrid import train, training_text


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


@pytest.mark.wide
@pytest.mark.timeout(3600)
async def test_a_trained_model_writes_the_same_text_however_it_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts, pods apart, a prefill pod that is gone, and prefix hits: as one by one without any of it."""
    monkeypatch.setenv("TANDEM_HOME", str(tmp_path / "home"))
    folder = pull(str(train(tmp_path / "checkpoint")))
    text = training_text()
    alone = LLM(folder, **SIZES, prefix_cache=False)
    prompts = [alone.tokenizer.encode(text[i * 9000 : i * 9000 + 150 + 37 * i]) for i in range(10)]
    prompts += [[*prompt[:100], *prompts[0][:40]] for prompt in prompts[5:]]  # leave the others' texts
    options = {"temperature": 0.7, "seed": 7, "max_tokens": 96, "ignore_eos": True}  # greedy texts repeat
    sampling = SamplingParams(**options)
    want = [alone.generate([p], sampling)[0].token_ids for p in prompts]
    assert len({token for tokens in want for token in tokens}) > 20, "the model writes one letter"
    async with run_fleet(folder, decode_blocks=200, num_blocks=200) as fleet:
        for target in (fleet.prefill_target, "127.0.0.1:1", fleet.prefill_target):
            for first in range(0, len(prompts), 4):
                part = range(first, min(first + 4, len(prompts)))
                calls = [
                    run(fleet, request(f"{target}-{i}-{first}", prompts[i], [target], **options))
                    for i in part
                ]
                got = await asyncio.gather(*calls)
                assert [tokens for tokens, _ in got] == [want[i] for i in part]
        # Turns: the last texts, which are still cached, and some more.
        for prompt, text_ids in zip(prompts[-2:], want[-2:], strict=True):
            turn = [*prompt, *text_ids, *prompts[1][:20]]
            tokens, receipt = await run(fleet, request("turn", turn, [], **options))
            assert tokens == alone.generate([turn], sampling)[0].token_ids
            assert receipt.cached_tokens > len(prompt)
        await fleet.assert_idle()
