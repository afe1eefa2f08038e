"""What the Triton attention kernel takes of a GPU, by compiling it ahead of time; no GPU is needed.

    python benchmarks/triton_resources.py [--out benchmarks/results/triton-resources.md]

Compiles every configuration of tests/kernels/triton_configurations.py for sm_80 and sm_90, which takes some
seconds each, and writes a table of registers, shared memory, stack and tensor core instructions. The tests
hold the same numbers to their limits (`test_triton_kernel`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import triton
from reporting import describe_command, markdown_table

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "kernels"))

from compile_triton_kernel import Resources, compile_one  # noqa: E402 - a folder of tests is no package
from triton_configurations import ALL, CAPABILITIES, HEAD_SIZES, Configuration  # noqa: E402

Results = Sequence[tuple[Configuration, Resources]]


def summary(results: Results) -> str:
    """Shared memory and registers by head size, for bfloat16 without more than a tree mask."""
    found = dict(results)
    rows = []
    for capability in CAPABILITIES:
        for new_tokens in (1, 8, None):
            cells = []
            num_rows = set()
            for head_size in HEAD_SIZES:
                resources = found[Configuration(capability, head_size, max_new_tokens=new_tokens)]
                num_rows.add(resources.rows)
                cells.append(f"{resources.shared_bytes / 1024:.1f} KB, {resources.registers}")
            tile = "/".join(str(n) for n in sorted(num_rows, reverse=True))
            rows.append([f"sm_{capability}", tile, *cells])
    return markdown_table(["GPU", "rows", *(f"D = {d}" for d in HEAD_SIZES)], rows)


def full_table(results: Results) -> str:
    head = [
        "GPU", "D", "group", "new tokens", "query/cache", "block", "scales", "features", "tile", "warps",
        "registers", "shared bytes", "stack", "HGMMA", "HMMA",
    ]  # fmt: skip
    rows = []
    for config, resources in results:
        features = ["tree"] * config.tree + ["window, softcap, sinks"] * config.features
        rows.append(
            [
                f"sm_{config.capability}",
                str(config.head_size),
                str(config.group_size),
                str(config.max_new_tokens or "any"),
                f"{config.dtype}/{config.cache_dtype}",
                str(config.block_size),
                config.scales,
                ", ".join(features) or "-",
                f"{resources.rows} x {resources.keys}",
                str(resources.num_warps),
                str(resources.registers),
                str(resources.shared_bytes),
                str(resources.stack_bytes),
                str(resources.hgmma),
                str(resources.hmma),
            ]
        )
    return markdown_table(head, rows)


def report(results: Results) -> str:
    most = max(resources.shared_bytes for _, resources in results)
    spilling = sum(1 for _, resources in results if resources.stack_bytes or resources.local)
    return f"""# Resources of the Triton attention kernel

`{describe_command()}`, triton {triton.__version__}: compiled ahead of time, not run.

{len(results)} configurations, {spilling} of them with spilled registers; the most shared memory is
{most / 1024:.1f} KB.
HGMMA and HMMA count the tensor core instructions in the code: those of a warp group, on sm_90, and those of a
warp.

Shared memory and registers per thread by head size, bfloat16 with a tree mask and no other feature. One chunk
of 64 dimensions is pipelined over keys; from two chunks on, the loop over chunks is, and a larger head adds
nothing to shared memory. It adds its part of the accumulator to registers, of which the compiler takes what
it can use, up to the limit of 168 set for 16 rows of at most 128 dimensions and the hardware's of 255.

{summary(results)}

All configurations. "new tokens" is what the plan was told that most sequences stay within, "tile" is rows x
keys.

{full_table(results)}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "triton-resources.md")
    arguments = parser.parse_args()
    results = []
    for config in ALL:
        results.append((config, compile_one(config)))
        print(f"{len(results)}/{len(ALL)} {config.name}", file=sys.stderr)
    arguments.out.write_text(report(results))


if __name__ == "__main__":
    main()
