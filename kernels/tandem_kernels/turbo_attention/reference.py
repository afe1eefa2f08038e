"""The definition of turbo_attention in plain torch, one sequence at a time, slow and meant to be read.

Computes in float32 (float64 when the query is). It says what a row sees once, in `visible_slots`; the other
backends are tested against it and share no code with it.
"""

from __future__ import annotations

import torch

from tandem_kernels.turbo_attention.inputs import MAX_TREE_NODES, AttentionInputs, is_per_token


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


def attend(inputs: AttentionInputs, out: torch.Tensor | None) -> torch.Tensor:
    """Return out [T, Hq, D], or a new tensor when None; see `turbo_attention`."""
    if out is None:
        out = torch.empty_like(inputs.query, memory_format=torch.contiguous_format)
    dtype = torch.float64 if inputs.query.dtype == torch.float64 else torch.float32
    starts = inputs.query_start_loc.tolist()
    for b, seq_len in enumerate(inputs.seq_lens.tolist()):
        start, stop = starts[b], starts[b + 1]
        num_new = stop - start
        if num_new == 0:
            continue
        bits = None
        if inputs.ancestor_bits is not None and num_new <= MAX_TREE_NODES:
            bits = inputs.ancestor_bits[start:stop].tolist()
            if bits[0] == 0:
                bits = None
        visible = visible_slots(seq_len - num_new, bits, num_new, inputs.window).to(inputs.query.device)

        num_blocks = -(-seq_len // inputs.block_size)
        block_ids = inputs.block_table[b, :num_blocks].long()
        # [n, 2, Hkv, bs, D] -> [2, Hkv, seq_len, D]
        blocks = inputs.kv_cache[block_ids]
        key, value = blocks.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :seq_len].to(dtype)
        key = key * _factors(inputs, inputs.k_scale, block_ids, seq_len, dtype)
        value = value * _factors(inputs, inputs.v_scale, block_ids, seq_len, dtype)
        key = key.repeat_interleave(inputs.group_size, dim=0)
        value = value.repeat_interleave(inputs.group_size, dim=0)
        query = inputs.query[start:stop].to(dtype).transpose(0, 1)

        logits = query @ key.transpose(1, 2) * inputs.scale
        if inputs.softcap is not None:
            logits = inputs.softcap * torch.tanh(logits / inputs.softcap)
        logits = logits.masked_fill(~visible, -torch.inf)
        if inputs.sinks is not None:
            sink_column = inputs.sinks.to(dtype)[:, None, None].expand(-1, num_new, 1)
            logits = torch.cat((logits, sink_column), dim=2)
        weights = logits.softmax(dim=2)[:, :, :seq_len]
        out[start:stop] = (weights @ value).transpose(0, 1).to(out.dtype)
    return out


def _factors(
    inputs: AttentionInputs,
    factor: float | torch.Tensor | None,
    block_ids: torch.Tensor,
    seq_len: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """k_scale or v_scale to multiply [Hkv, seq_len, D] with: [Hkv, 1 or seq_len, 1] of dtype."""
    if is_per_token(factor):
        # [n, Hkv, bs] -> [Hkv, seq_len, 1]
        return factor[block_ids].transpose(0, 1).flatten(1)[:, :seq_len, None].to(dtype)
    return inputs.scale_per_kv_head(factor, dtype)[:, None, None]
