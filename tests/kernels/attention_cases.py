"""Inputs for turbo_attention's tests: ragged batches over a scattered cache, and how results are judged.

Everything a sequence must not read is NaN: slots past its end, blocks of nobody, unused block table
entries (out of range as well). A backend that reads them fails by a wide margin.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from native_libraries import ARM_PROCESSORS, COMPILED, native_library
from tandem_kernels import Attention, AttentionLayer, AttentionMetadata, turbo_attention

#: Ways to compute on the CPU; a COMPILED name is backend "cpu" with that library.
CPU_BACKENDS = ["torch", *COMPILED]
_LIBRARIES = {*COMPILED, *ARM_PROCESSORS}


def attend(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    ancestor_bits: torch.Tensor | None = None,
    *,
    backend: str | Attention = "auto",
    out: torch.Tensor | None = None,
    interleaved: bool = False,
    **layer: object,
) -> torch.Tensor:
    """turbo_attention, where backend may also be the name of a library or the backend itself."""
    metadata = AttentionMetadata(block_table, seq_lens, query_start_loc, ancestor_bits)
    constants = AttentionLayer(**layer)
    if isinstance(backend, Attention):
        backend.prepare(metadata)
        return backend.run(query, kv_cache, constants, out)
    with native_library(backend if backend in _LIBRARIES else None):
        return turbo_attention(
            query, kv_cache, metadata, constants,
            out=out, backend="cpu" if backend in _LIBRARIES else backend, interleaved=interleaved,
        )  # fmt: skip


@dataclass(frozen=True)
class Sequence:
    """context tokens in the cache, new tokens, and whether these form a random tree."""

    context: int
    new: int
    tree: bool = False


@dataclass(frozen=True)
class Options:
    """What differs between the layers of models."""

    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    scales: bool = False
    #: Factors per token and K/V head, in one piece of memory with the values of their block.
    token_scales: bool = False


@dataclass(frozen=True)
class Shape:
    num_kv_heads: int = 2
    group_size: int = 3
    head_size: int = 64
    block_size: int = 16


def random_bits(num_nodes: int, generator: torch.Generator) -> list[int]:
    """Ancestor bits of a random tree as signed int64; parents precede their children."""
    bits = [1]
    for node in range(1, num_nodes):
        parent = int(torch.randint(node, (1,), generator=generator))
        bits.append(bits[parent] | 1 << node)
    return [b - 2**64 if b >= 2**63 else b for b in bits]


@dataclass(frozen=True, eq=False)
class Case:
    query: torch.Tensor
    kv_cache: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    ancestor_bits: torch.Tensor | None
    options: Options
    sinks: torch.Tensor | None
    k_scale: torch.Tensor | float | None
    v_scale: torch.Tensor | float | None

    def to(self, device: str) -> Case:
        """The same case with every tensor on device."""
        tensors = {f.name: getattr(self, f.name) for f in fields(self)}
        moved = {n: t.to(device) for n, t in tensors.items() if isinstance(t, torch.Tensor)}
        return replace(self, **moved)

    def run(self, backend: str | Attention, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The result of a backend, with query and cache cast to dtype first."""
        cache = self.kv_cache
        if dtype is not None and cache.dtype == self.query.dtype:
            cache = cache.to(dtype)
        return attend(
            self.query if dtype is None else self.query.to(dtype),
            cache,
            self.block_table,
            self.seq_lens,
            self.query_start_loc,
            self.ancestor_bits,
            scale=self.query.shape[2] ** -0.5,
            window=self.options.window,
            softcap=self.options.softcap,
            sinks=self.sinks,
            k_scale=self.k_scale,
            v_scale=self.v_scale,
            backend=backend,
        )


