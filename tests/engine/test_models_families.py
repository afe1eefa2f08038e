"""Every family's logits and greedy tokens equal transformers', from random weights saved as a checkpoint.

The weights are wide (N(0, 1.44 / depth)), so that attention matters: with transformers' own initialisation
the logits are nearly those of the last token alone. One more family is one more line of FAMILIES.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from paged_model import PagedModel
from random_models import SIZES, prompts, randomize
from safetensors.torch import load_file, save_file
from tandem_engine.model_loader import load_decoder, pull
from torch import Tensor
from toy_models import save_checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

Tensors = dict[str, Tensor]
Config = dict[str, Any]

#: A model with as many key heads as heads.
MHA = SIZES | {"num_key_value_heads": 4}
HEADS_16 = {"head_dim": 16}
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0 + 0.1 * n for n in range(6)],
    "long_factor": [2.0 + 0.5 * n for n in range(6)], "original_max_position_embeddings": 32,
    "partial_rotary_factor": 0.75,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
FULL_YARN = {
    "full_attention": YARN,
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
GPT_2 = {
    "vocab_size": 96, "n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 256, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip

#: Name -> model_type and config.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma": ("gemma", SIZES | HEADS_16),
    "gemma2": ("gemma2", SIZES | {"head_dim": 32, "sliding_window": 9, "query_pre_attn_scalar": 24}),
    "gemma3": (
        "gemma3_text", SIZES | {"head_dim": 32, "sliding_window": 9, "query_pre_attn_scalar": 24},
    ),
    "gemma3-full": (
        "gemma3_text",
        SIZES | HEADS_16 | {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
    "vaultgemma": ("vaultgemma", SIZES | {"head_dim": 16, "sliding_window": 9}),
    "granite": (
        "granite", SIZES | {"embedding_multiplier": 3.0, "logits_scaling": 4.0, "residual_multiplier": 0.4,
                            "attention_multiplier": 0.2, "attention_bias": True, "mlp_bias": True},
    ),
    "phi3": ("phi3", SIZES | {"sliding_window": 9}),
    "phi4-mini": ("phi3", SIZES | {"rope_parameters": LONGROPE, "original_max_position_embeddings": 32}),
    "smollm3": ("smollm3", SIZES),
    "smollm3-windows": ("smollm3", SIZES | {"use_sliding_window": True, "sliding_window": 9}),
    "olmo": ("olmo", SIZES),
    "olmo2": ("olmo2", SIZES),
    "olmo3": ("olmo3", SIZES | {"sliding_window": 9, "rope_parameters": FULL_YARN}),
    "exaone4": ("exaone4", SIZES | {"sliding_window": 9}),
    "exaone4-1.2b": ("exaone4", SIZES | {"sliding_window": None, "layer_types": ["full_attention"] * 4}),
    "cohere": ("cohere", SIZES | {"logit_scale": 0.3}),
    "cohere2": ("cohere2", SIZES | {"sliding_window": 9, "attention_bias": True}),
    "glm": ("glm", SIZES | HEADS_16),
    "glm4": ("glm4", SIZES | HEADS_16),
    "ministral": ("ministral", SIZES | HEADS_16 | {"sliding_window": 9}),
    "ministral3": (
        "ministral3",
        SIZES | HEADS_16 | {"rope_parameters": YARN | {"llama_4_scaling_beta": 0.5,
                                                       "original_max_position_embeddings": 16}},
    ),
    "hunyuan": (
        "hunyuan_v1_dense",
        SIZES | HEADS_16 | {"rope_parameters": {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0,
                                                "rope_theta": 10000.0}},
    ),
    "seed-oss": ("seed_oss", SIZES | {"head_dim": 32, "attention_out_bias": True}),
    "starcoder2": ("starcoder2", SIZES | {"sliding_window": 9}),
    "gpt2": ("gpt2", GPT_2),
    "gpt-bigcode": ("gpt_bigcode", GPT_2),
    "gpt-bigcode-mha": ("gpt_bigcode", GPT_2 | {"multi_query": False}),
    "gpt-neo": (
        "gpt_neo",
        {"vocab_size": 96, "hidden_size": 64, "num_layers": 4, "num_heads": 4, "window_size": 9,
         "max_position_embeddings": 256, "attention_types": [[["global", "local"], 2]], "bos_token_id": 1,
         "eos_token_id": 2},
    ),
    "pythia": ("gpt_neox", MHA),
    "gpt-neox-serial": ("gpt_neox", MHA | {"use_parallel_residual": False, "attention_bias": False}),
    "gptj": ("gptj", GPT_2 | {"rotary_dim": 8}),
    "opt": ("opt", MHA | {"ffn_dim": 112, "word_embed_proj_dim": 64}),
    "biogpt": ("biogpt", MHA),
    "arcee": ("arcee", SIZES),
    "nemotron": ("nemotron", SIZES | {"attention_bias": True, "mlp_bias": True}),
    "stablelm": ("stablelm", SIZES | {"use_qkv_bias": True}),
    "stablelm-parallel": ("stablelm", SIZES | {"use_parallel_residual": True}),
    "phi": ("phi", SIZES),
    "persimmon": ("persimmon", MHA),
    "falcon": ("falcon", SIZES | {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}),
    "falcon-7b": ("falcon", SIZES),
    "falcon-serial": ("falcon", SIZES | {"multi_query": False, "parallel_attn": False, "bias": True}),
    "helium": ("helium", SIZES | HEADS_16),
    "ernie4.5": ("ernie4_5", SIZES | HEADS_16 | {"use_bias": True}),
    "cwm": ("cwm", SIZES | HEADS_16 | {"sliding_window": 9}),
    "internlm3": ("internlm3", SIZES | HEADS_16 | {"qkv_bias": True, "bias": True}),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def folder_of(
    model: PreTrainedModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Tensors, Config], tuple[Tensors, Config]] | None = None,
) -> Path:
    """change: what to do with the checkpoint's tensors and its config before it is pulled."""
    monkeypatch.setenv("TANDEM_HOME", str(tmp_path / "home"))
    checkpoint = tmp_path / "checkpoint"
    save_checkpoint(model, checkpoint)
    if change is not None:
        file, config = checkpoint / "model.safetensors", checkpoint / "config.json"
        tensors, changed = change(load_file(file), json.loads(config.read_text()))
        save_file({name: t.contiguous() for name, t in tensors.items()}, file, {"format": "pt"})
        config.write_text(json.dumps(changed))
    return pull(str(checkpoint))


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_and_greedy_tokens_equal_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Two sequences of unequal length, in chunks that end inside blocks; then 64 tokens of each."""
    torch.manual_seed(0)
    model_type, config = FAMILIES[name]
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(model_type, **config), attn_implementation="eager"
    )
    randomize(model)
    paged = PagedModel(load_decoder(folder_of(model, tmp_path, monkeypatch), torch.float32), 2, max_blocks=9)
    texts = prompts(61, 38)
    first, second = texts
    steps = [
        paged.step([first[:23], second[:5]]),
        paged.step([first[23:60], second[5:36]]),
        paged.step([first[60:], second[36:]]),
    ]
    rows = [[step[b] for step in steps] for b in range(2)]
    for _ in range(64):
        for b, text in enumerate(texts):
            text.append(int(rows[b][-1][-1].argmax()))
        for b, logits in enumerate(paged.step([[text[-1]] for text in texts])):
            rows[b].append(logits)
    for ours, text, length in zip(rows, texts, (61, 38), strict=True):
        with torch.inference_mode():
            theirs = model(torch.tensor([text])).logits[0]
        difference = (torch.cat(ours) - theirs).abs().max()
        assert difference < 1e-4 * theirs.abs().max()
        assert theirs[length - 1 : -1].argmax(-1).tolist() == text[length:]
        # The same last token after other texts: attention decides.
        with torch.inference_mode():
            other = model(torch.tensor([[*text[1:40][::-1], text[-1]]])).logits[0, -1]
        assert (other - theirs[-1]).abs().max() > 0.02 * theirs.abs().max()


def internlm2(tensors: Tensors, config: Config) -> tuple[Tensors, Config]:
    found = {}
    names = {
        "model.embed_tokens": "model.tok_embeddings", "lm_head": "output",
        "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm",
        "self_attn.o_proj": "attention.wo", "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3", "mlp.down_proj": "feed_forward.w2",
    }  # fmt: skip
    for name, tensor in tensors.items():
        if name.endswith(("k_proj.weight", "v_proj.weight")):
            continue
        if name.endswith("q_proj.weight"):
            # Each key head after the queries that read it.
            parts = [tensors[name.replace("q_proj", f"{x}_proj")].view(2, -1, 16, 64) for x in "qkv"]
            name, tensor = (
                name.replace("self_attn.q_proj", "attention.wqkv"),
                torch.cat(parts, 1).view(-1, 64),
            )
        for theirs, ours in names.items():
            name = name.replace(theirs, ours)
        found[name] = tensor
    return found, config | {"model_type": "internlm2", "bias": False}


def baichuan(tensors: Tensors, config: Config) -> tuple[Tensors, Config]:
    found = {n: t for n, t in tensors.items() if not n.endswith(("k_proj.weight", "v_proj.weight"))}
    for name in [n for n in found if n.endswith("q_proj.weight")]:
        parts = [tensors[name.replace("q_proj", f"{x}_proj")] for x in "qkv"]
        found[name.replace("q_proj", "W_pack")] = torch.cat(parts)
        del found[name]
    config["model_max_length"] = config.pop("max_position_embeddings")
    return found, config | {"model_type": "baichuan"}


def chatglm(tensors: Tensors, config: Config) -> tuple[Tensors, Config]:
    found = {}
    names = {
        "model.embed_tokens": "transformer.embedding.word_embeddings", "lm_head": "transformer.output_layer",
        "model.layers": "transformer.encoder.layers", "model.norm": "transformer.encoder.final_layernorm",
        "self_attn.o_proj": "self_attention.dense", "mlp.gate_up_proj": "mlp.dense_h_to_4h",
        "mlp.down_proj": "mlp.dense_4h_to_h",
    }  # fmt: skip
    for name, tensor in tensors.items():
        if "k_proj" in name or "v_proj" in name:
            continue
        if "q_proj" in name:
            tensor = torch.cat([tensors[name.replace("q_proj", f"{x}_proj")] for x in "qkv"])
            name = name.replace("self_attn.q_proj", "self_attention.query_key_value")
        for theirs, ours in names.items():
            name = name.replace(theirs, ours)
        found[name] = tensor
    changed = {
        "model_type": "chatglm", "num_layers": 4, "padded_vocab_size": 96, "ffn_hidden_size": 112,
        "kv_channels": 16, "seq_length": 256, "multi_query_group_num": 2, "hidden_size": 64,
        "num_attention_heads": 4, "add_qkv_bias": True, "layernorm_epsilon": config["rms_norm_eps"],
        "multi_query_attention": True, "rmsnorm": True,
    }  # fmt: skip
    return found, changed


def multimodal(tensors: Tensors, config: Config) -> tuple[Tensors, Config]:
    found = {name.replace("model.", "language_model.model.", 1): t for name, t in tensors.items()}
    found["vision_tower.patches.weight"] = torch.ones(3, 5)
    return found, {"model_type": "gemma3", "text_config": config, "vision_config": {"hidden_size": 5}}


@pytest.mark.parametrize(
    ("name", "change"),
    [("llama", internlm2), ("llama-mha", baichuan), ("glm", chatglm), ("gemma3", multimodal)],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_other_layouts_of_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, change: Any
) -> None:
    """Layouts that only code of their repositories reads, and a text model inside a multimodal checkpoint."""
    torch.manual_seed(0)
    more = {"llama": ("llama", SIZES), "llama-mha": ("llama", MHA)}
    model_type, config = (FAMILIES | more)[name]
    model = randomize(AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **config)))
    paged = PagedModel(load_decoder(folder_of(model, tmp_path, monkeypatch, change), torch.float32), 1)
    (text,) = prompts(60)
    ours = torch.cat([paged.step([text[:33]])[0], paged.step([text[33:]])[0]])
    with torch.inference_mode():
        theirs = model(torch.tensor([text])).logits[0]
    assert (ours - theirs).abs().max() < 1e-4 * theirs.abs().max()
