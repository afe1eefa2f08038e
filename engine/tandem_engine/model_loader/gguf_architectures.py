"""What llama.cpp's architectures are called in transformers, and how their files differ from checkpoints.

Names of tensors come from the gguf package's tables, which know transformers' names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tandem_core.errors import ModelLoadError, quoted


@dataclass(frozen=True)
class Architecture:
    model_type: str
    #: Rows of queries and keys are interleaved within each head, for a rotation of neighbours.
    interleaved: bool = False
    #: Norms hold 1 + w where checkpoints hold w.
    one_plus: bool = False
    #: Field of config.json -> key, where the file may have it.
    fields: Mapping[str, str] = field(default_factory=dict)
    #: Field with the norms' epsilon and its key.
    eps: tuple[str, str] = ("rms_norm_eps", "attention.layer_norm_rms_epsilon")


_CAPS = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "sliding_window": "attention.sliding_window",
}
ARCHITECTURES: Mapping[str, Architecture] = {
    "arcee": Architecture("arcee", interleaved=True),
    "gemma": Architecture("gemma", one_plus=True),
    "gemma2": Architecture("gemma2", one_plus=True, fields=_CAPS),
    "gemma3": Architecture(
        "gemma3_text", one_plus=True, fields=_CAPS | {"rope_local_base_freq": "rope.freq_base_swa"}
    ),
    "granite": Architecture(
        "granite",
        interleaved=True,
        fields={
            "embedding_multiplier": "embedding_scale",
            "residual_multiplier": "residual_scale",
            "attention_multiplier": "attention.scale",
            "logits_scaling": "logit_scale",
        },
    ),
    "llama": Architecture("llama", interleaved=True),
    "olmo2": Architecture("olmo2"),
    "phi3": Architecture("phi3", fields={"sliding_window": "attention.sliding_window"}),
    "qwen2": Architecture("qwen2"),
    "qwen2moe": Architecture("qwen2_moe"),
    "qwen3": Architecture("qwen3"),
    "qwen3moe": Architecture("qwen3_moe"),
    "seed_oss": Architecture("seed_oss"),
    "smollm3": Architecture("smollm3", interleaved=True),
    "starcoder2": Architecture("starcoder2", eps=("norm_epsilon", "attention.layer_norm_epsilon")),
}


def check_gguf_architecture(name: object, where: object) -> str:
    """The name, if models of this architecture can be read. Raises ModelLoadError."""
    supported = ", ".join(ARCHITECTURES)
    if not name:
        raise ModelLoadError(f"{where} names no architecture; use a model of one of these: {supported}")
    if name not in ARCHITECTURES:
        raise ModelLoadError(
            f"{where}: architecture {quoted(str(name))} is not supported; use one of {supported}"
        )
    return str(name)
