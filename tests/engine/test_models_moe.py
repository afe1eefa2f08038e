"""Mixtures of experts compute what transformers computes, for every family with them.

Models are tiny and random, saved as Hugging Face checkpoints. Weights are about N(0, 1.44 / depth): with
transformers' own small ones routing and attention hardly matter.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers as hf
from native_libraries import native_library
from paged_model import PagedModel
from safetensors.torch import load_file, save_file
from tandem_core.errors import ModelLoadError
from tandem_engine.model_loader import load_decoder, pull
from tandem_engine.models import ModelConfig, Quantization
from torch import Tensor
from toy_models import save_checkpoint

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
FAMILIES = {
    "mixtral": (hf.MixtralConfig, {"num_local_experts": 8}),
    "qwen3_moe": (
        hf.Qwen3MoeConfig,
        {
            "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 32, "norm_topk_prob": True,
            "head_dim": 32, "mlp_only_layers": [1],
        },
    ),
    "qwen2_moe": (
        hf.Qwen2MoeConfig,
        {"num_experts": 12, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 80},
    ),
    "olmoe": (hf.OlmoeConfig, {"num_experts": 16, "num_experts_per_tok": 3}),
    "glm4_moe": (
        hf.Glm4MoeConfig,
        {
            "n_routed_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 32, "n_group": 4,
            "topk_group": 2, "routed_scaling_factor": 2.5, "use_qk_norm": True, "attention_bias": True,
            "head_dim": 32, "n_shared_experts": 2,
        },
    ),
    "minimax_m2": (
        hf.MiniMaxM2Config,
        {"num_local_experts": 16, "num_experts_per_tok": 4, "head_dim": 32, "rotary_dim": 16},
    ),
    "ernie4_5": (hf.Ernie4_5Config, {"head_dim": 32}),
    "ernie4_5_moe": (
        hf.Ernie4_5_MoeConfig,
        {"moe_num_experts": 16, "moe_k": 4, "moe_intermediate_size": 32, "moe_num_shared_experts": 2},
    ),
    "granitemoe": (
        hf.GraniteMoeConfig,
        {
            "num_local_experts": 8, "num_experts_per_tok": 3, "attention_multiplier": 0.3,
            "embedding_multiplier": 3.0, "residual_multiplier": 0.4, "logits_scaling": 2.0,
        },
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """family -> (transformers' model, its checkpoint)"""
    monkeypatch.setenv("TANDEM_HOME", str(tmp_path / "home"))

    def make(family: str) -> tuple[hf.PreTrainedModel, Path]:
        kind, changes = FAMILIES[family]
        model = hf.AutoModelForCausalLM.from_config(kind(**SIZES | changes))
        randomize(model)
        save_checkpoint(model, tmp_path / family)
        return model, tmp_path / family

    return make


def randomize(model: hf.PreTrainedModel) -> None:
    generator = torch.Generator().manual_seed(1)
    named = [*model.named_parameters(), *model.named_buffers()]
    with torch.no_grad():
        for name, tensor in named:
            noise = torch.randn(tensor.shape, generator=generator)
            if "correction" in name:
                tensor.copy_(noise / 8)
            elif tensor.ndim > 1:
                tensor.copy_(noise * 1.2 / tensor.shape[-1] ** 0.5)
            elif "inv_freq" not in name:
                tensor.copy_(1 + 0.3 * noise if "norm" in name else 0.15 * noise)
    model.eval()


def reference_logits(model: hf.PreTrainedModel, prompt: list[int]) -> Tensor:
    with torch.inference_mode():
        return model(torch.tensor([prompt])).logits[0]


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(0, SIZES["vocab_size"], (n,), generator=generator).tolist() for n in lengths]


@pytest.mark.parametrize(
    "family, library", [*((family, None) for family in FAMILIES), ("qwen2_moe", "off"), ("granitemoe", "off")]
)
def test_logits_equal_transformers(stored, family: str, library: str | None) -> None:
    """Two sequences of unequal length, in chunks, then one token at a time."""
    model, checkpoint = stored(family)
    with native_library(library):
        paged = PagedModel(load_decoder(pull(str(checkpoint)), torch.float32), num_sequences=2)
        first, second = prompts(40, 25)
        steps = [
            paged.step([first[:23], second[:5]]),
            paged.step([first[23:39], second[5:24]]),
            paged.step([first[39:], second[24:]]),
        ]
    for b, prompt in enumerate((first, second)):
        ours, theirs = torch.cat([step[b] for step in steps]), reference_logits(model, prompt)
        assert theirs.std() > 0.1, "logits this flat would agree by accident"
        assert (ours - theirs).abs().max() <= 1e-4 * theirs.abs().max()


def run(folder: Path, quantization: Quantization = Quantization.NONE) -> Tensor:
    """Logits of 30 tokens."""
    return PagedModel(load_decoder(folder, torch.float32, quantization=quantization), 1).step(prompts(30))[0]


def test_stacked_experts_are_those_of_separate_tensors(stored, tmp_path: Path) -> None:
    """Files may hold all experts of a layer in one tensor, as transformers has them in memory."""
    _, checkpoint = stored("qwen3_moe")
    expected = run(pull(str(checkpoint)))
    tensors = load_file(checkpoint / "model.safetensors")
    for layer in (0, 2):  # layer 1 is dense
        base = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (
            torch.stack([tensors.pop(f"{base}.{e}.{role}_proj.weight") for e in range(16)])
            for role in ("gate", "up", "down")
        )
        tensors |= {f"{base}.gate_up_proj": torch.cat([gate, up], 1), f"{base}.down_proj": down}
    other = tmp_path / "stacked"
    checkpoint.rename(other)
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    assert torch.equal(run(pull(str(other))), expected)


def test_experts_of_8_bits_are_close(stored) -> None:
    model, checkpoint = stored("glm4_moe")
    ours, theirs = run(pull(str(checkpoint)), Quantization.W8A8), reference_logits(model, *prompts(30))
    # A near tie may choose another expert, which changes its row much.
    assert (ours - theirs).abs().median() < 0.06 * theirs.std()


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"num_experts_per_tok": 9}, "num_experts_per_tok is '9', but there are 8 experts to choose from"),
        ({"num_local_experts": 1 << 20}, "num_local_experts is '1048576', but must be from 1 to 4096"),
        ({"num_local_experts": 0}, "num_local_experts is '0', but must be from 1 to 4096"),
        ({"num_local_experts": 4096, "num_hidden_layers": 100}, "409600 experts in all layers"),
    ],
)
def test_configs_that_cannot_be_are_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        ModelConfig.from_hf(hf.MixtralConfig(**SIZES).to_dict() | {"num_local_experts": 8} | changes)


def test_lacking_and_misshapen_experts_are_named(stored) -> None:
    _, checkpoint = stored("mixtral")
    file = checkpoint / "model.safetensors"
    whole = load_file(file)
    name = "model.layers.1.block_sparse_moe.experts.3.w2.weight"
    for changed, message in (
        ({n: t for n, t in whole.items() if n != name}, f"the weights lack {name}"),
        (whole | {name: whole[name].t().contiguous()}, rf"{name} has shape \(96, 64\), but the config asks"),
    ):
        save_file(changed, file, {"format": "pt"})
        with pytest.raises(ModelLoadError, match=message):
            load_decoder(pull(str(checkpoint)), torch.float32)
