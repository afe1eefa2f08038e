"""The CPU kernels written in C++ (kernels/csrc), loaded through ctypes: the best variant for this processor.

    LIBRARY     the loaded library, or None: not compiled (no compiler at install time), or an unknown CPU
    DTYPE       torch dtype -> the number the kernels know it by

The libraries share torch's OpenMP threads: both use libgomp, which is loaded once. A second pool would
compete with the first and cost more than the kernels save. TANDEM_NATIVE=off, or the name of an instruction
set (avx2, avx512, avx512_vnni, avx512_bf16, amx; on ARM neon_dotprod, neon_bf16), overrides the choice.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Set
from pathlib import Path

import torch

log = logging.getLogger(__name__)

DTYPE = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
#: A float8 cache is read through a table of its 256 values.
BYTE = 3
INT8 = 4

_FOLDER = Path(__file__).parent
#: Flags of /proc/cpuinfo, on x86-64 and ARM; each instruction set also needs those of all before it.
_NEEDED_FLAGS = (
    {
        "avx2": {"avx2", "fma", "f16c"},
        "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl"},
        "avx512_vnni": {"avx512_vnni"},
        "avx512_bf16": {"avx512_bf16"},
        "amx": {"amx_tile", "amx_int8", "amx_bf16"},
    },
    {
        "neon_dotprod": {"asimd", "asimddp", "atomics"},
        "neon_bf16": {"bf16"},
    },
)
#: Linux on x86-64: the number of arch_prctl, its request for a state component, and that of AMX's tile data.
_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _TILE_DATA = 158, 0x1023, 18

_POINTER, _INT64, _INT32, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float


class AttentionCall(ctypes.Structure):
    """TandemAttention of csrc/attention.h, field by field."""

    _fields_ = (
        *((name, _POINTER) for name in (
            "query", "out", "cache", "table", "block_table", "seq_lens", "query_start_loc", "ancestor_bits",
            "sinks", "k_scale", "v_scale", "k_token_scale", "v_token_scale",
        )),
        ("query_stride", _INT64),
        ("out_stride", _INT64),
        ("cache_strides", _INT64 * 4),
        *((name, _INT64 * 3) for name in ("k_token_scale_strides", "v_token_scale_strides")),
        *((name, _INT32) for name in (
            "num_seqs", "max_blocks", "num_blocks", "num_tokens", "num_heads", "num_kv_heads", "k_dim",
            "v_dim", "block_size", "query_dtype", "cache_dtype", "window",
        )),
        ("scale", _FLOAT),
        ("softcap", _FLOAT),
        ("num_threads", _INT32),
        ("interleaved", _INT32),
    )  # fmt: skip


class LinearWeight(ctypes.Structure):
    """TandemLinear of csrc/linear.h."""

    _fields_ = (
        ("packed", _POINTER),
        ("bias", _POINTER),
        *((name, _INT32) for name in ("columns", "depth", "packing", "first", "stride", "pieces")),
        ("order", _POINTER),
        ("table", _POINTER),
    )


class Norm(ctypes.Structure):
    """TandemNorm of csrc/elementwise.h."""

    _fields_ = (("weight", _POINTER), ("bias", _POINTER), ("eps", _FLOAT), ("kind", _INT32))


class Activation(ctypes.Structure):
    """TandemActivation of csrc/elementwise.h."""

    _fields_ = (("act", _INT32), ("gated", _INT32), ("limit", _FLOAT))


class Heads(ctypes.Structure):
    """TandemHeads of csrc/elementwise.h."""

    _fields_ = (
        *((name, Norm) for name in ("q_norm", "k_norm", "v_norm")),
        ("rotations", _POINTER),
        ("num_positions", _INT64),
        *((name, _INT32) for name in (
            "rope_dims", "num_heads", "num_kv_heads", "k_dim", "v_dim", "norm_whole", "norm_after_rope",
        )),
    )  # fmt: skip


class Group(ctypes.Structure):
    """TandemGroup of csrc/decoder.cpp."""

    _fields_ = (
        ("block_table", _POINTER),
        ("slots", _POINTER),
        *((name, _INT32) for name in ("max_blocks", "num_blocks", "block_size")),
    )


class AttentionMixer(ctypes.Structure):
    """TandemAttentionMixer of csrc/decoder.cpp."""

    _fields_ = (
        *((name, ctypes.POINTER(LinearWeight)) for name in ("qkv", "o", "gate")),
        ("heads", Heads),
        ("cache", _POINTER),
        ("sinks", _POINTER),
        ("scale", _FLOAT),
        ("softcap", _FLOAT),
        ("window", _INT32),
        ("group", _INT32),
    )


class MlpMixer(ctypes.Structure):
    """TandemMlp of csrc/decoder.cpp."""

    _fields_ = (*((name, ctypes.POINTER(LinearWeight)) for name in ("up", "down")), ("act", Activation))


class Moe(ctypes.Structure):
    """TandemMoe of csrc/moe.h."""

    _fields_ = (
        ("router", ctypes.POINTER(LinearWeight)),
        ("correction", _POINTER),
        *((name, ctypes.POINTER(LinearWeight)) for name in (
            "gate_up", "down", "shared_gate_up", "shared_down",
        )),
        ("shared_gate", _POINTER),
        ("act", Activation),
        *((name, _INT32) for name in ("experts", "top_k", "score", "groups", "top_groups", "renorm")),
        ("scale", _FLOAT),
    )  # fmt: skip


class Branch(ctypes.Structure):
    """TandemBranch of csrc/decoder.cpp."""

    _fields_ = (
        ("pre", Norm),
        ("post", Norm),
        ("attention", ctypes.POINTER(AttentionMixer)),
        ("mlp", ctypes.POINTER(MlpMixer)),
        ("moe", ctypes.POINTER(Moe)),
    )


class Sublayer(ctypes.Structure):
    """TandemSublayer of csrc/decoder.cpp."""

    _fields_ = (("branches", Branch * 2), ("num_branches", _INT32), ("scale", _FLOAT), ("post", Norm))


class Ends(ctypes.Structure):
    """TandemEnds of csrc/decoder.cpp."""

    _fields_ = (
        *((name, _POINTER) for name in ("token_ids", "embedding", "learned_positions")),
        ("norm", Norm),
        ("head", ctypes.POINTER(LinearWeight)),
        *((name, _POINTER) for name in ("rows", "logits", "likeliest")),
        *((name, _INT64) for name in ("num_rows", "vocab_size", "num_learned", "position_offset")),
        *((name, _FLOAT) for name in ("embed_scale", "logit_scale", "logit_cap")),
    )


class LayersCall(ctypes.Structure):
    """TandemLayers of csrc/decoder.cpp."""

    _fields_ = (
        *((name, _POINTER) for name in ("sublayers", "groups", "ends", "hidden", "delta", "positions")),
        ("attention", AttentionCall),
        *((name, _INT32) for name in ("first", "end", "num_groups", "hidden_size")),
    )


class States(ctypes.Structure):
    """TandemStates of csrc/gated_delta.h."""

    _fields_ = (
        *((name, _POINTER) for name in (
            "query_start_loc", "ancestor_bits", "initial_slots", "final_slots", "snapshot_slots",
            "snapshot_rows",
        )),
        *((name, _INT32) for name in ("num_seqs", "num_tokens", "num_slots")),
    )  # fmt: skip


class GatedDelta(ctypes.Structure):
    """TandemGatedDelta of csrc/gated_delta.h."""

    _fields_ = (
        *((name, _POINTER) for name in (
            "conv_weight", "decay_rate", "decay_bias", "norm", "conv", "recurrent",
        )),
        *((name, _INT32) for name in (
            "k_heads", "v_heads", "k_dim", "v_dim", "taps", "decay_per_channel", "sigmoid_gate",
        )),
        ("eps", _FLOAT),
    )  # fmt: skip


class GatedDeltaInputs(ctypes.Structure):
    """TandemGatedDeltaInputs of csrc/gated_delta.h: pointer and stride of each."""

    _fields_ = tuple(
        field for name in ("qkv", "z", "b", "a") for field in ((name, _POINTER), (f"{name}_stride", _INT64))
    )


def instruction_sets() -> list[str]:
    """The instruction sets of build_native.py that this processor supports, slowest first."""
    return supported_sets(*_processor())


def supported_sets(vendor: str, flags: Set[str]) -> list[str]:
    """The same for a processor described by /proc/cpuinfo's vendor_id and flags, which ARM calls Features."""
    sets = []
    for family in _NEEDED_FLAGS:
        for name, needed in family.items():
            if not needed <= flags:
                break
            sets.append(name)
    if vendor == "GenuineIntel" and "avx512_bf16" in sets:
        # Intel's vdpbf16ps takes 2.2 cycles, a float32 FMA .56 (Emerald Rapids).
        sets.remove("avx512_bf16")
        sets.insert(sets.index("avx512_vnni"), "avx512_bf16")
    return sets


