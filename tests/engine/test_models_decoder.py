"""The native decoder computes what transformers computes, for every variant it accepts.

Models are tiny and random (biases and norms too), saved as Hugging Face checkpoints, taken in by the store
and run over a paged cache in shuffled blocks.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from native_libraries import native_library
from paged_model import BLOCK_SIZE, PagedModel, kv_caches
from tandem_engine.model_loader import load_decoder, pull
from tandem_engine.models import Decoder, ModelConfig, ModelInputs
from tandem_engine.models.layout import WeightForm, stored_tensors
from tandem_engine.models.linear import linear_policy
from tandem_kernels import AttentionMetadata, make_attention, native
from torch import Tensor
from toy_models import save_checkpoint
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 500.0,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
YARN_MSCALE = YARN | {"mscale": 1.0, "mscale_all_dim": 0.5, "beta_fast": 8, "beta_slow": 2}


def softcapped(model: PreTrainedModel) -> PreTrainedModel:
    """With Gemma 2's attention: transformers applies no softcap in other models."""
    cap = model.config.attn_logit_softcapping
    ALL_ATTENTION_FUNCTIONS.register("softcapped", partial(eager_attention_forward, softcap=cap))
    ALL_MASK_ATTENTION_FUNCTIONS.register("softcapped", eager_mask)
    model.config._attn_implementation = "softcapped"
    return model


VARIANTS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "llama-tied-mha": lambda: LlamaForCausalLM(
        LlamaConfig(**SIZES | {"num_key_value_heads": 4}, tie_word_embeddings=True)
    ),
    "llama-mqa": lambda: LlamaForCausalLM(LlamaConfig(**SIZES | {"num_key_value_heads": 1})),
    "llama-head-dim": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, head_dim=32)),
    "llama-biases": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True)),
    "llama-theta": lambda: LlamaForCausalLM(
        LlamaConfig(**SIZES, rope_parameters={"rope_type": "default", "rope_theta": 77.0})
    ),
    "llama-linear": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=LINEAR)),
    "llama-dynamic": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=DYNAMIC)),
    "llama-llama3": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=LLAMA3)),
    "llama-yarn": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=YARN)),
    "llama-yarn-mscale": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=YARN_MSCALE)),
    "llama-softcap": lambda: softcapped(LlamaForCausalLM(LlamaConfig(**SIZES, attn_logit_softcapping=0.5))),
    "mistral-window": lambda: MistralForCausalLM(MistralConfig(**SIZES, head_dim=16, sliding_window=9)),
    "mistral-no-window": lambda: MistralForCausalLM(MistralConfig(**SIZES, head_dim=16, sliding_window=None)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "qwen2-mixed-window": lambda: Qwen2ForCausalLM(
        Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=9, max_window_layers=1)
    ),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=32)),
    "qwen3-tied-biases": lambda: Qwen3ForCausalLM(
        Qwen3Config(**SIZES, head_dim=16, attention_bias=True, tie_word_embeddings=True)
    ),
}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def randomize(model: PreTrainedModel) -> PreTrainedModel:
    """Every parameter matters: transformers starts biases at 0 and norms at 1, which would hide both."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.3 * noise if "norm" in name else 0.15 * noise)
    return model.eval()


def reference_logits(model: PreTrainedModel, prompt: list[int]) -> Tensor:
    with torch.inference_mode():
        return model(torch.tensor([prompt])).logits[0]


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(0, SIZES["vocab_size"], (n,), generator=generator).tolist() for n in lengths]


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """variant name -> (transformers' model, our model folder)"""
    monkeypatch.setenv("TANDEM_HOME", str(tmp_path / "home"))

    def make(variant: str) -> tuple[PreTrainedModel, Path]:
        torch.manual_seed(0)
        model = randomize(VARIANTS[variant]())
        save_checkpoint(model, tmp_path / variant)
        return model, pull(str(tmp_path / variant))

    return make


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers(stored, variant: str) -> None:
    """Two sequences of unequal length, in chunks that end inside blocks, then one token at a time."""
    model, folder = stored(variant)
    paged = PagedModel(load_decoder(folder, torch.float32), num_sequences=2)
    first, second = prompts(61, 38)
    steps = [
        paged.step([first[:23], second[:5]]),
        paged.step([first[23:59], second[5:36]]),
        paged.step([first[59:60], second[36:37]]),
        paged.step([first[60:], second[37:]]),
    ]
    for b, prompt in enumerate((first, second)):
        ours = torch.cat([step[b] for step in steps])
        theirs = reference_logits(model, prompt)
        assert theirs.std() > 0.1, "logits this flat would agree by accident"
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("variant", ["llama-biases", "llama-softcap", "qwen3-tied-biases"])
def test_without_compiled_kernels_torch_computes_the_same(stored, variant: str) -> None:
    model, folder = stored(variant)
    (prompt,) = prompts(40)
    with native_library("off"):
        paged = PagedModel(load_decoder(folder, torch.float32), num_sequences=1)
        ours = torch.cat([paged.step([prompt[:33]])[0], *(paged.step([[t]])[0] for t in prompt[33:])])
    torch.testing.assert_close(ours, reference_logits(model, prompt), atol=1e-4, rtol=0)


@pytest.mark.parametrize("compiled", [False, True])
def test_bfloat16_is_as_close_to_float32_as_transformers_bfloat16(stored, compiled: bool) -> None:
    model, folder = stored("qwen3")
    (prompt,) = prompts(40)
    exact = reference_logits(model, prompt)
    theirs = reference_logits(model.to(torch.bfloat16), prompt).float()
    with native_library(None if compiled else "off"):
        paged = PagedModel(load_decoder(folder, torch.bfloat16), num_sequences=1)
        ours = torch.cat([paged.step([prompt[:39]])[0], paged.step([prompt[39:]])[0]])
    assert (ours - exact).square().mean() <= 2 * (theirs - exact).square().mean()
    assert not torch.equal(ours, exact)


def test_a_tree_of_drafts_sees_only_ancestors(stored) -> None:
    """Two branches after one root, in one forward: each row equals its own branch run alone."""
    model, folder = stored("llama")
    paged = PagedModel(load_decoder(folder, torch.float32), num_sequences=1)
    (prompt,) = prompts(21)
    paged.step([prompt[:20]])
    root, left, right = prompt[20], 5, 9
    slots = paged.block_table[0][1].long() * BLOCK_SIZE + torch.tensor([4, 5, 6])
    inputs = ModelInputs(
        input_ids=torch.tensor([root, left, right]),
        positions=torch.tensor([20, 21, 21]),
        slot_mapping=slots,
        attention=AttentionMetadata(
            block_table=paged.block_table,
            seq_lens=torch.tensor([23], dtype=torch.int32),
            query_start_loc=torch.tensor([0, 3], dtype=torch.int32),
            ancestor_bits=torch.tensor([0b001, 0b011, 0b101]),
        ),
    )
    ours = paged.decoder.logits(paged.decoder.forward(inputs, paged.kv))
    torch.testing.assert_close(ours[1], reference_logits(model, [*prompt, left])[-1], atol=1e-4, rtol=0)
    torch.testing.assert_close(ours[2], reference_logits(model, [*prompt, right])[-1], atol=1e-4, rtol=0)


def test_a_layer_is_reported_once_its_cache_is_written(stored) -> None:
    _, folder = stored("llama")
    paged = PagedModel(load_decoder(folder, torch.float32), num_sequences=1)
    seen: list[tuple[int, list[bool]]] = []
    first_block = int(paged.block_table[0, 0])

    def on_layer_done(layer: int) -> None:
        seen.append((layer, [not kv[first_block].isnan().any() for kv in paged.kv]))

    paged.step(prompts(BLOCK_SIZE), on_layer_done)
    assert seen == [(0, [True, False]), (1, [True, True])]


@pytest.mark.parametrize("compiled", [False, True])
def test_weights_are_mapped_and_not_copied(stored, compiled: bool) -> None:
    """Weights of either form lie in the file's mapping, whose clean pages all processes share."""
    form = "-packed" if compiled and native.LIBRARY is not None else ""
    _, folder = stored("llama")
    with native_library(None if compiled else "off"):
        decoder = load_decoder(folder, torch.float32)
    address = decoder.embed_tokens.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(x, 16) for x in line.split()[0].split("-"))
        if start <= address < end:
            assert line.endswith(f"model-float32{form}.safetensors")
            return
    pytest.fail("the embedding lies in no mapping")


