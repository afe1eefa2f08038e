"""Compile the layer's Triton kernels for GPUs that are not there; run by test_triton_layer_ops.

Prints one JSON object per configuration: name, shared_bytes, and stack_bytes (spilled registers; null where
Triton comes without cuobjdump).
"""

import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import triton
from tandem_kernels.gpu import add_rms_norm, copy_blocks, rope_store, silu_mul
from tandem_kernels.quantize import SMALLEST_SCALE
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

LARGEST = {"i8": 127.0, "fp8e4nv": 448.0, "fp8e5": 57344.0}
Configuration = tuple[str, object, dict[str, str], dict[str, object], int]


def configurations() -> Iterator[Configuration]:
    """name, kernel, types of its pointers, constants, warps."""
    for dtype in ("bf16", "fp16"):
        pointers = {"gate_up_ptr": dtype, "out_ptr": dtype}
        yield f"silu_mul {dtype}", silu_mul.silu_mul_kernel, pointers, {"BLOCK": silu_mul.BLOCK}, 4
    for block in (1024, 8192, 32768):
        pointers = {"hidden_ptr": "fp32", "delta_ptr": "bf16", "weight_ptr": "bf16", "out_ptr": "bf16"}
        constants = {"BLOCK": block, "HAS_DELTA": True}
        warps = add_rms_norm.num_warps_for(block)
        yield f"add_rms_norm {block}", add_rms_norm.add_rms_norm_kernel, pointers, constants, warps
    for bits in ("u8", "i16"):
        for to_cache in (False, True):
            pointers = {"cache_ptr": bits, "payload_ptr": bits, "block_ids_ptr": "i64"}
            constants = {"PIECE": 64 * 128, "CHUNK": 4096, "TO_CACHE": to_cache}
            yield f"copy_blocks {bits} {to_cache}", copy_blocks.copy_blocks_kernel, pointers, constants, 4
    for heads, kv_heads, head_size in ((32, 8, 128), (9, 3, 64), (16, 1, 256), (32, 8, 80)):
        for cache in ("bf16", "i8", "fp8e5", "fp8e4nv") if head_size == 128 else ("bf16", "i8"):
            for per_token in (False, True) if cache != "bf16" and head_size == 128 else (cache == "i8",):
                pointers = {
                    "qkv_ptr": "bf16", "positions_ptr": "i64", "rotations_ptr": "fp32",
                    "slot_mapping_ptr": "i64", "cache_ptr": cache, "q_norm_ptr": "bf16",
                    "k_norm_ptr": "bf16", "k_scale_ptr": "fp32", "v_scale_ptr": "fp32",
                }  # fmt: skip
                block_dim = triton.next_power_of_2(head_size)
                block_heads, warps = rope_store.choose_tile(heads + 2 * kv_heads, block_dim)
                constants = {
                    "NUM_HEADS": heads, "NUM_KV_HEADS": kv_heads, "HEAD_SIZE": head_size, "BLOCK_SIZE": 64,
                    "BLOCK_HEADS": block_heads, "BLOCK_DIM": block_dim,
                    "HAS_Q_NORM": True, "HAS_K_NORM": True, "HAS_SCALES": cache in LARGEST,
                    "PER_TOKEN": per_token, "LARGEST_STORED": LARGEST.get(cache, 0.0),
                    "MIN_SCALE": SMALLEST_SCALE,
                }  # fmt: skip
                name = f"rope_store {heads}/{kv_heads} x {head_size} {cache} {per_token}"
                yield name, rope_store.rope_store_kernel, pointers, constants, warps


def compile_one(
    capability: int, kernel: object, pointers: dict[str, str], constants: dict[str, object], num_warps: int
) -> tuple[int, int | None]:
    names = kernel.arg_names
    signature = dict.fromkeys(names, "i32") | dict.fromkeys(constants, "constexpr")
    signature |= {"eps": "fp32"} if "eps" in names else {}
    signature |= {name: f"*{pointee}" for name, pointee in pointers.items()}
    # As a launch with aligned tensors specializes it; otherwise loads go one element at a time.
    aligned = [i for i, name in enumerate(names) if name.endswith(("_ptr", "_stride", "width"))]
    compiled = triton.compile(
        ASTSource(kernel, signature, constants, {(i,): [["tt.divisibility", 16]] for i in aligned}),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": num_warps},
    )
    cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not cuobjdump.exists():
        return compiled.metadata.shared, None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = subprocess.run(
            [cuobjdump, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    return compiled.metadata.shared, max(int(n) for n in re.findall(r"STACK:(\d+)", usage))


if __name__ == "__main__":
    for capability in (80, 90):
        for name, kernel, pointers, constants, num_warps in configurations():
            if capability == 80 and "fp8e4nv" in pointers.values():
                continue  # sm_80 has no such conversion; the launcher says so
            shared_bytes, stack_bytes = compile_one(capability, kernel, pointers, constants, num_warps)
            result = {
                "name": f"sm_{capability} {name}",
                "shared_bytes": shared_bytes,
                "stack_bytes": stack_bytes,
            }
            print(json.dumps(result), flush=True)
