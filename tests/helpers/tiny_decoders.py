"""Small random models of every decoder type of transformers.

Weights are normal with variance 1.44 / depth: with transformers' own .02 attention is almost uniform, and
errors in it do not show.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

NUM_LAYERS, VOCAB, CONTEXT = 4, 272, 256
#: Sizes by the names that configs use for them.
_SIZES = (
    (VOCAB, "vocab_size vocab_size_per_layer_input"),
    (64, "hidden_size d_model n_embd embed_dim dim word_embed_proj_dim hidden_dim index_topk dim_model"),
    (
        96,
        "intermediate_size ffn_dim n_inner dense_intermediate_size intermediate_size_mlp ffn_hidden_size "
        "dim_ff",
    ),
    (NUM_LAYERS, "num_hidden_layers n_layer n_layers num_layers num_decoder_layers decoder_layers"),
    (
        4,
        "num_attention_heads n_head n_heads num_heads num_experts num_local_experts n_routed_experts "
        "moe_num_experts linear_num_value_heads num_sliding_attention_heads linear_num_heads compress_ratio",
    ),
    (
        2,
        "num_key_value_heads num_experts_per_tok moe_topk moe_k num_attention_groups linear_num_key_heads "
        "max_window_layers index_n_heads mamba_expand expand",
    ),
    (
        16,
        "head_dim v_head_dim qk_rope_head_dim qk_nope_head_dim hidden_size_per_layer_input linear_head_dim "
        "linear_key_head_dim linear_value_head_dim mamba_d_head mamba_head_dim mamba_d_state ssm_state_size "
        "state_size index_head_dim head_size rope_head_dim kv_channels router_dim attention_chunk_size "
        "dim_head",
    ),
    (CONTEXT, "max_position_embeddings n_positions n_ctx max_seq_len max_seq_length"),
    (
        32,
        "moe_intermediate_size shared_expert_intermediate_size q_lora_rank kv_lora_rank qk_head_dim "
        "global_head_dim moe_shared_expert_intermediate_size share_expert_dim expert_ffn_hidden_size "
        "moe_ffn_hidden_size",
    ),
    (48, "shared_intermediate_size"),
    (8, "sliding_window mamba_n_heads mamba_num_heads mamba_dt_rank time_step_rank rotary_dim"),
    (
        1,
        "n_group topk_group first_k_dense_replace num_global_key_value_heads num_shared_experts "
        "n_shared_experts mamba_n_groups n_groups bos_token_id",
    ),
    (128, "mamba_d_ssm"),
    (3, "conv_L_cache"),
)
_SMALL: dict[str, Any] = {name: size for size, names in _SIZES for name in names.split()}
_SMALL |= {"num_kv_shared_layers": 0, "pad_token_id": 0, "eos_token_id": 2, "ple_layer_ids": None}
#: Sizes that stay None where that is the default: the model then has no such part.
_OPTIONAL = ("sliding_window", "q_lora_rank", "head_dim", "n_inner", "num_global_key_value_heads")
#: Lists with an entry per layer; each kind of layer is kept.
_PER_LAYER = ("layer_types", "mlp_layer_types", "layers_block_type", "block_types", "indexer_types")
_HUNYUAN = {"rope_parameters": {"rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0, "rope_theta": 1e4}}
_HYBRID = ["conv", "full_attention"] * 2
_CHANGES: dict[str, dict[str, Any]] = {
    "lfm2": {"layer_types": _HYBRID},
    "lfm2_moe": {"layer_types": _HYBRID, "num_dense_layers": 1},
    "bamba": {"attn_layer_indices": [1, 3]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "hunyuan_v1_dense": _HUNYUAN | {"head_dim": 16},
    "hunyuan_v1_moe": _HUNYUAN | {"head_dim": 16},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2},
    "falcon": {"new_decoder_architecture": True, "alibi": False, "num_kv_heads": 2},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1},
    "ministral": {"head_dim": 16},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 8},
}


#: Types of encoders, of decoders that read an encoder's output, and of other modalities, that transformers
#: lists as causal language models too. "blt" has models within it for parts of words.
_NO_DECODERS = """
    bart bert bert-generation big_bird bigbird_pegasus blenderbot blenderbot-small blt camembert cpmant
    data2vec-text electra emu3 ernie fuyu gemma3n git got_ocr2 marian mbart megatron-bert mllama moshi
    moss_transcribe_diarize musicgen musicgen_melody mvp pegasus phi4_multimodal plbart prophetnet
    qdqbert reformer rembert roberta roberta-prelayernorm roc_bert roformer speech_to_text_2 trocr
    whisper xlm xlm-prophetnet xlm-roberta xlm-roberta-xl xlnet xmod gemma4_assistant
    gemma4_unified_assistant
"""


def decoder_types() -> list[str]:
    """Every decoder type of transformers; of types with more modalities their text model's."""
    return sorted(
        name
        for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        if name in CONFIG_MAPPING and name not in _NO_DECODERS.split() and _text_config(name) is None
    )


def text_types() -> dict[str, str]:
    """The type of the text model within each type that has one."""
    return {
        name: inner.model_type for name in sorted(CONFIG_MAPPING) if (inner := _text_config(name)) is not None
    }


def _text_config(name: str) -> Any:
    inner = getattr(CONFIG_MAPPING[name], "sub_configs", {}).get("text_config")
    return inner if getattr(inner, "model_type", "") else None


def tiny_config(model_type: str, **changes: Any) -> PreTrainedConfig:
    """Of a decoder with four layers of each kind that the type mixes. Raises what transformers raises."""
    kind = CONFIG_MAPPING[model_type]
    names = set(inspect.signature(kind.__init__).parameters)
    names |= {name for base in kind.__mro__ for name in getattr(base, "__annotations__", {})}
    aliases = getattr(kind, "attribute_map", {})
    try:
        default = kind().to_dict()
    except Exception:  # some types have no defaults
        default = {}
    values = {n: v for n, v in _SMALL.items() if n in names and aliases.get(n) not in names}
    for name in _OPTIONAL:
        if name in default and default[name] is None:
            values.pop(name, None)
    if default.get("num_shared_experts") == 0:
        values.pop("num_shared_experts", None)
    if "kv_lora_rank" in names:
        values["num_key_value_heads"] = 4
    for name in _PER_LAYER:
        if isinstance(default.get(name), list) and default[name]:
            kinds = list(dict.fromkeys(default[name]))
            values[name] = (kinds * NUM_LAYERS)[:NUM_LAYERS]
    return kind(**{**values, **_CHANGES.get(model_type, {}), **changes})


def tiny_model(model_type: str, **changes: Any) -> PreTrainedModel:
    """In float32 with eager attention, in eval mode."""
    config = tiny_config(model_type, **changes)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    fill(model)
    return model


@torch.no_grad()
def fill(model: PreTrainedModel) -> None:
    """Random weights; decays and time steps of recurrences stay as transformers makes them."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() > 1 and "conv" not in name and "A_log" not in name:
            parameter.copy_(noise * (1.2 / math.sqrt(parameter.shape[-1])))
        elif parameter.dim() == 1 and not any(part in name for part in ("A_log", "dt_bias", "lam")):
            parameter.add_(noise * 0.1)
