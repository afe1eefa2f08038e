"""Compares the perplexity of Tandem and llama.cpp on one GGUF file per format.

    python benchmarks/gguf_quality.py --dataset dialogues.jsonl --out benchmarks/results/gguf-quality.md

For each format llama.cpp's quantizer (ggml_quantize_chunk) writes the default model's projections into a new
file; the embedding, which is also the head, keeps its format. llama.cpp and Tandem then read equal tokens
(teacher-forced), and one float64 function computes the perplexity of both.

Formats with blocks of 256 do not fit rows of 576. For them every dimension is padded with zeros to a multiple
of 256, which makes more heads and a longer hidden state that are zero; norms are scaled to the longer mean.
The padded model computes the same function: in F32 its perplexity is the unpadded one's.

Formats below 3.5 bits are used in every sixth layer only, because they would make so small a model useless;
the other layers have Q8_0.

The error that a packing adds is measured on normal random numbers: the default model's weights lie on Q4_1's
grid, where some formats have no error of their own.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import json
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray
from peers import LLAMA_CPP
from reporting import markdown_table, page
from tandem_cli.bench.dataset import load_dialogues
from tandem_core.model.manifest import ModelManifest
from tandem_core.model.tokenizer import Tokenizer
from tandem_engine.model_loader import DEFAULT_MODEL, load_decoder, pull
from tandem_engine.model_loader.convert import quantized_bits
from tandem_engine.model_loader.gguf_formats import grid_of, stored_of, values_of
from tandem_engine.model_loader.gguf_source import GgufSource
from tandem_engine.model_loader.loading import pick_numerics
from tandem_engine.model_loader.stored import pack, pick_packing
from tandem_engine.models import ModelInputs
from tandem_engine.models.config import ModelConfig
from tandem_kernels import AttentionMetadata, pack_quantized

if TYPE_CHECKING:
    from tandem_engine.models.executors import AnyDecoder

FORMATS = (
    "F32", "BF16", "F16", "Q8_0", "Q6_K", "Q5_K", "Q5_1", "Q5_0", "Q4_K", "Q4_1", "Q4_0", "Q3_K", "Q2_K",
    "IQ4_NL", "IQ4_XS", "IQ3_S", "IQ3_XXS", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_M", "IQ1_S", "TQ2_0", "TQ1_0",
    "MXFP4",
)  # fmt: skip
BLOCK_SIZE = 64
HEAD = (
    "file", "bits", "packed", "added / own error", "llama.cpp", "Tandem", "difference",
)  # fmt: skip
Floats = NDArray[np.float32]
Logits = Callable[[Sequence[int]], NDArray[np.floating]]


class _ModelParams(ctypes.Structure):
    """llama_model_params of the pinned version, as it comes from the defaults."""

    _fields_ = [("opaque", ctypes.c_uint64 * 10)]


class _ContextParams(ctypes.Structure):
    """llama_context_params of the pinned version."""

    _fields_ = [
        (name, ctypes.c_int32)
        for name in (
            "n_ctx", "n_batch", "n_ubatch", "n_seq_max", "n_rs_seq", "n_outputs_max", "n_outputs_max_per_seq",
            "n_threads", "n_threads_batch",
        )
    ] + [
        ("opaque", ctypes.c_uint8 * 68),
        ("type_k", ctypes.c_int32),
        ("type_v", ctypes.c_int32),
        ("more", ctypes.c_uint64 * 7),
    ]  # fmt: skip


class _Batch(ctypes.Structure):
    _fields_ = [
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embd", ctypes.c_void_p),
        ("pos", ctypes.POINTER(ctypes.c_int32)),
        ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    ]


class LlamaCpp:
    """The library inside xllamacpp's wheel, whose Python interface has neither logits nor the quantizer."""

    def __init__(self) -> None:
        (path,) = LLAMA_CPP.python().parents[1].glob("lib/python*/site-packages/xllamacpp/xllamacpp.abi3.so")
        lib = self._lib = ctypes.CDLL(str(path))
        pointer = ctypes.c_void_p
        for name, result, arguments in (
            ("llama_backend_init", None, []),
            ("llama_log_set", None, [pointer, pointer]),
            ("llama_model_default_params", _ModelParams, []),
            ("llama_context_default_params", _ContextParams, []),
            ("llama_model_load_from_file", pointer, [ctypes.c_char_p, _ModelParams]),
            ("llama_init_from_model", pointer, [pointer, _ContextParams]),
            ("llama_batch_init", _Batch, [ctypes.c_int32, ctypes.c_int32, ctypes.c_int32]),
            ("llama_batch_free", None, [_Batch]),
            ("llama_decode", ctypes.c_int32, [pointer, _Batch]),
            ("llama_get_logits", ctypes.POINTER(ctypes.c_float), [pointer]),
            ("llama_free", None, [pointer]),
            ("llama_model_free", None, [pointer]),
            ("ggml_quantize_init", None, [ctypes.c_int]),
            ("ggml_quantize_requires_imatrix", ctypes.c_bool, [ctypes.c_int]),
            (
                "ggml_quantize_chunk",
                ctypes.c_size_t,
                [ctypes.c_int, pointer, pointer, *[ctypes.c_int64] * 3, pointer],
            ),
        ):
            function = getattr(lib, name)
            function.restype, function.argtypes = result, arguments
        self._silent = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, pointer)(lambda *_: None)
        lib.llama_log_set(ctypes.cast(self._silent, pointer), None)
        lib.llama_backend_init()

    def quantize(self, kind: Kind, values: Floats) -> NDArray[np.uint8]:
        """[R, K] -> [R, bytes]. Where the format demands an importance of each column, all are equal."""
        num_rows, depth = values.shape
        block, block_bytes = GGML_QUANT_SIZES[kind]
        values = np.ascontiguousarray(values)
        rows = np.empty((num_rows, depth // block * block_bytes), dtype=np.uint8)
        equal = np.ones(depth, dtype=np.float32)
        importance = equal.ctypes.data if self._lib.ggml_quantize_requires_imatrix(kind) else None
        self._lib.ggml_quantize_init(kind)

        def quantize_span(first: int) -> None:
            count = min(32, num_rows - first)
            self._lib.ggml_quantize_chunk(
                kind, values.ctypes.data, rows.ctypes.data, first * depth, count, depth, importance
            )

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(quantize_span, range(0, num_rows, 32)))
        return rows

    def perplexity(
        self, path: Path, texts: Sequence[Sequence[int]], vocab_size: int, *, exact: bool
    ) -> float:
        """exact: keys and values in float32 instead of float16."""
        lib = self._lib
        model = lib.llama_model_load_from_file(str(path).encode(), lib.llama_model_default_params())
        if not model:
            raise RuntimeError(f"llama.cpp cannot load {path}")

        def logits(text: Sequence[int]) -> NDArray[np.floating]:
            params = lib.llama_context_default_params()
            params.n_ctx = params.n_batch = params.n_ubatch = params.n_outputs_max = max(len(text), 64)
            params.n_seq_max = 1
            if exact:
                params.type_k = params.type_v = Kind.F32
            params.n_threads = params.n_threads_batch = os.cpu_count()
            context = lib.llama_init_from_model(model, params)
            batch = lib.llama_batch_init(len(text), 0, 1)
            batch.n_tokens = len(text)
            for n, token in enumerate(text):
                batch.token[n], batch.pos[n], batch.n_seq_id[n], batch.logits[n] = token, n, 1, 1
                batch.seq_id[n][0] = 0
            if lib.llama_decode(context, batch) != 0:
                raise RuntimeError(f"llama.cpp cannot compute {path}")
            rows = np.ctypeslib.as_array(lib.llama_get_logits(context), (len(text), vocab_size)).copy()
            lib.llama_batch_free(batch)
            lib.llama_free(context)
            return rows

        try:
            return perplexity_of(logits, texts)
        finally:
            lib.llama_model_free(model)


def perplexity_of(logits: Logits, texts: Sequence[Sequence[int]]) -> float:
    """exp of the mean negative log probability of each text's tokens after the first."""
    loss, count = 0.0, 0
    for text in texts:
        scores = torch.from_numpy(logits(text))[:-1].double().log_softmax(-1)
        loss -= scores.gather(1, torch.tensor(text[1:]).unsqueeze(1)).sum().item()
        count += len(text) - 1
    return math.exp(loss / count)


def logits_of(decoder: AnyDecoder, text: Sequence[int]) -> NDArray[np.floating]:
    n = len(text)
    num_blocks = -(-n // BLOCK_SIZE)
    caches = [
        torch.zeros(num_blocks, 2, a.kv_heads, BLOCK_SIZE, a.k_dim, dtype=decoder.dtype)
        for a in decoder.spec.attentions
    ]
    attention = AttentionMetadata(
        block_table=torch.arange(num_blocks, dtype=torch.int32).unsqueeze(0),
        seq_lens=torch.tensor([n], dtype=torch.int32),
        query_start_loc=torch.tensor([0, n], dtype=torch.int32),
    )
    positions = torch.arange(n)
    inputs = ModelInputs(torch.tensor(text), positions, positions, attention)
    rows: NDArray[np.floating] = decoder.logits(decoder.forward(inputs, caches)).float().numpy()
    return rows


def padded(size: int) -> int:
    return -(-size // 256) * 256


@lru_cache(2)
def read(path: Path) -> tuple[gguf.GGUFReader, dict[str, Floats]]:
    """A file's keys and the values of its tensors."""
    reader = gguf.GGUFReader(path)
    return reader, {t.name: gguf.dequantize(t.data, t.tensor_type) for t in reader.tensors}


def rewrite(
    base: Path,
    path: Path,
    change: Callable[[str, Kind, Floats], tuple[Kind, NDArray[Any]]],
    fields: Mapping[str, object] = MappingProxyType({}),
) -> None:
    """Writes the file `base` again. change(name, format, values) returns a tensor's new format and data."""
    reader, values = read(base)
    writer = gguf.GGUFWriter(path, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            value = fields.get(name, field.contents())
            writer.add_key_value(name, value, field.types[0], field.types[-1])
    for tensor in reader.tensors:
        kind, data = change(tensor.name, tensor.tensor_type, values[tensor.name])
        writer.add_tensor(tensor.name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def bits_per_weight(kind: Kind) -> float:
    block, block_bytes = GGML_QUANT_SIZES[kind]
    return 8 * block_bytes / block


def is_coarse(kind: Kind) -> bool:
    return bits_per_weight(kind) < 3.5


def write_file(llama: LlamaCpp, base: Path, kind: Kind, path: Path) -> None:
    """The model of `base` with its projections in the format `kind`."""
    grown = padded if GGML_QUANT_SIZES[kind][0] == 256 else int
    config = GgufSource(base).hf_config()
    hidden, heads, kv_heads, head_dim = (
        config[key] for key in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    )
    if grown(heads * head_dim) * kv_heads != grown(kv_heads * head_dim) * heads:
        raise ValueError(f"{base}: heads and KV heads cannot be padded alike")

    def change(name: str, own: Kind, values: Floats) -> tuple[Kind, NDArray[Any]]:
        values = np.pad(values, [(0, grown(n) - n) for n in values.shape])
        if values.ndim == 1:
            return Kind.F32, (values * math.sqrt(hidden / grown(hidden))).astype(np.float32)
        wanted = kind
        if name == "token_embd.weight":
            wanted = own
        elif is_coarse(kind) and int(name.split(".")[1]) % 6:
            wanted = Kind.Q8_0
        rows = llama.quantize(wanted, values)
        return wanted, rows.view(np.float32) if wanted is Kind.F32 else rows

    fields = {
        "embedding_length": grown(hidden),
        "attention.head_count": grown(heads * head_dim) // head_dim,
        "attention.head_count_kv": grown(kv_heads * head_dim) // head_dim,
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"] * hidden / grown(hidden),
    }
    rewrite(base, path, change, {f"{config['model_type']}.{key}": value for key, value in fields.items()})


def folder_of(path: Path, manifest: ModelManifest, folder: Path) -> Path:
    """A model folder around a GGUF file, without the tokenizer."""
    source = GgufSource(path)
    (folder / "config.json").write_text(json.dumps(source.hf_config()))
    bits = quantized_bits(ModelConfig.from_folder(folder), source)
    dataclasses.replace(manifest, weights=str(path), weight_bits=bits).write(folder)
    return folder


def errors_of(llama: LlamaCpp, kind: Kind) -> tuple[str, str]:
    """Bits per weight of the packing, and its added error over the format's own (rms)."""
    grid = grid_of(kind)
    if grid is None:
        return "-", "-"
    numbers = np.random.default_rng(0).standard_normal((256, 4096), dtype=np.float32)
    rows = llama.quantize(kind, numbers)
    values, weight = values_of(kind, rows), pack(stored_of(kind, rows), pick_packing(grid))
    own, added = (values - torch.from_numpy(numbers)).norm(), (weight.dequantize() - values).norm()
    return f"{8 * pack_quantized(weight).nbytes / numbers.size:.2f}", f"{added / own:.3f}"


def compare(
    llama: LlamaCpp, path: Path, folder: Path, texts: Sequence[Sequence[int]], *, exact: bool
) -> list[str]:
    """The perplexities' cells of a row: of the file; or of its values in float32, which both compute in."""
    vocab_size = ModelManifest.read(folder).vocab_size
    numerics = pick_numerics(folder, *(("float32", "none") if exact else ()))
    with tempfile.TemporaryDirectory() as temporary:
        if exact:
            source, path = path, Path(temporary) / "values.gguf"
            rewrite(source, path, lambda name, kind, values: (Kind.F32, values))
        theirs = llama.perplexity(path, texts, vocab_size, exact=exact)
    decoder = load_decoder(folder, numerics.dtype, quantization=numerics.quantization)
    ours = perplexity_of(partial(logits_of, decoder), texts)
    return [f"{theirs:.4f}", f"{ours:.4f}", f"{100 * (ours / theirs - 1):+.2f} %"]


def encode(model_dir: Path, options: argparse.Namespace) -> list[list[int]]:
    tokenizer = Tokenizer(model_dir)
    dialogues = load_dialogues(options.dataset)[: options.dialogues]
    return [tokenizer.encode(dialogue.as_text())[: options.tokens] for dialogue in dialogues]


def measure(llama: LlamaCpp, options: argparse.Namespace) -> Iterator[list[str]]:
    for name in options.models:
        model_dir = pull(name)
        path = model_dir / ModelManifest.read(model_dir).weights
        label = f"{name} ({', '.join(GgufSource(path).formats())})"
        yield [
            label,
            *"---",
            *compare(llama, path, model_dir, encode(model_dir, options), exact=options.float32),
        ]
    model_dir = pull(DEFAULT_MODEL)
    manifest, texts = ModelManifest.read(model_dir), encode(model_dir, options)
    for name in options.formats:
        kind = Kind[name]
        packing_bits, added = errors_of(llama, kind)
        with tempfile.TemporaryDirectory() as temporary:
            path = Path(temporary) / "model.gguf"
            write_file(llama, model_dir / manifest.weights, kind, path)
            cells = compare(
                llama, path, folder_of(path, manifest, Path(temporary)), texts, exact=options.float32
            )
        label = f"{name}, padded" if GGML_QUANT_SIZES[kind][0] == 256 else name
        label += ", every sixth layer" if is_coarse(kind) else ""
        yield [label, f"{bits_per_weight(kind):.2f}", packing_bits, added, *cells]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--dataset", type=Path, help="dialogues as JSON lines; default: the small sample")
    parser.add_argument("--dialogues", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512, help="most tokens of one dialogue")
    parser.add_argument("--formats", nargs="*", choices=FORMATS, default=list(FORMATS), metavar="FORMAT")
    parser.add_argument(
        "--models", nargs="*", default=[DEFAULT_MODEL], help="pulled models, files as they are"
    )
    parser.add_argument("--float32", action="store_true", help="both compute the file's values in float32")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    notes = (
        f"{LLAMA_CPP.requirements[0]}; {options.dialogues} dialogues of at most {options.tokens} tokens. "
        + ("Both compute the file's values in float32." if options.float32 else "Both use their defaults.")
    )
    rows = []
    for row in measure(LlamaCpp(), options):
        print(*row, sep="  ", file=sys.stderr, flush=True)
        rows.append(row)
        # After each row, because all take an hour.
        options.out.write_text(page("GGUF formats and llama.cpp", markdown_table(HEAD, rows), notes))


if __name__ == "__main__":
    main()
