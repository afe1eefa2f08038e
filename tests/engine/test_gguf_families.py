"""GGUF files of every dense architecture give the logits of the checkpoint that they are made of.

The files are written as llama.cpp's converter writes them: its names, rows of queries and keys interleaved
for some architectures, and 1 + w for Gemma's norms.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from paged_model import PagedModel
from random_models import SIZES, prompts, randomize
from tandem_core.model.manifest import ModelManifest
from tandem_engine.model_loader import load_decoder
from tandem_engine.model_loader.gguf_architectures import ARCHITECTURES
from tandem_engine.model_loader.gguf_source import GgufSource
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

#: Architecture -> changes of the config, and the file's own keys.
FILES: dict[str, tuple[dict[str, Any], dict[str, float]]] = {
    "arcee": ({}, {}),
    "gemma": ({"head_dim": 16}, {}),
    "gemma2": (
        {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 9},
        {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "attention.sliding_window": 9},
    ),
    "gemma3": (
        {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 9},
        {"attention.sliding_window": 9},
    ),
    "granite": (
        {"embedding_multiplier": 3.0, "logits_scaling": 4.0, "residual_multiplier": 0.5,
         "attention_multiplier": 0.25},
        {"embedding_scale": 3.0, "logit_scale": 4.0, "residual_scale": 0.5, "attention.scale": 0.25},
    ),
    "olmo2": ({}, {}),
    "phi3": ({"sliding_window": 9}, {"attention.sliding_window": 9}),
    "seed_oss": ({"head_dim": 32}, {}),
    "smollm3": ({}, {}),
    "starcoder2": ({}, {}),
}  # fmt: skip


def write_gguf(path: Path, arch: str, model: PreTrainedModel, keys: dict[str, float]) -> None:
    c, conversion = model.config, ARCHITECTURES[arch]
    writer = gguf.GGUFWriter(path, arch)
    head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    for key, value in {
        "block_count": c.num_hidden_layers, "context_length": c.max_position_embeddings,
        "embedding_length": c.hidden_size, "feed_forward_length": c.intermediate_size,
        "attention.head_count": c.num_attention_heads, "attention.head_count_kv": c.num_key_value_heads,
        "attention.key_length": head_dim, "attention.value_length": head_dim,
    }.items():  # fmt: skip
        writer.add_uint32(f"{arch}.{key}", value)
    rope = c.rope_parameters
    theta = rope.get("full_attention", rope)["rope_theta"]
    writer.add_float32(f"{arch}.rope.freq_base", theta)
    writer.add_float32(f"{arch}.{conversion.eps[1]}", getattr(c, conversion.eps[0]))
    for key, value in keys.items():
        add = writer.add_uint32 if isinstance(value, int) else writer.add_float32
        add(f"{arch}.{key}", value)
    known = gguf.get_tensor_name_map(
        next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == arch), c.num_hidden_layers
    )
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and c.tie_word_embeddings:
            continue
        if conversion.interleaved and ("q_proj" in name or "k_proj" in name):
            heads = c.num_attention_heads if "q_proj" in name else c.num_key_value_heads
            tensor = tensor.view(heads, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
        if conversion.one_plus and name.endswith("norm.weight"):
            tensor = tensor + 1
        writer.add_tensor(known.get_name(name, (".weight", ".bias")), tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("arch", FILES)
def test_logits_equal_those_of_the_checkpoint(tmp_path: Path, arch: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    changes, keys = FILES[arch]
    config = AutoConfig.for_model(ARCHITECTURES[arch].model_type, **SIZES | changes)
    model = randomize(AutoModelForCausalLM.from_config(config, attn_implementation="eager"))
    write_gguf(tmp_path / "model.gguf", arch, model, keys)
    raw = GgufSource(tmp_path / "model.gguf").hf_config()
    (tmp_path / "config.json").write_text(json.dumps(raw))
    ModelManifest(
        name="tiny", revision="ab" * 32, source="test", license="unknown", architecture=arch,
        max_model_len=256, vocab_size=96, eos_token_ids=(2,), bos_token="", eos_token="", chat_template="",
        tokenizer_hash="", add_bos=False, weights="model.gguf", weight_bits=0,
    ).write(tmp_path)  # fmt: skip
    paged = PagedModel(load_decoder(tmp_path, torch.float32), 1)
    (text,) = prompts(50)
    ours = torch.cat([paged.step([text[:33]])[0], paged.step([text[33:]])[0]])
    with torch.inference_mode():
        theirs = model(torch.tensor([text])).logits[0]
    assert (ours - theirs).abs().max() < 1e-4 * theirs.abs().max()
