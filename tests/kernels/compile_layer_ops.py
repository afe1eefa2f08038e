"""Compile the layer's Triton kernels for GPUs that are not there; run by test_triton_layer_ops.

Prints one JSON object per configuration: name, shared_bytes, and num_spills, the instructions that access
local memory (null where Triton comes without cuobjdump). The size of the stack would not do: float64 division
is a subroutine, which has one.
"""

import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import triton
from tandem_kernels.draw_tokens import FACTORS, GAMMA
from tandem_kernels.gpu import draw_tokens, elementwise, gated_delta, moe, move_slots, rope_store
from tandem_kernels.quantize import SMALLEST_SCALE
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

LARGEST = {"i8": 127.0, "fp8e4nv": 448.0, "fp8e5": 57344.0}
Configuration = tuple[str, object, dict[str, str], dict[str, object], int]


def configurations() -> Iterator[Configuration]:
    """name, kernel, types of its pointers, constants, warps."""
    for act, gated, has_limit in ((0, True, False), (1, False, False), (2, True, False), (0, True, True)):
        pointers = {"x_ptr": "bf16", "out_ptr": "bf16"}
        constants = {
            "BLOCK": elementwise.ACTIVATE_BLOCK, "ACT": act, "GATED": gated, "HAS_LIMIT": has_limit,
        }  # fmt: skip
        name = f"activate {act} {gated} {has_limit}"
        yield name, elementwise.activate_kernel, pointers, constants, 4
    pointers = {
        "logits_ptr": "fp32", "scratch_ptr": "fp32", "out_ptr": "i64", "keys_ptr": "i64",
        "temperature_ptr": "fp32", "top_k_ptr": "i64", "top_p_ptr": "fp64", "log_min_p_ptr": "fp32",
    }  # fmt: skip
    constants = {
        "BLOCK": draw_tokens.BLOCK, "GAMMA_BITS": GAMMA, "FACTOR_1": FACTORS[0], "FACTOR_2": FACTORS[1]
    }  # fmt: skip
    yield "draw_tokens", draw_tokens.draw_tokens_kernel, pointers, constants, draw_tokens.NUM_WARPS
    for block, kind in ((8192, 1), (32768, 1), (8192, 2)):
        pointers = {
            "x_ptr": "fp32", "delta_ptr": "bf16", "weight_ptr": "fp32", "bias_ptr": "fp32", "out_ptr": "bf16",
        }  # fmt: skip
        constants = {
            "BLOCK": block, "HAS_DELTA": True, "KIND": kind, "HAS_WEIGHT": True, "HAS_BIAS": kind == 2,
        }  # fmt: skip
        warps = elementwise.num_warps_for(block)
        yield f"add_norm {block} {kind}", elementwise.add_norm_kernel, pointers, constants, warps
    for bits, kv_heads, head_size in (("i16", 8, 128), ("i8", 8, 128), ("i16", 1, 256), ("i16", 3, 80)):
        pointers = {"cache_ptr": bits, "src_slots_ptr": "i64", "dst_slots_ptr": "i64"}
        constants = {
            "PIECES": 2 * kv_heads, "BLOCK_SIZE": 64, "HEAD_SIZE": head_size,
            "BLOCK_DIM": triton.next_power_of_2(head_size), "MOVES": move_slots.MOVES,
        }  # fmt: skip
        name = f"move_slots {kv_heads} x {head_size} {bits}"
        yield name, move_slots.move_slots_kernel, pointers, constants, move_slots.NUM_WARPS
    for heads, kv_heads, head_size, cache, per_token in (
        (32, 8, 128, "bf16", False),
        (32, 8, 128, "i8", True),
        (32, 8, 128, "fp8e5", False),
        (32, 8, 128, "fp8e4nv", True),
        (9, 3, 64, "bf16", False),
        (32, 8, 80, "i8", False),
        (16, 1, 256, "i8", True),
    ):
        parts = [f"{name}_{part}_ptr" for name in "qkv" for part in ("weight", "bias")]
        pointers = {
            "qkv_ptr": "bf16", "positions_ptr": "i64", "rotations_ptr": "fp32", "slot_mapping_ptr": "i64",
            "key_cache_ptr": cache, "value_cache_ptr": cache, **dict.fromkeys(parts, "fp32"),
            "k_scale_ptr": "fp32", "v_scale_ptr": "fp32",
        }  # fmt: skip
        block_dim = triton.next_power_of_2(head_size)
        block_heads, warps = rope_store.choose_tile(heads + 2 * kv_heads, block_dim)
        rich = head_size == 80
        constants = {
            "NUM_HEADS": heads, "NUM_KV_HEADS": kv_heads, "K_DIM": head_size, "V_DIM": head_size - 16 * rich,
            "BLOCK_SIZE": 64, "ROPE_DIMS": head_size - 16 * rich,
            "BLOCK_HEADS": block_heads, "BLOCK_DIM": block_dim,
            "Q_NORM": 1 + rich, "K_NORM": 1 + rich, "V_NORM": 2 * rich, "WEIGHTS": 3 + 4 * rich,
            "BIASES": 7 * rich, "NORM_AFTER_ROPE": rich,
            "HAS_SCALES": cache in LARGEST, "PER_TOKEN": per_token,
            "LARGEST_STORED": LARGEST.get(cache, 0.0), "MIN_SCALE": SMALLEST_SCALE,
        }  # fmt: skip
        name = f"rope_store {heads}/{kv_heads} x {head_size} {cache} {per_token}"
        yield name, rope_store.rope_store_kernel, pointers, constants, warps
    for rows, out in ((16, "bf16"), (64, "fp32")):
        pointers = dict.fromkeys(("order_ptr", "experts_ptr", "first_ptr", "ends_ptr"), "i64")
        pointers |= {"x_ptr": "bf16", "weight_ptr": "bf16", "bias_ptr": "fp32", "out_ptr": out}
        constants = {
            "HAS_BIAS": True, "BLOCK_ROWS": rows, "BLOCK_COLUMNS": moe.BLOCK_COLUMNS,
            "BLOCK_DEPTH": moe.BLOCK_DEPTH,
        }  # fmt: skip
        yield f"moe linear {rows} {out}", moe.grouped_linear_kernel, pointers, constants, 4
    pointers = dict.fromkeys(("partial_ptr", "factors_ptr", "share_ptr"), "fp32")
    pointers |= dict.fromkeys(("shared_ptr", "out_ptr"), "bf16")
    constants = {"HAS_SHARED": True, "HAS_SHARE": True, "BLOCK": moe.COMBINE_BLOCK}
    yield "moe combine", moe.combine_kernel, pointers, constants, 4
    # Qwen3.5-9B, and Kimi Linear.
    yield from gated_delta_configurations(k_heads=16, per_row=False)
    yield from gated_delta_configurations(k_heads=32, per_row=True)


