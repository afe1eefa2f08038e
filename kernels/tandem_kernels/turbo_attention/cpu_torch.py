"""turbo_attention on the CPU in few torch calls: one copy of K and V, then torch's fused attention.

    plan      the step's metadata -> groups of sequences (`cpu_torch_plan`), once for all layers
    copy      a group's blocks -> [2, B, Hkv, keys, D], one index_select; consecutive keys make the matrix
              products large, and the copy costs less than the products save
    attend    query heads folded into rows, so that K and V are not repeated; the context without a mask,
              the new tokens tile by tile with one, joined by their log-sum-exp

Not batch-invariant: how sequences are grouped changes the last bits of a result.

Computes in the query's dtype where the processor multiplies it natively, else in float32.
"""

from __future__ import annotations

import torch

from tandem_kernels.turbo_attention.cpu_torch_plan import Group, plan_for
from tandem_kernels.turbo_attention.inputs import AttentionInputs, is_per_token

# What F.scaled_dot_product_attention calls; it alone returns the log-sum-exp.
_flash_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def attend(inputs: AttentionInputs, out: torch.Tensor | None) -> torch.Tensor:
    """Return out [T, Hq, D], or a new tensor when None; see `turbo_attention`."""
    if inputs.query.device.type != "cpu":
        raise ValueError(f'query is on {inputs.query.device}, wanted a CPU tensor for backend "torch"')
    dtype = compute_dtype(inputs.query.dtype)
    if inputs.softcap is not None and dtype == torch.bfloat16:
        dtype = torch.float32  # these logits pass through memory, where bfloat16 would round them
    groups = plan_for(inputs, dtype)
    if out is None and len(groups) == 1 and groups[0].covers(inputs.query.shape[0]):
        return _cast(_attend_group(inputs, groups[0], dtype), inputs.query.dtype)
    if out is None:
        out = torch.empty_like(inputs.query, memory_format=torch.contiguous_format)
    for group in groups:
        rows = _attend_group(inputs, group, dtype)
        out[group.output_rows] = (rows if group.kept_rows is None else rows[group.kept_rows]).to(out.dtype)
    return out


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype to multiply in: bfloat16 only on processors with instructions for it, float16 never."""
    if dtype == torch.float64 or (dtype == torch.bfloat16 and torch.cpu._is_avx512_bf16_supported()):
        return dtype
    return torch.float32


def _attend_group(inputs: AttentionInputs, group: Group, dtype: torch.dtype) -> torch.Tensor:
    """Attention output [B * num_tokens, Hq, D] of one group, padding rows included."""
    batch, num_tokens, num_kv_heads, group_size = (
        group.batch, group.num_tokens, inputs.num_kv_heads, inputs.group_size,
    )  # fmt: skip
    head_size = inputs.query.shape[2]
    num_rows = num_tokens * group_size

    key, value = _cast(_copy_blocks(inputs.kv_cache, group), dtype).unbind(0)
    if is_per_token(inputs.k_scale):
        key = key * _copy_scales(inputs.k_scale, group).to(dtype)
    if is_per_token(inputs.v_scale):
        value = value * _copy_scales(inputs.v_scale, group).to(dtype)
    for b, end in group.cleared:
        key[b, :, end:] = 0
        value[b, :, end:] = 0
    query = _cast(inputs.query[group.token_rows], dtype)
    query = query.view(batch, num_tokens, num_kv_heads, group_size, head_size).transpose(1, 2)
    query = query.reshape(batch, num_kv_heads, num_rows, head_size)
    if inputs.k_scale is not None and not is_per_token(inputs.k_scale):
        query = query * inputs.scale_per_kv_head(inputs.k_scale, dtype)[:, None, None]

    parts = [
        _attend_keys(
            inputs, _part(query, tile.rows), _part(key, tile.keys), _part(value, tile.keys), tile.mask
        )
        for tile in group.tiles
    ]
    output, lse = parts[0] if len(parts) == 1 else (torch.cat(p, 2) for p in zip(*parts, strict=True))
    if group.context is not None:
        context_output, context_lse = _attend_keys(
            inputs, query, _part(key, group.context), _part(value, group.context), None
        )
        share = (context_lse - lse).sigmoid_().unsqueeze(-1)
        output = torch.lerp(output.to(lse.dtype), context_output.to(lse.dtype), share)
        lse = torch.logaddexp(lse, context_lse)
    if inputs.v_scale is not None and not is_per_token(inputs.v_scale):
        output = output * inputs.scale_per_kv_head(inputs.v_scale, dtype)[:, None, None]
    if inputs.sinks is not None:
        sinks = inputs.sinks.to(lse.dtype).view(num_kv_heads, 1, group_size)
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
    inputs: AttentionInputs,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [B, Hkv, rows, D] and log-sum-exp [B, Hkv, rows] over these keys alone."""
    if inputs.softcap is None:
        output, lse = _flash_attention(query, key, value, attn_mask=mask, scale=inputs.scale)
        return output, lse
    logits = (query @ key.transpose(2, 3)).mul_(inputs.scale / inputs.softcap).tanh_().mul_(inputs.softcap)
    if mask is not None:
        logits += mask
    lse = logits.logsumexp(-1)
    return logits.softmax(-1) @ value, lse
