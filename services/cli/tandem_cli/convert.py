"""Converts a model's weights to the file pods map: `python -m tandem_cli.convert FOLDER DTYPE QUANTIZATION`.

A process of its own, started by `tandem up` and `tandem model pull`: torch's memory goes back at its end.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tandem_core.errors import ModelLoadError
from tandem_engine.model_loader import ensure_weights
from tandem_engine.model_loader.loading import pick_numerics
from tandem_kernels import runs_packed

from tandem_cli.models import note_prepared
from tandem_cli.progress import ProgressView


def main() -> None:
    import torch

    folder, dtype, quantization = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        with ProgressView() as progress:
            wanted = pick_numerics(folder, dtype, quantization, device)
            packed = runs_packed(wanted.dtype, torch.device(device))
            path = ensure_weights(
                folder, wanted.dtype, progress, packed=packed, quantization=wanted.quantization
            )
        note_prepared(folder, dtype, quantization, path.name)
    except ModelLoadError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
