"""The default model's beams are transformers' beams on 20 prompts, in float32 from the same file."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from greedy import SHORT_CHARS, make_llm, make_prompts
from tandem_core.beams import BeamParams
from tandem_core.model.manifest import ModelManifest
from tandem_core.sampling import SamplingParams
from tandem_engine.model_loader import DEFAULT_MODEL, pull
from transformers import AutoModelForCausalLM, GgufConfig

NUM_TOKENS = 32
#: Widths and length penalties, in turns.
CASES = ((4, 1.0), (2, 0.0), (8, 0.6), (3, -1.0), (5, 2.0))


@pytest.mark.wide
@pytest.mark.timeout(1800)
def test_the_default_models_beams_are_those_of_transformers(corpus, tmp_path: Path) -> None:
    folder = pull(DEFAULT_MODEL)
    # Alone in a folder: beside it transformers would read our config.json.
    (tmp_path / "model.gguf").symlink_to(folder / ModelManifest.read(folder).weights)
    reference = AutoModelForCausalLM.from_pretrained(
        tmp_path,
        gguf_file="model.gguf",
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    ).eval()
    llm = make_llm(folder, "off")
    prompts = make_prompts(llm, corpus, SHORT_CHARS * 3)
    assert len(prompts) == 20
    ends = list(llm.manifest.eos_token_ids)
    seconds = {"transformers": 0.0, "here": 0.0}
    for i, prompt in enumerate(prompts):
        width, penalty = CASES[i % len(CASES)]
        begun = time.perf_counter()
        with torch.inference_mode():
            output = reference.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                num_beams=width,
                num_return_sequences=width,
                do_sample=False,
                length_penalty=penalty,
                max_new_tokens=NUM_TOKENS,
                eos_token_id=ends,
                pad_token_id=2,
            )
        seconds["transformers"] += time.perf_counter() - begun
        rows = output[:, len(prompt) :].tolist()
        want = [row[: next((n for n, t in enumerate(row, 1) if t in ends), len(row))] for row in rows]
        begun = time.perf_counter()
        sampling = SamplingParams(beam_search=BeamParams(width, penalty), max_tokens=NUM_TOKENS)
        found = llm.beam_search(prompt, sampling)
        seconds["here"] += time.perf_counter() - begun
        assert [one.token_ids for one in found] == want, i
    print(f"{len(prompts)} prompts, seconds: {seconds}")