def load(name: str, folder: Path = _FOLDER) -> ctypes.CDLL:
    """The library for one instruction set. Raises OSError where it was not built or the system refuses AMX,
    ImportError where it lacks a function."""
    if name == "amx":
        request_tiles()
    library = ctypes.CDLL(str(folder / f"tandem_{name}.so"))
    try:
        _declare(library)
    except AttributeError as error:  # says which file and function
        raise ImportError(
            f"the kernels were compiled from other sources than this Python code ({error}); "
            "run `python build_native.py` or `make venv`; without a checkout reinstall Tandem"
        ) from error
    return library


def _declare(library: ctypes.CDLL) -> None:
    """Sets the functions' types. Raises AttributeError."""
    library.tandem_attention.argtypes = [ctypes.POINTER(AttentionCall)]
    norm = ctypes.POINTER(Norm)
    library.tandem_add_norm.argtypes = [
        _POINTER, _POINTER, norm, _POINTER, _INT64, _INT32, _INT32, _FLOAT, _INT32,
    ]  # fmt: skip
    library.tandem_add_norm.restype = None
    library.tandem_norm_rows.argtypes = [_POINTER, norm, _POINTER, _INT64, *[_INT32] * 4]
    library.tandem_norm_rows.restype = None
    library.tandem_activate.argtypes = [
        _POINTER, ctypes.POINTER(Activation), _POINTER, _INT64, *[_INT32] * 4,
    ]  # fmt: skip
    library.tandem_activate.restype = None
    library.tandem_sigmoid_gate.argtypes = [_POINTER, _POINTER, _INT32, _INT64, *[_INT32] * 4]
    library.tandem_sigmoid_gate.restype = None
    library.tandem_packed_linear.argtypes = [
        _POINTER, ctypes.POINTER(LinearWeight), _POINTER, _INT64, *[_INT32] * 3,
    ]  # fmt: skip
    library.tandem_packed_linear.restype = None
    library.tandem_moe.argtypes = [ctypes.POINTER(Moe), _POINTER, _POINTER, _INT64, _INT32, _INT32]
    library.tandem_moe.restype = None
    library.tandem_move_slots.argtypes = [
        ctypes.POINTER(_POINTER), _INT32, _POINTER, _POINTER, *[_INT64] * 2, *[_INT32] * 5,
    ]  # fmt: skip
    library.tandem_move_slots.restype = _INT64
    library.tandem_decoder_layers.argtypes = [ctypes.POINTER(LayersCall)]
    library.tandem_decoder_layers.restype = _INT64
    library.tandem_draw_tokens.argtypes = [*[_POINTER] * 7, *[_INT64] * 2, _INT32]
    library.tandem_draw_tokens.restype = None
    library.tandem_finish_logits.argtypes = [_POINTER, _INT64, _INT64, _FLOAT, _FLOAT, _INT32]
    library.tandem_finish_logits.restype = None
    library.tandem_rope_store.argtypes = [
        ctypes.POINTER(Heads), *[_POINTER] * 4, *[_INT64] * 2, *[_INT32] * 3,
    ]  # fmt: skip
    library.tandem_rope_store.restype = _INT64
    library.tandem_gated_delta.argtypes = [
        ctypes.POINTER(States), ctypes.POINTER(GatedDelta), ctypes.POINTER(GatedDeltaInputs), _POINTER,
        *[_INT32] * 2,
    ]  # fmt: skip
    library.tandem_gated_delta.restype = _INT64
    library.tandem_work_done.argtypes = []
    library.tandem_work_done.restype = _INT64


