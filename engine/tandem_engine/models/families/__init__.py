"""One small file per family: its config as a spec, and where its checkpoints keep the weights.

Nothing here needs torch.
"""

from tandem_engine.models.families import llama, moe, qwen, qwen_next
from tandem_engine.models.families.names import Fused, Names, kind_of
from tandem_engine.models.families.registry import FAMILIES, Family, check_architecture

__all__ = [
    "FAMILIES",
    "Family",
    "Fused",
    "Names",
    "check_architecture",
    "kind_of",
    "llama",
    "moe",
    "qwen",
    "qwen_next",
]
