"""Compile the Triton kernel for GPUs that are not there, and read what it takes of them.

`python compile_triton_kernel.py [subset|all]` prints one JSON object per configuration of
`triton_configurations`: its name, its head size and its Resources. A process of its own, for Triton's
compiler must not see the interpreter that other tests choose.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import triton
from tandem_kernels.turbo_attention import triton_kernel
from tandem_kernels.turbo_attention.triton_plan import PLAN_LANES, plan_kernel
from tandem_kernels.turbo_attention.triton_tiles import Tiles, choose_tiles
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel
from triton_configurations import ALL, SUBSET, Configuration

POINTERS = {
    "block_table_ptr": "i32",
    "seq_lens_ptr": "i32",
    "query_start_loc_ptr": "i32",
    "ancestor_bits_ptr": "i64",
    "sinks_ptr": "fp32",
    "k_scale_ptr": "fp32",
    "v_scale_ptr": "fp32",
    "items_ptr": "i32",
    "num_items_ptr": "i32",
    "schedule_ptr": "i32",
    "counters_ptr": "i32",
    "partials_ptr": "fp32",
    "maxima_ptr": "fp32",
    "sums_ptr": "fp32",
}
SCALE_KINDS = {
    "none": triton_kernel.NO_SCALE,
    "head": triton_kernel.HEAD_SCALE,
    "token": triton_kernel.TOKEN_SCALE,
}


@dataclass(frozen=True)
class Resources:
    """What one compiled kernel takes; null where Triton comes without cuobjdump."""

    shared_bytes: int
    #: The tile's.
    rows: int
    keys: int
    num_warps: int
    #: On a multiprocessor.
    programs: int
    registers: int | None = None
    stack_bytes: int | None = None
    #: Tensor core instructions in the code: asynchronous ones of a warp group, and those of a warp.
    hgmma: int | None = None
    hmma: int | None = None
    #: Accesses to spilled registers.
    local: int | None = None


def compile_kernel(config: Configuration) -> tuple[Tiles, CompiledKernel]:
    tiles = choose_tiles(
        config.head_size,
        config.group_size,
        4 if config.dtype == "fp32" else 2,
        {"fp32": 4, "fp16": 2, "bf16": 2}.get(config.cache_dtype, 1),
        config.max_new_tokens,
    )
    constants = {
        "NUM_KV_HEADS": 8, "GROUP_SIZE": config.group_size, "HEAD_SIZE": config.head_size,
        "BLOCK_SIZE": config.block_size, "BLOCK_ROWS": tiles.block_rows, "BLOCK_KEYS": tiles.block_keys,
        "BLOCK_DIM": tiles.block_dim, "MAX_NODES": 64, "HAS_BITS": config.tree, "HAS_WINDOW": config.features,
        "HAS_SOFTCAP": config.features, "HAS_SINKS": config.features, "K_SCALE": SCALE_KINDS[config.scales],
        "V_SCALE": SCALE_KINDS[config.scales], "KEY_STAGES": tiles.key_stages,
    }  # fmt: skip
    kernel = triton_kernel.turbo_attention_kernel
    signature = dict.fromkeys(kernel.arg_names, "i32") | dict.fromkeys(constants, "constexpr")
    signature |= {"scale": "fp32", "softcap": "fp32"}
    pointers = POINTERS | {
        "query_ptr": config.dtype, "out_ptr": config.dtype, "kv_cache_ptr": config.cache_dtype
    }  # fmt: skip
    signature |= {name: f"*{pointee}" for name, pointee in pointers.items()}
    options = {"num_warps": tiles.num_warps, "maxnreg": tiles.max_registers}
    return tiles, _compile(kernel, signature, constants, config.capability, options)


def compile_one(config: Configuration) -> Resources:
    """Compile the configuration and disassemble it."""
    tiles, compiled = compile_kernel(config)
    sizes = (
        compiled.metadata.shared,
        tiles.block_rows,
        tiles.block_keys,
        tiles.num_warps,
        tiles.programs_per_multiprocessor,
    )
    cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not cuobjdump.exists():
        return Resources(*sizes)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()

        def dump(option: str) -> str:
            command = [str(cuobjdump), option, file.name]
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout

        usage, code = dump("-res-usage"), dump("-sass")
    return Resources(
        *sizes,
        registers=max(int(n) for n in re.findall(r"REG:(\d+)", usage)),
        stack_bytes=max(int(n) for n in re.findall(r"STACK:(\d+)", usage)),
        hgmma=len(re.findall(r"\bHGMMA\.", code)),
        hmma=len(re.findall(r"\bHMMA\.", code)),
        local=len(re.findall(r"\b(?:LDL|STL)\b", code)),
    )


def compile_plan(capability: int, group_size: int, window: bool) -> int:
    """Compile the planning kernel; returns its shared memory in bytes."""
    constants = {
        "GROUP_SIZE": group_size, "BLOCK_ROWS": 64, "BLOCK_KEYS": 64, "SPLIT_SIZE": 1024, "MAX_NODES": 64,
        "HAS_WINDOW": window, "LANES": PLAN_LANES,
    }  # fmt: skip
    signature = dict.fromkeys(plan_kernel.arg_names, "i32") | dict.fromkeys(constants, "constexpr")
    signature |= {name: "*i32" for name in plan_kernel.arg_names if name.endswith("_ptr")}
    compiled = _compile(plan_kernel, signature, constants, capability, {"num_warps": 4})
    return int(compiled.metadata.shared)


def _compile(
    kernel: triton.JITFunction,
    signature: dict[str, str],
    constants: dict[str, object],
    capability: int,
    options: dict[str, object],
) -> CompiledKernel:
    # As a launch with aligned tensors specializes it; otherwise loads go one element at a time.
    aligned = [
        i
        for i, name in enumerate(kernel.arg_names)
        if name.endswith(("_ptr", "_stride")) and name != "block_table_stride"
    ]
    attributes = {(i,): [["tt.divisibility", 16]] for i in aligned}
    return triton.compile(
        ASTSource(kernel, signature, constants, attributes),
        target=GPUTarget("cuda", capability, 32),
        options=options,
    )


if __name__ == "__main__":
    for capability, group_size, window in ((80, 3, False), (90, 8, True)):
        assert compile_plan(capability, group_size, window) > 0
    for config in ALL if sys.argv[1:] == ["all"] else SUBSET:
        identity = {"name": config.name, "head_size": config.head_size}
        print(json.dumps(identity | asdict(compile_one(config))), flush=True)