def gated_delta_configurations(k_heads: int, per_row: bool) -> Iterator[Configuration]:
    shape = {"K_HEADS": k_heads, "V_HEADS": 32, "K_DIM": 128, "V_DIM": 128, "PER_ROW": per_row}
    trees = {"HAS_TREES": True, "MAX_NODES": 64}
    metadata = dict.fromkeys(
        ("query_start_loc_ptr", "initial_slots_ptr", "final_slots_ptr", "snapshot_slots_ptr",
         "snapshot_rows_ptr"),
        "i32",
    )  # fmt: skip
    inputs = dict.fromkeys(("qkv_ptr", "b_ptr", "a_ptr", "z_ptr", "out_ptr", "conv_ptr"), "bf16")
    floats = dict.fromkeys(
        ("conv_weight_ptr", "rate_ptr", "bias_ptr", "x_ptr", "outs_ptr", "beta_ptr", "decay_ptr",
         "recurrent_ptr", "norm_ptr"),
        "fp32",
    )  # fmt: skip
    pointers = metadata | inputs | floats | {"bits_ptr": "i64"}
    for kernel, constants, warps in (
        (gated_delta.prepare_kernel, shape | trees | {
            "TAPS": 4, "BLOCK_SEQS": 16, "BLOCK_DIM": 128, "BLOCK_K": 128, "LENGTH_EPS": 1e-6,
        }, 1),
        (gated_delta.scan_kernel, shape | trees | {
            "BLOCK_K": 128, "COLUMNS": gated_delta.COLUMNS,
        }, gated_delta.NUM_WARPS),
        (gated_delta.keep_kernel, {"TAPS": 4, "BLOCK": gated_delta.KEEP_BLOCK, "BLOCK_TAPS": 4}, 4),
        (gated_delta.finish_kernel, {"V_HEADS": 32, "V_DIM": 128, "BLOCK_V": 128, "SIGMOID": per_row}, 1),
    ):  # fmt: skip
        names = set(kernel.arg_names)
        name = f"gated_delta {kernel.__name__} {per_row}"
        yield name, kernel, {n: t for n, t in pointers.items() if n in names}, constants, warps


def compile_one(
    capability: int, kernel: object, pointers: dict[str, str], constants: dict[str, object], num_warps: int
) -> tuple[int, int | None]:
    names = kernel.arg_names
    signature = dict.fromkeys(names, "i32") | dict.fromkeys(constants, "constexpr")
    floats = ("eps", "q_eps", "k_eps", "v_eps", "scale", "limit")
    signature |= {name: "fp32" for name in names if name in floats}
    signature |= {name: f"*{pointee}" for name, pointee in pointers.items()}
    # As a launch with aligned tensors specializes it; otherwise loads go one element at a time.
    unaligned = ("src_slots_ptr", "dst_slots_ptr")
    aligned = [
        i
        for i, name in enumerate(names)
        if name.endswith(("_ptr", "_stride", "width", "columns", "depth")) and name not in unaligned
    ]
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
        code = subprocess.run(
            [cuobjdump, "-sass", file.name], capture_output=True, text=True, check=True
        ).stdout
    assert "EXIT" in code
    return compiled.metadata.shared, len(re.findall(r"\b(?:LDL|STL)\b", code))


if __name__ == "__main__":
    for capability in (80, 90):
        for name, kernel, pointers, constants, num_warps in configurations():
            if capability == 80 and "fp8e4nv" in pointers.values():
                continue  # sm_80 has no such conversion; the launcher says so
            shared, spills = compile_one(capability, kernel, pointers, constants, num_warps)
            print(
                json.dumps({"name": f"sm_{capability} {name}", "shared_bytes": shared, "num_spills": spills})
            )
