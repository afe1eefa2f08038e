"""Compile the Triton kernel for GPUs that are not there; run by test_triton_kernel in a process of its own.

Prints one JSON object per configuration: name, shared_bytes, and stack_bytes (spilled registers; null where
Triton comes without cuobjdump).
"""

import json
import re
import subprocess
import tempfile
from pathlib import Path

import triton
from tandem_kernels.turbo_attention.triton_kernel import choose_tiles, turbo_attention_kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

POINTERS = {
    "block_table_ptr": "i32",
    "seq_lens_ptr": "i32",
    "query_start_loc_ptr": "i32",
    "ancestor_bits_ptr": "i64",
    "sinks_ptr": "fp32",
    "k_scale_ptr": "fp32",
    "v_scale_ptr": "fp32",
}
#: name: (compute capability, dtype, cache dtype, new tokens, group size, head size, all features)
CONFIGURATIONS = {
    "sm_80 tree of 8, 4 x 128": (80, "bf16", "bf16", 8, 4, 128, False),
    "sm_80 chunk, 3 x 64": (80, "fp16", "fp16", 512, 3, 64, False),
    "sm_80 chunk with everything, 8 x 256": (80, "bf16", "bf16", 512, 8, 256, True),
    "sm_80 float8_e5m2 cache": (80, "bf16", "fp8e5", 1, 8, 128, True),
    "sm_90 tree of 8, 4 x 128": (90, "bf16", "bf16", 8, 4, 128, False),
    "sm_90 chunk, 4 x 128": (90, "bf16", "bf16", 512, 4, 128, False),
    "sm_90 chunk with everything, 8 x 256": (90, "fp16", "fp16", 512, 8, 256, True),
    "sm_90 int8 cache": (90, "bf16", "i8", 1, 8, 128, True),
    "sm_90 float8_e4m3 cache": (90, "fp16", "fp8e4nv", 16, 4, 80, True),
}


def compile_one(
    capability: int, dtype: str, cache_dtype: str, num_new: int, group_size: int, head_size: int, full: bool
) -> tuple[int, int | None]:
    tiles = choose_tiles(num_new, 1, group_size, head_size, 64, element_bytes=2)
    constants = {
        "GROUP_SIZE": group_size, "HEAD_SIZE": head_size, "BLOCK_SIZE": 64, "BLOCK_ROWS": tiles.block_rows,
        "BLOCK_TOKENS": tiles.block_tokens, "BLOCK_KEYS": tiles.block_keys, "BLOCK_DIM": tiles.block_dim,
        "MAX_NODES": 64, "HAS_BITS": True, "HAS_WINDOW": full, "HAS_SOFTCAP": full, "HAS_SINKS": full,
        "HAS_SCALES": full,
    }  # fmt: skip
    names = turbo_attention_kernel.arg_names
    signature = dict.fromkeys(names, "i32") | dict.fromkeys(constants, "constexpr")
    signature |= {"scale": "fp32", "softcap": "fp32"}
    pointers = POINTERS | {"query_ptr": dtype, "out_ptr": dtype, "kv_cache_ptr": cache_dtype}
    signature |= {name: f"*{pointee}" for name, pointee in pointers.items()}
    # As a launch with aligned tensors specializes it; otherwise loads go one element at a time.
    aligned = [i for i, name in enumerate(names) if name.endswith(("_ptr", "_stride"))]
    attributes = {(i,): [["tt.divisibility", 16]] for i in aligned}
    kernel = triton.compile(
        ASTSource(turbo_attention_kernel, signature, constants, attributes),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": tiles.num_warps, "num_stages": tiles.num_stages},
    )
    cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not cuobjdump.exists():
        return kernel.metadata.shared, None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = subprocess.run(
            [cuobjdump, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    return kernel.metadata.shared, max(int(n) for n in re.findall(r"STACK:(\d+)", usage))


if __name__ == "__main__":
    for name, configuration in CONFIGURATIONS.items():
        shared_bytes, stack_bytes = compile_one(*configuration)
        print(json.dumps({"name": name, "shared_bytes": shared_bytes, "stack_bytes": stack_bytes}))
