"""Calls kernels of another processor type like those of a local library: a process under qemu-user runs them.

A call's memory is copied into a file that both processes have mapped, and back after the call. So the Python
functions of tandem_kernels and their tests run on it unchanged.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tandem_kernels import Packing, native, quantized_shape

#: Where the other process maps the file, and its size.
_ADDRESS, _BYTES = 1 << 40, 1 << 28
_ELEMENT_BYTES = {0: 4, 1: 2, 2: 2, native.BYTE: 1, native.INT8: 1}
_NUM_WORDS = 24


class QemuLibrary:
    """Takes the place of native.LIBRARY.

    command: starts the program run_library.cpp.
    """

    def __init__(self, command: Sequence[str], path: Path) -> None:
        self._name = str(path)  # as ctypes.CDLL's
        file = os.memfd_create("kernel-calls")
        os.ftruncate(file, _BYTES)
        self._memory = mmap.mmap(file, _BYTES)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._copies: list[tuple[int, int, int]] = []
        self._end = 0
        self._process = subprocess.Popen(
            [*command, path, str(file), str(_ADDRESS), str(_BYTES)],
            pass_fds=[file],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def tandem_packed_linear(
        self, x: int, weight: Any, out: int, rows: int, dtype: int, out_dtype: int, num_threads: int
    ) -> None:
        first = weight[0]
        self._call(
            "tandem_packed_linear", 0,
            self._put(x, rows * first.depth * _ELEMENT_BYTES[dtype]), self._put_weight(weight),
            self._put(out, rows * first.stride * _ELEMENT_BYTES[out_dtype]),
            rows, dtype, out_dtype, num_threads,
        )  # fmt: skip

    def tandem_attention(self, call: Any) -> int:
        return self._call("tandem_attention", 0, self._put_struct(self._attention(call._obj)))

    def tandem_add_norm(
        self, hidden: int, delta: int | None, norm: Any, out: int, rows: int, width: int, dtype: int,
        scale: float, num_threads: int,
    ) -> None:  # fmt: skip
        num_bytes = rows * width * _ELEMENT_BYTES[dtype]
        self._call(
            "tandem_add_norm", scale, self._put(hidden, rows * width * 4), self._put(delta, num_bytes),
            self._put_struct(self._norm(norm._obj, width)), self._put(out, num_bytes), rows, width, dtype,
            num_threads,
        )  # fmt: skip

    def tandem_norm_rows(
        self, x: int, norm: Any, out: int, rows: int, width: int, dtype: int, out_dtype: int, num_threads: int
    ) -> None:
        elements = rows * width
        self._call(
            "tandem_norm_rows", 0, self._put(x, elements * _ELEMENT_BYTES[dtype]),
            self._put_struct(self._norm(norm._obj, width)),
            self._put(out, elements * _ELEMENT_BYTES[out_dtype]), rows, width, dtype, out_dtype, num_threads,
        )  # fmt: skip

    def tandem_activate(
        self, x: int, by: Any, out: int, rows: int, width: int, dtype: int, out_dtype: int, num_threads: int
    ) -> None:
        elements = rows * width
        self._call(
            "tandem_activate", 0, self._put(x, (1 + by._obj.gated) * elements * _ELEMENT_BYTES[dtype]),
            self._put_struct(by._obj), self._put(out, elements * _ELEMENT_BYTES[out_dtype]), rows, width,
            dtype, out_dtype, num_threads,
        )  # fmt: skip

    def tandem_sigmoid_gate(
        self, x: int, gate: int, per_head: int, rows: int, heads: int, size: int, dtype: int, num_threads: int
    ) -> None:
        element = _ELEMENT_BYTES[dtype]
        self._call(
            "tandem_sigmoid_gate", 0, self._put(x, rows * heads * size * element),
            self._put(gate, rows * heads * (1 if per_head else size) * element), int(per_head), rows, heads,
            size, dtype, num_threads,
        )  # fmt: skip

    def tandem_rope_store(
        self, heads: Any, qkv: int, positions: int, slots: int, cache: int, tokens: int, num_slots: int,
        block_size: int, dtype: int, num_threads: int,
    ) -> int:  # fmt: skip
        h, element = heads._obj, _ELEMENT_BYTES[dtype]
        row = (h.num_heads + h.num_kv_heads) * h.k_dim + h.num_kv_heads * h.v_dim
        return self._call(
            "tandem_rope_store", 0, self._put_struct(self._heads(h)), self._put(qkv, tokens * row * element),
            self._put(positions, tokens * 8), self._put(slots, tokens * 8),
            self._put(cache, num_slots * h.num_kv_heads * (h.k_dim + h.v_dim) * element), tokens, num_slots,
            block_size, dtype, num_threads,
        )  # fmt: skip

    def _norm(self, norm: native.Norm, width: int) -> native.Norm:
        """A copy that points into the common memory."""
        weight, bias = (self._put(part, width * 4) for part in (norm.weight, norm.bias))
        return native.Norm(weight, bias, norm.eps, norm.kind)

    def _heads(self, heads: native.Heads) -> native.Heads:
        """A copy that points into the common memory."""
        h = native.Heads.from_buffer_copy(heads)
        h.q_norm = self._norm(h.q_norm, h.k_dim * (h.num_heads if h.norm_whole else 1))
        h.k_norm = self._norm(h.k_norm, h.k_dim * (h.num_kv_heads if h.norm_whole else 1))
        h.v_norm = self._norm(h.v_norm, h.v_dim)
        if h.rotations:
            h.rotations = self._put(h.rotations, h.num_positions * h.rope_dims * 4)
        return h

    def tandem_decoder_layers(self, call: Any) -> int:
        copy = native.LayersCall.from_buffer_copy(call._obj)
        tokens, element = copy.attention.num_tokens, _ELEMENT_BYTES[copy.attention.query_dtype]
        groups = _array(native.Group, copy.groups, copy.num_groups)
        num_blocks = [(group.num_blocks, group.block_size) for group in groups]
        for group in groups:
            group.block_table = self._put(group.block_table, copy.attention.num_seqs * group.max_blocks * 4)
            group.slots = self._put(group.slots, tokens * 8)
        sublayers = _array(native.Sublayer, copy.sublayers, copy.end)
        for sublayer in sublayers:
            sublayer.post = self._norm(sublayer.post, copy.hidden_size)
            for branch in sublayer.branches[: sublayer.num_branches]:
                branch.pre, branch.post = (
                    self._norm(norm, copy.hidden_size) for norm in (branch.pre, branch.post)
                )
                if branch.attention:
                    mixer = self._attention_mixer(branch.attention[0], num_blocks, element)
                    branch.attention = self._pointer(mixer)
                elif branch.mlp:
                    mlp = native.MlpMixer.from_buffer_copy(branch.mlp[0])
                    mlp.up, mlp.down = (self._linear(weight) for weight in (mlp.up, mlp.down))
                    branch.mlp = self._pointer(mlp)
        copy.sublayers, copy.groups = self._put_struct(sublayers), self._put_struct(groups)
        for name, num_bytes in (
            ("hidden", 4 * copy.hidden_size), ("delta", element * copy.hidden_size), ("positions", 8),
        ):  # fmt: skip
            setattr(copy, name, self._put(getattr(copy, name), tokens * num_bytes))
        if copy.ends:
            ends = _array(native.Ends, copy.ends, 1)[0]
            row_bytes = element * copy.hidden_size
            ends.norm = self._norm(ends.norm, copy.hidden_size)
            for name, num_bytes in (
                ("token_ids", tokens * 8), ("embedding", ends.vocab_size * row_bytes),
                ("learned_positions", ends.num_learned * row_bytes), ("rows", ends.num_rows * 8),
                ("logits", ends.num_rows * ends.vocab_size * 4), ("likeliest", ends.num_rows * 8),
            ):  # fmt: skip
                setattr(ends, name, self._put(getattr(ends, name), num_bytes))
            ends.head = self._linear(ends.head)
            copy.ends = self._put_struct(ends)
        copy.attention = self._attention(copy.attention)
        return self._call("tandem_decoder_layers", 0, self._put_struct(copy))

    def _attention_mixer(
        self, given: native.AttentionMixer, num_blocks: Sequence[tuple[int, int]], element: int
    ) -> native.AttentionMixer:
        """A copy that points into the common memory; num_blocks: blocks and their tokens by group."""
        mixer, heads = native.AttentionMixer.from_buffer_copy(given), given.heads
        mixer.qkv, mixer.o = self._linear(mixer.qkv), self._linear(mixer.o)
        if mixer.gate:
            mixer.gate = self._linear(mixer.gate)
        mixer.heads = self._heads(heads)
        blocks, tokens = num_blocks[mixer.group]
        cache_bytes = blocks * tokens * heads.num_kv_heads * (heads.k_dim + heads.v_dim) * element
        mixer.cache = self._put(mixer.cache, cache_bytes)
        mixer.sinks = self._put(mixer.sinks, heads.num_heads * 4)
        return mixer

    def _linear(self, weight: Any) -> Any:
        return ctypes.cast(self._put_weight(weight), ctypes.POINTER(native.LinearWeight))

    def _pointer(self, struct: Any) -> Any:
        return ctypes.cast(self._put_struct(struct), ctypes.POINTER(type(struct)))

    def tandem_draw_tokens(
        self, logits: int, keys: int, temperature: int, top_k: int, top_p: int, log_min_p: int, out: int,
        rows: int, size: int, num_threads: int,
    ) -> None:  # fmt: skip
        self._call(
            "tandem_draw_tokens", 0, self._put(logits, rows * size * 4), self._put(keys, rows * 8),
            self._put(temperature, rows * 4), self._put(top_k, rows * 8), self._put(top_p, rows * 8),
            self._put(log_min_p, rows * 4), self._put(out, rows * 8), rows, size, num_threads,
        )  # fmt: skip

    def _attention(self, call: native.AttentionCall) -> native.AttentionCall:
        """A copy that points into the common memory."""
        c = native.AttentionCall.from_buffer_copy(call)
        element = _ELEMENT_BYTES[c.query_dtype]
        per_token = (c.num_blocks, c.num_kv_heads, c.block_size)
        # The blocks without what follows V of the last head.
        values = (c.num_blocks, c.num_kv_heads, c.block_size * c.v_dim)
        cache = _span(values, (c.cache_strides[0], c.cache_strides[3], 1)) + c.cache_strides[1]
        for name, num_bytes in {
            "query": _span((c.num_tokens, c.num_heads * c.k_dim), (c.query_stride, 1)) * element,
            "out": _span((c.num_tokens, c.num_heads * c.v_dim), (c.out_stride, 1)) * element,
            "cache": cache * _ELEMENT_BYTES[c.cache_dtype],
            "table": 256 * 4,
            "block_table": c.num_seqs * c.max_blocks * 4,
            "seq_lens": c.num_seqs * 4,
            "query_start_loc": (c.num_seqs + 1) * 4,
            "ancestor_bits": c.num_tokens * 8,
            "sinks": c.num_heads * 4,
            "k_scale": c.num_kv_heads * 4,
            "v_scale": c.num_kv_heads * 4,
            "k_token_scale": _span(per_token, c.k_token_scale_strides) * 4,
            "v_token_scale": _span(per_token, c.v_token_scale_strides) * 4,
        }.items():
            setattr(c, name, self._put(getattr(c, name), num_bytes))
        return c

    def _put_weight(self, weight: Any) -> int:
        """weight: an array of native.LinearWeight, or a pointer to its first one."""
        pieces = (native.LinearWeight * weight[0].pieces)()
        for n, piece in enumerate(pieces):
            ctypes.memmove(ctypes.addressof(piece), ctypes.addressof(weight[n]), ctypes.sizeof(piece))
            piece.packed = self._put(piece.packed, _packed_bytes(piece))
            piece.bias = self._put(piece.bias, piece.columns * 4)
            piece.order = self._put(piece.order, piece.depth * 4)
            piece.table = self._put(piece.table, 16)
        return self._put_struct(pieces)

    def _put_struct(self, struct: Any) -> int:
        address = self._put(ctypes.addressof(struct), ctypes.sizeof(struct))
        self._copies.pop()  # it is not written
        return address

    def _put(self, address: int | None, num_bytes: int) -> int:
        """Copies memory of the caller's; its address in the other process, 0 for None."""
        if address is None:
            return 0
        at = self._end
        self._end = (at + num_bytes + 63) // 64 * 64
        assert self._end <= _BYTES, "the call's memory is too large for the test"
        ctypes.memmove(self._base + at, address, num_bytes)
        self._copies.append((address, at, num_bytes))
        return _ADDRESS + at

    def _call(self, name: str, number: float, *words: int) -> int:
        """Runs a function on what was put, and copies that back."""
        assert self._process.stdin and self._process.stdout
        line = " ".join(map(str, [name, number, *words, *[0] * (_NUM_WORDS - len(words))]))
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        result = self._process.stdout.readline()
        assert result, f"{name} failed under qemu; its message is above"
        for address, at, num_bytes in self._copies:
            ctypes.memmove(address, self._base + at, num_bytes)
        self._copies, self._end = [], 0
        return ctypes.c_int32(int(result)).value


def _array(kind: Any, address: int | None, count: int) -> Any:
    """A copy of the structs there."""
    size = count * ctypes.sizeof(kind)
    return (kind * count).from_buffer_copy(ctypes.string_at(address, size) if count else b"")


def _span(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from a tensor's first to the end of its last."""
    return 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) if all(shape) else 0


def _packed_bytes(piece: native.LinearWeight) -> int:
    if piece.packing < 2:
        shape, element = (-(-piece.columns // 32), piece.depth, 32), (4, 2)[piece.packing]
    else:
        quantized = quantized_shape(piece.columns, piece.depth, Packing(piece.packing))
        assert quantized is not None
        shape, element = quantized, 1
    return shape[0] * shape[1] * shape[2] * element