def make_case(
    sequences: list[Sequence],
    shape: Shape = Shape(),
    options: Options = Options(),
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    seed: int = 0,
) -> Case:
    """A case of random numbers; cache_dtype int8 or float8 makes a quantized cache."""
    generator = torch.Generator().manual_seed(seed)
    lens = [s.context + s.new for s in sequences]
    num_blocks = [-(-n // shape.block_size) for n in lens]
    order = torch.randperm(sum(num_blocks) + 3, generator=generator).int()
    cache = torch.full((len(order), 2, shape.num_kv_heads, shape.block_size, shape.head_size), torch.nan)
    block_table = torch.full((len(sequences), max(num_blocks) + 2), -7, dtype=torch.int32)
    used = 0
    for b, count in enumerate(num_blocks):
        block_table[b, :count] = order[used : used + count]
        for slot_start in range(0, lens[b], shape.block_size):
            block = order[used + slot_start // shape.block_size]
            filled = min(shape.block_size, lens[b] - slot_start)
            cache[block, :, :, :filled] = torch.randn(
                2, shape.num_kv_heads, filled, shape.head_size, generator=generator
            )
        used += count
    is_empty = cache[:, :, :, :, 0].isnan()
    if cache_dtype == torch.int8:
        cache = torch.nan_to_num(cache * 40, 127).clamp(-128, 127)

    bits: list[int] = []
    for s in sequences:
        bits += random_bits(s.new, generator) if s.tree else [0] * s.new
    starts = [0]
    for s in sequences:
        starts.append(starts[-1] + s.new)
    num_heads = shape.num_kv_heads * shape.group_size
    # The view of a fused QKV projection: tokens further apart than their heads.
    fused = torch.randn(starts[-1], num_heads + 2, shape.head_size, generator=generator).to(dtype)
    if cache_dtype == torch.float8_e5m2:
        # Triton 3.6's interpreter converts its subnormal numbers to float16 as others.
        cache = torch.where(cache.abs() < torch.finfo(cache_dtype).tiny, 0.0, cache)
    cache = cache.to(cache_dtype or dtype)
    k_scale = v_scale = None
    if options.token_scales:
        per_token = torch.rand(is_empty.shape, generator=generator) + 0.5
        if cache_dtype == torch.int8:
            per_token /= 40
        cache, per_token = in_one_piece(cache, per_token.masked_fill(is_empty, torch.nan))
        k_scale, v_scale = per_token.unbind(1)
    elif options.scales:
        per_head = torch.rand(2, shape.num_kv_heads, generator=generator) + 0.5
        k_scale, v_scale = per_head[0] / (40 if cache_dtype == torch.int8 else 1), per_head[1]
    return Case(
        query=fused[:, :num_heads],
        kv_cache=cache,
        block_table=block_table,
        seq_lens=torch.tensor(lens, dtype=torch.int32),
        query_start_loc=torch.tensor(starts, dtype=torch.int32),
        ancestor_bits=torch.tensor(bits) if any(s.tree for s in sequences) else None,
        options=options,
        sinks=torch.randn(num_heads, generator=generator) if options.sinks else None,
        k_scale=k_scale,
        v_scale=v_scale,
    )


def in_one_piece(cache: torch.Tensor, per_token: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The cache and its factors [num_blocks, 2, Hkv, block_size] as views of one row of bytes per block."""
    value_bytes = cache[0].nbytes + -cache[0].nbytes % 16
    storage = torch.zeros(len(cache), value_bytes + per_token[0].nbytes + 16, dtype=torch.uint8)
    storage = storage[:, : storage.shape[1] // 16 * 16].contiguous()
    values = storage.view(cache.dtype)[:, : cache[0].numel()].unflatten(1, cache.shape[1:])
    factors = storage.view(torch.float32)[:, value_bytes // 4 :][:, : per_token[0].numel()]
    factors = factors.unflatten(1, per_token.shape[1:])
    return values.copy_(cache), factors.copy_(per_token)


def naive_same_dtype(case: Case) -> torch.Tensor:
    """What plain torch makes of the case when every step is rounded to the query's dtype."""
    dtype = case.query.dtype
    # The reference upcasts, so its steps are repeated here; visibility is the only part it shares.
    from tandem_kernels.turbo_attention.reference import visible_slots

    num_kv_heads, block_size = case.kv_cache.shape[2:4]
    group_size = case.query.shape[1] // num_kv_heads
    out = torch.empty_like(case.query)
    for b, seq_len in enumerate(case.seq_lens.tolist()):
        start, stop = case.query_start_loc[b : b + 2].tolist()
        bits = None if case.ancestor_bits is None else case.ancestor_bits[start:stop].tolist()
        if bits is not None and (bits[0] == 0 or len(bits) > 64):
            bits = None
        visible = visible_slots(seq_len - (stop - start), bits, stop - start, case.options.window)
        blocks = case.kv_cache[case.block_table[b, : -(-seq_len // block_size)].long()].to(dtype)
        key, value = blocks.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :seq_len]
        if case.options.token_scales:
            ids = case.block_table[b, : -(-seq_len // block_size)].long()
            key = key * case.k_scale[ids].transpose(0, 1).flatten(1)[:, :seq_len, None].to(dtype)
            value = value * case.v_scale[ids].transpose(0, 1).flatten(1)[:, :seq_len, None].to(dtype)
        elif case.k_scale is not None and case.v_scale is not None:
            key = key * torch.as_tensor(case.k_scale).to(dtype)[:, None, None]
            value = value * torch.as_tensor(case.v_scale).to(dtype)[:, None, None]
        key, value = key.repeat_interleave(group_size, 0), value.repeat_interleave(group_size, 0)
        logits = case.query[start:stop].transpose(0, 1) @ key.transpose(1, 2) * case.query.shape[2] ** -0.5
        if case.options.softcap is not None:
            logits = case.options.softcap * torch.tanh(logits / case.options.softcap)
        logits = logits.masked_fill(~visible, -torch.inf)
        if case.sinks is not None:
            sinks = case.sinks.to(dtype)[:, None, None].expand(-1, stop - start, 1)
            logits = torch.cat((logits, sinks), 2)
        out[start:stop] = (logits.softmax(2)[:, :, :seq_len] @ value).transpose(0, 1)
    return out


def assert_as_good_as_torch(case: Case, backend: str | Attention, device: str = "cpu") -> None:
    """The error against float64 is at most twice that of plain torch in the same dtype, plus a floor.

    The floor is the rounding of the result itself in half precision, and a few float32 roundings of the
    values averaged, where plain torch can be lucky on a handful of numbers.
    """
    exact = case.run("reference", torch.float64)
    assert exact.isfinite().all()
    result = case.to(device).run(backend).cpu()
    assert result.dtype == case.query.dtype
    error = (result.double() - exact).abs().max().item()
    allowed = (naive_same_dtype(case).double() - exact).abs().max().item()
    dtype = case.query.dtype
    if dtype in (torch.float16, torch.bfloat16):
        floor = torch.finfo(dtype).eps / 2 * exact.abs().max().item()
    else:
        floor = 16 * torch.finfo(dtype).eps * max(1, exact.abs().max().item())
    assert error <= 2 * allowed + floor, f"error {error:.3g}, plain torch {allowed:.3g}, floor {floor:.3g}"
