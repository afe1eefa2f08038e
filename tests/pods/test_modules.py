"""Models through transformers' modules behind a prefill and a decode pod."""

from __future__ import annotations

from pathlib import Path

import pytest
from decoder_proof import eager_texts, prompts, pulled
from pod_fleet import request, run_fleet
from tandem_core.errors import ModelLoadError
from tiny_decoders import tiny_model


async def test_a_prefill_pod_sends_the_keys_of_layers_with_windows_and_two_shapes(tmp_path: Path) -> None:
    model = tiny_model("gemma4_text")
    want = eager_texts(model)
    folder = pulled(model, tmp_path)
    async with run_fleet(folder, prefix_cache=False) as fleet:
        # The second prompt is so short that the decode pod computes it.
        for n in (0, 2):
            prompt = prompts()[n]
            tokens: list[int] = []
            async for response in fleet.decode.Decode(request(f"r{n}", prompt, [fleet.prefill_target])):
                tokens.extend(response.chunk.token_ids)
            receipt = response.finished.receipt
            assert tokens[: len(want[n])] == want[n]
            assert receipt.prefill_pod == "p0"
            assert receipt.transfer_bytes > 0
        await fleet.assert_idle()


async def test_a_prefill_pod_refuses_recurrent_layers(tmp_path: Path) -> None:
    folder = pulled(tiny_model("jamba"), tmp_path)
    with pytest.raises(ModelLoadError, match=r"recurrent layers .* start decode pods alone"):
        async with run_fleet(folder):
            pass