def instruction_set() -> str | None:
    """The instruction set of LIBRARY."""
    if LIBRARY is None:
        return None
    return Path(LIBRARY._name).stem.removeprefix("tandem_")


def request_tiles() -> None:
    """Asks Linux for the tiles of AMX, for all threads of the process.

    Raises OSError: the kernel is older than 5.16, a sandbox does not pass the call, or a thread has a signal
    stack that is too small for the tiles (faulthandler makes one).
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _TILE_DATA) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"the system refuses AMX ({os.strerror(code)})")


def _processor() -> tuple[str, set[str]]:
    """vendor_id and flags or Features of /proc/cpuinfo; empty where there is none."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return "", set()
    first = dict(line.split(":", 1) for line in text.split("\n\n")[0].splitlines() if ":" in line)
    fields = {key.strip(): value.strip() for key, value in first.items()}
    return fields.get("vendor_id", ""), set((fields.get("flags") or fields.get("Features", "")).split())


def _load_best() -> ctypes.CDLL | None:
    wanted = os.environ.get("TANDEM_NATIVE", "")
    if wanted == "off":
        return None
    if wanted and wanted not in instruction_sets():
        # The library would run illegal instructions.
        raise ValueError(
            f"TANDEM_NATIVE is {wanted!r}, wanted off or one of this processor's {instruction_sets()}"
        )
    failures = {}
    for name in [wanted] if wanted else reversed(instruction_sets()):
        try:
            library = load(name)
        except OSError as error:
            if wanted:
                raise
            failures[name] = error
            continue
        if failures:
            log.warning("CPU kernels: using %s (%s)", name, _reasons(failures))
        return library
    if failures:
        log.warning(
            "native CPU kernels were not compiled (%s); using torch, which is slower", _reasons(failures)
        )
    return None


def _reasons(failures: dict[str, OSError]) -> str:
    return "; ".join(f"{name}: {error}" for name, error in failures.items())


LIBRARY = _load_best()


def work_done() -> int:
    """Grows while kernels of this process compute; 0 without LIBRARY."""
    return LIBRARY.tandem_work_done() if LIBRARY is not None else 0


def covers(width: int, *tensors: torch.Tensor | None) -> bool:
    """Whether a kernel over rows of `width` elements can take these dense CPU tensors of one dtype."""
    given = [t for t in tensors if t is not None]
    dtype = given[0].dtype
    return (
        LIBRARY is not None
        and width % 16 == 0
        and dtype in DTYPE
        and all(t.dtype == dtype and not t.is_cuda and t.is_contiguous() for t in given)
    )