@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.int8], ids=str)
def test_sinks_and_kv_scales_among_the_tensors_reach_attention(cache_dtype: torch.dtype) -> None:
    config = ModelConfig.from_hf({"model_type": "llama", "rms_norm_eps": 1e-5} | SIZES)
    generator = torch.Generator().manual_seed(3)
    tensors = {
        stored.name: torch.randn(stored.shape, generator=generator) / 8
        for stored in stored_tensors(config.spec, config.names, WeightForm(torch.float32))
    }
    for n, a in enumerate(config.spec.attentions):
        tensors[f"sublayers.{2 * n}.0.sinks"] = torch.randn(a.heads, generator=generator)
        if cache_dtype == torch.int8:
            tensors |= {f"sublayers.{2 * n}.0.{x}_scale": torch.full((a.kv_heads,), 0.02) for x in "kv"}
    plain = {name: t for name, t in tensors.items() if not name.endswith(("sinks", "scale"))}
    inputs = ModelInputs(
        input_ids=torch.tensor([5, 7, 11]),
        positions=torch.arange(3),
        slot_mapping=torch.arange(3),
        attention=AttentionMetadata(
            torch.zeros(1, 1, dtype=torch.int32),
            torch.tensor([3], dtype=torch.int32),
            torch.tensor([0, 3], dtype=torch.int32),
        ),
    )

    def run(tensors: dict[str, Tensor], dtype: torch.dtype, backend: str) -> Tensor:
        caches = kv_caches(config.spec, 1, dtype)
        decoder = Decoder(config.spec, tensors, linear_policy(torch.float32, torch.device("cpu"), 0))
        attention = make_attention(torch.float32, 16, torch.device("cpu"), backend=backend)
        return decoder.forward(inputs, caches, attention=attention)

    ours = run(tensors, cache_dtype, "auto")
    torch.testing.assert_close(ours, run(tensors, cache_dtype, "reference"), atol=1e-4, rtol=0)
    without_sinks = run(plain, torch.float32, "reference")
    assert (ours - without_sinks).abs().max() > 0.01
    if cache_dtype == torch.int8:
        sinks_only = {name: t for name, t in tensors.items() if not name.endswith("scale")}
        exact = run(sinks_only, torch.float32, "reference")
        assert (ours - exact).abs().max() < (ours - without_sinks).abs().max()
