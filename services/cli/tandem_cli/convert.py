"""Converts a model's weights to the file pods map: `python -m tandem_cli.convert FOLDER DTYPE`.

A process of its own, started by `tandem up` and `tandem model pull`: torch's memory goes back at its end.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tandem_engine.errors import ModelLoadError
from tandem_engine.models import pick_dtype
from tandem_engine.store import ensure_weights
from tandem_kernels import runs_packed

from tandem_cli.progress import ProgressView


def main() -> None:
    import torch

    folder, dtype = Path(sys.argv[1]), sys.argv[2]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        with ProgressView() as progress:
            wanted = pick_dtype(dtype, device)
            ensure_weights(folder, wanted, progress, packed=runs_packed(wanted, torch.device(device)))
    except ModelLoadError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
