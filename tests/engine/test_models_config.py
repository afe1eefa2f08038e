"""What a config.json asks for is served exactly, or refused with the reason and a remedy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tandem_core.errors import ModelLoadError
from tandem_core.model.spec import Attention, Head, Rope
from tandem_engine.models import ModelConfig
from tandem_engine.models.layout import WeightForm, stored_tensors

BASE: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}


def test_defaults_follow_hugging_face() -> None:
    spec = ModelConfig.from_hf(BASE).spec
    attention = Attention(heads=4, kv_heads=4, k_dim=16, v_dim=16, scale=0.25, rope=Rope(16))
    assert spec.attentions == (attention,) * 3
    assert spec.head == Head(tied=False)


def test_rope_is_read_from_transformers_4_and_5_alike() -> None:
    old = BASE | {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}
    new = BASE | {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}}
    assert ModelConfig.from_hf(old) == ModelConfig.from_hf(new)
    rope = ModelConfig.from_hf(old).spec.attentions[0].rope
    assert rope == Rope(16, "linear", 5e5, 2.0)


def windows(raw: dict[str, Any]) -> list[int | None]:
    return [a.window for a in ModelConfig.from_hf(raw).spec.attentions]


def test_windows_without_layer_types_start_at_max_window_layers() -> None:
    raw = BASE | {"model_type": "qwen2", "sliding_window": 8, "max_window_layers": 1}
    assert windows(raw) == [None, None, None]
    assert windows(raw | {"use_sliding_window": True}) == [None, 8, 8]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model_type": "mamba9"}, "'mamba9' is not supported"),
        ({"hidden_act": "quick_gelu"}, "'quick_gelu'"),
        (
            {"quantization_config": {"quant_method": "hqq"}},
            "'hqq', which cannot be read; use the model's files",
        ),
        ({"quantization_config": 4}, "quantization_config is '4', not an object"),
        ({"rope_scaling": {"rope_type": "spiral", "factor": 2.0}}, "'spiral'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"num_key_value_heads": 3}, "does not divide"),
        ({"head_dim": 15}, "odd"),
        ({"attn_logit_softcapping": 0.0}, "attn_logit_softcapping is 0.0, which is not positive"),
        ({"hidden_size": "wide"}, "pull the model again"),
        ({"layer_types": ["sliding_attention"], "model_type": "mistral", "sliding_window": 4}, "layer types"),
    ],
)
def test_what_cannot_be_run_exactly_is_refused(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelLoadError, match=reason):
        ModelConfig.from_hf(BASE | change)


def test_a_missing_key_is_named() -> None:
    raw = {k: v for k, v in BASE.items() if k != "hidden_size"}
    with pytest.raises(ModelLoadError, match="hidden_size"):
        ModelConfig.from_hf(raw)


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_an_unreadable_file_is_one_clear_error(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelLoadError, match="pull the model again"):
        ModelConfig.from_folder(tmp_path)


def test_the_file_layout_fuses_projections() -> None:
    raw = BASE | {"model_type": "qwen2", "num_key_value_heads": 2, "tie_word_embeddings": True}
    config = ModelConfig.from_hf(json.loads(json.dumps(raw)))
    shapes = {t.name: t.shape for t in stored_tensors(config.spec, config.names, WeightForm(torch.float32))}
    assert shapes["sublayers.0.0.qkv_proj.weight"] == (64 + 2 * 32, 64)
    assert shapes["sublayers.0.0.qkv_proj.bias"] == (128,)
    assert shapes["sublayers.5.0.gate_up_proj.weight"] == (192, 64)
    assert "lm_head.weight" not in shapes
