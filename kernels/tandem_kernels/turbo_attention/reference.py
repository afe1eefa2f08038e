"""The definition of turbo_attention in plain torch, one sequence at a time, slow and meant to be read.

Computes in float32 (float64 when the query is). It says what a row sees once, in `visible_slots`; the other
backends are tested against it and share nothing with it but the interface.
"""

from __future__ import annotations

import torch

from tandem_kernels.checks import KVCache, keys_and_values
from tandem_kernels.quantize import Scale, is_per_token
from tandem_kernels.turbo_attention.interface import Attention, AttentionLayer, scale_per_kv_head


def visible_slots(context_len: int, bits: list[int] | None, num_new: int, window: int | None) -> torch.Tensor:
    """Which of a sequence's logical slots each new row sees: [num_new, context_len + num_new] bool.

    bits: the new rows' ancestor bits when they form a tree, None when they are causal.
    """
    if bits is None:
        sees = [[j <= i for j in range(num_new)] for i in range(num_new)]
        depths = list(range(num_new))
    else:
        sees = [[bool(bits[i] >> j & 1) for j in range(num_new)] for i in range(num_new)]
        depths = [(b & (2**64 - 1)).bit_count() - 1 for b in bits]
    positions = torch.tensor([*range(context_len), *(context_len + d for d in depths)])
    visible = torch.ones(num_new, context_len + num_new, dtype=torch.bool)
    visible[:, context_len:] = torch.tensor(sees, dtype=torch.bool)
    if window is not None:
        visible &= positions[context_len:, None] - positions[None, :] < window
    return visible


class ReferenceAttention(Attention):
    """Any device and dtype."""

    def _run(
        self, query: torch.Tensor, kv_cache: KVCache, layer: AttentionLayer, out: torch.Tensor | None
    ) -> torch.Tensor:
        key_cache, value_cache = keys_and_values(kv_cache)
        _, num_kv_heads, block_size, _ = key_cache.shape
        if out is None:
            out = query.new_empty(*query.shape[:2], value_cache.shape[3])
        dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
        group_size = query.shape[1] // num_kv_heads
        starts = self.metadata.query_start_loc.tolist()
        for b, seq_len in enumerate(self.metadata.seq_lens.tolist()):
            start, stop = starts[b], starts[b + 1]
            num_new = stop - start
            if num_new == 0:
                continue
            bits = self.metadata.tree_bits(start, stop)
            visible = visible_slots(seq_len - num_new, bits, num_new, layer.window).to(query.device)

            block_ids = self.metadata.block_table[b, : -(-seq_len // block_size)].long()
            # [n, Hkv, bs, D] -> [Hkv, seq_len, D]
            key, value = (
                part[block_ids].transpose(0, 1).flatten(1, 2)[:, :seq_len].to(dtype)
                for part in (key_cache, value_cache)
            )
            key = key * _factors(layer.k_scale, key, block_ids)
            value = value * _factors(layer.v_scale, value, block_ids)
            key = key.repeat_interleave(group_size, dim=0)
            value = value.repeat_interleave(group_size, dim=0)

            logits = query[start:stop].to(dtype).transpose(0, 1) @ key.transpose(1, 2) * layer.scale
            if layer.softcap is not None:
                logits = layer.softcap * torch.tanh(logits / layer.softcap)
            logits = logits.masked_fill(~visible, -torch.inf)
            if layer.sinks is not None:
                sink_column = layer.sinks.to(dtype)[:, None, None].expand(-1, num_new, 1)
                logits = torch.cat((logits, sink_column), dim=2)
            weights = logits.softmax(dim=2)[:, :, :seq_len]
            out[start:stop] = (weights @ value).transpose(0, 1).to(out.dtype)
        return out


def _factors(factor: Scale, tensor: torch.Tensor, block_ids: torch.Tensor) -> torch.Tensor:
    """k_scale or v_scale to multiply tensor [Hkv, seq_len, D] with: [Hkv, 1 or seq_len, 1] of its dtype."""
    num_kv_heads, seq_len, _ = tensor.shape
    if is_per_token(factor):
        # [n, Hkv, bs] -> [Hkv, seq_len, 1]
        return factor[block_ids].transpose(0, 1).flatten(1)[:, :seq_len, None].to(tensor.dtype)
    return scale_per_kv_head(factor, num_kv_heads, tensor.dtype, tensor.device)[:, None, None]
