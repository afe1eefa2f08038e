"""AutoRound (arXiv 2309.05516) in the layouts of GPTQ and AWQ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tandem_engine.model_loader.checkpoints import awq, gptq
from tandem_engine.model_loader.checkpoints.matrix import Matrix, Tensors, option


def read(config: Mapping[str, Any], tensors: Tensors) -> dict[str, Matrix]:
    option(config, "bits", 4, [2, 4, 8])
    known = ["auto_round:auto_gptq", "auto_round:auto_awq"]
    if option(config, "packing_format", known[0], known) == known[1]:
        return awq.matrices(tensors)
    return gptq.matrices(config, tensors, less_one=True)
