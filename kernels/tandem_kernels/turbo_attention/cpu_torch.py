"""Attention on the CPU in few torch calls: one copy of K and V, then torch's fused attention.

    plan      the step's metadata -> groups of sequences (`cpu_torch_plan`), once for all layers of a window
    copy      a group's blocks -> [2, B, Hkv, keys, D], one index_select; consecutive keys make the matrix
              products large, and the copy costs less than the products save
    attend    query heads folded into rows, so that K and V are not repeated; the context without a mask,
              the new tokens tile by tile with one, joined by their log-sum-exp

Not batch-invariant: how sequences are grouped changes the last bits of a result.

Computes in the query's dtype where the processor multiplies it natively, else in float32.
"""

from __future__ import annotations

import torch

from tandem_kernels.checks import KVCache
from tandem_kernels.quantize import is_per_token
from tandem_kernels.turbo_attention.cpu_torch_plan import Geometry, Group, plan
from tandem_kernels.turbo_attention.interface import (
    Attention,
    AttentionLayer,
    AttentionMetadata,
    scale_per_kv_head,
)
from tandem_kernels.turbo_attention.reference import ReferenceAttention

# What F.scaled_dot_product_attention calls; it alone returns the log-sum-exp.
_flash_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


class TorchAttention(Attention):
    """CPU tensors.

    bfloat16: whether to multiply bfloat16 as it is, not in float32; None: where the processor can.
    """

    def __init__(self, *, bfloat16: bool | None = None) -> None:
        self._bfloat16 = torch.cpu._is_avx512_bf16_supported() if bfloat16 is None else bfloat16
        #: The step's plans. The first layer of a geometry makes one, the others use it.
        self._plans: dict[Geometry, tuple[Group, ...]] = {}

    def prepare(self, metadata: AttentionMetadata) -> None:
        super().prepare(metadata)
        self._plans.clear()

    def _run(
        self, query: torch.Tensor, kv_cache: KVCache, layer: AttentionLayer, out: torch.Tensor | None
    ) -> torch.Tensor:
        if query.device.type != "cpu":
            raise ValueError(f'query is on {query.device}, wanted a CPU tensor for backend "torch"')
        if isinstance(kv_cache, tuple):
            # Torch's fused attention wants keys and values of one size.
            reference = ReferenceAttention()
            reference.prepare(self.metadata)
            return reference.run(query, kv_cache, layer, out)
        dtype = self._compute_dtype(query.dtype)
        if layer.softcap is not None and dtype == torch.bfloat16:
            dtype = torch.float32  # these logits pass through memory, where bfloat16 would round them
        num_blocks, _, num_kv_heads, block_size, head_size = kv_cache.shape
        group_size = query.shape[1] // num_kv_heads
        geometry = Geometry(num_kv_heads, group_size, block_size, head_size, layer.window, dtype)
        if geometry not in self._plans:
            self.metadata.check_values(len(query), block_size, num_blocks)
            self._plans[geometry] = plan(self.metadata, geometry)
        groups = self._plans[geometry]
        if out is None and len(groups) == 1 and groups[0].covers(len(query)):
            return _cast(_attend_group(query, kv_cache, layer, groups[0], dtype), query.dtype)
        if out is None:
            out = torch.empty_like(query, memory_format=torch.contiguous_format)
        for group in groups:
            rows = _attend_group(query, kv_cache, layer, group, dtype)
            out[group.output_rows] = (rows if group.kept_rows is None else rows[group.kept_rows]).to(
                out.dtype
            )
        return out

    def _compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype to multiply in; float16 is never multiplied as it is."""
        if dtype == torch.float64 or (dtype == torch.bfloat16 and self._bfloat16):
            return dtype
        return torch.float32


def _attend_group(
    query: torch.Tensor, kv_cache: torch.Tensor, layer: AttentionLayer, group: Group, dtype: torch.dtype
) -> torch.Tensor:
    """Attention output [B * num_tokens, Hq, D] of one group, padding rows included."""
    batch, num_tokens = group.batch, group.num_tokens
    num_kv_heads, head_size = kv_cache.shape[2], kv_cache.shape[4]
    group_size = query.shape[1] // num_kv_heads
    num_rows = num_tokens * group_size

    key, value = _cast(_copy_blocks(kv_cache, group), dtype).unbind(0)
    if is_per_token(layer.k_scale):
        key = key * _copy_scales(layer.k_scale, group).to(dtype)
    if is_per_token(layer.v_scale):
        value = value * _copy_scales(layer.v_scale, group).to(dtype)
    for b, end in group.cleared:
        key[b, :, end:] = 0
        value[b, :, end:] = 0
    query = _cast(query[group.token_rows], dtype)
    query = query.view(batch, num_tokens, num_kv_heads, group_size, head_size).transpose(1, 2)
    query = query.reshape(batch, num_kv_heads, num_rows, head_size)
    if layer.k_scale is not None and not is_per_token(layer.k_scale):
        k_scale = scale_per_kv_head(layer.k_scale, num_kv_heads, dtype, query.device)
        query = query * k_scale[:, None, None]

    parts = [
        _attend_keys(
            layer, _part(query, tile.rows), _part(key, tile.keys), _part(value, tile.keys), tile.mask
        )
        for tile in group.tiles
    ]
    output, lse = parts[0] if len(parts) == 1 else (torch.cat(p, 2) for p in zip(*parts, strict=True))
    if group.context is not None:
        context_output, context_lse = _attend_keys(
            layer, query, _part(key, group.context), _part(value, group.context), None
        )
        share = (context_lse - lse).sigmoid_().unsqueeze(-1)
        output = torch.lerp(output.to(lse.dtype), context_output.to(lse.dtype), share)
        lse = torch.logaddexp(lse, context_lse)
    if layer.v_scale is not None and not is_per_token(layer.v_scale):
        v_scale = scale_per_kv_head(layer.v_scale, num_kv_heads, dtype, query.device)
        output = output * v_scale[:, None, None]
    if layer.sinks is not None:
        sinks = layer.sinks.to(lse.dtype).view(num_kv_heads, 1, group_size)
        shares = (lse.view(batch, num_kv_heads, num_tokens, group_size) - sinks).sigmoid_()
        output = output * shares.view(batch, num_kv_heads, num_rows, 1).to(dtype)
    output = output.view(batch, num_kv_heads, num_tokens, group_size, head_size).transpose(1, 2)
    return output.reshape(batch * num_tokens, num_kv_heads * group_size, head_size)


def _copy_blocks(cache: torch.Tensor, group: Group) -> torch.Tensor:
    """A group's blocks side by side: [2, B, Hkv, keys, D] of the cache's dtype."""
    num_kv_heads, block_size, head_size = cache.shape[2:]
    if cache.is_contiguous():
        copied = cache.view(-1, block_size * head_size).index_select(0, group.cache_rows)
        return copied.view(2, group.batch, num_kv_heads, -1, head_size)
    blocks = cache.index_select(0, group.block_ids.flatten())
    blocks = blocks.view(*group.block_ids.shape, *cache.shape[1:])
    # [B, blocks, 2, Hkv, bs, D]
    return blocks.permute(2, 0, 3, 1, 4, 5).flatten(3, 4)


def _copy_scales(factor: torch.Tensor, group: Group) -> torch.Tensor:
    """The factors of a group's tokens, [B, Hkv, keys, 1]."""
    blocks = factor.index_select(0, group.block_ids.flatten())
    blocks = blocks.view(*group.block_ids.shape, *factor.shape[1:])
    return blocks.transpose(1, 2).flatten(2)[..., None]


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The tensor as dtype; a conversion to its own dtype would still cost microseconds."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def _part(tensor: torch.Tensor, range_: slice) -> torch.Tensor:
    """The range of dimension 2; narrow costs less than indexing, and nothing less still."""
    length = range_.stop - range_.start
    return tensor if length == tensor.shape[2] else tensor.narrow(2, range_.start, length)


def _attend_keys(
    layer: AttentionLayer,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [B, Hkv, rows, D] and log-sum-exp [B, Hkv, rows] over these keys alone."""
    if layer.softcap is None:
        output, lse = _flash_attention(query, key, value, attn_mask=mask, scale=layer.scale)
        return output, lse
    logits = (query @ key.transpose(2, 3)).mul_(layer.scale / layer.softcap).tanh_().mul_(layer.softcap)
    if mask is not None:
        logits += mask
    lse = logits.logsumexp(-1)
    return logits.softmax(-1) @ value, lse
