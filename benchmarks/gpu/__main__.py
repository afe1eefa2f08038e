"""Measures Tandem on one GPU, in parts of at most nine minutes.

    cd benchmarks && python -m gpu --part B --minutes 9 --out DIR      or   python benchmarks/gpu --part B ...

    A   checks.py      versions, ceilings, graphs and drafts against eager steps, the tests marked `gpu`
    B   attention.py   attention beside FA3 and SDPA
    C   steps.py       decode and prefill steps of an 8B model with random weights
    D   transfer.py    a prefill and a decode pod as two processes on the GPU

Each part adds to DIR/<part>.md row by row, and to DIR/<part>.log. Without a GPU, or with --dry-run, the same
stages run on the CPU with tiny shapes and add to DIR/<part>-dry-run.md, which holds no results.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def extend_path(bundle: Path | None, unpacked: Path) -> None:
    """Makes the working tree and the bundle's wheels importable, here and in child processes.

    Neither needs an installation. Both come before what the machine has.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    folders = [*project["tool"]["hatch"]["build"]["dev-mode-dirs"], "benchmarks", "tests/helpers"]
    for wheel in sorted(bundle.glob("*.whl")) if bundle else ():
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(unpacked)
    paths = [*(str(ROOT / folder) for folder in folders), str(unpacked)]
    sys.path[:0] = paths
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*paths, os.environ.get("PYTHONPATH")]))
    os.environ["TANDEM_GPU_BUNDLE"] = str(bundle.resolve()) if bundle else ""


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="gpu", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--part", action="append", choices=tuple("ABCD"), help="repeatable; default: all")
    parser.add_argument("--minutes", type=float, default=9.0, help="for each part")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--stage", action="append", metavar="NAME", help="run only these; repeatable")
    parser.add_argument("--bundle", type=Path, metavar="DIR",
                        help="wheels that the machine lacks, _vllm_fa3_C.abi3.so")  # fmt: skip
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on the CPU")
    options = parser.parse_args()
    if not options.minutes > 0:
        parser.error(f"--minutes {options.minutes:g}: wanted more than 0")
    if options.bundle and not options.bundle.is_dir():
        parser.error(f"--bundle {options.bundle}: no such folder")
    with tempfile.TemporaryDirectory() as unpacked:
        extend_path(options.bundle, Path(unpacked))
        from gpu import runner

        try:
            code = runner.run_parts(options)
        except OSError as error:
            raise SystemExit(f"gpu: stopped with --out {options.out}: {error}") from error
        raise SystemExit(code)


if __name__ == "__main__":
    main()
