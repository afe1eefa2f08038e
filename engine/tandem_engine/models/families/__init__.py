"""One small file per family: its config as a spec, and where its checkpoints keep the weights.

Nothing here needs torch.
"""

from tandem_engine.models.families import (
    cohere,
    gemma,
    glm,
    gpt,
    internlm,
    layernorms,
    llama,
    moe,
    phi,
    qwen,
    qwen_next,
)
from tandem_engine.models.families.names import Fused, Names, kind_of
from tandem_engine.models.families.registry import FAMILIES, Family, check_architecture

__all__ = [
    "FAMILIES",
    "Family",
    "Fused",
    "Names",
    "check_architecture",
    "cohere",
    "gemma",
    "glm",
    "gpt",
    "internlm",
    "kind_of",
    "layernorms",
    "llama",
    "moe",
    "phi",
    "qwen",
    "qwen_next",
]
